"""`optimizer_state` and `restore_optimizer`: an optimizer into a checkpoint and out of it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch.distributed.checkpoint.planner import LoadPlanner as DcpLoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.optim import Optimizer

from dcpstore.config import ReadConfig
from dcpstore.loading import load
from dcpstore.optimizer.live import LiveOptimizer
from dcpstore.optimizer.restoring import Restoring
from dcpstore.plan.rules import Rename, Strictness
from dcpstore.ranks.agreement import Ranks
from dcpstore.read.sharing import SharePolicy
from dcpstore.report import LoadResult, ProgressCallback


def optimizer_state(model: nn.Module, optimizer: Optimizer | Iterable[Optimizer]) -> dict[str, Any]:
    """Return an optimizer's state by parameter names, to be saved. All ranks; collective.

    It has the form of torch's ``get_optimizer_state_dict``, so whoever reads that reads this.
    Unlike torch's it is a pure look: an optimizer that has not stepped yet is saved without
    state, where torch takes a step to make it some.

    ::

        dcpstore.save(
            {
                "model": get_model_state_dict(model),
                "optim": dcpstore.optimizer_state(model, optimizer),
            },
            "s3://bucket/run/step-100",
        )

    Args:
        model: As it is trained: FSDP1, FSDP2, tensor parallel, DDP, any mix, or none of them.
        optimizer: Of the model's parameters, or several, whose parameters are disjoint.

    Returns:
        ``{"state": {name: {...}}, "param_groups": [...]}``. Its tensors are the optimizer's
        own where the layout allows: save them before the next step.

    Raises:
        ConfigError: If the optimizer has parameters that are not the model's, or keeps state
            that belongs to none.
        IncompatibleError: If state would not come back: partial sums, or with FSDP1 a tensor
            that has not its parameter's shape.
    """
    live = LiveOptimizer(model, optimizer)
    live.check_can_be_saved()
    return live.state_dict()


def restore_optimizer(
    model: nn.Module,
    optimizer: Optimizer | Iterable[Optimizer],
    source: str | os.PathLike[str] | StorageReader,
    *,
    key: str = "optim",
    rename: Rename | None = None,
    strict: Strictness = True,
    planner: DcpLoadPlanner | None = None,
    process_group: Ranks = None,
    storage_options: Mapping[str, Any] | None = None,
    config: ReadConfig | None = None,
    share: SharePolicy = "auto",
    coordinator_rank: int = 0,
    deadline_s: float = 1800.0,
    progress: ProgressCallback | bool | None = None,
) -> LoadResult:
    """Restore an optimizer from a checkpoint, on any number of ranks. All ranks; collective.

    State and hyperparameters become what they were when they were saved, sharded the way the
    model is now. The optimizer may be fresh: no step is taken to make it state, and no
    parameter, gradient, random number or counter changes. Each tensor is allocated once, as
    what this rank holds of it; an optimizer that has state already is filled in place.

    What was saved for no parameter of these optimizers is in ``unexpected`` of the result, and
    each parameter that got no state although the optimizer keeps some is in ``missing`` (as
    ``optim.state.<name>``); it may never have had a gradient. FSDP1 takes no state for frozen
    parameters, so theirs is in ``unexpected``; elsewhere it is restored.

    Restore after the model was sharded, and after learning rate schedulers were made: a new
    scheduler sets the learning rate.

    Args:
        model: As it is trained.
        optimizer: One, or several that were saved together. Some of those will do, too.
        source: Folder of the checkpoint, or any DCP storage reader.
        key: Where the optimizer is in the saved state dict; dotted if nested, empty if it is
            all that was saved.
        rename: From a parameter's name in the model to that in the checkpoint: a map of names
            and of prefixes that end with ``.``, or a function.
        strict: Whether a parameter that the saved optimizer did not have is an error, for all
            or per prefix of names. If not, its state stays as it is.
        planner: Any DCP load planner; None for `dcpstore.LoadPlanner`. It is given the flat
            keys of the checkpoint.
        process_group: The ranks that load together; None for all, or for this process alone.
        storage_options: As for `dcpstore.load`; so are all arguments below.
        config: Sizes, bounds, retries, casts and trust.
        share: Whether ranks share what they fetch.
        coordinator_rank: Rank of the group that reads the metadata.
        deadline_s: Most seconds that one step may take.
        progress: A callback, True for a bar, None for one on a terminal.

    Returns:
        What the load did: ``loaded``, ``missing`` and ``unexpected`` are of this optimizer.

    Raises:
        RankFailures: On every rank of several, if any failed.
        NotFoundError: If the checkpoint has no such optimizer; names those it has.
        IncompatibleError: If the optimizer is of another kind, the model of other shapes, a
            parameter unknown, or groups join what was saved apart. A fresh optimizer is
            unchanged then; one with state may hold some of the checkpoint's.
        CheckpointError: As `dcpstore.load` does.
    """
    restoring = Restoring(LiveOptimizer(model, optimizer), key, rename, strict)
    result = load(
        restoring.make_state,
        None if isinstance(source, StorageReader) else source,
        storage_reader=source if isinstance(source, StorageReader) else None,
        planner=planner,
        process_group=process_group,
        storage_options=storage_options,
        config=config,
        share=share,
        coordinator_rank=coordinator_rank,
        deadline_s=deadline_s,
        progress=progress,
    )
    return restoring.finish(result)
