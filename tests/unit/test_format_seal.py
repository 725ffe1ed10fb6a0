"""The footer of ``.metadata``, with the manifest beside it in the object and apart."""

from __future__ import annotations

import json
import math
import pickle
import struct
import tracemalloc
from dataclasses import replace
from typing import Any

import crc32c
import pytest

from dcpstore.errors import CorruptError, IncompatibleError, StoreError
from dcpstore.format.manifest import DataObject, Entry, ItemId, Manifest, StoredItem, encode
from dcpstore.format.seal import (
    Facts,
    Seal,
    data_key,
    get_manifest,
    make_metadata,
    manifest_key,
    read_seal,
    read_tail,
)
from dcpstore.store import Store, open_store
from dcpstore.store.base import ByteRange
from dcpstore.testing import FaultyStore, RecordingStore, StoreFault
from dcpstore.write.commit import keys_named_in

PICKLED, MANIFEST, SAVE = pickle.dumps({"a": 1}), b"a manifest", "a" * 16
TAIL_BYTES = 12
HERE, APART = len(MANIFEST), 0
"""Values of ``embed_manifest_bytes``."""

both_layouts = pytest.mark.parametrize("most_bytes", [HERE, APART], ids=["here", "apart"])


@pytest.fixture
def store() -> Store:
    return open_store("memory://seal", engine="obstore")


def made(most_bytes: int, facts: Facts | None = None) -> tuple[Seal, bytes]:
    return make_metadata(SAVE, PICKLED, MANIFEST, embed_manifest_bytes=most_bytes, facts=facts)


@both_layouts
def test_a_seal_reads_back_and_a_stock_reader_sees_only_the_pickle(most_bytes: int) -> None:
    seal, data = made(most_bytes)
    assert pickle.loads(data) == {"a": 1}
    assert read_seal(memoryview(data)) == seal
    assert (seal.save_id, seal.manifest_bytes) == (SAVE, len(MANIFEST))
    assert seal.pickle_span == (0, len(PICKLED))


def test_a_manifest_lies_in_the_metadata_up_to_a_size_and_apart_beyond() -> None:
    for most_bytes, is_inside in ((HERE + 1, True), (HERE, True), (HERE - 1, False), (0, False)):
        seal, data = made(most_bytes)
        assert (MANIFEST in data) == is_inside
        assert seal.manifest_key == (None if is_inside else manifest_key(SAVE))
        assert seal.manifest_span.num_bytes == (len(MANIFEST) if is_inside else 0)


def test_a_manifest_beside_the_pickle_costs_no_request(store: Store) -> None:
    seal, data = made(HERE)
    recorded = RecordingStore(store)
    assert get_manifest(recorded, memoryview(data), seal) == MANIFEST
    assert recorded.counts == {}


@pytest.mark.parametrize("folder", ["", "run/step-1/"])
def test_a_manifest_apart_costs_one_request(store: Store, folder: str) -> None:
    seal, data = made(APART)
    store.put(folder + manifest_key(SAVE), MANIFEST)
    recorded = RecordingStore(store)
    assert get_manifest(recorded, memoryview(data), seal, folder=folder) == MANIFEST
    assert recorded.counts == {"get": 1}


def test_a_manifest_apart_that_is_gone_changed_or_refused_is_told_apart(store: Store) -> None:
    seal, data = made(APART)
    key = manifest_key(SAVE)
    with pytest.raises(CorruptError, match="is gone") as caught:
        get_manifest(store, memoryview(data), seal)
    assert caught.value.key == key
    for wrong in (MANIFEST[:-1], MANIFEST + b"!", b"A" + MANIFEST[1:], b""):
        store.put(key, wrong)
        with pytest.raises(CorruptError, match="not the 10") as caught:
            get_manifest(store, memoryview(data), seal)
        assert (caught.value.key, caught.value.end) == (key, len(wrong))
    denied = FaultyStore(store, [StoreFault("denied", verb="get")])
    with pytest.raises(StoreError):
        get_manifest(denied, memoryview(data), seal)


def test_a_manifest_apart_is_looked_for_in_the_folder_only(store: Store) -> None:
    _, data = made(APART)
    changed = memoryview(data.replace(manifest_key(SAVE).encode(), b"../" + b"x" * 23))
    with pytest.raises(CorruptError, match="no manifest of save"):
        read_seal(changed)
    seal, data = make_metadata("/../../x", PICKLED, MANIFEST, embed_manifest_bytes=APART)
    with pytest.raises(CorruptError, match="outside"):
        get_manifest(store, memoryview(data), seal)


# --- facts --------------------------------------------------------------------------------

FACTS = Facts(100, "r" * 16, {"loss": 0.1, "a": math.inf, "b": -math.inf, "c": 1e-320})


@both_layouts
def test_facts_come_back_and_the_footer_then_vouches_for_itself(most_bytes: int) -> None:
    seal, data = made(most_bytes, FACTS)
    assert seal.facts == FACTS
    assert read_seal(memoryview(data)) == seal
    assert b'"seal_crc32c"' in data
    assert pickle.loads(data) == {"a": 1}


def test_a_metric_that_is_no_number_comes_back_as_such() -> None:
    _, data = made(HERE, Facts(metrics={"loss": math.nan}))
    assert b'"loss":"nan"' in data
    found = read_seal(memoryview(data))
    assert found is not None
    assert found.facts is not None
    assert math.isnan(found.facts.metrics["loss"])


@both_layouts
def test_a_footer_without_facts_says_nothing_of_them(most_bytes: int) -> None:
    assert made(most_bytes, Facts()) == made(most_bytes)
    assert b"facts" not in made(most_bytes)[1]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"step": -1}, "no count"),
        ({"step": True}, "no count"),
        ({"step": 1.0}, "no count"),
        ({"run": 7}, "no text"),
        ({"metrics": {"loss": 1}}, "not a float"),
        ({"metrics": {"loss": "0.1"}}, "not a float"),
        ({"metrics": {1: 0.1}}, "not a float"),
        ({"run": "x" * (16 << 10)}, "is the most"),
        ({"metrics": {str(n): 0.1 for n in range(4096)}}, "is the most"),
    ],
)
def test_facts_of_other_types_or_too_many_are_refused(fields: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Facts(**fields)


def with_fields(data: bytes, start: int, **changes: Any) -> bytes:
    """Change fields of a footer and make its CRC32C right again."""
    fields = {**json.loads(data[start:-TAIL_BYTES]), **changes}
    fields.pop("seal_crc32c", None)
    fields["seal_crc32c"] = crc32c.crc32c(json.dumps(fields, separators=(",", ":")).encode())
    text = json.dumps(fields, separators=(",", ":")).encode()
    return data[:start] + text + struct.pack("<I8s", len(text), b"DCPSSEAL")


@both_layouts
@pytest.mark.parametrize(
    "facts",
    [
        7,
        [],
        "step",
        {"step": -1},
        {"step": "7"},
        {"step": 2**63},
        {"run": 7},
        {"metrics": 7},
        {"metrics": [["a", 1.0]] * 2 + ["abc"]},
        {"metrics": {"a": "NaN"}},
        {"metrics": {"a": None}},
        {"metrics": {"a": True}},
        {"metrics": {"a": [1.0]}},
        {"metrics": {"a": 10**400 - 1}},
        {"metrics": {"a" * (17 << 10): 1.0}},
    ],
    ids=str,
)
def test_facts_that_no_writer_makes_are_corrupt(most_bytes: int, facts: Any) -> None:
    seal, data = made(most_bytes, FACTS)
    hostile = with_fields(data, seal.manifest_span.end, facts=facts)
    with pytest.raises(CorruptError, match="footer of the metadata is damaged"):
        read_seal(memoryview(hostile))


@both_layouts
def test_fields_of_later_releases_are_passed_over(most_bytes: int) -> None:
    seal, data = made(most_bytes)
    later = with_fields(data, seal.manifest_span.end, unheard_of={"a": [1]})
    assert read_seal(memoryview(later)) == seal
    seal, data = made(most_bytes, FACTS)
    later = with_fields(data, seal.manifest_span.end, facts={**FACTS.as_json(), "epoch": 1})
    assert read_seal(memoryview(later)) == seal


@both_layouts
def test_a_field_that_is_not_known_counts_only_with_a_checksum(most_bytes: int) -> None:
    """Else a flipped bit in a name would take the field away, the checksum's own too."""
    seal, data = made(most_bytes)
    start = seal.manifest_span.end
    fields = json.loads(data[start:-TAIL_BYTES])
    fields.pop("seal_crc32c", None)
    text = json.dumps({**fields, "unheard_of": 1}).encode()
    data = data[:start] + text + struct.pack("<I8s", len(text), b"DCPSSEAL")
    with pytest.raises(CorruptError, match="another CRC32C"):
        read_seal(memoryview(data))


@both_layouts
def test_every_single_bit_of_a_footer_with_facts_is_covered(most_bytes: int) -> None:
    seal, whole = made(most_bytes, FACTS)
    for at in range(seal.manifest_span.end, len(whole)):
        for bit in range(8):
            data = bytearray(whole)
            data[at] ^= 1 << bit
            try:
                found = read_seal(memoryview(data))
            except CorruptError:
                continue
            # Another way to write the same number ("1E-320") is the same footer.
            assert found == seal if found is not None else at >= len(whole) - 8


@both_layouts
def test_the_footer_is_read_out_of_the_end_of_an_object(most_bytes: int) -> None:
    seal, data = made(most_bytes, FACTS)
    num_bytes = len(data) - seal.manifest_span.end
    for length in (num_bytes, num_bytes + 1, len(data)):
        assert read_tail(memoryview(data)[-length:], len(data)) == seal
    changed = b"A" + data[1:]
    assert read_tail(memoryview(changed)[-num_bytes:], len(data)) == seal


def test_the_end_of_another_object_has_no_footer_or_a_damaged_one() -> None:
    seal, data = made(HERE, FACTS)
    num_bytes = len(data) - seal.manifest_span.end
    assert read_tail(memoryview(data)[-TAIL_BYTES + 1 :], len(data)) is None
    assert read_tail(memoryview(PICKLED), len(PICKLED)) is None
    for length, object_bytes in ((num_bytes - 1, len(data)), (num_bytes, len(data) + 1)):
        with pytest.raises(CorruptError, match="metadata") as caught:
            read_tail(memoryview(data)[-length:], object_bytes)
        assert caught.value.end == object_bytes


# --- damage -------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [b"", b"x", PICKLED, PICKLED * 100])
def test_bytes_without_our_mark_have_no_seal(data: bytes) -> None:
    assert read_seal(memoryview(data)) is None


@both_layouts
def test_a_footer_that_does_not_fit_is_corrupt(most_bytes: int) -> None:
    seal, whole = made(most_bytes)
    start = seal.manifest_span.end

    def with_field(name: str, value: object) -> bytes:
        fields = {**json.loads(whole[start:-TAIL_BYTES]), name: value}
        if fields.pop("seal_crc32c", None) is not None and name != "seal_crc32c":
            text = json.dumps(fields, separators=(",", ":")).encode()
            fields["seal_crc32c"] = crc32c.crc32c(text)
        text = json.dumps(fields).encode()
        return whole[:start] + text + struct.pack("<I8s", len(text), b"DCPSSEAL")

    assert read_seal(memoryview(with_field("pickle_bytes", seal.pickle_bytes))) == seal
    damaged = {
        "a changed pickle": b"A" + whole[1:],
        "a longer pickle": b"A" + whole,
        "a shorter pickle": whole[1:],
        "a footer alone": whole[start:],
        "nothing but the pickle": whole[: len(PICKLED)] + whole[start - 1 :],
        "no json": whole[:start] + b"#" + whole[start + 1 :],
        "another field": whole.replace(b'"save_id"', b'"SAVE_ID"'),
        "an impossible length": whole[:-12] + struct.pack("<I8s", 2**31, b"DCPSSEAL"),
        "length 0": whole[:-12] + struct.pack("<I8s", 0, b"DCPSSEAL"),
        "a length below 0": with_field("manifest_bytes", -1),
        "a length that is none": with_field("pickle_bytes", "16"),
        "a checksum that is none": with_field("pickle_crc32c", None),
        "one byte of the manifest called the pickle's": with_field(
            "pickle_bytes", seal.pickle_bytes + 1
        ),
        "a list": whole[:start] + b"[1]" + struct.pack("<I8s", 3, b"DCPSSEAL"),
        "a nested footer": whole[:start] + b"[" * 90_000 + struct.pack("<I8s", 90_000, b"DCPSSEAL"),
    }
    for what, data in damaged.items():
        with pytest.raises(CorruptError, match="metadata"):
            pytest.fail(f"{what}: {read_seal(memoryview(data))}")


@both_layouts
def test_every_single_bit_before_the_footer_is_covered_and_its_place_named(most_bytes: int) -> None:
    seal, whole = made(most_bytes)
    for at in range(seal.manifest_span.end):
        for bit in range(8):
            data = bytearray(whole)
            data[at] ^= 1 << bit
            with pytest.raises(CorruptError) as caught:
                read_seal(memoryview(data))
            span = seal.pickle_span if at < len(PICKLED) else seal.manifest_span
            assert (caught.value.start, caught.value.end) == span
            assert ("manifest" if at >= len(PICKLED) else "pickle") in str(caught.value)


@both_layouts
def test_every_single_bit_of_the_footer_is_covered(most_bytes: int) -> None:
    """By itself where the manifest is here; else by pickle and manifest as they turn out."""
    seal, whole = made(most_bytes)
    for at in range(seal.manifest_span.end, len(whole)):
        for bit in range(8):
            data = bytearray(whole)
            data[at] ^= 1 << bit
            try:
                found = read_seal(memoryview(data))
            except CorruptError as error:
                if at < len(whole) - TAIL_BYTES and most_bytes == HERE:
                    assert (error.start, error.end) == (seal.manifest_span.end, len(whole))
                continue
            if found is None:
                assert at >= len(whole) - 8  # no footer: taken for a stock one, which fails later
                continue
            assert most_bytes == APART
            of_manifest = {"manifest_bytes": 0, "manifest_crc32c": 0}
            assert replace(found, **of_manifest) == replace(seal, **of_manifest)


@both_layouts
def test_metadata_cut_short_anywhere_has_no_seal(most_bytes: int) -> None:
    _, whole = made(most_bytes)
    assert not any(read_seal(memoryview(whole[:size])) for size in range(len(whole)))


def test_a_large_pickle_is_not_copied(store: Store) -> None:
    pickled = b"\x80" * (8 << 20)
    seal, data = make_metadata(SAVE, pickled, MANIFEST, embed_manifest_bytes=HERE)
    view = memoryview(data)
    tracemalloc.start()
    assert read_seal(view) == seal
    assert get_manifest(store, view, seal) == MANIFEST
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 18


# --- what it refers to --------------------------------------------------------------------


def manifest_of_one() -> bytes:
    key = data_key(0, 0, SAVE)
    item = StoredItem(key, ByteRange(0, 9), "bytes", ByteRange(0, 9))
    return encode(
        Manifest(SAVE, (Entry("a", None),), {ItemId("a", None): item}, (DataObject(key, 9),))
    )


@pytest.mark.parametrize("most_bytes", [1 << 20, 0], ids=["here", "apart"])
def test_metadata_refer_to_data_and_to_a_manifest_apart(store: Store, most_bytes: int) -> None:
    manifest = manifest_of_one()
    seal, data = make_metadata(SAVE, b"?", manifest, embed_manifest_bytes=most_bytes)
    if seal.manifest_key is not None:
        store.put("run/" + seal.manifest_key, manifest)
    named = keys_named_in(store, memoryview(data), key=".metadata", folder="run/")
    assert named == {data_key(0, 0, SAVE), *([seal.manifest_key] if seal.manifest_key else [])}


def test_what_damaged_metadata_refer_to_is_not_guessed(store: Store) -> None:
    stock = pickle.dumps([1])
    newer = manifest_of_one()[:8] + struct.pack("<I", 99) + manifest_of_one()[12:]
    for data, error in (
        (make_metadata(SAVE, stock, b"no manifest", embed_manifest_bytes=99)[1], CorruptError),
        (make_metadata(SAVE, stock, newer, embed_manifest_bytes=1 << 20)[1], IncompatibleError),
        (b"A" + made(HERE)[1], CorruptError),
        (stock, CorruptError),
        (b"", CorruptError),
    ):
        with pytest.raises(error):
            keys_named_in(store, memoryview(data), key=".metadata")
