from __future__ import annotations

import array
import io
import os
import zipfile

import pytest
import torch

from dcpstore.read.targets import BufferView

DATA = bytes(range(20))


@pytest.fixture
def view() -> BufferView:
    return BufferView(DATA)


def test_it_reads_its_buffer_and_no_more(view: BufferView) -> None:
    assert view.read(5) == DATA[:5]
    assert view.read() == DATA[5:]
    assert view.read() == b""
    assert view.read(7) == b""


def test_it_seeks_as_files_do(view: BufferView) -> None:
    assert view.seek(0, os.SEEK_END) == 20
    assert view.seek(-4, os.SEEK_END) == 16
    assert view.read(100) == DATA[16:]
    assert view.seek(-10, os.SEEK_CUR) == 10
    assert view.tell() == 10
    assert view.readall() == DATA[10:]


def test_a_seek_beyond_the_end_reads_nothing(view: BufferView) -> None:
    assert view.seek(50) == 50
    assert view.read(3) == b""
    assert view.readinto(bytearray(3)) == 0


def test_a_seek_before_the_start_raises_and_stays(view: BufferView) -> None:
    view.seek(3)
    for offset, whence in ((-1, os.SEEK_SET), (-4, os.SEEK_CUR), (-21, os.SEEK_END)):
        with pytest.raises(ValueError, match="negative seek position"):
            view.seek(offset, whence)
    assert view.tell() == 3


def test_readinto_fills_any_writable_buffer(view: BufferView) -> None:
    target = array.array("i", [0, 0])
    assert view.readinto(target) == 8
    assert target.tobytes() == DATA[:8]


def test_it_can_only_be_read(view: BufferView) -> None:
    assert view.readable()
    assert view.seekable()
    assert not view.writable()
    for action in (view.truncate, lambda: view.truncate(3)):
        with pytest.raises(io.UnsupportedOperation):
            action()
    with pytest.raises(OSError):
        view.fileno()


def test_closing_lets_go_of_the_buffer() -> None:
    buffer = bytearray(8)
    view = BufferView(buffer)
    with pytest.raises(BufferError):
        buffer.append(0)
    view.close()
    view.close()
    buffer.append(0)


def test_any_contiguous_buffer_will_do() -> None:
    assert BufferView(array.array("H", [1, 2])).read() == b"\x01\x00\x02\x00"


def test_zipfile_and_torch_load_read_it() -> None:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as writer:
        writer.writestr("a", b"hello")
    assert zipfile.ZipFile(BufferView(stream.getvalue())).read("a") == b"hello"
    stream = io.BytesIO()
    torch.save(torch.arange(5), stream)
    view = BufferView(memoryview(b"xx" + stream.getvalue())[2:])
    assert torch.load(view, weights_only=True).tolist() == [0, 1, 2, 3, 4]
    view.seek(0)
    assert torch.load(io.BufferedReader(view), weights_only=True).tolist() == [0, 1, 2, 3, 4]
