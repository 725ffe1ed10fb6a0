"""The judge sees what it shall see; schedules read back, shrink, and are counted once."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dcpstore
from campaign.judge import (
    Evidence,
    Report,
    Save,
    judge,
    outcome_of,
    rank_state,
    read_checkpoint,
    shapes_of,
)
from campaign.schedule import (
    FAULT_CELLS,
    OPERATIONS,
    TRANSPORTS,
    Draws,
    Fault,
    Schedule,
    draw,
    parse,
    shrink,
)
from campaign.table import Table
from dcpstore import CommitUnknownError, ConflictError, RankFailures, WriteConfig
from dcpstore.testing.ranks import run_ranks

OLD, A, B = Save("O", 1), Save("A", 7), Save("B", 8)
SHAPES = shapes_of(2)
Objects = dict[str, bytes]


@pytest.fixture(scope="module")
def objects_of(tmp_path_factory: Any) -> Callable[..., Objects]:
    """The objects of a save of two ranks."""
    made: dict[tuple[Save, bool], Objects] = {}

    def make(save: Save, *, is_apart: bool = False) -> Objects:
        if (save, is_apart) not in made:
            folder: Path = tmp_path_factory.mktemp("objects")
            config = WriteConfig(embed_manifest_bytes=0 if is_apart else 1 << 20)
            run_ranks(
                2,
                lambda group: dcpstore.save(
                    rank_state(save, group.rank, 2),
                    folder,
                    process_group=group,
                    config=config,
                    progress=False,
                ),
            ).values()
            made[save, is_apart] = {path.name: path.read_bytes() for path in folder.iterdir()}
        return dict(made[save, is_apart])

    return make


def evidence(objects: Objects, *reports: Report, old: Save | None = None, **more: Any) -> Evidence:
    return Evidence(SHAPES, old, list(reports), objects, **more)


def said(outcome: str, save: Save = A) -> Report:
    return Report(f"{save.saver}0", outcome, "an error", save)


def test_a_whole_save_is_recognised(objects_of: Callable[..., Objects]) -> None:
    for is_apart in (False, True):
        objects = objects_of(A, is_apart=is_apart)
        reading = read_checkpoint(objects, SHAPES)
        assert reading.save == A
        assert reading.referenced == set(objects)
    assert read_checkpoint({}, SHAPES).is_there is False


@pytest.mark.parametrize("is_apart", [False, True])
def test_any_object_that_is_gone_or_short_or_anothers_breaks_it(
    is_apart: bool, objects_of: Callable[..., Objects]
) -> None:
    whole = objects_of(A, is_apart=is_apart)
    others = objects_of(B, is_apart=is_apart)
    for key, data in whole.items():
        without = {one: bytes_ for one, bytes_ in whole.items() if one != key}
        if key != ".metadata":
            assert read_checkpoint(without, SHAPES).problems, key
        assert read_checkpoint({**whole, key: data[:-40]}, SHAPES).problems, key
        kin = next(one for one in others if one[:5] == key[:5])
        assert read_checkpoint({**whole, key: others[kin]}, SHAPES).problems, key


def test_a_mix_of_two_saves_within_one_tensor_is_seen(
    objects_of: Callable[..., Objects],
) -> None:
    mine, theirs = objects_of(A), objects_of(B)
    key = next(one for one in mine if one.startswith("__1"))
    kin = next(one for one in theirs if one.startswith("__1"))
    half = len(mine[key]) // 2
    mixed = mine[key][:half] + theirs[kin][half : len(mine[key])]
    problems = read_checkpoint({**mine, key: mixed}, SHAPES).problems
    assert any("mix" in one for one in problems), problems


def test_promises_that_are_kept_give_no_problem(objects_of: Callable[..., Objects]) -> None:
    new, old = objects_of(A), objects_of(OLD)
    for objects, reports, before in (
        (new, [said("ok")], None),
        (new, [said("ok")], OLD),
        (old, [said("definite")], OLD),
        ({}, [said("definite")], None),
        (new, [said("unknown")], OLD),
        (old, [said("unknown")], OLD),
        (new, [said("died")], OLD),
        (new, [said("ok"), said("definite", B)], OLD),
        (objects_of(B), [said("ok"), said("ok", B)], OLD),
    ):
        assert judge(evidence(objects, *reports, old=before)) == []


@pytest.mark.parametrize(
    ("there", "reports", "before", "problem"),
    [
        (None, [said("ok")], None, "(2)"),
        (OLD, [said("ok")], OLD, "(2)"),
        (B, [said("ok"), said("definite", B)], OLD, "(2)"),
        (A, [said("definite")], OLD, "(3)"),
        (A, [said("died"), Report("A1", "definite", "", A)], OLD, "(3)"),
        (None, [said("definite")], OLD, "(4)"),
        (None, [said("unknown")], OLD, "(4)"),
        (B, [said("definite")], OLD, "(1)"),
        (OLD, [said("raw")], OLD, "no error of dcpstore"),
        (OLD, [said("hung")], OLD, "hung"),
    ],
)
def test_each_broken_promise_is_named(
    there: Save | None,
    reports: list[Report],
    before: Save | None,
    problem: str,
    objects_of: Callable[..., Objects],
) -> None:
    objects = objects_of(there) if there else {}
    problems = judge(evidence(objects, *reports, old=before))
    assert any(problem in one for one in problems), problems


def test_two_winners_where_there_may_be_one_are_named(objects_of: Callable[..., Objects]) -> None:
    both = [said("ok"), said("ok", B)]
    problems = judge(evidence(objects_of(B), *both, may_replace=False))
    assert any("(5)" in one for one in problems)


def test_a_load_of_mixed_or_unknown_values_is_named(objects_of: Callable[..., Objects]) -> None:
    right = {**rank_state(A, 0, 2), **rank_state(A, 1, 2)}
    mixed = {**right, **rank_state(B, 1, 2), "code": A.code}
    untouched = {**right, "shared": right["shared"] * 0 - 1}
    objects, report = objects_of(A), said("ok")
    assert judge(evidence(objects, report, loads=[("R0", right)])) == []
    for wrong in (mixed, untouched):
        problems = judge(evidence(objects, report, loads=[("R0", wrong)]))
        assert any("(6)" in one for one in problems), problems


def test_what_a_prune_left_or_took_is_named(objects_of: Callable[..., Objects]) -> None:
    objects = objects_of(A)
    orphan = {**objects, "__0_0.0123456789abcdef.distcp": b""}
    short = {key: data for key, data in objects.items() if not key.startswith("__1")}
    assert judge(evidence(orphan, said("ok"), pruned=objects)) == []
    for after, uploads in ((orphan, ()), (short, ()), (objects, ("key",))):
        found = evidence(orphan, said("ok"), pruned=after, open_uploads=uploads)
        assert any("(8)" in one for one in judge(found))


def test_errors_promise_what_their_names_say() -> None:
    unknown, definite = CommitUnknownError("sent"), ConflictError("replaced")
    assert outcome_of(unknown) == "unknown"
    assert outcome_of(definite) == "definite"
    assert outcome_of(RankFailures("seal", {0: "CommitUnknownError: sent"})) == "unknown"
    assert outcome_of(RankFailures("seal", {0: "killed: it may be sealed"})) == "unknown"
    assert outcome_of(RankFailures("seal", {0: "killed"})) == "definite"
    assert outcome_of(ValueError("?")) == "raw"


# Schedules -------------------------------------------------------------------------------------


def test_a_schedule_reads_back_from_its_text() -> None:
    rng = random.Random(4)
    for transport in TRANSPORTS:
        for _ in range(300):
            schedule = draw(rng, transport, flags=("apart", "force", "sweep"))
            assert parse(str(schedule)) == schedule


@pytest.mark.parametrize(
    "text",
    [
        "overwrite dcp x1 s3",
        "rewrite dcp x1 s3 |",
        "overwrite dcp x5 s3 |",
        "overwrite dcp x1 s3 +fast |",
        "overwrite dcp x1 s3 fast |",
        "overwrite dcp x1 s3 | no-403@A0",
        "overwrite dcp x1 s3 | no-404@A0:seal#0",
        "overwrite dcp x1 s3 | no-403@A0:meal#0",
    ],
)
def test_what_is_no_schedule_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        parse(text)


def test_shrinking_keeps_what_fails_and_drops_the_rest() -> None:
    big = parse(
        "two_savers dcpstore x4 s3 +apart +many +old meet=3/99 | no-503@A3:data#0*3"
        " did-lost@A0:seal#0*2 no-403@A0:readback#0 late-1@B0:seal#0"
    )
    needed = {("did-lost", "seal"), ("no-403", "readback")}

    def fails(one: Schedule) -> bool:
        return needed <= {(fault.kind, fault.of) for fault in one.faults}

    small = shrink(big, fails)
    assert str(small) == "overwrite dcpstore x1 s3 | did-lost@A0:seal#0 no-403@A0:readback#0"


def test_draws_fill_every_cell_of_operation_and_fault() -> None:
    draws = Draws(random.Random(9), {"s3": 1}, {"s3": {"many": 0.3, "apart": 0.3}})
    table = Table()
    for _ in range(4000):
        schedule = draws.next()
        draws.note(schedule, schedule.faults)
        table.add(schedule, schedule.faults)
    assert len(table.cells) == len(OPERATIONS) * len(FAULT_CELLS)
    assert table.short_cells(20) == []


def test_a_schedule_counts_once_and_only_if_its_fault_fired() -> None:
    fault, other = Fault("no-403", "A0", "seal", 0), Fault("late-3", "A0", "data", 0)
    schedule = Schedule("overwrite", faults=(fault, other))
    table, again = Table(), Table()
    assert not table.add(schedule, [])
    assert table.add(schedule, [fault, other])
    assert not table.add(schedule, [fault])
    again.add(schedule, [fault])
    again.add(Schedule("prune", transport="sim-gcs", faults=(fault,)), [fault])
    table.merge(Table.from_json(again.to_json()))
    assert table.num_fired == 2
    assert table.cells == {
        ("overwrite", "no-403"): 1,
        ("overwrite", "late"): 1,
        ("prune", "no-403"): 1,
    }
    assert (table.num_of("wire"), table.num_of("verbs"), table.num_run) == (1, 1, 5)
    assert "| no-403 | 0 | 1 | 0 | 0 | 1 |" in table.markdown()
