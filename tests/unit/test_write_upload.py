"""Parts of an upload: which bytes are copied, which are lent, and what memory is held."""

from __future__ import annotations

import gc
import random
import threading
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

import dcpstore
from dcpstore import IncompatibleError, StoreError, WriteConfig
from dcpstore.format.checksum import BlockChecksummer
from dcpstore.store import open_store
from dcpstore.store.base import Capabilities, ObjectInfo
from dcpstore.testing import FaultyStore, StoreFault
from dcpstore.write.upload import Uploads

MIB = 1 << 20
PART = 5 * MIB


class Sink:
    """Keeps what it was sent and where in memory that lay.

    Args:
        max_parts: Fail after so many parts of an object.
        gathers: Take parts in pieces.
    """

    def __init__(self, max_parts: int = 1000, *, gathers: bool = False) -> None:
        self.capabilities = Capabilities(
            atomic_create=True,
            compare_and_swap=True,
            acknowledges_puts=True,
            gathers_parts=gathers,
        )
        self.objects: dict[str, bytes] = {}
        self.addresses: list[int] = []
        self.sizes: list[int] = []
        self._max_parts = max_parts

    def head(self, key: str) -> ObjectInfo:
        raise AssertionError("puts are acknowledged")

    def put(self, key: str, data: Any) -> str:
        self.objects[key] = self._take(data)
        return "etag"

    def put_parts(
        self, key: str, parts: Iterable[Any], *, part_bytes: int, max_concurrency: int
    ) -> str:
        held = []
        for number, part in enumerate(parts):
            if number == self._max_parts:
                raise StoreError("enough", key=key)
            pieces = part if self.capabilities.gathers_parts and type(part) is tuple else (part,)
            held.extend(self._take(piece) for piece in pieces)
            self.sizes.append(sum(len(piece) for piece in pieces))
        self.objects[key] = b"".join(held)
        return "etag"

    def _take(self, data: Any) -> bytes:
        self.addresses.append(np.frombuffer(data, np.uint8).__array_interface__["data"][0])
        return bytes(data)


class Engine(Sink):
    """Gathers, and sends parts in threads, each of which waits before it lets go of its part.

    Args:
        wait: What a part waits for; an error of it fails the upload.
    """

    def __init__(self, wait: Callable[[], object] = lambda: None) -> None:
        super().__init__(gathers=True)
        self._wait = wait
        self.copied: set[tuple[int, int]] = set()
        """Address and length of every piece."""

    def put_parts(
        self, key: str, parts: Iterable[Any], *, part_bytes: int, max_concurrency: int
    ) -> str:
        with ThreadPoolExecutor(max_concurrency) as executor:
            sending = []
            free = threading.Semaphore(max_concurrency)
            for part in parts:
                free.acquire()
                sending.append(executor.submit(self._send, [part], free))
                del part
            self.objects[key] = b"".join(one.result() for one in sending)
        return "etag"

    def _send(self, held: list[Any], free: threading.Semaphore) -> bytes:
        part = held.pop()
        try:
            self._wait()
            pieces = part if type(part) is tuple else (part,)
            for piece in pieces:
                at = np.frombuffer(piece, np.uint8).__array_interface__["data"][0]
                self.copied.add((at, len(piece)))
            return b"".join(pieces)
        finally:
            free.release()


def config(num_parts: int = 8) -> WriteConfig:
    return WriteConfig(part_bytes=PART, budget_bytes=num_parts * PART)


def upload(sink: Sink, tensors: list[torch.Tensor], **options: Any) -> Uploads:
    with Uploads(sink, config(**options), pin=False) as uploads:
        stream = uploads.open("object")
        for tensor in tensors:
            stream.write(b"h" * 64)
            stream.write_tensor(tensor)
        stream.finish()
    return uploads


def is_lent(address: int, tensor: torch.Tensor) -> bool:
    return tensor.data_ptr() <= address < tensor.data_ptr() + tensor.nbytes


def test_whole_parts_of_a_host_tensor_are_lent_and_the_rest_is_copied() -> None:
    sink, tensor = Sink(), torch.randint(0, 256, (3 * PART,), dtype=torch.uint8)
    uploads = upload(sink, [tensor])
    assert sink.objects["object"] == b"h" * 64 + tensor.numpy().tobytes()
    assert [is_lent(one, tensor) for one in sink.addresses] == [False, True, True, False]
    assert uploads.pool.peak_bytes <= 2 * PART, "memory was made for parts that were lent"


def test_a_store_that_gathers_reads_host_tensors_where_they_lie() -> None:
    sink = Sink(gathers=True)
    tensors = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in (3 * PART, 1 << 16)]
    small = torch.randint(0, 256, (1000,), dtype=torch.uint8)
    uploads = upload(sink, [small, *tensors, small])
    expected = [b"h" * 64 + one.numpy().tobytes() for one in (small, *tensors, small)]
    assert sink.objects["object"] == b"".join(expected)
    assert sink.sizes == [PART, PART, PART, len(b"".join(expected)) - 3 * PART]
    lent = [any(is_lent(one, tensor) for tensor in tensors) for one in sink.addresses]
    # Of the last part, the end of one tensor is too short to lend, the other one is not.
    assert lent == [False, True, True, True, False, True, False]
    assert uploads.pool.peak_bytes <= 2 * PART, "memory was made for parts that were lent"


@pytest.mark.timeout(20)
@pytest.mark.parametrize("max_uploads", [2, 9])
def test_as_many_lent_parts_are_in_flight_as_told_whatever_the_memory(max_uploads: int) -> None:
    together = threading.Barrier(max_uploads)
    sink, tensor = Engine(lambda: together.wait(5)), torch.zeros(PART - 64, dtype=torch.uint8)
    tight = WriteConfig(part_bytes=PART, budget_bytes=3 * PART, max_uploads=max_uploads)
    with Uploads(sink, tight, pin=False) as uploads:
        stream = uploads.open("object")
        for _ in range(2 * max_uploads):
            stream.write(b"h" * 64)
            stream.write_tensor(tensor)
        stream.finish()
    assert uploads.pool.peak_bytes <= 2 * PART
    assert sink.objects["object"] == 2 * max_uploads * (b"h" * 64 + bytes(PART - 64))


@pytest.mark.parametrize("num_parts", [2, 3, 4])
def test_parts_of_every_mix_stay_within_the_budget(num_parts: int) -> None:
    luck, whole = random.Random(num_parts), torch.randint(0, 256, (9 * PART,), dtype=torch.uint8)
    sink, expected = Engine(), []
    tight = WriteConfig(part_bytes=PART, budget_bytes=num_parts * PART, max_uploads=16)
    with Uploads(sink, tight, pin=False) as uploads:
        for key in "abc":
            stream = uploads.open(key)
            for _ in range(12):
                data = luck.randbytes(8 * luck.randrange(1, luck.choice([9, 99, 1 << 16])))
                size = 8 * luck.randrange(luck.choice([99, 1 << 15, PART // 8]))
                tensor = whole[8 : 8 + size]
                if luck.random() < 0.3:
                    tensor = whole[: 2 * size : 2]  # with gaps: no memory of its own to lend
                stream.write(data)
                stream.write_tensor(tensor.view(torch.int64) if tensor.is_contiguous() else tensor)
                expected.append(data + bytes(tensor.contiguous().numpy()))
            stream.finish()
    assert b"".join(sink.objects[key] for key in "abc") == b"".join(expected)
    assert uploads.pool.peak_bytes <= num_parts * PART
    touched = {
        page
        for at, size in sink.copied
        if not is_lent(at, whole)
        for page in range(at // 4096, (at + size - 1) // 4096 + 1)
    }
    assert 0 < len(touched) * 4096 <= num_parts * (PART + 4096)


def test_pieces_of_a_part_are_checksummed_in_their_order() -> None:
    tensors = [
        torch.randint(0, 256, (n,), dtype=torch.uint8) for n in (1 << 17, 100, PART, 1 << 16)
    ]
    checksummers = [BlockChecksummer(4096) for _ in tensors]
    with Uploads(Sink(gathers=True), config(), pin=False) as uploads:
        stream = uploads.open("object")
        for tensor, checksummer in zip(tensors, checksummers, strict=True):
            stream.write(b"h" * 64)
            stream.begin_checked(checksummer)
            stream.write_tensor(tensor)
            stream.end_checked()
        stream.finish()
    for tensor, checksummer in zip(tensors, checksummers, strict=True):
        expected = BlockChecksummer(4096)
        expected.update(tensor.numpy().data)
        assert checksummer.finish().tolist() == expected.finish().tolist()


@pytest.mark.parametrize("gathers", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda whole: whole.view(torch.bfloat16).reshape(-1, 1024),
        lambda whole: whole.view(-1, 4096)[:, :4095],
        lambda whole: whole.view(torch.float32).reshape(1024, -1).t(),
        lambda whole: whole.view(torch.complex64).conj(),
        lambda whole: whole[7 : 2 * PART + 8],
    ],
    ids=["another dtype", "with gaps", "transposed", "conjugate", "inside a larger storage"],
)
def test_tensors_of_any_form_are_stored_right(make: Any, gathers: bool) -> None:
    sink = Sink(gathers=gathers)
    tensor = make(torch.randint(0, 128, (3 * PART,), dtype=torch.uint8))
    upload(sink, [tensor, tensor])
    plain = tensor.resolve_conj().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    assert sink.objects["object"] == 2 * (b"h" * 64 + plain)


def test_lent_parts_are_checksummed_like_copied_ones() -> None:
    tensor = torch.randint(0, 256, (3 * PART + 4096,), dtype=torch.uint8)
    checksummer, expected = BlockChecksummer(4096), BlockChecksummer(4096)
    with Uploads(Sink(), config(), pin=False) as uploads:
        stream = uploads.open("object")
        stream.write(b"h" * 4096)
        stream.begin_checked(checksummer)
        stream.write_tensor(tensor)
        stream.end_checked()
        stream.write(b"t" * 100)
        stream.finish()
    expected.update(tensor.numpy().data)
    assert checksummer.finish().tolist() == expected.finish().tolist()


@pytest.mark.parametrize("gathers", [False, True])
def test_a_failed_upload_ends_although_parts_were_lent(gathers: bool) -> None:
    tensor = torch.zeros(6 * PART, dtype=torch.uint8)
    with pytest.raises(StoreError, match="enough"):
        upload(Sink(max_parts=2, gathers=gathers), [tensor], num_parts=2)


class PartSizes:
    """Passes everything on and keeps the size of parts that it is told."""

    def __init__(self) -> None:
        self.inner, self.told = open_store("memory://parts", engine="obstore"), []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def put_parts(self, key: str, parts: Iterable[Any], *, part_bytes: int, **more: Any) -> Any:
        self.told.append(part_bytes)
        return self.inner.put_parts(key, parts, part_bytes=part_bytes, **more)


@pytest.mark.parametrize(
    ("max_uploads", "part_mib"), [(32, 8), (2, 11)], ids=["one each", "two rounds of two"]
)
def test_a_small_save_goes_out_in_parts_that_end_together(max_uploads: int, part_mib: int) -> None:
    store = PartSizes()
    tight = WriteConfig(max_uploads=max_uploads)
    writer = dcpstore.ObjectStoreWriter(
        "memory://parts", config=tight, store_opener=lambda *_a, **_o: store
    )
    dcpstore.save({"w": torch.zeros(30 * MIB, dtype=torch.uint8)}, storage_writer=writer)
    assert store.told == [part_mib * MIB]


def test_saving_and_loading_leave_storages_resizable(tmp_path) -> None:
    state = {"w": torch.ones(2 * 4 * MIB), "small": torch.ones(10)}
    dcpstore.save(state, tmp_path / "c", config=config())
    target = {"w": torch.zeros(2 * 4 * MIB), "small": torch.zeros(10)}
    dcpstore.load(target, tmp_path / "c")
    assert target["w"].sum() == 2 * 4 * MIB
    for tensor in [*state.values(), *target.values()]:
        tensor.untyped_storage().resize_(0)  # what FSDP does to free a parameter


def test_a_tensor_without_memory_is_named_and_nothing_is_read_or_written(tmp_path) -> None:
    state = {"fine": torch.ones(3), "model": {"gone": torch.ones(1000)}}
    dcpstore.save(state, tmp_path / "good")
    state["model"]["gone"].untyped_storage().resize_(0)
    with pytest.raises(IncompatibleError, match=r"'model\.gone' was freed"):
        dcpstore.save(state, tmp_path / "c")
    assert not list(tmp_path.glob("c/*"))
    state["fine"].fill_(-1)
    with pytest.raises(IncompatibleError, match=r"'model\.gone': the target's memory was freed"):
        dcpstore.load(state, tmp_path / "good")
    assert (state["fine"] == -1).all()


@pytest.mark.parametrize("num_elements", [1000, 5 << 20])
def test_a_save_that_failed_lets_go_of_its_tensors(tmp_path, num_elements: int) -> None:
    """A job that catches the error and goes on must not lose the memory of each such save."""
    state = {"a": torch.ones(num_elements), "b": torch.ones(10)[::2]}
    storage = weakref.ref(state["a"].untyped_storage())
    tensor = weakref.ref(state["a"])

    def refusing(*given: Any, **more: Any) -> FaultyStore:
        denied = StoreFault("denied", verb="put", times=None)
        uploads = StoreFault("denied", verb="put_parts", times=None)
        return FaultyStore(open_store(*given, **more), [denied, uploads])

    writer = dcpstore.ObjectStoreWriter(str(tmp_path / "x"), store_opener=refusing)
    with pytest.raises(StoreError, match="denied"):
        dcpstore.save(state, storage_writer=writer)
    del state, writer
    gc.collect()
    assert tensor() is None
    assert storage() is None
