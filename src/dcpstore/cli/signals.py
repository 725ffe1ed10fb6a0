"""Ctrl-C and SIGTERM that end a command promptly and cleanly.

Python runs a signal's handler in the main thread, between two of its own instructions. A thread
that waits inside a foreign library for an answer that does not come is not there for minutes:

1. the handler raises in the main thread, which cleans up and ends as after any error
2. if the main thread did not come to that within `GRACE_S`, it waits in such a call: a second
   thread, told of the signal through a pipe, ends the process. A put that is under way then
   publishes its object or does not, as after a crash; it never publishes a part of one
3. a second signal ends the process at once
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

__all__ = ["GRACE_S", "answer_signals"]

GRACE_S = 2.0
"""Longer than any instruction of Python's own takes."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def answer_signals(
    message: str, *, grace_s: float = GRACE_S, end: Callable[[int], object] = os._exit
) -> None:
    """Answer SIGINT and SIGTERM from now on. Call it once, in the main thread.

    SIGINT raises KeyboardInterrupt, SIGTERM raises SystemExit with 143.

    Args:
        message: What to write on standard error if ctrl-C has to end the process.
        grace_s: Seconds that the main thread has to answer.
        end: Ends the process with an exit code, cleaning up nothing.
    """
    was_heard = threading.Event()

    def answer(number: int, _: FrameType | None) -> NoReturn:
        was_heard.set()
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + number)

    told, tell = os.pipe()
    os.set_blocking(tell, False)
    for number in _SIGNALS:
        signal.signal(number, answer)
    signal.set_wakeup_fd(tell, warn_on_full_buffer=False)

    def end_unheard(number: int) -> None:
        if number == signal.SIGINT:
            os.write(2, message.encode())
        end(128 + number)

    def watch() -> None:
        number = _next_signal(told)
        if not was_heard.wait(grace_s):
            end_unheard(number)
        end(128 + _next_signal(told))

    threading.Thread(target=watch, name="dcpstore-signals", daemon=True).start()


def _next_signal(told: int) -> int:
    while True:
        for number in os.read(told, 64):
            if number in _SIGNALS:
                return number
