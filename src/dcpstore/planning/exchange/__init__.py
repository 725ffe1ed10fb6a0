"""The exchange of plans: packed columns up, a few bits per rank down.

One save, R ranks (every step is a pure function; whoever owns the collectives calls them):

1. (all ranks) ``save_plans.pack_save_plan``: a plan becomes named parts of packed columns
2. (gather, 16 bytes a rank) ``PackedPlan.digest``; ``PlanCache.find`` may answer here
3. (gather, ~300 bytes a rank) ``PackedPlan.head``; the coordinator asks with
   ``PlanCache.wanted`` for the parts it lacks, each from one rank only
4. (coordinator) ``PlanCache.assemble``, then ``merge.merge_save_plans``: one writer per chunk,
   conflicts, bounds, overlaps and gaps; whole packed plans may be given to it directly
5. (scatter, ~30 to 200 bytes a rank) ``Decision``; (all ranks) ``save_plans.apply_decision``
6. (coordinator) ``PlanCache.confirm`` once the save is sealed, ``invalidate`` if it failed

Load plans are not exchanged; what ranks want to fetch is (``dcpstore.share``). Only
``save_plans`` knows torch. See ``docs/design/008-plan-exchange.md``.
"""
