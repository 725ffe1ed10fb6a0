"""Events: their lines, who is told, and what a callback may not break."""

from __future__ import annotations

import importlib.util
import json
import logging
import threading

import pytest

import dcpstore
from dcpstore.manager.events import Event, Events, TensorBoardEvents

URL = "s3://bucket/run/step-100"


def test_an_event_is_one_line_that_ends_in_pairs() -> None:
    assert str(Event("sealed", 100, URL, 3.25, 3 << 30)) == (
        "the checkpoint is safe (3.0 GiB in 3.2 s): event=sealed step=100 seconds=3.250"
        f" bytes={3 << 30} url={URL}"
    )
    assert str(Event("save_started", 1, URL)).endswith(f": event=save_started step=1 url={URL}")
    assert "step=" not in str(Event("preempted", None, "memory://run"))


def test_an_error_of_many_lines_is_in_one_and_reads_back() -> None:
    line = str(Event("failed", 7, URL, error=ValueError('rank 3:\n \x1b[31m"gone" ' + "x" * 9999)))
    assert "\n" not in line
    assert "\x1b" not in line
    assert len(line) < 1500
    assert json.loads(line.partition(" error=")[2]).startswith("ValueError: rank 3:\n ")


def test_no_secret_of_a_url_is_in_the_line() -> None:
    line = str(Event("sealed", 1, "https://key:secret@host/a b"))
    assert "secret" not in line
    assert "/a%20b" in line


def test_the_coordinator_tells_of_checkpoints_and_each_rank_of_itself(caplog) -> None:
    told: list[tuple[str, Event]] = []
    with caplog.at_level(logging.INFO, "dcpstore"):
        for name, is_coordinator in (("coordinator", True), ("other", False)):
            events = Events([lambda e, n=name: told.append((n, e))], is_coordinator=is_coordinator)
            events.send(Event("sealed", 1, URL, 1, 5))
            events.send(Event("preempted", 2, URL), is_own=True)
            events.send(Event("failed", 3, URL, error=OSError("no")))
    assert [(name, event.kind) for name, event in told] == [
        *(("coordinator", kind) for kind in ("sealed", "preempted", "failed")),
        ("other", "preempted"),
    ]
    assert told[0][1] == Event("sealed", 1, URL, 1, 5)
    assert [record.message for record in caplog.records] == [str(event) for _, event in told]
    levels = [record.levelname for record in caplog.records]
    assert levels == ["INFO", "WARNING", "ERROR", "WARNING"]
    assert {record.name for record in caplog.records} == {"dcpstore.manager.events"}


def test_a_callback_that_raises_ends_nothing(caplog) -> None:
    told: list[Event] = []

    def fail(event: Event) -> None:
        raise ArithmeticError("scripted")

    Events([fail, told.append], is_coordinator=True).send(Event("sealed", 1, URL))
    assert len(told) == 1
    assert "a callback failed on the event 'sealed'" in caplog.text
    assert "scripted" in caplog.text


def test_callbacks_are_called_one_event_at_a_time() -> None:
    inside, most = 0, 0

    def count(event: Event) -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        event.url.encode()
        inside -= 1

    events = Events([count] * 20, is_coordinator=True)
    threads = [
        threading.Thread(target=lambda: [events.send(Event("staged", n, URL)) for n in range(50)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (inside, most) == (0, 1)


class Writer:
    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int]] = []

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.scalars.append((tag, value, step))


def test_scalars_are_written_for_what_an_event_has() -> None:
    writer = Writer()
    told = dcpstore.TensorBoardEvents(writer)
    told(Event("sealed", 5, URL, 1.5, 100))
    told(Event("save_started", 6, URL))
    told(Event("failed", 7, URL, 2.0, error=OSError()))
    told(Event("preempted", None, URL, 1.0))
    TensorBoardEvents(writer, prefix="job")(Event("restored", 8, URL, 0.5, 0))
    assert writer.scalars == [
        ("dcpstore/sealed_seconds", 1.5, 5),
        ("dcpstore/sealed_bytes", 100, 5),
        ("dcpstore/failed_seconds", 2.0, 7),
        ("dcpstore/failed", 1, 7),
        ("job/restored_seconds", 0.5, 8),
        ("job/restored_bytes", 0, 8),
    ]


@pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed"
)
def test_torchs_writer_takes_them(tmp_path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        TensorBoardEvents(writer)(Event("sealed", 5, URL, 1.5, 100))
    assert list(tmp_path.glob("events*"))
