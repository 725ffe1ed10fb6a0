from __future__ import annotations

import json
import struct
import tracemalloc
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import crc32c
import numpy as np
import pytest
from hostile_manifests import Change, Columns, Fields, changed, packed, take_apart

from dcpstore.config import ReadConfig
from dcpstore.errors import CorruptError, IncompatibleError
from dcpstore.format.manifest import DataObject, Entry, ItemId, Manifest, StoredItem, decode, encode
from dcpstore.read.discovery import discover
from dcpstore.store import open_store
from dcpstore.store.base import ByteRange


def properties(dtype: str) -> str:
    fields = {"dtype": dtype, "layout": "strided", "memory_format": "contiguous_format"}
    return json.dumps({**fields, "requires_grad": False, "pin_memory": False})


def example() -> Manifest:
    key = "__0_0.0123456789abcdef.distcp"
    raw = StoredItem(
        key=key,
        record=ByteRange(64, 9000),
        kind="raw",
        payload=ByteRange(512, 8704),
        dtype="bfloat16",
        sizes=(16, 256),
        checksums=np.array([1, 2**32 - 1], np.uint32),
        block_bytes=4096,
    )
    scalar = replace(
        raw,
        record=ByteRange(9000, 9500),
        payload=ByteRange(9400, 9404),
        dtype="float32",
        sizes=(),
        checksums=np.array([7], np.uint32),
        inline=b"\x00\x01\x02\x03",
    )
    value = StoredItem(
        key=key,
        record=ByteRange(9500, 9500),
        kind="bytes",
        payload=ByteRange(9500, 9500),
        transforms=("stream.zstd/1", "other/2"),
        block_bytes=4096,
        inline=b"",
    )
    return Manifest(
        save_id="0123456789abcdef",
        entries=(
            Entry("model.w", properties("bfloat16"), (48, 256)),
            Entry("step", properties("float32"), ()),
            Entry("naïve \U0001f600 key", None),
            Entry("extra", None, in_state_dict=False),
        ),
        items={
            ItemId("model.w", (32, 0)): raw,
            ItemId("step", ()): scalar,
            ItemId("naïve \U0001f600 key", None): value,
            ItemId("extra", None): value,
        },
        objects=(DataObject(key, 9500, '"etag"'), DataObject("other", 0, None)),
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
    entries = tuple(Entry(f"layers.{i}.scale", properties("float32"), ()) for i in range(num))
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


# --- the gate -----------------------------------------------------------------------------


def resealed(change: Change, before: Manifest | None = None) -> bytes:
    """Encode a manifest of which something was changed, with checksums that are right."""
    return changed(encode(before or example()), change)


def setting(name: str, row: int, value: int) -> Change:
    def change(_: Fields, columns: Columns) -> None:
        columns[name][row] = value

    return change


def replacing(name: str, column: object) -> Change:
    return lambda _, columns: columns.update({name: column})


def telling(name: str, value: object) -> Change:
    return lambda fields, _: fields.update({name: value})


def text_column(text: str | bytes) -> np.ndarray:
    return np.frombuffer(text if isinstance(text, bytes) else text.encode(), np.uint8)


def test_a_manifest_that_nothing_was_changed_of_passes() -> None:
    assert decode(resealed(lambda *_: None)).entries == example().entries


HUGE = 2**63
DAMAGE = {
    # one value of a column: the row that is wrong is named by its key
    "an entry that is not there": (setting("item.entry", 1, 4), "item.entry .*row 1"),
    "an object that is not there": (setting("item.object", 0, 2), "item.object .*'model.w'"),
    "a start beyond the object": (setting("item.start", 0, 9501), "item.start .*'model.w'"),
    "a huge start": (setting("item.start", 0, HUGE), "item.start"),
    "a start that wraps around": (setting("item.start", 0, 2**64 - 1), "item.start"),
    "a record beyond the object": (setting("item.length", 1, 501), "item.length .*'step'"),
    "a huge length": (setting("item.length", 0, 2**64 - 1), "item.length"),
    "a payload beyond the record": (
        setting("item.payload_offset", 1, 500),
        "item.payload_length .*'step'",
    ),
    "a payload that starts beyond it": (
        setting("item.payload_offset", 1, 2**32 - 1),
        "item.payload_offset",
    ),
    "a huge payload": (setting("item.payload_length", 0, HUGE), "item.payload_length"),
    "a shorter payload": (setting("item.payload_length", 1, 3), "item.inline .*'step'"),
    "a kind that there is not": (setting("item.kind", 0, 3), "item.kind .*'model.w'"),
    "a dtype below the strings": (setting("item.dtype", 0, -1), "item.dtype .*'model.w'"),
    "a dtype beyond the strings": (setting("item.dtype", 0, 99), "item.dtype .*'model.w'"),
    "transforms that are not there": (setting("item.transforms", 1, -7), "item.transforms"),
    "a transform of plain elements": (setting("item.transforms", 0, 0), "item.transforms"),
    "more blocks": (setting("item.blocks", 0, 3), "item.blocks .*'model.w'"),
    "a negative number of blocks": (setting("item.blocks", 0, -2), "item.blocks"),
    "a huge number of blocks": (setting("item.blocks", 0, HUGE - 1), "item.blocks"),
    "a longer inline payload": (setting("item.inline", 1, 5), "item.inline .*'step'"),
    "a negative inline payload": (setting("item.inline", 1, -2), "item.inline"),
    "has_offsets of 2": (setting("item.has_offsets", 0, 2), "item.has_offsets"),
    "offsets for what has none": (setting("item.has_offsets", 0, 0), "item.offsets .*'model.w'"),
    "no offsets for a tensor": (setting("item.has_offsets", 1, 0), "item.has_offsets .*'step'"),
    "a negative offset": (setting("item.offsets.flat", 0, -1), "item.offsets.flat"),
    "a chunk outside its tensor": (setting("item.offsets.flat", 0, 33), "item.offsets .*'model.w'"),
    "a huge offset": (setting("item.offsets.flat", 0, HUGE - 1), "item.offsets .*'model.w'"),
    "a negative size": (setting("item.sizes.flat", 0, -16), "item.sizes.flat"),
    "a larger chunk": (setting("item.sizes.flat", 0, 17), "item.offsets .*'model.w'"),
    "a smaller chunk": (setting("item.sizes.flat", 0, 15), "item.payload_length .*'model.w'"),
    "a smaller tensor": (setting("entry.sizes.flat", 0, 47), "item.offsets .*'model.w'"),
    "a negative tensor": (setting("entry.sizes.flat", 0, -48), "entry.sizes.flat"),
    "a tensor beyond all bounds": (setting("entry.sizes.flat", 0, HUGE - 1), "entry.sizes"),
    "dimensions that do not add up": (setting("item.sizes.ndim", 0, 3), "item.sizes.ndim"),
    "dimensions of another item": (
        replacing("item.sizes.ndim", np.array([0, 2, 0, 0], np.uint8)),
        "item.sizes .*'model.w'",
    ),
    "properties that are not there": (setting("entry.properties", 0, 5), "entry.properties"),
    "properties below -1": (setting("entry.properties", 2, -2), "entry.properties"),
    "properties that are a dtype": (setting("entry.properties", 0, 2), "entry.properties"),
    "in_state_dict of 2": (setting("entry.in_state_dict", 0, 2), "entry.in_state_dict"),
    "a shape of a value": (setting("entry.properties", 0, -1), "entry.sizes .*'model.w'"),
    "a huge object": (setting("object.size", 1, HUGE), "object.size"),
    "a smaller object": (setting("object.size", 0, 9499), "item.start .*key'"),
    "names that do not add up": (setting("entry.fqn.length", 0, 8), "entry.fqn.length"),
    "a name of a half character": (setting("entry.fqn.text", 0, 0xFF), "entry.fqn.text"),
    "a name twice": (
        replacing("entry.fqn.length", np.array([0, 0, 26, 5], np.uint32)),
        "entry.fqn .*there twice",
    ),
    # whole columns
    "more checksums": (replacing("checksums", np.zeros(4, np.uint32)), "checksums .* 4 .* 3"),
    "fewer inline bytes": (replacing("inline", text_column("abc")), "inline .* 3 .* 4"),
    "fewer rows": (replacing("item.kind", np.zeros(3, np.uint8)), "item.kind .* 3 .* 4"),
    "another dtype": (replacing("item.start", np.zeros(4, np.float64)), "item.start .*float64"),
    "a dtype of Python": (replacing("inline", ("object", 4, b"")), "inline .*object"),
    "a dtype that is no word": (replacing("inline", ([], 4, b"")), "header .*dtype"),
    "a missing column": (lambda _, c: c.pop("item.start"), "item.start .*not there"),
    "no zlib": (replacing("inline", ("uint8", 4, b"1234")), "inline .*decompress"),
    "half a column": (
        replacing("inline", ("uint8", 4, packed(text_column("abcd"))[:-3])),
        "inline .*decompress",
    ),
    "two columns in one": (
        replacing("inline", ("uint8", 4, packed(text_column("abcd")) * 2)),
        "inline .*decompress",
    ),
    "a longer column": (
        replacing("inline", ("uint8", 4, packed(text_column("abcde")))),
        "inline .*decompress",
    ),
    "a column of 4 GB": (
        replacing("inline", ("uint8", 1 << 32, packed(text_column("abcd")))),
        "4294967.* more than 64 times",
    ),
    "a negative count": (replacing("inline", ("uint8", -1, b"")), "header .*count"),
    "a count of NaN": (replacing("inline", ("uint8", float("nan"), b"")), "header .*NaN"),
    "a true count": (replacing("inline", ("uint8", True, b"")), "header .*True"),
    "columns twice": (
        telling("columns", [["inline", "uint8", 0, 0]] * 2),
        "inline .*twice",
    ),
    "columns that are no list": (telling("columns", 5), "header"),
    "a column that is a number": (telling("columns", [5]), "header"),
    "no columns": (telling("columns", []), "columns take 0"),
    "columns that end behind the object": (
        telling("columns", [["unknown", "uint8", 0, 1 << 40]]),
        "columns take",
    ),
    # the header
    "a save id that climbs": (telling("save_id", "../../../../etc/a"), "header .*save id"),
    "a save id that is none": (telling("save_id", None), "header .*save id"),
    "info that is a list": (telling("info", []), "header .*info"),
    "a flag that is a number": (telling("has_other_planner_data", 1), "header"),
    "strings that are a text": (telling("strings", "abc"), "header .*strings"),
    "strings that are numbers": (telling("strings", [1]), "header .*strings"),
    "blocks of 1 byte": (telling("block_bytes", 1), "header .*block_bytes=1 "),
    "blocks of no power of two": (telling("block_bytes", 4097), "header .*block_bytes"),
    "negative blocks": (telling("block_bytes", -4096), "header"),
    "huge blocks": (telling("block_bytes", 2**70), "header"),
    "broken blocks": (telling("block_bytes", 4096.0), "header"),
    "blocks of no size": (telling("block_bytes", 0), "item.blocks"),
    "other blocks": (telling("block_bytes", 8192), "item.blocks .*'model.w'"),
    # planner_paths
    "paths that are no JSON": (replacing("planner_paths", text_column("{")), "planner_paths"),
    "paths that are a map": (replacing("planner_paths", text_column("{}")), "planner_paths"),
    "a path that is a text": (replacing("planner_paths", text_column('[["a","b"]]')), "'a'"),
    "a path of no key": (replacing("planner_paths", text_column("[[1,[]]]")), "planner_paths"),
    "a path of floats": (replacing("planner_paths", text_column('[["a",[1.5]]]')), "'a'"),
    "a path of truths": (replacing("planner_paths", text_column('[["a",[true]]]')), "'a'"),
    "a path of lists": (replacing("planner_paths", text_column('[["a",[[]]]]')), "'a'"),
    "a path twice": (replacing("planner_paths", text_column('[["a",["a"]],["a",["b"]]]')), "twice"),
    "half a path": (replacing("planner_paths", text_column('[["a"]]')), "planner_paths"),
    "paths in paths": (replacing("planner_paths", text_column("[" * 90_000)), "planner_paths"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_what_no_checkpoint_can_be_is_refused_with_its_place(what: str) -> None:
    change, match = DAMAGE[what]
    with pytest.raises(CorruptError, match=f"(?s)^the/object: the manifest.*{match}") as caught:
        decode(resealed(change), key="the/object")
    assert caught.value.key == "the/object"


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"dtype":1}', properties("float32").replace("false", "0"), properties("a.b")],
)
def test_damaged_properties_are_refused_with_their_key(text: str) -> None:
    with pytest.raises(CorruptError, match=r"entry.properties .*'model.w'") as caught:
        decode(resealed(lambda fields, _: fields["strings"].__setitem__(0, text)))
    assert caught.value.fqn == "model.w"


def test_a_chunk_that_is_there_twice_with_different_contents_is_refused() -> None:
    before = example()
    checksums = np.array([1, 2], np.uint32)
    other = replace(before.items[ItemId("model.w", (32, 0))], checksums=checksums)
    manifest = replace(before, items={**before.items, ItemId("model.w", (16, 0)): other})
    assert len(decode(encode(manifest)).items) == 5
    with pytest.raises(CorruptError, match=r"\(32, 0\) is there twice .*'model.w'"):
        decode(
            resealed(lambda _, columns: columns["item.offsets.flat"].__setitem__(2, 32), manifest)
        )


def test_a_dtype_that_only_a_newer_release_knows_is_refused_by_name() -> None:
    def change(fields: Fields, _: Columns) -> None:
        fields["strings"] = [text.replace("bfloat16", "float3") for text in fields["strings"]]

    with pytest.raises(IncompatibleError, match=r"'float3' .*'model.w'.*Update dcpstore"):
        decode(resealed(change))


def test_columns_that_are_not_known_are_not_even_decompressed() -> None:
    zeros = zlib.compress(bytes(64 << 20))
    data = resealed(replacing("from the future", ("uint8", 64 << 20, zeros)))
    tracemalloc.start()
    assert decode(data).entries == example().entries
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


def test_zeros_that_were_packed_well_are_refused_before_they_are_unpacked() -> None:
    stored = zlib.compress(bytes(64 << 20))
    tracemalloc.start()
    for count in (64 << 18, 1, 2**62):
        with pytest.raises(CorruptError, match="manifest"):
            decode(resealed(replacing("checksums", ("uint32", count, stored))))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2 << 20


def test_a_manifest_of_more_than_the_allowed_memory_is_refused() -> None:
    data = encode(example())
    with pytest.raises(IncompatibleError, match="max_metadata_bytes=10000"):
        decode(data, max_bytes=10_000)
    assert decode(data, max_bytes=100_000).entries == example().entries


# --- version 2 ------------------------------------------------------------------------------


def example_2() -> Manifest:
    """The example with an encoding of its first value."""
    before = example()
    one = ItemId("naïve \U0001f600 key", None)
    encoded = replace(
        before.items[one],
        record=ByteRange(9000, 9100),
        payload=ByteRange(9000, 9100),
        kind="value",
        checksums=np.array([5], np.uint32),
        inline=bytes(100),
    )
    items = {**before.items, one: replace(before.items[one], encoded=encoded)}
    return replace(before, items=items)


def test_an_encoding_makes_it_version_2_and_survives() -> None:
    manifest = example_2()
    assert (encode(example())[8], encode(manifest)[8]) == (1, 2)
    again = decode(encode(manifest))
    assert list(again.items) == list(manifest.items)
    for one, item in manifest.items.items():
        for form, other in zip(item.forms, again.items[one].forms, strict=True):
            assert same_item(replace(form, encoded=None), replace(other, encoded=None))


def test_version_1_has_no_encodings() -> None:
    with pytest.raises(CorruptError, match=r"item\.kind .*no such kind .*key"):
        decode(resealed(setting("item.kind", 2, 3)))


def test_a_need_that_is_not_known_is_refused_by_name() -> None:
    data = resealed(telling("needs", ["values", "blocks"]), example_2())
    with pytest.raises(IncompatibleError, match=r"needs \['blocks'\].*Update dcpstore"):
        decode(data)


@pytest.mark.parametrize("needs", [None, "values", [1], {"values": 1}])
def test_damaged_needs_are_refused(needs: object) -> None:
    with pytest.raises(CorruptError, match="header is damaged"):
        decode(resealed(telling("needs", needs), example_2()))


@pytest.mark.parametrize(
    ("name", "row", "value"),
    [
        ("item.kind", 0, 3),  # the first row of all
        ("item.kind", 1, 3),  # behind a tensor's
        ("item.kind", 2, 0),  # its own value is no value's bytes any more
        ("item.kind", 4, 3),  # behind another encoding
        ("item.entry", 3, 3),  # of another key
        ("item.has_offsets", 3, 1),
        ("item.has_offsets", 2, 1),
    ],
)
def test_an_encoding_without_its_value_is_refused(name: str, row: int, value: int) -> None:
    with pytest.raises(CorruptError, match="the manifest's column item"):
        decode(resealed(setting(name, row, value), example_2()))


def test_an_encoding_beyond_its_object_is_refused() -> None:
    with pytest.raises(CorruptError, match=r"item\.length .*beyond its object's end .*key"):
        decode(resealed(setting("item.length", 3, 501), example_2()))


# --- attachments ---------------------------------------------------------------------------


def attachment(start: int, num_bytes: int, *, inline: bool, key: str) -> StoredItem:
    return StoredItem(
        key=key,
        record=ByteRange(start, start + num_bytes),
        kind="bytes",
        payload=ByteRange(start, start + num_bytes),
        checksums=np.arange(-(-num_bytes // 4096), dtype=np.uint32),
        block_bytes=4096,
        inline=bytes(num_bytes) if inline else None,
    )


def example_attached(before: Manifest | None = None) -> Manifest:
    before = before or example()
    key = before.objects[0].key
    return replace(
        before,
        attachments={
            "rng-0.json": attachment(9000, 7, inline=True, key=key),
            "data/\xe9": attachment(0, 9000, inline=False, key=key),
            "empty": attachment(9500, 0, inline=True, key=key),
            "last": attachment(9500, 0, inline=False, key=key),
        },
        info={"user_metadata": {"a": [1]}},
    )


@pytest.mark.parametrize("before", [example, example_2], ids=["alone", "with values"])
def test_attachments_make_it_version_2_and_survive(before: Callable[[], Manifest]) -> None:
    manifest = example_attached(before())
    assert encode(manifest)[8] == 2
    again = decode(encode(manifest))
    assert list(again.attachments) == list(manifest.attachments)
    for name, item in manifest.attachments.items():
        assert same_item(again.attachments[name], item), name
    stored = [*again.stored]
    assert len(stored) == len([*manifest.stored]) == len([*before().stored]) + 4
    for (one, form), (other, after) in zip(manifest.stored, stored, strict=True):
        assert one == other
        assert same_item(replace(form, encoded=None), replace(after, encoded=None))
    assert again.info == manifest.info


def test_attachments_alone_make_a_manifest() -> None:
    key = "__0_0.0123456789abcdef.distcp"
    manifest = Manifest(
        "0" * 16,
        (),
        {},
        (DataObject(key, 5000),),
        attachments={"a": attachment(0, 5000, inline=False, key=key)},
    )
    assert same_item(decode(encode(manifest)).attachments["a"], manifest.attachments["a"])


def test_columns_of_attachments_that_are_not_needed_are_passed_over() -> None:
    """As every column that a release does not know; no writer leaves such a manifest."""

    def change(fields: Fields, columns: Columns) -> None:
        fields["needs"] = []
        for name in ("checksums", "inline"):
            columns[name] = columns[name][: len(take_apart(encode(example()))[1][name])]
        columns["attachment.name.text"] = ("float64", 7, b"no zlib")

    assert decode(resealed(change, example_attached())).attachments == {}


def duplicated(_: Fields, columns: Columns) -> None:
    columns["attachment.name.text"] = text_column("a" * 4)
    columns["attachment.name.length"][:] = 1


def named(name: str) -> Change:
    """Give the first attachment another name."""

    def change(_: Fields, columns: Columns) -> None:
        text = columns["attachment.name.text"].tobytes()[columns["attachment.name.length"][0] :]
        columns["attachment.name.text"] = text_column(name.encode("utf-8", "surrogatepass") + text)
        columns["attachment.name.length"][0] = len(name.encode("utf-8", "surrogatepass"))

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (setting("attachment.object", 0, 2), "attachment.object .*no such object"),
        (setting("attachment.start", 0, 9501), "attachment.start .*beyond .*rng-0"),
        (setting("attachment.start", 0, 9494), "attachment.length .*beyond .*rng-0"),
        (setting("attachment.start", 0, 2**63), "attachment.start .*too large"),
        (setting("attachment.length", 1, 2**63 - 1), "attachment.length .*beyond .*data/"),
        (setting("attachment.length", 1, 8192), "attachment.blocks .*another number of blocks"),
        (setting("attachment.length", 0, 8), "attachment.inline .*another length .*rng-0"),
        (setting("attachment.blocks", 1, 2), "attachment.blocks .*another number of blocks"),
        (setting("attachment.blocks", 1, -1), "attachment.blocks .*negative"),
        (setting("attachment.inline", 0, -2), "attachment.inline .*negative"),
        (setting("attachment.inline", 0, -1), "column inline .*11 rows"),
        (replacing("attachment.object", np.zeros(3, np.uint32)), "attachment.object .*3 rows"),
        (replacing("attachment.blocks", np.zeros(4, np.int32)), "attachment.blocks .*dtype"),
        (lambda _, columns: columns.pop("attachment.length"), "attachment.length .*not there"),
        (lambda _, columns: columns.pop("attachment.name.text"), "attachment.name.text .*not"),
        (setting("attachment.name.length", 0, 11), "attachment.name.length .*add up"),
        (duplicated, "attachment.name .*'a' is there twice"),
        (named("/etc/passwd"), "outside"),
        (named("../a"), "outside"),
        (named(""), "outside"),
        (named("a\x1b[2J"), "control character"),
        (named("\ud800"), "control character"),
        (named("a" * 1025), "longer than any store"),
        (lambda _, c: c.update(checksums=c["checksums"][:-1]), "checksums .*are referred to"),
        (telling("info", {"user_metadata": [1]}), "user_metadata is no object"),
        (telling("block_bytes", 0), "blocks of no size"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_attachments_that_no_writer_makes_are_refused(change: Change, message: str) -> None:
    with pytest.raises(CorruptError, match=message):
        decode(resealed(change, example_attached()))


GOLDEN = Path(__file__).parents[1] / "compat" / "golden"


@pytest.mark.parametrize("folder", sorted(path.name for path in GOLDEN.glob("dcpstore-*")))
def test_a_golden_manifest_is_encoded_as_it_was(folder: str) -> None:
    """But for zlib's bytes, which differ from one build to another."""
    data = discover(open_store(GOLDEN / folder), ReadConfig()).manifest
    assert data is not None
    again = encode(decode(data))
    assert again[:12] == data[:12]
    (fields, columns), (before, columns_before) = take_apart(again), take_apart(data)
    assert json.dumps(fields) == json.dumps(before)
    assert list(columns) == list(columns_before)
    for name, column in columns.items():
        assert np.array_equal(column, columns_before[name]), name
