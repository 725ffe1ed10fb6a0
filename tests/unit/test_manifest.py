from __future__ import annotations

import struct

import crc32c
import numpy as np
import pytest

from dcpstore.errors import CorruptError, IncompatibleError
from dcpstore.manifest import DataObject, Entry, ItemId, Manifest, StoredItem, decode, encode
from dcpstore.ranges import ByteRange


def example() -> Manifest:
    key = "__0_0.0123456789abcdef.distcp"
    raw = StoredItem(
        key=key,
        record=ByteRange(64, 2000),
        kind="raw",
        payload=ByteRange(512, 1536),
        dtype="bfloat16",
        sizes=(16, 32),
        checksums=np.array([1, 2**32 - 1], np.uint32),
        block_bytes=512,
    )
    scalar = StoredItem(
        key=key,
        record=ByteRange(2000, 2500),
        kind="raw",
        payload=ByteRange(2400, 2404),
        dtype="float32",
        checksums=np.array([7], np.uint32),
        block_bytes=512,
        inline=b"\x00\x01\x02\x03",
    )
    value = StoredItem(
        key=key,
        record=ByteRange(2500, 2500),
        kind="bytes",
        payload=ByteRange(2500, 2500),
        transforms=("stream.zstd/1", "other/2"),
        block_bytes=512,
        inline=b"",
    )
    return Manifest(
        save_id="0123456789abcdef",
        entries=(
            Entry("model.w", '{"dtype":"bfloat16"}', (48, 32)),
            Entry("step", '{"dtype":"float32"}', ()),
            Entry("naïve \U0001f600 key", None),
            Entry("extra", None, in_state_dict=False),
        ),
        items={
            ItemId("model.w", (32, 0)): raw,
            ItemId("step", ()): scalar,
            ItemId("naïve \U0001f600 key", None): value,
            ItemId("extra", None): value,
        },
        objects=(DataObject(key, 2500, '"etag"'), DataObject("other", 0, None)),
        planner_paths={"model.w": ("model", "w"), "step": ("opt", 0, "step")},
        info={"torch": "2.13.0"},
    )


def same_item(one: StoredItem, other: StoredItem) -> bool:
    for name in StoredItem.__slots__:
        a, b = getattr(one, name), getattr(other, name)
        if not (np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b):
            return False
    return True


def test_a_manifest_survives_its_wire_form() -> None:
    before = example()
    after = decode(encode(before))
    assert list(after.items) == list(before.items)
    assert all(same_item(after.items[one], before.items[one]) for one in before.items)
    assert after.entries == before.entries
    assert after.objects == before.objects
    assert after.planner_paths == before.planner_paths
    assert (after.save_id, after.info) == (before.save_id, before.info)


def test_an_empty_manifest_survives_too() -> None:
    after = decode(encode(Manifest("0" * 16, (), {}, ())))
    assert after.items == {}
    assert after.planner_paths is None


def test_every_flipped_byte_is_noticed() -> None:
    data = encode(example())
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 0x10
        with pytest.raises((CorruptError, IncompatibleError)):
            decode(bytes(damaged))


def test_every_cut_is_noticed() -> None:
    data = encode(example())
    for end in range(0, len(data), 7):
        with pytest.raises(CorruptError):
            decode(data[:end])


def test_a_newer_format_is_refused_by_name() -> None:
    data = bytearray(encode(example())[:-4])
    struct.pack_into("<I", data, 8, 99)
    data += struct.pack("<I", crc32c.crc32c(bytes(data)))
    with pytest.raises(IncompatibleError, match="version 99"):
        decode(bytes(data))


def test_an_object_outside_the_folder_is_refused() -> None:
    manifest = Manifest("0" * 16, (), {}, (DataObject("../victim", 1),))
    with pytest.raises(CorruptError, match="outside"):
        decode(encode(manifest))


def test_a_large_manifest_costs_few_bytes_per_item() -> None:
    num = 20_000
    entries = tuple(Entry(f"layers.{i}.scale", '{"dtype":"float32"}', ()) for i in range(num))
    items = {
        ItemId(entry.fqn, ()): StoredItem(
            key="__0_0.0123456789abcdef.distcp",
            record=ByteRange(600 * i, 600 * i + 596),
            kind="raw",
            payload=ByteRange(600 * i + 400, 600 * i + 404),
            dtype="float32",
            checksums=np.array([i * 2654435761 % 2**32], np.uint32),
            block_bytes=1 << 18,
            inline=struct.pack("<f", i),
        )
        for i, entry in enumerate(entries)
    }
    objects = (DataObject("__0_0.0123456789abcdef.distcp", 600 * num),)
    data = encode(Manifest("0" * 16, entries, items, objects))
    assert len(data) < 25 * num  # 8 of them are the value and its checksum
