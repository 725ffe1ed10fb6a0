"""Whatever layout a checkpoint was saved in, any other layout loads the same elements."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import fsspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from roundtrip_ranks import Box, Pieces, load_on_ranks, save_on_ranks
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

from dcpstore import ObjectStoreReader, ObjectStoreWriter, ReadConfig, WriteConfig

pytestmark = [
    # Stock writers say so of every stream that has no file descriptor.
    pytest.mark.filterwarnings("ignore:.*fsync:UserWarning"),
    # Torch says so of every complex32 tensor.
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning"),
]

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float64,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.uint16,
    torch.float8_e4m3fn,
)
_numbers = itertools.count()


# --- layouts ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """How ranks hold a tensor: boxes per rank."""

    ranks: tuple[tuple[Box, ...], ...]


def split(box: Box, dim: int, cuts: list[int]) -> list[Box]:
    """Cut a box at positions counted from its start."""
    edges = [0, *cuts, box.sizes[dim]]
    return [
        Box(
            (*box.offsets[:dim], box.offsets[dim] + start, *box.offsets[dim + 1 :]),
            (*box.sizes[:dim], end - start, *box.sizes[dim + 1 :]),
        )
        for start, end in itertools.pairwise(edges)
    ]


@st.composite
def layouts(draw, sizes: tuple[int, ...], num_ranks: int) -> Layout:
    """A mesh of one or two dims with a placement each, or boxes dealt at random."""
    whole = Box((0,) * len(sizes), sizes)
    if sizes and draw(st.booleans()):
        return draw(scattered(whole, num_ranks))
    meshes = [(num_ranks,)] + [(n, num_ranks // n) for n in (2, 3) if num_ranks % n == 0]
    mesh = draw(st.sampled_from(meshes))
    held: dict[tuple[int, ...], Box] = {(): whole}
    for length in mesh:
        dim = draw(st.sampled_from([None, *range(len(sizes))]))
        is_even = draw(st.booleans())
        parts_of: dict[Box, list[Box]] = {}  # replicas are cut alike
        for box in held.values():
            if box in parts_of:
                continue
            cuts = draw(cuts_of(box.sizes[dim], length, is_even)) if dim is not None else []
            parts_of[box] = split(box, dim, cuts) if dim is not None else [box] * length
        held = {
            (*place, number): part
            for place, box in held.items()
            for number, part in enumerate(parts_of[box])
        }
    return Layout(tuple((as_dtensor_places(held[place], sizes),) for place in sorted(held)))


def cuts_of(size: int, length: int, is_even: bool) -> st.SearchStrategy[list[int]]:
    """Where to cut ``size`` elements into ``length`` parts: as torch.chunk does, or anywhere."""
    if is_even:
        part = -(-size // length)
        return st.just([min(size, part * number) for number in range(1, length)])
    one = st.integers(0, size)
    return st.lists(one, min_size=length - 1, max_size=length - 1).map(sorted)


def as_dtensor_places(box: Box, whole: tuple[int, ...]) -> Box:
    """Put an empty piece at the end of the tensor, where DTensor puts it."""
    offsets = tuple(
        end if size == 0 else offset
        for offset, size, end in zip(box.offsets, box.sizes, whole, strict=True)
    )
    return Box(offsets, box.sizes)


@st.composite
def scattered(draw, whole: Box, num_ranks: int) -> Layout:
    """Disjoint boxes dealt to the ranks: some ranks get several, some none."""
    boxes = [whole]
    for _ in range(draw(st.integers(0, 4))):
        chosen = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(whole.sizes) - 1))
        boxes += split(chosen, dim, [draw(st.integers(0, chosen.sizes[dim]))])
    boxes = [box for box in boxes if 0 not in box.sizes] or [whole]
    owners = [draw(st.integers(0, num_ranks - 1)) for _ in boxes]
    return Layout(
        tuple(
            tuple(box for box, owner in zip(boxes, owners, strict=True) if owner == rank)
            for rank in range(num_ranks)
        )
    )


# --- memory ---------------------------------------------------------------------------------------


def dense(sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(sizes, dtype=dtype)


def transposed(sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(sizes[::-1], dtype=dtype).permute(tuple(reversed(range(len(sizes)))))


def padded(sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A window in the middle of a larger tensor, with a stride of two in the last dim."""
    wide = torch.zeros([2 * size + 3 for size in sizes], dtype=dtype)
    for dim, size in enumerate(sizes):
        wide = wide.narrow(dim, 1, 2 * size)
    return wide[tuple(slice(None, None, 2) for _ in sizes)] if sizes else wide


MEMORY = (dense, transposed, padded)
Make = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]


def filled(make: Make, values: torch.Tensor) -> torch.Tensor:
    made = make(tuple(values.shape), values.dtype)
    made.copy_(values)
    return made


def bits(tensor: torch.Tensor) -> bytes:
    dense_copy = tensor.clone(memory_format=torch.contiguous_format)
    return dense_copy.view(-1).view(torch.uint8).numpy().tobytes()


def storage_bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.untyped_storage().tolist())


# --- one job ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    full: torch.Tensor
    saved: Layout
    wanted: Layout
    save_memory: Make
    load_memory: Make


@st.composite
def cases(draw, num_saved: int, num_loaded: int) -> Case:
    sizes = tuple(draw(st.lists(st.integers(0, 40), max_size=3)))
    sizes = sizes if len(sizes) < 3 else tuple(min(size, 17) for size in sizes)
    dtype = draw(st.sampled_from(DTYPES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    num_bytes = torch.Size(sizes).numel() * dtype.itemsize
    raw = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator)
    full = (raw % 2).bool() if dtype == torch.bool else raw.view(dtype)
    return Case(
        full.view(sizes),
        draw(layouts(sizes, num_saved)),
        draw(layouts(sizes, num_loaded)),
        draw(st.sampled_from(MEMORY)),
        draw(st.sampled_from(MEMORY)),
    )


@st.composite
def jobs(draw) -> tuple[int, int, list[Case]]:
    num_saved, num_loaded = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    several = st.lists(cases(num_saved, num_loaded), min_size=1, max_size=3)
    return num_saved, num_loaded, draw(several)


WRITE_CONFIGS = st.builds(
    WriteConfig,
    object_bytes=st.sampled_from([1, 5000, 1 << 20]),
    checksum_block_bytes=st.sampled_from([4096, 1 << 18]),
    inline_bytes=st.sampled_from([0, 100, 2048]),
    inline_rank_bytes=st.sampled_from([0, 200, 1 << 20]),
)
READ_CONFIGS = st.builds(
    ReadConfig,
    request_bytes=st.sampled_from([50, 5000, 1 << 20]),
    join_gap_bytes=st.sampled_from([0, 100, 1 << 19]),
    max_requests=st.sampled_from([1, 8]),
    verify=st.booleans(),
)


def states_to_save(job: tuple[int, int, list[Case]]) -> list[dict[str, Any]]:
    num_saved, _, found = job
    return [
        {
            "step": 7,
            **{
                f"t{n}": Pieces(
                    tuple(case.full.shape),
                    {box: filled(case.save_memory, box.of(case.full)) for box in boxes},
                )
                for n, case in enumerate(found)
                if (boxes := case.saved.ranks[rank]) or rank == 0
            },
        }
        for rank in range(num_saved)
    ]


def blank_targets(job: tuple[int, int, list[Case]]) -> list[dict[str, Any]]:
    _, num_loaded, found = job
    return [
        {
            "step": -1,
            **{
                f"t{n}": Pieces(
                    tuple(case.full.shape),
                    {box: case.load_memory(box.sizes, case.full.dtype) for box in boxes},
                )
                for n, case in enumerate(found)
                if (boxes := case.wanted.ranks[rank])
            },
        }
        for rank in range(num_loaded)
    ]


def check(job: tuple[int, int, list[Case]], states: list[dict[str, Any]]) -> None:
    for rank, state in enumerate(states):
        assert state["step"] == 7
        for n, case in enumerate(job[2]):
            for box in case.wanted.ranks[rank]:
                got = state[f"t{n}"].pieces[box]
                expected = box.of(case.full)
                assert bits(got) == bits(expected), (rank, n, box)
                untouched = filled(case.load_memory, expected)
                assert storage_bytes(got) == storage_bytes(untouched), "wrote beside the target"


def fresh_url() -> str:
    return f"memory://roundtrip-{next(_numbers)}"


def forget(url: str) -> None:
    memory = fsspec.filesystem("memory")
    memory.rm(memory._strip_protocol(url), recursive=True)


def roundtrip(
    job, make_writer: Callable[[str], Any], make_reader: Callable[[str], Any], coordinator: int = 0
) -> list[Any]:
    url = fresh_url()
    save_on_ranks(states_to_save(job), lambda: make_writer(url), coordinator=coordinator)
    states = blank_targets(job)
    readers = load_on_ranks(states, lambda: make_reader(url))
    check(job, states)
    forget(url)
    return readers


def roundtrip_by_ours(job, write: WriteConfig, read: ReadConfig, coordinator: int) -> None:
    roundtrip(
        job,
        lambda url: ObjectStoreWriter(url, config=write),
        lambda url: ObjectStoreReader(url, config=read),
        coordinator=coordinator,
    )


@given(job=jobs(), write=WRITE_CONFIGS, read=READ_CONFIGS, pick=st.integers(0, 5))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_any_layout_loads_from_any_other(job, write, read, pick) -> None:
    roundtrip_by_ours(job, write, read, pick % job[0])


@given(job=jobs(), write=WRITE_CONFIGS)
@settings(max_examples=12, deadline=None, derandomize=True)
def test_stock_loads_any_layout_of_ours(job, write) -> None:
    roundtrip(job, lambda url: ObjectStoreWriter(url, config=write), FsspecReader)


@given(job=jobs(), read=READ_CONFIGS, zstd=st.booleans(), one_file=st.booleans())
@settings(max_examples=12, deadline=None, derandomize=True)
def test_ours_loads_any_layout_of_stock(job, read, zstd, one_file) -> None:
    extensions = [ZStandard()] if zstd else None

    def make_writer(url: str) -> FsspecWriter:
        return FsspecWriter(
            url, single_file_per_rank=one_file, sync_files=False, _extensions=extensions
        )

    roundtrip(job, make_writer, lambda url: ObjectStoreReader(url, config=read))


@given(job=jobs(), write=WRITE_CONFIGS, read=READ_CONFIGS)
@settings(max_examples=12, deadline=None, derandomize=True)
def test_any_layout_loads_compressed(job, write, read) -> None:
    roundtrip(
        job,
        lambda url: ObjectStoreWriter(url, config=write, extensions=[ZStandard()]),
        lambda url: ObjectStoreReader(url, config=read),
    )


@given(job=jobs())
@settings(max_examples=12, deadline=None, derandomize=True)
def test_nothing_but_the_elements_wanted_is_fetched(job) -> None:
    """Without checksums to widen for and without gaps to join, not one byte too many."""
    readers = roundtrip(
        job,
        lambda url: ObjectStoreWriter(url, config=WriteConfig(inline_bytes=0)),
        lambda url: ObjectStoreReader(url, config=ReadConfig(verify=False, join_gap_bytes=0)),
    )
    for reader in readers:
        assert reader.last_read.fetched_bytes == reader.last_read.needed_bytes


@pytest.mark.campaign
@given(job=jobs(), write=WRITE_CONFIGS, read=READ_CONFIGS, pick=st.integers(0, 5))
@settings(max_examples=3000, deadline=None)
def test_any_layout_loads_from_any_other_at_length(job, write, read, pick) -> None:
    roundtrip_by_ours(job, write, read, pick % job[0])


@pytest.mark.campaign
@given(
    job=jobs(), write=WRITE_CONFIGS, read=READ_CONFIGS, zstd=st.booleans(), one_file=st.booleans()
)
@settings(max_examples=600, deadline=None)
def test_stock_and_compressed_and_exact_at_length(job, write, read, zstd, one_file) -> None:
    test_stock_loads_any_layout_of_ours.hypothesis.inner_test(job, write)
    test_ours_loads_any_layout_of_stock.hypothesis.inner_test(job, read, zstd, one_file)
    test_any_layout_loads_compressed.hypothesis.inner_test(job, write, read)
    test_nothing_but_the_elements_wanted_is_fetched.hypothesis.inner_test(job)
