"""Hearing that the job is to stop: a signal, or a cloud's notice.

Python runs a signal's handler in the main thread, between two of its own instructions. While that
thread waits in a collective, which is C++, no handler runs: a SIGTERM is then heard after the
collective, or never. So a signal takes two ways at once:

1. C writes its number into a socket (``signal.set_wakeup_fd``), whatever the main thread does. A
   thread of ours reads it and calls ``on_notice``.
2. Python's handler runs once the main thread comes to it. It calls the handler that was there
   before. Where that was the default, which ends the process, the process lives on and can save.

Who was to be told by the former wakeup socket still is. A second signal of the same kind ends a
process that the first would have ended without us. It must come some seconds later: a
scheduler that sends SIGTERM to all processes of a job, and torchrun, which sends it to its
workers when it gets one, are not to end the save that the first of the two began.

In a process that this one forks, everything is as before: a signal to a worker of a data loader
must end it, and must not reach our thread through the socket that both share.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from typing_extensions import Self

from dcpstore.errors import ConfigError

logger = logging.getLogger(__name__)

_JOIN_S = 5.0
_HANDLED = 128
"""Added to a signal's number by Python's handler; C's numbers are all below it."""


class Preemption:
    """Call a function once this process, or its machine, is told to stop.

    Signals are heard within moments, also while the main thread waits in C code that gives up
    Python's lock, as collectives do. Make it in the main thread and close it there, best as a
    context manager. What was there before is put back, but for what somebody else has changed
    meanwhile: that stays, and we pass on to what was there before whatever it passes to us. A
    handler that is no Python function, such as ``faulthandler``'s, is not known to Python: it is
    neither called nor put back.

    Args:
        on_notice: Called with a signal's name or ``"notice"``, once for each, in a thread of
            ours. It should return soon; what it raises is logged.
        signals: Names of the signals. One that was ignored is noticed, and else still ignored.
        notice: Asked every `poll_s` seconds, in a thread of ours, whether the machine is to go
            away, until it says so. If it raises, that is logged once, and it is asked again.
        poll_s: Seconds between two such questions.
        again_s: Seconds after the first signal of a kind in which others count as the same.

    Raises:
        ConfigError: If a signal is unknown or cannot be caught; if there are signals and this
            is not the main thread; or if `poll_s` is not positive.
    """

    def __init__(
        self,
        on_notice: Callable[[str], object],
        signals: Sequence[str] = ("SIGTERM",),
        notice: Callable[[], bool] | None = None,
        poll_s: float = 5.0,
        *,
        again_s: float = 5.0,
    ) -> None:
        if poll_s <= 0:
            raise ConfigError(f"poll_s must be positive, not {poll_s}")
        self._on_notice = on_notice
        self._notice = notice
        self._poll_s = poll_s
        self._is_closed = threading.Event()
        self._signals: _Signals | None = None
        self._asker: threading.Thread | None = None
        if signals:
            self._signals = _Signals([_number(name) for name in signals], self._tell, again_s)
        if notice is not None:
            name = "dcpstore-preemption-notice"
            self._asker = threading.Thread(target=self._ask, name=name, daemon=True)
            self._asker.start()

    @property
    def was_default(self) -> bool:
        """Whether a signal came that would have ended the process: it is to end after the save."""
        return self._signals is not None and self._signals.was_default

    def close(self) -> None:
        """Put back what was there before. Idempotent; in the main thread, if there are signals.

        A `notice` that is being asked is waited for, for 5 s at most.

        Raises:
            ConfigError: If there are signals and this is not the main thread.
        """
        if self._is_closed.is_set():
            return
        if self._signals is not None:
            self._signals.close()
        self._is_closed.set()
        if self._asker is not None and self._asker is not threading.current_thread():
            self._asker.join(_JOIN_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _tell(self, what: str) -> None:
        try:
            self._on_notice(what)
        except Exception:
            logger.exception("what is to be done on %s failed", what)

    def _ask(self) -> None:
        assert self._notice is not None
        has_failed = False
        while not self._is_closed.is_set():
            try:
                if self._notice():
                    self._tell("notice")
                    return
            except Exception as error:  # noqa: BLE001 - the next answer may be well
                if not has_failed:
                    logger.warning("asking for a notice failed; it is asked again: %r", error)
                has_failed = True
            self._is_closed.wait(self._poll_s)


class _Signals:
    """Handlers and a wakeup socket in place of others.

    Args:
        numbers: The signals.
        tell: Called with a signal's name when it comes for the first time.
        again_s: See `Preemption`.
    """

    def __init__(self, numbers: Sequence[int], tell: Callable[[str], None], again_s: float) -> None:
        _check_main_thread("made")
        self._tell = tell
        self._again_s = again_s
        # A handler that was not made in Python is None: it can be neither called nor put back.
        self._former: dict[int, Any] = {
            number: signal.getsignal(number) or signal.SIG_DFL for number in numbers
        }
        self._first_s: dict[int, float] = {}
        self._is_closed = False
        self.was_default = False
        self._receiver, self._sender = socket.socketpair()
        self._sender.setblocking(False)
        self._former_fd = signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        for number in numbers:
            signal.signal(number, self._handle)
        # There is no way to take this back, so it keeps nothing alive.
        leave = weakref.WeakMethod(self._leave_to_parent)
        os.register_at_fork(after_in_child=lambda: (leave() or int)())
        name = "dcpstore-preemption-signals"
        self._thread = threading.Thread(target=self._listen, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Put back what is still ours, and end the thread."""
        if self._is_closed:
            return
        _check_main_thread("closed")
        self._is_closed = True
        for number, former in self._former.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, former)
        if self._put_back_fd():
            self._sender.close()
            if self._thread is not threading.current_thread():
                self._thread.join(_JOIN_S)

    def _put_back_fd(self) -> bool:
        """Put back the former wakeup socket, unless another one came after ours."""
        found = signal.set_wakeup_fd(-1)
        is_ours = found == self._sender.fileno()
        with contextlib.suppress(ValueError, OSError):  # it was closed meanwhile
            signal.set_wakeup_fd(self._former_fd if is_ours else found, warn_on_full_buffer=False)
        return is_ours

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Answer a signal; in the main thread."""
        with contextlib.suppress(OSError):  # in case the socket is not asked any more
            self._sender.send(bytes([number + _HANDLED]))
        former = self._former[number]
        if callable(former):
            former(number, frame)
        elif former == signal.SIG_DFL and self._is_closed:  # called by who came after us
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _listen(self) -> None:
        with self._receiver:
            while data := self._receiver.recv(64):
                numbers = bytes(number for number in data if number < _HANDLED)
                if self._former_fd >= 0 and numbers:
                    with contextlib.suppress(OSError):  # it is full or was closed
                        os.write(self._former_fd, numbers)
                if not self._is_closed:
                    for number in data:
                        self._hear(number % _HANDLED, is_handled=number >= _HANDLED)

    def _hear(self, number: int, *, is_handled: bool) -> None:
        if number not in self._former:
            return
        now_s = time.monotonic()
        is_default = self._former[number] == signal.SIG_DFL
        if number not in self._first_s:
            self._first_s[number] = now_s
            self.was_default = self.was_default or is_default
            self._tell(_name(number))
        elif is_default and not is_handled and now_s - self._first_s[number] > self._again_s:
            # Only the main thread can set the default action again, and it may hang.
            logger.warning("%s came again: this process ends at once", _name(number))
            os._exit(128 + number)

    def _leave_to_parent(self) -> None:
        """Be as before in a process that was forked."""
        if self._is_closed:
            return
        self._is_closed = True
        self._put_back_fd()
        for number, former in self._former.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, former)
        self._sender.close()
        self._receiver.close()


def _number(name: str) -> int:
    found = getattr(signal.Signals, name, None)
    if found is None or name in ("SIGKILL", "SIGSTOP"):
        raise ConfigError(f"{name!r} is no signal that a process can catch; SIGTERM is one")
    return int(found)


def _name(number: int) -> str:
    return signal.Signals(number).name


def _check_main_thread(what: str) -> None:
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError(
            f"what hears signals is {what} in the main thread alone; elsewhere, give signals=()"
            " and a notice"
        )
