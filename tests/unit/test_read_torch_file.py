"""``torch.save`` files read by ranges: what is found, by how many requests, and what is refused."""

from __future__ import annotations

import collections
import io
import zipfile
from pathlib import Path

import pytest
import torch

from dcpstore import ConflictError, CorruptError, IncompatibleError, NotFoundError
from dcpstore.format.dtypes import DTYPES
from dcpstore.read.torch_file import TorchFile, open_torch_file
from dcpstore.store import open_store
from dcpstore.testing import RecordingStore

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse (CSR|CSC|BSR|BSC) tensor support:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*nested tensors.*prototype:UserWarning"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning"),
]

MIB = 1 << 20
ran: list[str] = []


class Foreign:
    """A class that no restricted unpickler knows."""

    def __setstate__(self, state: object) -> None:
        ran.append("setstate")
        self.__dict__.update(state)


def saved(value: object, folder: Path, name: str = "model.pt") -> Path:
    torch.save(value, folder / name)
    return folder / name


def bits(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.unsqueeze(-1).view(torch.uint8)


def members_of(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {one: archive.read(one) for one in archive.namelist()}


def repacked(path: Path, members: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> Path:
    """Write a zip as Python would: no padding, sizes in the headers."""
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


def counting(path: Path) -> tuple[TorchFile, RecordingStore]:
    stores: list[RecordingStore] = []

    def opener(url: str, **settings: object) -> RecordingStore:
        stores.append(RecordingStore(open_store(url, **settings)))
        return stores[0]

    return open_torch_file(path, opener=opener), stores[0]


# --- what is found --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", [n for n, row in DTYPES.items() if row.is_plain and hasattr(torch, n)]
)
def test_a_tensor_of_every_dtype_is_read_to_the_last_bit(name: str, tmp_path: Path) -> None:
    dtype = getattr(torch, name)
    raw = torch.arange(6 * 4 * dtype.itemsize, dtype=torch.uint8).view(6, -1)
    tensor = (raw % 2 if dtype == torch.bool else raw).view(dtype)
    with open_torch_file(saved({"t": tensor}, tmp_path)) as file:
        stand_in = file.value["t"]
        assert (stand_in.device.type, stand_in.dtype) == ("meta", dtype)
        assert torch.equal(bits(file.read_box(stand_in)), bits(tensor))
        assert torch.equal(bits(file.read_box(stand_in, (2, 1), (3, 2))), bits(tensor[2:5, 1:3]))


@pytest.mark.parametrize(
    "make",
    [
        lambda base: base.t(),
        lambda base: base[2:7, 3:],
        lambda base: base[:, 4],
        lambda base: base.unsqueeze(1).expand(10, 3, 12),
        lambda base: base.as_strided((3, 4), (24, 3), 5),
        lambda base: base[4:4],
        lambda base: torch.complex(base, -base).conj(),
        lambda base: torch.complex(base, -base).conj().imag,
        lambda base: base.sum(),
    ],
)
def test_views_are_read_as_they_were(make, tmp_path: Path) -> None:
    tensor = make(torch.arange(120.0).view(10, 12))
    with open_torch_file(saved([tensor], tmp_path)) as file:
        place = file.place(file.value[0])
        assert place.strides == tensor.stride()
        assert (place.is_conj, place.is_neg) == (tensor.is_conj(), tensor.is_neg())
        assert torch.equal(bits(file.read_box(file.value[0])), bits(tensor))


def test_tensors_that_share_memory_name_one_storage(tmp_path: Path) -> None:
    base = torch.arange(20.0)
    value = {"a": base, "b": [base[5:], base], "c": base.clone(), "e": torch.empty(0)}
    with open_torch_file(saved(value, tmp_path)) as file:
        places = [file.place(one) for one in (file.value["a"], *file.value["b"], file.value["c"])]
        keys = [place.storage_key for place in places]
        assert keys[0] == keys[1] == keys[2] != keys[3]
        assert places[1].storage_offset == 5
        assert file.value["b"][1] is file.value["a"]
        assert file.storages[keys[0]].num_bytes == 80
        assert list(file.storages) == ["0", "1", "2"]


def test_structure_types_and_flags_are_those_of_torch_load(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.tag = "kept"
    state = collections.OrderedDict(w=parameter, n=3)
    state._metadata = {"version": 1}
    value = {1: state, "t": (None, 2.5, "x", b"y", {3}), "m": torch.empty(2, device="meta")}
    with open_torch_file(saved(value, tmp_path)) as file:
        found = file.value
        assert found["t"] == value["t"]
        assert list(found) == [1, "t", "m"]
        assert type(found[1]) is collections.OrderedDict
        assert found[1]._metadata == {"version": 1}
        assert type(found[1]["w"]) is torch.nn.Parameter
        assert found[1]["w"].tag == "kept"
        assert file.place(found["m"]) is None


def test_a_sparse_tensor_has_places_for_its_parts_only(tmp_path: Path) -> None:
    with open_torch_file(saved(torch.eye(3).to_sparse(), tmp_path)) as file:
        assert file.place(file.value) is None
        values = file.value._values()
        assert torch.equal(file.read_box(values), torch.ones(3))
        with pytest.raises(IncompatibleError, match=r"layout torch.sparse_coo has no bytes"):
            file.read_box(file.value)


def test_a_file_whose_contents_lie_elsewhere_than_torch_puts_them_is_read(tmp_path: Path) -> None:
    path = saved({"a": torch.arange(9.0), "b": torch.arange(4)}, tmp_path)
    other = repacked(tmp_path / "other.pt", members_of(path))
    with open_torch_file(other) as file:
        assert torch.equal(file.read_box(file.value["a"]), torch.arange(9.0))
        assert bytes(file.read_storage("1", 8, 16)) == (1).to_bytes(8, "little")


def test_storages_beyond_4_gib_are_found(tmp_path: Path) -> None:
    sizes = [(5 << 30) // 4, 3, (5 << 30) // 4, 0, 7]
    value = [torch.empty(size) for size in sizes]  # nothing touches this memory
    with torch.serialization.skip_data():  # nor the disk: the file is a hole between headers
        path = saved(value, tmp_path)
    assert path.stat().st_blocks * 512 < 10 * MIB
    with zipfile.ZipFile(path) as archive:
        offsets = [archive.getinfo(f"model/data/{n}").header_offset for n in range(5)]
    with open_torch_file(path) as file:
        for stand_in, offset, size in zip(file.value, offsets, sizes, strict=True):
            key = file.place(stand_in).storage_key
            start = file.start_of(key)
            assert start % 64 == 0
            assert offset < start < offset + 200
            assert file.storages[key].member.expected_offset == start
            assert len(file.read_storage(key, 0, min(8, 4 * size))) == min(8, 4 * size)
        assert max(offsets) > 2 * (5 << 30)


# --- how many requests ------------------------------------------------------------------------


def test_opening_takes_three_requests_and_no_tensor(tmp_path: Path) -> None:
    path = saved({f"t{n}": torch.ones(64 << 10) for n in range(20)}, tmp_path)
    file, store = counting(path)
    with file:
        assert [one.verb for one in store.requests] == ["head", "get_range", "get_range"]
        assert sum(one.num_bytes for one in store.requests) < 200 << 10


def test_the_directory_of_many_tensors_takes_one_request_more(tmp_path: Path) -> None:
    path = saved({f"t{n}": torch.ones(2) for n in range(3000)}, tmp_path)
    file, store = counting(path)
    with file:
        assert len(store.requests) == 4
        assert len(file.storages) == 3000


def test_a_tensor_takes_one_request_and_its_header_comes_with_it(tmp_path: Path) -> None:
    path = saved({"a": torch.arange(1000.0), "b": torch.arange(MIB, dtype=torch.int32)}, tmp_path)
    file, store = counting(path)
    with file:
        before = len(store.requests)
        assert torch.equal(file.read_box(file.value["a"]), torch.arange(1000.0))
        rows = file.read_box(file.value["b"], (MIB // 2,), (10,))
        assert rows.tolist() == list(range(MIB // 2, MIB // 2 + 10))
        requests = store.requests[before:]
        # One for the first; the header of the second, once, as the range lies far behind it.
        assert [one.num_bytes <= 4200 for one in requests] == [True] * 3
        file.read_box(file.value["b"], (MIB // 2,), (10,))
        assert store.requests[-1].num_bytes == 40
        assert len(store.requests) == before + 4


def test_neighbours_are_read_by_one_request(tmp_path: Path) -> None:
    path = saved([torch.full((3,), float(n)) for n in range(200)], tmp_path)
    file, store = counting(path)
    with file:
        before = len(store.requests)
        starts = [file.laid_out_start(file.place(one).storage_key) for one in file.value]
        data = file.read_laid_out(starts[0], starts[-1] + 12)
        assert len(store.requests) == before + 1
        found = [data[start - starts[0] :][:12] for start in starts]
        values = [torch.frombuffer(bytearray(one), dtype=torch.float32)[0] for one in found]
        assert values == list(range(200))


# --- what is refused ----------------------------------------------------------------------------


def zip_of(*names: str) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name in names:
            archive.writestr(name, b"x")
    return stream.getvalue()


SAFETENSORS = (8).to_bytes(8, "little") + b'{"a":{}}' + bytes(64)


@pytest.mark.parametrize(
    ("content", "meaning"),
    [
        (b"", "it is empty"),
        (b"\x89HDF\r\n\x1a\n" + bytes(100), "an HDF5 file"),
        (b"\x1f\x8b" + bytes(100), "a gzip file"),
        (b"<html>404</html>", "an error page"),
        (b"GGUF" + bytes(100), "a GGUF file"),
        (b"version https://git-lfs.github.com/spec/v1\n", "a Git LFS pointer"),
        (b"\x80\x04\x95" + bytes(100), "a plain pickle"),
        (SAFETENSORS, "a safetensors file"),
        (bytes(257) + b"ustar" + bytes(300), "a tar file"),
        (b"no idea" + bytes(50), r"it starts with b'no idea"),
        (zip_of("m/data.pkl", "m/constants.pkl", "m/code/a.py"), "a TorchScript archive"),
        (zip_of("m/archive_format", "m/models/a.json"), r"torch.export \(.pt2\)"),
        (zip_of("a.npy", "b.npy"), "NumPy arrays"),
        (zip_of("p/.data/version", "p/model.py"), "torch.package"),
        (zip_of("readme.txt"), "holds 'readme.txt' and no data.pkl"),
        (zip_of(), "holds nothing and no data.pkl"),
        (zip_of("a/data.pkl", "b/data.pkl"), "without one data.pkl"),
    ],
)
def test_another_kind_of_file_is_named(content: bytes, meaning: str, tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_bytes(content)
    with pytest.raises(IncompatibleError, match=f"no torch.save file: .*{meaning}"):
        open_torch_file(tmp_path / "model.pt")


def test_the_format_before_zip_is_named(tmp_path: Path) -> None:
    torch.save([torch.ones(2)], tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(IncompatibleError, match=r"format of torch before 1.6.*save it again"):
        open_torch_file(tmp_path / "old.pt")


def test_a_compressed_archive_is_refused(tmp_path: Path) -> None:
    members = members_of(saved([torch.ones(2)], tmp_path))
    packed = repacked(tmp_path / "packed.pt", members, zipfile.ZIP_DEFLATED)
    with pytest.raises(IncompatibleError, match="compressed or encrypted"):
        open_torch_file(packed)


def test_a_file_of_a_big_endian_machine_is_refused(tmp_path: Path) -> None:
    members = members_of(saved([torch.ones(2)], tmp_path))
    other = repacked(tmp_path / "big.pt", {**members, "model/byteorder": b"big"})
    with pytest.raises(IncompatibleError, match="big-endian machine"):
        open_torch_file(other)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    ],
    ids=["quantized", "nested"],
)
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_a_tensor_without_a_stand_in_is_refused(make, tmp_path: Path) -> None:
    with pytest.raises(IncompatibleError, match="cannot be read by ranges"):
        open_torch_file(saved({"t": make()}, tmp_path))


def test_a_missing_file_and_a_folder_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-1" / ".metadata").write_bytes(b"x")
    with pytest.raises(NotFoundError):
        open_torch_file(tmp_path / "absent.pt")
    with pytest.raises(IncompatibleError, match=r"is a folder.*a DCP checkpoint"):
        open_torch_file(tmp_path / "step-1")


def test_a_class_is_refused_unrun_until_it_is_allowed(tmp_path: Path) -> None:
    thing = Foreign()
    thing.weight = torch.ones(2)
    path = saved({"thing": thing}, tmp_path)
    ran.clear()
    with pytest.raises(CorruptError, match=r"not run.*weights_only=False.*add_safe_globals"):
        open_torch_file(path)
    assert ran == []
    with open_torch_file(path, weights_only=False) as file:
        assert torch.equal(file.read_box(file.value["thing"].weight), torch.ones(2))
    with torch.serialization.safe_globals([Foreign]), open_torch_file(path) as file:
        assert type(file.value["thing"]) is Foreign
    assert ran == ["setstate", "setstate"]


def test_a_pickle_that_would_run_a_command_does_not(tmp_path: Path) -> None:
    members = members_of(saved([torch.ones(2)], tmp_path))
    mark = tmp_path / "ran"
    members["model/data.pkl"] = f"cposix\nsystem\n(S'touch {mark}'\ntR.".encode()
    with pytest.raises(CorruptError, match="not run"):
        open_torch_file(repacked(tmp_path / "evil.pt", members))
    assert not mark.exists()


@pytest.mark.parametrize("kept", [10, 200, 700, -1])
def test_a_cut_off_file_is_damaged(kept: int, tmp_path: Path) -> None:
    path = saved({"t": torch.ones(300)}, tmp_path)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(CorruptError, match=r"cut off|ends early|no directory|damaged"):
        open_torch_file(path)


def test_a_changed_pickle_is_damaged(tmp_path: Path) -> None:
    path = saved({"weight": torch.ones(300)}, tmp_path)
    data = path.read_bytes()
    path.write_bytes(data.replace(b"weight", b"veight", 1))
    with pytest.raises(CorruptError, match=r"data.pkl is not what was saved"):
        open_torch_file(path)


def test_a_tensor_that_reaches_past_its_storage_is_damaged(tmp_path: Path) -> None:
    members = members_of(saved([torch.ones(300)], tmp_path))
    # Where the tensor says 300 elements; the storage keeps its own count, further ahead.
    head, tail = members["model/data.pkl"].rsplit(b"M,\x01", 1)
    members["model/data.pkl"] = head + b"M\xff\x01" + tail
    with pytest.raises(CorruptError, match="reaches past its storage"):
        open_torch_file(repacked(tmp_path / "long.pt", members))


@pytest.mark.parametrize(
    ("content", "problem"), [(None, "has none"), (bytes(9), "9 bytes instead")]
)
def test_a_storage_that_is_not_there_is_damage(content, problem: str, tmp_path: Path) -> None:
    members = members_of(saved([torch.ones(300)], tmp_path))
    del members["model/data/0"]
    if content is not None:
        members["model/data/0"] = content
    with pytest.raises(CorruptError, match=problem):
        open_torch_file(repacked(tmp_path / "short.pt", members))


def test_a_header_that_is_not_where_the_directory_says_is_damage(tmp_path: Path) -> None:
    path = saved([torch.ones(300)], tmp_path)
    data = bytearray(path.read_bytes())
    at = data.index(b"model/data/0")
    data[at : at + 5] = b"nodel"
    path.write_bytes(data)
    with (
        open_torch_file(path) as file,
        pytest.raises(CorruptError, match="directory says that model/data/0 lies at"),
    ):
        file.read_box(file.value[0])


def test_a_wrong_checksum_of_a_storage_is_told_where_the_file_has_one(tmp_path: Path) -> None:
    path = saved([torch.ones(300)], tmp_path)
    torch.serialization.set_crc32_options(False)
    try:
        without = saved([torch.ones(300)], tmp_path, "without.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    with open_torch_file(path) as file, open_torch_file(without) as other:
        assert (file.has_crc("0"), other.has_crc("0")) == (True, False)
        other.check_crc("0", 1)
        with pytest.raises(CorruptError, match="storage 0 is not what was saved") as failure:
            file.check_crc("0", 1)
        assert failure.value.end - failure.value.start == 1200


def test_a_file_that_was_replaced_is_a_conflict(tmp_path: Path) -> None:
    path = saved([torch.ones(300)], tmp_path)
    with open_torch_file(path) as file:
        file.check_unchanged()
        saved([torch.ones(301)], tmp_path)
        with pytest.raises(ConflictError, match="was replaced while it was read"):
            file.check_unchanged()
