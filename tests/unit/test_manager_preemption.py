"""Signals and notices, in processes of their own."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from dcpstore.errors import ConfigError
from dcpstore.manager.preemption import Preemption

BEGIN = """
import ctypes, multiprocessing, os, signal, socket, sys, threading, time
from dcpstore.manager.preemption import Preemption

def say(text):
    print(text, flush=True)

def hang():
    "Wait in C, where no handler runs."
    mutex = ctypes.create_string_buffer(128)
    libc = ctypes.CDLL(None)
    libc.pthread_mutex_lock(mutex)
    say("ready")
    libc.pthread_mutex_lock(mutex)

def sleep():
    say("ready")
    time.sleep(30)
    say("slept")

"""


@contextlib.contextmanager
def running(script: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", BEGIN + script],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as process:
        try:
            assert says(process) == "ready"
            yield process
        finally:
            process.kill()


def says(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_a_signal_is_heard_while_the_main_thread_waits_in_c() -> None:
    names = ("SIGTERM", "SIGUSR1", "SIGUSR2")
    with running(f"Preemption(say, {names})\nhang()") as process:
        took_s = []
        for name in names:
            began_s = time.monotonic()
            process.send_signal(getattr(signal, name))
            assert says(process) == name
            took_s.append(time.monotonic() - began_s)
        assert min(took_s) < 0.2  # each takes a millisecond, on a machine with nothing else to do
        assert process.poll() is None


def test_a_handler_that_was_there_is_called_at_once_in_the_main_thread() -> None:
    script = """
def former(number, frame):
    say(f"former {number} {threading.current_thread() is threading.main_thread()}")
    raise KeyboardInterrupt
signal.signal(signal.SIGTERM, former)
preemption = Preemption(lambda why: None)
for _ in range(2):
    try:
        sleep()
    except KeyboardInterrupt:
        say(f"interrupted {preemption.was_default}")
preemption.close()
say(signal.getsignal(signal.SIGTERM) is former)
"""
    with running(script) as process:
        process.send_signal(signal.SIGTERM)
        assert says(process) == "former 15 True"
        assert says(process) == "interrupted False"
        assert says(process) == "ready"
        process.send_signal(signal.SIGTERM)
        assert says(process) == "former 15 True"
        assert says(process) == "interrupted False"
        assert says(process) == "True"


def test_a_process_that_a_signal_would_have_ended_lives_on_until_a_second_one() -> None:
    script = """
preemption = Preemption(lambda why: say(f"{why} {preemption.was_default}"), again_s=0.5)
say(preemption.was_default)
hang()
"""
    with running("say('ready')\n" + script) as process:
        assert says(process) == "False"
        assert says(process) == "ready"
        process.send_signal(signal.SIGTERM)
        assert says(process) == "SIGTERM True"
        process.send_signal(signal.SIGTERM)  # such as torchrun's, after a scheduler's
        time.sleep(0.6)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert "came again: this process ends" in says(process)
        assert process.wait(10) == 128 + signal.SIGTERM


def test_an_ignored_signal_is_noticed_and_still_ignored() -> None:
    script = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
preemption = Preemption(lambda why: say(f"{why} {preemption.was_default}"), again_s=0)
hang()
"""
    with running(script) as process:
        process.send_signal(signal.SIGTERM)
        assert says(process) == "SIGTERM False"
        process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
        assert process.poll() is None


def test_after_it_is_closed_a_signal_does_what_it_did_before() -> None:
    with running("Preemption(say).close()\nsleep()") as process:
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == -signal.SIGTERM
        assert says(process) == ""


@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_a_process_that_was_started_ends_by_a_signal_and_its_parent_hears_nothing(how) -> None:
    """Else no worker of a data loader could be ended, and each would preempt the job."""
    script = f"""
if __name__ == "__main__":
    preemption = Preemption(say)
    child = multiprocessing.get_context({how!r}).Process(target=time.sleep, args=(60,))
    child.start()
    say("ready")
    time.sleep(0.1)
    child.terminate()
    child.join(20)
    say(child.exitcode)
    time.sleep(0.1)
    preemption.close()
    say("end")
"""
    with running(script) as process:
        assert says(process) == str(-signal.SIGTERM)
        assert says(process) == "end"


@contextlib.contextmanager
def wakeup_socket() -> Iterator[tuple[socket.socket, int]]:
    """A wakeup socket that somebody else has set."""
    receiver, sender = socket.socketpair()
    sender.setblocking(False)
    receiver.settimeout(10)
    before = signal.set_wakeup_fd(sender.fileno())
    try:
        with receiver, sender:
            yield receiver, sender.fileno()
    finally:
        signal.set_wakeup_fd(before)


@pytest.fixture
def handled() -> Iterator[list[int]]:
    """Signals that a handler of somebody else got."""
    numbers: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: numbers.append(number))
    yield numbers
    signal.signal(signal.SIGUSR1, before)


class Heard(list[str]):
    def wait(self, num: int = 1) -> None:
        ends_s = time.monotonic() + 10
        while len(self) < num:
            assert time.monotonic() < ends_s
            time.sleep(0.001)


def test_the_former_wakeup_socket_gets_its_bytes_and_is_put_back(handled) -> None:
    heard = Heard()
    with wakeup_socket() as (receiver, fd):
        with Preemption(heard.append, ["SIGUSR1"]):
            os.kill(os.getpid(), signal.SIGUSR1)
            heard.wait()
            assert receiver.recv(10) == bytes([signal.SIGUSR1])
        assert signal.set_wakeup_fd(fd) == fd
        os.kill(os.getpid(), signal.SIGUSR1)
        assert receiver.recv(10) == bytes([signal.SIGUSR1])
    assert heard == ["SIGUSR1"]
    assert handled == [signal.SIGUSR1] * 2


def test_what_somebody_else_set_meanwhile_stays_and_is_passed_on(handled) -> None:
    heard, theirs = Heard(), []
    preemption = Preemption(heard.append, ["SIGUSR1"])
    ours = signal.getsignal(signal.SIGUSR1)

    def later(number: int, frame: Any) -> None:
        theirs.append(number)
        ours(number, frame)  # type: ignore[operator, misc]

    signal.signal(signal.SIGUSR1, later)
    with wakeup_socket() as (receiver, fd):
        os.kill(os.getpid(), signal.SIGUSR1)
        heard.wait()  # by way of Python's handler alone
        preemption.close()
        assert signal.getsignal(signal.SIGUSR1) is later
        assert signal.set_wakeup_fd(fd) == fd
        os.kill(os.getpid(), signal.SIGUSR1)
        assert receiver.recv(1)
        assert theirs == handled == [signal.SIGUSR1] * 2
    assert heard == ["SIGUSR1"]
    preemption._signals._sender.close()  # type: ignore[union-attr]
    preemption._signals._thread.join(10)  # type: ignore[union-attr]


def test_a_former_default_holds_after_closing_for_who_came_later() -> None:
    script = """
preemption = Preemption(say)
ours = signal.getsignal(signal.SIGTERM)
signal.signal(signal.SIGTERM, lambda number, frame: ours(number, frame))
preemption.close()
sleep()
"""
    with running(script) as process:
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == -signal.SIGTERM


def test_elsewhere_than_in_the_main_thread_only_notices_are_heard() -> None:
    heard, errors = Heard(), []

    def work() -> None:
        try:
            Preemption(heard.append)
        except ConfigError as error:
            errors.append(str(error))
        with Preemption(heard.append, signals=(), notice=lambda: True):
            heard.wait()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(20)
    assert heard == ["notice"]
    assert "main thread alone; elsewhere, give signals=() and a notice" in errors[0]


def test_a_notice_is_asked_for_until_it_comes_whatever_it_raises(caplog) -> None:
    heard, num_asked = Heard(), [0]

    def notice() -> bool:
        num_asked[0] += 1
        if num_asked[0] < 4:
            raise OSError("no metadata server")
        return num_asked[0] == 6

    def fail(what: str) -> None:
        heard.append(what)
        raise ArithmeticError("scripted")

    with Preemption(fail, (), notice, poll_s=0.001):
        heard.wait()
    assert heard == ["notice"]
    assert num_asked[0] == 6
    first, second = [record.message for record in caplog.records]
    assert "no metadata server" in first
    assert "notice failed" in second


def test_closing_ends_the_threads_at_once_and_twice_is_once() -> None:
    before = threading.active_count()
    preemption = Preemption(print, ["SIGUSR1"], notice=lambda: False, poll_s=1000)
    assert threading.active_count() == before + 2
    errors: list[BaseException] = []

    def close_elsewhere() -> None:
        try:
            preemption.close()
        except ConfigError as error:
            errors.append(error)

    thread = threading.Thread(target=close_elsewhere)
    thread.start()
    thread.join()
    assert "closed in the main thread alone" in str(errors[0])
    began_s = time.monotonic()
    preemption.close()
    preemption.close()
    assert time.monotonic() - began_s < 2
    assert threading.active_count() == before
    assert not preemption.was_default


def test_what_cannot_be_heard_is_refused_before_anything_changes() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ConfigError, match="'SIGKILL' is no signal that a process can catch"):
        Preemption(print, ["SIGTERM", "SIGKILL"])
    with pytest.raises(ConfigError, match="'TERM' is no signal"):
        Preemption(print, ["TERM"])
    with pytest.raises(ConfigError, match="poll_s must be positive"):
        Preemption(print, poll_s=0)
    assert signal.getsignal(signal.SIGTERM) is before
