from __future__ import annotations

import pytest

from dcpstore.errors import NotFoundError
from dcpstore.store import open_store
from dcpstore.testing import RecordingStore


@pytest.fixture
def recorder(tmp_path):
    return RecordingStore(open_store(tmp_path))


def test_every_verb_is_recorded_with_its_bytes(recorder):
    recorder.put("a", b"12345", mode="create")
    recorder.put_parts("b", [b"abc", b"d"], part_bytes=3, max_concurrency=1)
    recorder.get("a")
    recorder.get_range("a", 1, 3)
    recorder.head("a")
    list(recorder.list())
    recorder.delete_many(["a", "b"])
    seen = [(r.verb, r.key, r.start, r.end, r.num_bytes, r.mode) for r in recorder.requests]
    assert seen == [
        ("put", "a", None, None, 5, "create"),
        ("put_parts", "b", None, None, 4, None),
        ("get", "a", None, None, 5, None),
        ("get_range", "a", 1, 3, 2, None),
        ("head", "a", None, None, 0, None),
        ("list", "", None, None, 2, None),
        ("delete_many", "a", None, None, 2, None),
    ]
    assert recorder.num_bytes_put == 9
    assert recorder.num_bytes_fetched == 7
    assert recorder.peak_in_flight == 1


def test_an_error_is_recorded_and_comes_through(recorder):
    with pytest.raises(NotFoundError):
        recorder.get("absent")
    assert recorder.requests[0].error == "NotFoundError"


def test_clear_forgets(recorder):
    recorder.put("a", b"1")
    recorder.clear()
    assert not recorder.counts
    assert recorder.peak_in_flight == 0
