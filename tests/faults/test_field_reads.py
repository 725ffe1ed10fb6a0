"""What the field measured of loads (M1-M3, M10-M12), repeated against ours on the emulator."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcpstore.errors import CheckpointError, CorruptError, IncompatibleError
from dcpstore.format.manifest import StoredItem
from dcpstore.format.seal import read_seal
from dcpstore.testing import MotoServer
from faults.places import APART, ENGINES, HERE, Place, new_place
from faults.states import MIB, failing, is_equal, load, load_slice, save

WHOLE = {"part_bytes": 16 * MIB, "budget_bytes": 256 * MIB, "object_bytes": 256 * MIB}
"""The defaults: the field's measurements are of large objects."""


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def mib_tensors(count: int) -> dict[str, torch.Tensor]:
    return {f"w{number:03d}": noise(MIB // 4, seed=number) for number in range(count)}


def tell(row: str, text: str) -> None:
    print(f"\n{row}: {text}")


# M1-M3: bytes fetched for bytes needed ---------------------------------------------------


@pytest.fixture(scope="module")
def many_tensors(moto_server: MotoServer) -> tuple[Place, dict[str, torch.Tensor]]:
    """24 tensors of 1 MiB saved into one object."""
    moto_server.heal()
    place = new_place(moto_server)
    state = mib_tensors(24)
    save(state, place.writer(**WHOLE))
    assert len(place.data_keys()) == 1
    return place, state


@pytest.mark.parametrize("engine", ENGINES)
def test_m1_one_tensor_out_of_a_large_object_fetches_only_its_bytes(many_tensors, engine) -> None:
    place, state = many_tensors
    place.server.clear_requests()
    place.engine = engine
    found = {"w017": torch.zeros(MIB // 4)}
    load(found, place.reader())

    assert torch.equal(found["w017"], state["w017"])
    ratio = place.data_bytes_fetched() / MIB
    assert ratio <= 1.1
    assert place.server.counts() == {"GetObject": 2}  # metadata, the tensor
    tell("M1", f"{engine}: {ratio:.3f} x the bytes needed")


@pytest.mark.parametrize("engine", ENGINES)
def test_m2_tensors_in_another_order_than_saved_are_fetched_once(many_tensors, engine) -> None:
    place, state = many_tensors
    place.server.clear_requests()
    place.engine = engine
    names = list(state)
    random.Random(2).shuffle(names)
    found = {name: torch.zeros(MIB // 4) for name in names}
    reader = place.reader()
    load(found, reader)

    assert is_equal(found, {name: state[name] for name in names})
    ratio = place.data_bytes_fetched() / (24 * MIB)
    assert ratio <= 1.02
    tell("M2", f"{engine}: {ratio:.4f} x, {reader.last_read.num_requests} GETs")


@pytest.fixture(scope="module")
def large_chunk(moto_server: MotoServer) -> tuple[Place, torch.Tensor]:
    """A tensor of 64 MiB saved as one chunk, whose rows end inside checksum blocks."""
    moto_server.heal()
    place = new_place(moto_server)
    tensor = noise(8, 2 * MIB + 1)
    save({"w": tensor, "before": noise(333)}, place.writer(**WHOLE))
    return place, tensor


@pytest.mark.parametrize("engine", ENGINES)
def test_m3_an_eighth_of_the_rows_of_a_large_chunk_fetches_only_them(large_chunk, engine) -> None:
    place, tensor = large_chunk
    place.server.clear_requests()
    out = torch.zeros(1, tensor.shape[1])
    place.engine = engine
    load_slice(place.reader(), "w", (5, 0), out)

    assert torch.equal(out, tensor[5:6])
    ratio = place.data_bytes_fetched() / (out.numel() * 4)
    assert ratio <= 1.05
    tell("M3", f"{engine}: rows {ratio:.4f} x")


@pytest.mark.parametrize("engine", ENGINES)
def test_m3_half_of_the_columns_of_a_large_chunk_fetches_little_more(large_chunk, engine) -> None:
    place, tensor = large_chunk
    place.server.clear_requests()
    out = torch.zeros(8, MIB)
    place.engine = engine
    load_slice(place.reader(), "w", (0, 700_001), out)

    assert torch.equal(out, tensor[:, 700_001 : 700_001 + MIB])
    ratio = place.data_bytes_fetched() / (out.numel() * 4)
    assert ratio <= 1.25
    tell("M3", f"{engine}: columns {ratio:.4f} x")


# M10: a flipped byte ---------------------------------------------------------------------

SEEDS = [*range(4), *(pytest.param(seed, marks=pytest.mark.campaign) for seed in range(4, 40))]


@pytest.fixture
def saved_chunk(place: Place) -> tuple[Place, torch.Tensor, StoredItem]:
    tensor = noise(64, 6001)
    save({"a": noise(5000), "w": tensor, "tiny": noise(3), "text": "x" * 9000}, place.writer())
    items = place.manifest().items
    (item,) = [item for one, item in items.items() if one.fqn == "w"]
    return place, tensor, item


@pytest.mark.parametrize("seed", SEEDS)
def test_m10_a_flipped_bit_under_a_random_slice_is_named(saved_chunk, seed: int) -> None:
    place, _, item = saved_chunk
    chance = random.Random(seed)
    at = chance.randrange(item.payload.num_bytes)
    place.client.flip_bit(f"{place.name}/{item.key}", item.payload.start + at, chance.randrange(8))

    row, column = divmod(at // 4, 6001)
    first = (chance.randint(0, row), chance.randint(0, column))
    last = (chance.randint(row, 63), chance.randint(column, 6000))
    out = torch.full((last[0] - first[0] + 1, last[1] - first[1] + 1), -1.0)
    error = failing(CorruptError, load_slice, place.reader(), "w", first, out)

    assert error.key == item.key
    assert error.fqn == "w"
    assert error.start <= item.payload.start + at < error.end
    assert error.end - error.start <= item.block_bytes
    for word in (place.url, item.key, str(error.start), str(error.end), "'w'"):
        assert word in error.message


@pytest.mark.parametrize("seed", SEEDS)
def test_m10_a_flipped_bit_beside_a_slice_does_not_disturb_it(saved_chunk, seed: int) -> None:
    place, tensor, item = saved_chunk
    chance = random.Random(seed)
    block = item.block_bytes // 4 // 6001 + 2  # rows from a block to one that it cannot touch
    row = chance.randrange(64)
    at = item.payload.start + row * 6001 * 4 + chance.randrange(6001 * 4)
    place.client.flip_bit(f"{place.name}/{item.key}", at, chance.randrange(8))
    rows = [one for one in range(64) if abs(one - row) > block]
    if not rows:
        pytest.skip("the block of this row covers the whole tensor")
    out = torch.zeros(1, 6001)
    load_slice(place.reader(), "w", (rows[seed % len(rows)], 0), out)
    assert torch.equal(out[0], tensor[rows[seed % len(rows)]])


def test_m10_every_object_and_kind_of_item_is_covered_by_a_checksum(place: Place) -> None:
    state = {"a": noise(5000), "tiny": noise(3), "text": "x" * 9000, "step": 7}
    save(state, place.writer(object_bytes=1, inline_bytes=0))
    manifest = place.manifest()
    assert len(manifest.objects) == 4
    for one, item in manifest.items.items():
        original = place.get(item.key)
        place.client.flip_bit(f"{place.name}/{item.key}", item.payload.end - 1)
        found = {"a": torch.zeros(5000), "tiny": torch.zeros(3), "text": "", "step": 0}
        error = failing(CorruptError, load, found, place.reader())
        assert (error.key, error.fqn) == (item.key, one.fqn)
        place.put_all({item.key: original})
    load(found, place.reader())
    assert is_equal(found, state)


@pytest.mark.parametrize("seed", SEEDS)
def test_m10_a_flipped_bit_in_metadata_or_manifest_is_found(place: Place, seed: int) -> None:
    state = {"a": noise(5000), "tiny": noise(3), "step": 7}
    save(state, place.writer(**(HERE, APART)[seed % 2]))
    chance = random.Random(seed)
    originals = {key: place.get(key) for key in place.names() if not key.endswith(".distcp")}
    for key, data in originals.items():
        for _ in range(12 // len(originals)):
            at, bit = chance.randrange(len(data)), chance.randrange(8)
            place.client.flip_bit(f"{place.name}/{key}", at, bit)
            found = {"a": torch.zeros(5000), "tiny": torch.zeros(3), "step": 0}
            try:
                load(found, place.reader())
            except BaseException as error:
                assert isinstance(error.failures[0][0], CheckpointError | AssertionError), error
                assert ".metadata" in str(error) or key in str(error)
            else:
                pytest.fail(f"{key}: bit {bit} of byte {at} went unnoticed")
            place.put_all({key: data})


@pytest.mark.parametrize("part", ["pickle", "manifest", "footer", "last byte", "magic"])
def test_m10_metadata_that_was_cut_short_is_refused(place: Place, part: str) -> None:
    save({"a": noise(500)}, place.writer())
    whole = place.get(".metadata")
    seal = read_seal(memoryview(whole))
    assert seal is not None
    length = {
        "pickle": len(whole) // 3,
        "manifest": sum(seal.manifest_span) // 2,
        "footer": len(whole) - 100,
        "last byte": len(whole) - 1,
        "magic": len(whole) - 8,
    }[part]
    place.client.truncate(f"{place.name}/.metadata", length)
    found = {"a": torch.zeros(500)}
    try:
        load(found, place.reader())
    except BaseException as error:
        assert ".metadata" in str(error)
        assert torch.equal(found["a"], torch.zeros(500))
    else:
        pytest.fail("loaded without the checksums that the footer leads to")


def test_metadata_without_its_footer_loads_unverified_on_request(place: Place) -> None:
    state = {"a": noise(500)}
    save(state, place.writer())
    place.client.truncate(f"{place.name}/.metadata", len(place.get(".metadata")) - 1)
    found = {"a": torch.zeros(500)}
    load(found, place.reader(verify=False))
    assert is_equal(found, state)


# M11: dtypes -----------------------------------------------------------------------------


@pytest.mark.parametrize("target", [torch.int32, torch.bfloat16, torch.float16, torch.bool])
def test_m11_a_cast_that_loses_values_is_refused_before_any_byte_moves(
    any_place: Place, target: torch.dtype
) -> None:
    save({"model": {"w": noise(300), "ok": noise(300)}}, any_place.writer())
    any_place.server.clear_requests()
    found = {"model": {"w": torch.ones(300, dtype=target), "ok": torch.ones(300)}}
    error = failing(IncompatibleError, load, found, any_place.reader())

    for word in ("'model.w'", "float32", str(target).removeprefix("torch."), "casts='any'"):
        assert word in error.message
    assert "model.ok" not in error.message
    assert torch.equal(found["model"]["w"], torch.ones(300, dtype=target))
    assert torch.equal(found["model"]["ok"], torch.ones(300))
    assert any_place.server.counts() == {"GetObject": 1}


@pytest.mark.parametrize(
    ("saved", "target"),
    [
        (torch.float32, torch.float64),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.int32, torch.int64),
        (torch.uint8, torch.float32),
    ],
)
def test_m11_a_cast_that_keeps_every_value_is_done(place: Place, saved, target) -> None:
    tensor = (noise(300) * 9).abs().to(saved)
    save({"w": tensor}, place.writer())
    found = {"w": torch.zeros(300, dtype=target)}
    load(found, place.reader())
    assert torch.equal(found["w"], tensor.to(target))
    failing(IncompatibleError, load, {"w": torch.zeros(300, dtype=target)}, exact(place))


def exact(place: Place):
    return place.reader(casts="exact")


def test_m11_a_lossy_cast_is_done_on_request(place: Place) -> None:
    tensor = noise(300) * 100
    save({"w": tensor}, place.writer())
    found = {"w": torch.zeros(300, dtype=torch.int32)}
    load(found, place.reader(casts="any"))
    assert torch.equal(found["w"], tensor.to(torch.int32))


# M12: many scalars -----------------------------------------------------------------------


@pytest.mark.parametrize("count", [3000, pytest.param(20_000, marks=pytest.mark.campaign)])
def test_m12_many_scalars_load_without_a_data_request(
    place: Place, count: int, tmp_path: Path
) -> None:
    state = {f"state.{number}.step": torch.tensor(float(number)) for number in range(count)}
    save(state, dcp.FileSystemWriter(tmp_path, sync_files=False))
    save(state, place.writer(**WHOLE))
    place.server.clear_requests()

    found = {key: torch.tensor(-1.0) for key in state}
    stock_cpu_s = cpu_s_of_load(found, dcp.FileSystemReader(tmp_path))
    found = {key: torch.tensor(-1.0) for key in state}
    cpu_s = cpu_s_of_load(found, place.reader())

    assert is_equal(found, state)
    assert cpu_s < stock_cpu_s  # measured: a third of it
    assert place.server.counts() == {"GetObject": 1}
    data = sum(len(place.get(key)) for key in place.data_keys())
    seal = read_seal(memoryview(place.get(".metadata")))
    assert seal is not None
    assert data / count < 1577 / 2
    assert seal.pickle_bytes / count < 223 * 1.1  # torch's own, kept for stock readers
    assert seal.manifest_bytes < seal.pickle_bytes / 4
    tell(
        "M12",
        f"load {cpu_s:.2f} CPU s, stock {stock_cpu_s:.2f}, data {data / count:.0f} B, manifest"
        f" {seal.manifest_bytes / count:.0f} B and pickle {seal.pickle_bytes / count:.0f} B"
        " per tensor",
    )


def cpu_s_of_load(found: dict[str, torch.Tensor], reader: Any) -> float:
    began_s = time.process_time()
    load(found, reader)
    return time.process_time() - began_s
