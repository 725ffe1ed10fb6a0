"""Training that is resumed goes on as if it had not been broken off, to the last bit."""

from __future__ import annotations

import pytest
import torch
from rank_resume import (
    KINDS,
    LAYOUTS,
    restore_and_train,
    resume_in_one_world,
    train_and_save,
    train_through,
)

FSDP1 = {name for name in LAYOUTS if name.startswith("fsdp1")}
ALL = [
    (layout, kind, num_ranks)
    for num_ranks in (1, 2, 4)
    for layout in LAYOUTS
    for kind in KINDS
    if not (layout in FSDP1 and kind == "rows")  # FSDP1 has no rows to keep state of
]
QUICK = [
    ("fsdp1", "adam"),
    ("fsdp1_original", "amsgrad"),
    ("fsdp2", "amsgrad"),
    ("fsdp2", "rows"),
    ("fsdp2_and_tp", "adam"),
    ("fsdp2_hybrid", "momentum"),
    ("ddp", "sgd"),
]
# Where it was saved and how, where it goes on and how.
MOVES = [
    ("fsdp2", 2, "fsdp2", 4, "adam"),
    ("fsdp1_original", 4, "fsdp2_and_tp", 4, "adam"),
    ("fsdp2_and_tp", 4, "fsdp1", 2, "amsgrad"),
    ("fsdp2_and_tp", 4, "fsdp2", 2, "rows"),
    ("ddp", 2, "fsdp2_hybrid", 4, "momentum"),
    ("fsdp2", 4, "plain", 1, "amsgrad"),
]


@pytest.mark.parametrize(("layout", "kind"), QUICK)
def test_twenty_steps_are_ten_and_ten_after_a_restore(
    pool, tmp_path, layout: str, kind: str
) -> None:
    num_ranks = 4 if layout in ("fsdp2_and_tp", "fsdp2_hybrid") else 2
    pool.run(num_ranks, resume_in_one_world, layout, kind, str(tmp_path / "c"))


@pytest.mark.campaign
@pytest.mark.parametrize(("layout", "kind", "num_ranks"), ALL)
def test_twenty_steps_are_ten_and_ten_everywhere(
    pool, tmp_path, layout: str, kind: str, num_ranks: int
) -> None:
    pool.run(num_ranks, resume_in_one_world, layout, kind, str(tmp_path / "c"))


def check_move(
    pool, folder, saved_as: str, num_saved: int, loaded_as: str, num_loaded: int, kind: str
) -> None:
    url = str(folder / f"{saved_as}-{num_saved}-{kind}")
    if not (folder / url).exists():
        pool.run(num_saved, train_and_save, saved_as, kind, url)
    expected = train_through(kind)
    for parameters in pool.run(num_loaded, restore_and_train, loaded_as, kind, url):
        assert parameters.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(parameters[name], value), name


@pytest.mark.parametrize(("saved_as", "num_saved", "loaded_as", "num_loaded", "kind"), MOVES)
def test_training_goes_on_elsewhere_as_the_unsharded_model_would(
    pool, tmp_path, saved_as: str, num_saved: int, loaded_as: str, num_loaded: int, kind: str
) -> None:
    check_move(pool, tmp_path, saved_as, num_saved, loaded_as, num_loaded, kind)
