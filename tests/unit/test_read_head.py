from __future__ import annotations

import io
import math
import pickle
import warnings
import zipfile

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcpstore.format import dtypes
from dcpstore.format.payload import copy_box_in
from dcpstore.format.record import plan_record
from dcpstore.format.tensors import encode_opaque
from dcpstore.read.targets import HEAD_BYTES, TensorInRecord, find_tensor

NAMES = [n for n, row in dtypes.DTYPES.items() if row.is_plain and hasattr(torch, n)]
SHAPES = [(), (0,), (3,), (2, 3, 5), (0, 7), (70_000, 2), (1, 2, 1, 2, 1, 2)]
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


def saved(value: object, **options: object) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream, **options)
    return stream.getvalue()


def filled(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    dtype = dtypes.dtype_from_name(name)
    count = math.prod(shape) * dtype.itemsize
    return (torch.arange(count) % 2).to(torch.uint8).view(dtype).reshape(shape)


def payload(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def reads(record: bytes) -> tuple[TensorInRecord | None, list[int]]:
    """Return what is found in a record, and how many bytes were asked for each time."""
    asked = []

    def read_at(start: int, end: int) -> memoryview:
        assert (start, end <= len(record)) == (0, True)
        asked.append(end)
        return memoryview(record)[start:end]

    return find_tensor(read_at, len(record)), asked


def found(record: bytes) -> TensorInRecord | None:
    return reads(record)[0]


def assert_finds(record: bytes, tensor: torch.Tensor) -> None:
    stored, asked = reads(record)
    assert asked == [min(HEAD_BYTES, len(record))]
    assert stored is not None
    assert stored.place.is_dense
    assert stored.place.dtype == tensor.dtype
    assert stored.place.sizes == tuple(tensor.shape)
    start = stored.storage.start
    data = payload(tensor)
    assert stored.storage.num_bytes == len(data)
    assert record[start : start + len(data)] == data


@pytest.mark.parametrize("name", NAMES)
def test_the_payload_of_what_torch_saves_is_found(name: str) -> None:
    for shape in SHAPES:
        tensor = filled(name, shape)
        assert_finds(saved(tensor), tensor)


@pytest.mark.parametrize("name", NAMES)
def test_our_own_records_are_read_too(name: str) -> None:
    for shape in SHAPES:
        for force_zip64 in (False, True):
            tensor = filled(name, shape)
            layout = plan_record(tensor.dtype, shape, object_offset=7, force_zip64=force_zip64)
            assert_finds(layout.header + payload(tensor) + layout.trailer, tensor)


def test_parameters_and_tensors_of_a_device_are_tensors() -> None:
    tensor = torch.arange(6.0).reshape(2, 3)
    assert_finds(saved(torch.nn.Parameter(tensor)), tensor)
    assert_finds(saved(tensor.clone().requires_grad_()), tensor)
    elsewhere = saved(tensor).replace(b"\x03\0\0\0cpu", b"\x03\0\0\0xpu")
    assert_finds(elsewhere, tensor)


@pytest.mark.parametrize("alignment", [1, 64, 4096, 32768])
@pytest.mark.parametrize("has_crc", [True, False])
def test_other_settings_of_the_writer_do_not_matter(alignment: int, has_crc: bool) -> None:
    config = pytest.importorskip("torch.utils.serialization").config
    if not hasattr(config.save, "storage_alignment"):
        pytest.skip("this torch always aligns storages to 64 bytes")
    tensor = torch.arange(100.0)
    with config.patch({"save.storage_alignment": alignment, "save.compute_crc32": has_crc}):
        record = saved(tensor)
    stored, asked = reads(record)
    # Every member is aligned, so the head has one alignment per member.
    assert len(asked) == 1 or alignment > 64
    assert stored is not None
    assert stored.place.is_dense
    start = stored.storage.start
    assert record[start : start + 400] == payload(tensor)


def test_items_of_a_stock_checkpoint_are_found(tmp_path) -> None:
    state = {
        f"w{i}": torch.randn(i + 1, 3).to(kind)
        for i, kind in enumerate((torch.float32, torch.bfloat16, torch.int64, torch.uint16))
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path))
    metadata = dcp.FileSystemReader(tmp_path).read_metadata()
    assert len(metadata.storage_data) == 4
    for index, info in metadata.storage_data.items():
        blob = (tmp_path / info.relative_path).read_bytes()
        record = blob[info.offset : info.offset + info.length]
        assert_finds(record, state[index.fqn])


VIEWS = {
    "transposed": torch.arange(12.0).reshape(3, 4).t(),
    "part": torch.arange(12.0)[3:7],
    "prefix": torch.arange(12.0)[:7],
    "stepped": torch.arange(12.0)[1::3],
    "expanded": torch.arange(3.0).expand(4, 3),
    "uint16 part": torch.arange(12).to(torch.uint16)[3:7],
}


@pytest.mark.parametrize("kind", list(VIEWS))
def test_views_are_described(kind: str) -> None:
    view = VIEWS[kind]
    record = saved(view)
    stored = found(record)
    assert stored is not None
    place = stored.place
    assert place.is_dense == view.is_contiguous()
    assert (place.sizes, place.strides) == (tuple(view.shape), view.stride())
    # The description is enough to copy a box out of the payload.
    target = torch.zeros(view.shape, dtype=view.dtype)
    span = place.span()
    data = record[stored.storage.start + span.start : stored.storage.start + span.end]
    copy_box_in(data, 0, view.dtype, place.strides, [0] * view.dim(), view.shape, target)
    assert torch.equal(target, view)


@pytest.mark.parametrize("part", ["conj", "neg"])
def test_elements_that_are_changed_once_read_are_not_taken_as_they_are(part: str) -> None:
    tensor = torch.zeros(2, dtype=torch.complex64).conj()
    stored = found(saved(tensor if part == "conj" else tensor.imag))
    assert stored is not None
    assert not stored.place.is_dense


def test_dimensions_of_size_one_may_have_any_stride() -> None:
    tensor = torch.arange(6.0).as_strided((1, 6, 1), (17, 1, 5))
    stored = found(saved(tensor))
    assert stored is not None
    assert stored.place.is_dense


def marked() -> torch.Tensor:
    tensor = torch.zeros(3)
    tensor.mark = 1
    return tensor


def quantized() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.arange(8.0), 0.5, 3, torch.qint8)


OPAQUE = {
    "list": lambda: saved([1, 2]),
    "two tensors": lambda: saved((torch.zeros(2), torch.zeros(2))),
    "dictionary": lambda: saved({"a": torch.zeros(2)}),
    "sparse": lambda: saved(torch.eye(3).to_sparse()),
    "quantized": lambda: encode_opaque(quantized()),
    "attributes": lambda: saved(marked()),
    "meta": lambda: saved(torch.zeros(3, device="meta")),
    "storage": lambda: saved(torch.zeros(3).untyped_storage()),
    "legacy": lambda: saved(torch.zeros(3), _use_new_zipfile_serialization=False),
    "pickle": lambda: pickle.dumps([1, 2]) * 100,
    "protocol 4": lambda: saved(torch.zeros(3), pickle_protocol=4),
    "zeros": lambda: bytes(2000),
    "empty": lambda: b"",
    "text": lambda: saved("x" * 100_000),
}


@pytest.mark.parametrize("kind", list(OPAQUE))
def test_all_else_is_opaque(kind: str) -> None:
    assert found(OPAQUE[kind]()) is None


class Evil:
    def __reduce__(self):
        return exec, ("raise SystemExit('ran')",)


def test_nothing_that_stands_in_a_record_is_run() -> None:
    assert found(saved(Evil())) is None


def test_a_truncated_record_is_opaque() -> None:
    record = saved(torch.arange(12.0))
    stored = found(record)
    assert stored is not None
    for size in range(stored.storage.start + 48):
        assert found(record[:size]) is None


def edited(tensor: torch.Tensor, old: bytes, new: bytes) -> bytes:
    record = saved(tensor)
    assert old in record
    assert len(old) == len(new)
    return record.replace(old, new, 1)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"K\x0c\x85q", b"K\x0d\x85q"),
        (b"cpuq\x04K\x0c", b"cpuq\x04K\xff"),
        (b"storage", b"garbage"),
        (b"K\x00K\x0c", b"K\x0cK\x0c"),
        (b"\x89c", b"\x89]"),
        (b"_rebuild_tensor_v2", b"_rebuild_tensor_v9"),
        (b"archive/data.pkl", b"archive/data.xyz"),
        (b"PK\x03\x04\0\0\x08\x08\0\0", b"PK\x03\x04\0\0\x08\x08\x08\0"),
        (b"PK\x03\x04\0\0\x08\x08\0\0", b"PK\x03\x04\0\0\x09\x08\0\0"),
        (b"little", b"biggie"),
    ],
)
def test_an_edited_head_is_opaque(old: bytes, new: bytes) -> None:
    assert found(edited(torch.arange(12.0), old, new)) is None


def test_any_flipped_byte_of_the_head_gives_an_answer_inside_the_record() -> None:
    for record in (saved(torch.arange(12.0)), saved(filled("uint16", (3, 4)))):
        whole = found(record)
        assert whole is not None
        for position in range(whole.storage.start):
            for flip in (1, 0x80, 0xFF):
                bad = bytearray(record)
                bad[position] ^= flip
                stored = found(bytes(bad))
                if stored is not None:
                    assert stored.storage.end <= len(record)


def test_an_archive_of_another_writer_is_read_if_it_is_stored() -> None:
    inner = zipfile.ZipFile(io.BytesIO(saved(torch.arange(12.0))))
    for method, is_plain in ((zipfile.ZIP_STORED, True), (zipfile.ZIP_DEFLATED, False)):
        stream = io.BytesIO()
        with zipfile.ZipFile(stream, "w", method) as writer:
            for name in inner.namelist():
                writer.writestr(name, inner.read(name))
        assert (found(stream.getvalue()) is not None) == is_plain


@pytest.mark.parametrize(("num_bytes", "is_found"), [(5000, True), (300_000, False)])
def test_a_storage_is_found_near_its_pickle_only(num_bytes: int, is_found: bool) -> None:
    inner = zipfile.ZipFile(io.BytesIO(saved(torch.arange(12.0))))
    for extra in (
        [("archive/x", b"x" * num_bytes)],
        [(f"archive/{i:9}", b"") for i in range(num_bytes // 50)],
    ):
        stream = io.BytesIO()
        with zipfile.ZipFile(stream, "w") as writer:
            writer.writestr("archive/data.pkl", inner.read("archive/data.pkl"))
            for name, content in extra:
                writer.writestr(name, content)
            writer.writestr("archive/data/0", inner.read("archive/data/0"))
        assert (found(stream.getvalue()) is not None) == is_found


def test_a_dtype_that_this_torch_lacks_is_opaque() -> None:
    record = saved(filled("float8_e5m2", (4,)))
    assert found(record) is not None
    assert found(record.replace(b"float8_e5m2", b"float8_e9m9")) is None
