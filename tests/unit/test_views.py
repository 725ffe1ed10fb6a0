from __future__ import annotations

import io
import os
import subprocess
import sys
import zipfile

import pytest

from dcpstore.format.views import RangeView

DATA = bytes(range(100))


def over_reader(start: int, end: int, *, at_most: int = 1 << 30) -> RangeView:
    def read_at(offset: int, size: int) -> bytes:
        assert size > 0
        assert start <= offset
        assert offset + size <= end
        return DATA[offset : offset + min(size, at_most)]

    return RangeView.over_reader(read_at, start, end)


MAKERS = {
    "buffer": lambda start, end: RangeView.over_buffer(DATA, start, end),
    "reader": over_reader,
    "stingy reader": lambda start, end: over_reader(start, end, at_most=3),
}


@pytest.fixture(params=list(MAKERS))
def view(request: pytest.FixtureRequest) -> RangeView:
    return MAKERS[request.param](10, 30)


def test_it_reads_its_window_and_no_more(view: RangeView) -> None:
    assert view.size_bytes == 20
    assert view.read(5) == DATA[10:15]
    assert view.read() == DATA[15:30]
    assert view.read() == b""
    assert view.read(7) == b""


def test_positions_count_from_the_start_of_the_window(view: RangeView) -> None:
    assert view.seek(0, os.SEEK_END) == 20
    assert view.seek(-4, os.SEEK_END) == 16
    assert view.read(100) == DATA[26:30]
    assert view.seek(-10, os.SEEK_CUR) == 10
    assert view.tell() == 10
    assert view.readall() == DATA[20:30]


def test_a_seek_beyond_the_end_reads_nothing(view: RangeView) -> None:
    assert view.seek(50) == 50
    assert view.read(3) == b""
    assert view.readinto(bytearray(3)) == 0


def test_a_seek_before_the_start_raises_and_stays(view: RangeView) -> None:
    view.seek(3)
    for offset, whence in ((-1, os.SEEK_SET), (-4, os.SEEK_CUR), (-21, os.SEEK_END)):
        with pytest.raises(ValueError, match="negative seek position"):
            view.seek(offset, whence)
    with pytest.raises(ValueError, match="whence"):
        view.seek(0, 3)
    assert view.tell() == 3


def test_readinto_fills_any_writable_buffer(view: RangeView) -> None:
    import array

    target = array.array("i", [0, 0])
    count = view.readinto(target)
    assert count in (3, 8)
    assert target.tobytes()[:count] == DATA[10 : 10 + count]


def test_it_can_only_be_read(view: RangeView) -> None:
    assert view.readable()
    assert view.seekable()
    assert not view.writable()
    for action in (lambda: view.write(b"x"), view.truncate, lambda: view.truncate(3)):
        with pytest.raises(io.UnsupportedOperation):
            action()
    with pytest.raises(OSError):
        view.fileno()


def test_a_closed_view_refuses_everything(view: RangeView) -> None:
    with view:
        pass
    view.close()
    assert view.closed
    for action in (
        view.read,
        view.readall,
        view.tell,
        view.readable,
        view.seekable,
        lambda: view.seek(0),
        lambda: view.readinto(bytearray(1)),
    ):
        with pytest.raises(ValueError, match="closed"):
            action()


def test_closing_lets_go_of_the_buffer() -> None:
    buffer = bytearray(8)
    view = RangeView.over_buffer(buffer)
    with pytest.raises(BufferError):
        buffer.append(0)
    view.close()
    buffer.append(0)


def test_a_window_outside_the_buffer_is_refused() -> None:
    for start, end in ((-1, 3), (3, 2), (0, 101)):
        with pytest.raises(ValueError, match=r"byte range|reaches past"):
            RangeView.over_buffer(DATA, start, end)
    with pytest.raises(ValueError, match="byte range"):
        RangeView.over_reader(lambda *_: b"", 3, 2)


def test_an_object_that_ends_early_ends_the_view() -> None:
    view = RangeView.over_reader(lambda offset, size: DATA[offset : offset + size], 90, 200)
    assert view.read() == DATA[90:]


def test_a_reader_that_gives_too_much_is_cut() -> None:
    view = RangeView.over_reader(lambda offset, size: DATA[offset:], 10, 30)
    assert view.read(4) == DATA[10:14]
    assert view.readall() == DATA[14:30]


def test_an_error_of_the_reader_passes_unchanged() -> None:
    def read_at(offset: int, size: int) -> bytes:
        raise KeyError("gone")

    with pytest.raises(KeyError, match="gone"):
        RangeView.over_reader(read_at, 0, 5).read(1)


def test_a_whole_buffer_is_the_default_window() -> None:
    import array

    assert RangeView.over_buffer(array.array("H", [1, 2])).read() == b"\x01\x00\x02\x00"


@pytest.mark.parametrize("kind", list(MAKERS))
def test_buffered_reader_reads_lines_and_peeks(kind: str) -> None:
    reader = io.BufferedReader(MAKERS[kind](5, 60), buffer_size=8)
    assert reader.read(3) == DATA[5:8]
    assert reader.readline() == DATA[8:11]
    assert reader.seek(-2, os.SEEK_END) == 53
    assert reader.read() == DATA[58:60]


def archive() -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as writer:
        writer.writestr("a", b"hello")
        writer.writestr("b", b"x" * 1000)
    return stream.getvalue()


def test_zipfile_and_torch_load_work_in_the_middle_of_an_object() -> None:
    import torch

    stream = io.BytesIO()
    torch.save(torch.arange(5), stream)
    for content, check in (
        (archive(), lambda f: zipfile.ZipFile(f).read("a") == b"hello"),
        (stream.getvalue(), lambda f: torch.load(f, weights_only=True).tolist() == [0, 1, 2, 3, 4]),
    ):
        whole = b"\xff" * 77 + content + b"PK" * 50
        end = 77 + len(content)
        assert check(RangeView.over_buffer(whole, 77, end))
        view = RangeView.over_reader(lambda at, size, whole=whole: whole[at : at + size], 77, end)
        assert check(view)
        view.seek(0)
        assert check(io.BufferedReader(view))


def test_views_do_not_import_torch() -> None:
    script = (
        "import sys, dcpstore.format.views, dcpstore.format.dtypes\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
