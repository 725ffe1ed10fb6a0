"""A load while somebody overwrites: the old values, the new ones, or an error; never a mix."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from dcpstore.errors import CheckpointError
from faults.places import APART, HERE, Backend
from faults.states import load, loaded_step, save, state_at


class BeforeVerb:
    """Calls a hook once, before the n-th request of a verb."""

    def __init__(self, inner: Any, verb: str, at: int, hook: Any) -> None:
        self._inner = inner
        self._verb = verb
        self._left = at
        self._hook = hook
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if name != self._verb:
            return found

        def call(*args: Any, **options: Any) -> Any:
            with self._lock:
                self._left -= 1
                if self._left == -1:
                    self._hook()
            return found(*args, **options)

        return call


@pytest.mark.parametrize(
    ("verb", "at", "layout"),
    [
        *[("get", at, HERE) for at in range(2)],
        *[("get", at, APART) for at in range(4)],
        *[("get_range", at, HERE) for at in range(4)],
    ],
)
def test_an_overwrite_between_any_two_requests_of_a_load(
    verb: str, at: int, layout: dict[str, int]
) -> None:
    backend = Backend()
    save(state_at(1), backend.writer(**layout))

    def overwrite() -> None:
        save(state_at(2), backend.writer(overwrite=True))

    store = BeforeVerb(backend.shared, verb, at, overwrite)
    reader = backend.reader(max_requests=1)
    reader._folder._opener = lambda *_args, **_options: store
    try:
        step = loaded_step(reader, state_at(0))
    except BaseException as failed:
        error = failed.failures[0][0]  # type: ignore[attr-defined]
        assert isinstance(error, CheckpointError), error
        assert "another save replaced the checkpoint" in error.message
        assert "Load again" in error.message
        step = loaded_step(reader, state_at(0))
        assert step == 2
    assert step in (1, 2)
    # Before the metadata, or a manifest apart: the load simply finds the new one.
    if verb == "get" and at < (1 if layout is HERE else 2):
        assert step == 2


def test_readers_in_threads_beside_many_overwrites_see_whole_steps() -> None:
    backend = Backend()
    save(state_at(0), backend.writer())
    stop = threading.Event()
    seen: list[int] = []
    problems: list[BaseException] = []

    def read() -> None:
        while not stop.is_set():
            found = state_at(99)
            try:
                load(found, backend.reader())
            except BaseException as failed:
                error = failed.failures[0][0]  # type: ignore[attr-defined]
                if "another save replaced" not in str(error) and "is gone" not in str(error):
                    problems.append(error)
                continue
            expected = state_at(found["step"])
            if any(
                not (found["layers"][key] == value).all()
                for key, value in expected["layers"].items()
            ):
                problems.append(AssertionError(f"a mix at step {found['step']}"))
            seen.append(found["step"])

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for step in range(1, 25):
        save(state_at(step), backend.writer(overwrite=True))
    stop.set()
    for thread in threads:
        thread.join()
    assert problems == []
    assert seen
    assert loaded_step(backend.reader(), state_at(0)) == 24
