"""Whether the chunks of tensors fill them: tables of holes, overlaps, copies and empty chunks."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint import metadata as stock
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from dcpstore import CorruptError
from dcpstore.format.manifest import DataObject, Entry, ItemId, Manifest, StoredItem, decode, encode
from dcpstore.plan.coverage import (
    Flaw,
    HoleMetadata,
    find_flaws,
    find_holes,
    refuse_lacks,
    with_holes,
)
from dcpstore.plan.overlap import find_overlaps
from dcpstore.store.base import ByteRange

Box = tuple[tuple[int, ...], tuple[int, ...]]


def tensor(size: tuple[int, ...], *boxes: Box) -> TensorStorageMetadata:
    chunks = [stock.ChunkStorageMetadata(torch.Size(at), torch.Size(sizes)) for at, sizes in boxes]
    return TensorStorageMetadata(stock.TensorProperties(), torch.Size(size), chunks)


def grid(rows: int, columns: int) -> TensorStorageMetadata:
    """One element per chunk."""
    one = torch.Size((1, 1))
    chunks = [
        stock.ChunkStorageMetadata(torch.Size(at), one)
        for at in product(range(rows), range(columns))
    ]
    return TensorStorageMetadata(stock.TensorProperties(), torch.Size((rows, columns)), chunks)


def look(entry: TensorStorageMetadata) -> str | None:
    found = find_flaws({"before": tensor((2,), ((0,), (2,))), "w": entry})
    assert all(flaw.fqn == "w" for flaw in found)
    return found[0].text if found else None


PINWHEEL = [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((1, 0), (2, 1)), ((2, 1), (1, 2))]

SOUND: dict[str, TensorStorageMetadata] = {
    "whole": tensor((4, 3), ((0, 0), (4, 3))),
    "rows": tensor((4, 3), ((0, 0), (1, 3)), ((1, 0), (3, 3))),
    "rows backwards": tensor((4, 3), ((1, 0), (3, 3)), ((0, 0), (1, 3))),
    "columns": tensor((4, 3), ((0, 0), (4, 1)), ((0, 1), (4, 2))),
    "grid": grid(7, 5),
    "pinwheel": tensor((3, 3), *PINWHEEL, ((1, 1), (1, 1))),
    "empty chunks": tensor((4,), ((0,), (0,)), ((0,), (4,)), ((4,), (0,))),
    "an empty chunk far outside": tensor((4,), ((0,), (4,)), ((9,), (0,))),
    "a chunk twice": tensor((4,), ((0,), (2,)), ((2,), (2,)), ((2,), (2,))),
    "the whole three times": tensor((4, 2), *[((0, 0), (4, 2))] * 3),
    "scalar": tensor((), ((), ())),
    "a scalar twice": tensor((), ((), ()), ((), ())),
    "no elements, no chunk": tensor((0, 3)),
    "no elements, a chunk": tensor((3, 0), ((0, 0), (3, 0))),
}

FLAWED: dict[str, tuple[TensorStorageMetadata, str]] = {
    "no chunk": (tensor((4, 3)), "hold 0 of 12"),
    "no scalar": (tensor(()), "hold 0 of 1"),
    "only empty chunks": (tensor((4,), ((0,), (0,))), "hold 0 of 4"),
    "first rows": (tensor((4, 3), ((1, 0), (3, 3))), "hold 9 of 12"),
    "middle": (tensor((4,), ((0,), (1,)), ((3,), (1,))), "hold 2 of 4"),
    "last column": (tensor((4, 3), ((0, 0), (4, 2))), "hold 8 of 12"),
    "eye of the pinwheel": (tensor((3, 3), *PINWHEEL), "hold 8 of 9"),
    "twice instead of the rest": (tensor((4,), ((0,), (2,)), ((0,), (2,))), "hold 2 of 4"),
    "overlap by rows": (tensor((4,), ((0,), (3,)), ((2,), (2,))), "overlap"),
    "overlap at one start": (tensor((4,), ((0,), (3,)), ((0,), (4,))), "overlap"),
    "overlap of the right volume": (
        tensor((4, 2), ((0, 0), (2, 2)), ((1, 0), (2, 2))),
        "at (0, 0) of shape (2, 2) and at (1, 0) of shape (2, 2) overlap",
    ),
    "overlap among copies": (
        tensor((4,), ((0,), (2,)), ((0,), (2,)), ((1,), (3,))),
        "overlap",
    ),
    "outside": (tensor((4,), ((0,), (5,))), "at (0,) of shape (5,) lies outside"),
    "before the start": (tensor((4,), ((-1,), (5,))), "lies outside"),
    "negative": (tensor((4,), ((0,), (4,)), ((3,), (-2,))), "lies outside"),
    "far outside": (tensor((4,), ((2**62,), (2**62,))), "lies outside"),
    "flat chunk": (tensor((4, 3), ((0,), (12,))), "another number of dimensions"),
    "deep scalar": (tensor((), ((0,), (1,))), "another number of dimensions"),
    "vast": (tensor((2**40, 2**40), ((0, 0), (1, 1))), "impossible"),
    "size below zero": (tensor((-4,), ((0,), (4,))), "impossible"),
}


@pytest.mark.parametrize("name", SOUND)
def test_chunks_that_fill_their_tensor_have_no_flaw(name: str) -> None:
    assert look(SOUND[name]) is None


@pytest.mark.parametrize("name", FLAWED)
def test_a_flaw_is_told(name: str) -> None:
    entry, expected = FLAWED[name]
    told = look(entry)
    assert told is not None
    assert expected in told


def test_all_tensors_are_looked_at_together() -> None:
    entries: dict[str, Any] = dict(SOUND)
    entries |= {name: entry for name, (entry, _) in FLAWED.items()}
    entries["value"] = stock.BytesStorageMetadata()
    found = find_flaws(entries)
    assert {flaw.fqn for flaw in found} == set(FLAWED)
    holes = {flaw.fqn for flaw in found if flaw.is_hole}
    assert holes == {name for name, (_, text) in FLAWED.items() if text.startswith("hold ")}


def test_the_holes_are_boxes_of_what_is_missing() -> None:
    rows = tensor((12, 8), ((0, 0), (4, 8)), ((8, 0), (4, 8)))
    assert find_holes(rows) == [HoleMetadata(torch.Size((4, 0)), torch.Size((4, 8)))]
    corner = tensor((4, 4), ((0, 0), (2, 2)))
    assert find_holes(corner) == [
        HoleMetadata(torch.Size((0, 2)), torch.Size((2, 2))),
        HoleMetadata(torch.Size((2, 0)), torch.Size((2, 4))),
    ]
    assert find_holes(tensor(())) == [HoleMetadata(torch.Size(()), torch.Size(()))]


def test_metadata_without_a_flaw_stay_as_they_are() -> None:
    metadata = Metadata(dict(SOUND), storage_data={})
    assert with_holes(metadata, "here") is metadata


def test_a_hole_stands_in_the_metadata_and_is_refused_when_it_is_wanted() -> None:
    entry = tensor((12, 8), ((0, 0), (4, 8)), ((8, 0), (4, 8)), ((4, 0), (0, 8)))
    storage = {MetadataIndex("w", chunk.offsets): "place" for chunk in entry.chunks}
    metadata = Metadata({"w": entry}, storage_data=storage)
    marked = with_holes(metadata, "here")
    assert len(entry.chunks) == 3, "what was given is not changed"
    hole = marked.state_dict_metadata["w"].chunks[3]
    assert isinstance(hole, HoleMetadata)
    assert set(marked.storage_data) == {MetadataIndex("w", (0, 0)), MetadataIndex("w", (8, 0))}
    refuse_lacks([item("w", (0, 0), 0), item("w", (8, 0), 1), item("v", None, None)], marked)
    with pytest.raises(CorruptError, match=r"'w': .* \(4, 0\) of shape \(4, 8\); 32 of its 96"):
        refuse_lacks([item("w", (0, 0), 0), item("w", (4, 0), 3)], marked)


def item(fqn: str, offsets: tuple[int, ...] | None, hint: int | None) -> ReadItem:
    kind = LoadItemType.BYTE_IO if offsets is None else LoadItemType.TENSOR
    index = MetadataIndex(fqn, offsets, hint)
    none = torch.Size(())
    return ReadItem(kind, index, none, index, none, none)


def test_chunks_that_contradict_each_other_are_refused_in_one_error() -> None:
    entries = {f"w{number}": tensor((4,), ((0,), (5,))) for number in range(13)}
    with pytest.raises(CorruptError, match=r"(?s)here: .*'w0': .*'w9'.*and 3 more$"):
        with_holes(Metadata(dict(entries)), "here")


def test_a_tensor_with_a_hole_everywhere_is_refused_as_a_whole() -> None:
    every_other = tensor((40_000,), *[((at,), (1,)) for at in range(0, 40_000, 2)])
    assert find_holes(every_other) is None
    with pytest.raises(CorruptError, match="hold 20000 of 40000"):
        with_holes(Metadata({"w": every_other}), "here")


def test_a_million_chunks_take_no_step_in_python_each() -> None:
    """Calls are counted, so that the test does not depend on how quick the machine is."""
    entries = {"w": grid(1000, 1000)}
    assert count_calls(lambda: find_flaws(entries)) < 1_000
    entries["w"].chunks.pop(123_456)
    found: list[Flaw] = []
    assert count_calls(lambda: found.extend(find_flaws(entries))) < 1_000
    assert found == [Flaw("w", True, "its chunks hold 999999 of 1000000 elements")]
    holes: list[Any] = []
    assert count_calls(lambda: holes.extend(find_holes(entries["w"]) or ())) < 1_000
    assert holes == [HoleMetadata(torch.Size((123, 456)), torch.Size((1, 1)))]


def count_calls(work: Any) -> int:
    calls = 0

    def count(_frame: Any, event: str, _arg: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


# --- one chunk twice in a manifest -------------------------------------------------------


def stored(key: str, checksum: int | None, sizes: tuple[int, ...] = (4,)) -> StoredItem:
    span = ByteRange(0, 4 * sizes[0])
    checksums = None if checksum is None else np.array([checksum], np.uint32)
    return StoredItem(key, span, "raw", span, "float32", sizes, (), checksums, 4096)


class Twice(dict[ItemId, StoredItem]):
    """A manifest's items, one of them with a second place. Only what `encode` asks for."""

    def __init__(self, one: StoredItem, other: StoredItem) -> None:
        super().__init__()
        self._rows = [(ItemId("w", (0,)), one), (ItemId("w", (0,)), other)]

    def __len__(self) -> int:
        return len(self._rows)

    def items(self) -> Any:
        return self._rows


@pytest.mark.parametrize(
    ("other", "is_fine"),
    [
        (stored("b", 7), True),
        (stored("b", None), True),
        (stored("b", 8), False),
        (stored("b", 7, (3,)), False),
        (replace(stored("b", 7), dtype="int32"), False),
    ],
    ids=["same", "no checksum", "other contents", "other shape", "other dtype"],
)
def test_a_chunk_that_is_stored_twice_is_the_same_twice(other: StoredItem, is_fine: bool) -> None:
    objects = (DataObject("a", 16), DataObject("b", 16))
    properties = (
        '{"dtype":"float32","layout":"strided","memory_format":"contiguous_format",'
        '"requires_grad":false,"pin_memory":false}'
    )
    items = Twice(stored("a", 7), other)
    data = encode(Manifest("0" * 16, (Entry("w", properties, (4,)),), items, objects))
    if is_fine:
        assert decode(data).items[ItemId("w", (0,))].key in ("a", "b")
        return
    with pytest.raises(CorruptError, match=r"\(0,\) is there twice .*'w'"):
        decode(data)


# --- arrangements that no straight line cuts apart ----------------------------------------


def sticks(num: int) -> tuple[np.ndarray, np.ndarray]:
    """A pinwheel of four arms, each of ``num`` chunks side by side, around an empty eye."""
    at, none = np.arange(num), np.zeros(num, int)
    boxes = [
        (at, none, at + 1, none + 2 * num),
        (none, 2 * num + at, none + 2 * num, 2 * num + at + 1),
        (2 * num + at, none + num, 2 * num + at + 1, none + 3 * num),
        (none + num, at, none + 3 * num, at + 1),
    ]
    rows = np.concatenate([np.stack(box, axis=1) for box in boxes])
    return rows[:, :2], rows[:, 2:]


def cpu_s(work: Any) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


@pytest.mark.parametrize("has_overlap", [False, True])
def test_chunks_that_no_line_cuts_apart_cost_no_square_of_their_number(has_overlap: bool) -> None:
    """Each against each would be a thousand times the work of sorting a grid of as many."""
    starts, ends = sticks(25_000)
    group = np.zeros(len(starts), int)
    if has_overlap:
        ends[12_345, 1] += 1
    places = np.stack(np.divmod(np.arange(len(starts)), 250), axis=1)
    grid_s = cpu_s(lambda: find_overlaps(group, places, places + 1))
    found: list[Any] = []
    sticks_s = cpu_s(lambda: found.extend(map(set, find_overlaps(group, starts, ends).tolist())))
    assert found == ([{12_345, 25_000}] if has_overlap else [])
    assert sticks_s < 100 * max(grid_s, 0.01)
