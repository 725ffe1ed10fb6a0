"""States that know their step, and DCP's calls for one rank.

Every value of a state depends on its step, so that what was loaded is either bit-equal to
the state of one step or a mix.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, WriteItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from dcpstore.errors import CheckpointError

State = dict[str, Any]
MIB = 1 << 20
PART_BYTES = 5 * MIB  # the least that S3 takes
E = TypeVar("E", bound=BaseException)


def state_at(step: int, *, is_multipart: bool = False, num_tensors: int = 3) -> State:
    """A small state; with ``is_multipart`` one tensor of it needs a multipart upload."""
    source = torch.Generator().manual_seed(step)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=source)

    state: State = {
        "layers": {str(number): noise(30, 50) for number in range(num_tensors)},
        "half": noise(7, 3).bfloat16(),
        "count": torch.tensor(step),
        "step": step,
        "args": {"lr": step / 8, "name": f"run {step}"},
    }
    if is_multipart:
        state["big"] = torch.full((PART_BYTES // 4 + 5000,), float(step))
    return state


def blank(state: Any) -> Any:
    """The same keys, shapes and dtypes with other values."""
    if isinstance(state, torch.Tensor):
        return torch.full_like(state, -1)
    if isinstance(state, Mapping):
        return {key: blank(value) for key, value in state.items()}
    return None


def is_equal(one: Any, other: Any) -> bool:
    """Whether two states are bit-equal."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(is_equal(one[k], other[k]) for k in one)
    return bool(one == other)


def save(state: State, writer: Any, **options: Any) -> None:
    """``dcp.save`` of a single process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is")
        dcp.save(state, storage_writer=writer, no_dist=True, **options)


def load(state: State, reader: Any, **options: Any) -> None:
    """``dcp.load`` of a single process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is")
        dcp.load(state, storage_reader=reader, no_dist=True, **options)


def loaded_step(reader: Any, like: State) -> int:
    """Load everything and return the one step that all of it belongs to."""
    found = blank(like)
    load(found, reader)
    step = found["step"]
    expected = state_at(step, is_multipart="big" in like, num_tensors=len(like["layers"]))
    assert is_equal(found, expected), f"what was loaded is not the whole state of step {step}"
    return int(step)


def failing(kind: type[E], call: Callable[..., object], *args: Any, **options: Any) -> E:
    """Call and return the error of rank 0, which DCP wraps in its own."""
    try:
        call(*args, **options)
    except CheckpointException as wrapped:
        error: BaseException = wrapped.failures[0][0]
    except Exception as plain:
        error = plain
    else:
        pytest.fail(f"no error at all, expected {kind.__name__}")
    assert isinstance(error, kind), f"expected {kind.__name__}, got {error!r}"
    return error


def dies(call: Callable[..., object], *args: Any, **options: Any) -> bool:
    """Call; whether it failed with an error of ours or with what DCP made of one."""
    try:
        call(*args, **options)
    except (CheckpointException, CheckpointError):
        return True
    return False


class SlicePlanner(DefaultLoadPlanner):
    """Loads boxes of tensors, as a rank of a sharded job does.

    Args:
        boxes: Per key the offsets of the box and the tensor to fill.
    """

    def __init__(self, boxes: Mapping[str, tuple[Sequence[int], torch.Tensor]]) -> None:
        super().__init__()
        self._boxes = boxes

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items = []
        for fqn, (offsets, tensor) in self._boxes.items():
            box = ChunkStorageMetadata(torch.Size(offsets), tensor.size())
            saved: Any = self.metadata.state_dict_metadata[fqn]
            items += create_read_items_for_chunk_list(fqn, saved, [box])
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self._boxes[index.fqn][1]


def load_slice(reader: Any, fqn: str, offsets: Sequence[int], out: torch.Tensor) -> None:
    """Fill ``out`` with a box of one tensor."""
    load({}, reader, planner=SlicePlanner({fqn: (offsets, out)}))


class FailingPlanner(DefaultSavePlanner):
    """Raises when the ``at``-th item is resolved, counted from 0, once ``has_begun()``."""

    def __init__(
        self,
        at: int,
        has_begun: Callable[[], object] = lambda: True,
        error: type[BaseException] = ArithmeticError,
    ) -> None:
        super().__init__()
        self._left = at
        self._error = error
        self._has_begun = has_begun

    def resolve_data(self, write_item: WriteItem) -> Any:
        if self._left == 0:
            deadline = time.monotonic() + 30
            while not self._has_begun():
                assert time.monotonic() < deadline
                time.sleep(0.02)
            raise self._error("the device failed (scripted)")
        self._left -= 1
        return super().resolve_data(write_item)
