"""The processes of the demo: a failure is noticed, and nobody is left behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from dcpstore.demo.launch import RanksError, run_ranks


def write_rank(folder: Path, rank: int) -> None:
    (folder / str(rank)).write_text(str(os.getpid()))


def fail_on_rank_1(folder: Path, rank: int) -> None:
    write_rank(folder, rank)
    if rank == 1:
        sys.exit(3)
    time.sleep(60)


def sleep_long(folder: Path, rank: int) -> None:
    write_rank(folder, rank)
    time.sleep(60)


def pids(folder: Path, num_ranks: int) -> list[int]:
    """Wait until every rank has said its process id."""
    deadline = time.monotonic() + 100
    while True:
        said = [path.read_text() for path in folder.iterdir()]
        if len(said) == num_ranks and all(said):
            return [int(pid) for pid in said]
        assert time.monotonic() < deadline
        time.sleep(0.05)


def assert_all_end(gone: list[int]) -> None:
    deadline = time.monotonic() + 15
    while any(psutil.pid_exists(pid) and is_running(pid) for pid in gone):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def test_every_rank_runs(tmp_path: Path) -> None:
    run_ranks(write_rank, tmp_path, 3, timeout_s=60)
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1", "2"}


def test_one_failing_rank_ends_the_others_and_is_named(tmp_path: Path) -> None:
    with pytest.raises(RanksError, match="rank 1 ended with exit code 3"):
        run_ranks(fail_on_rank_1, tmp_path, 2, timeout_s=50)
    assert multiprocessing.active_children() == []


def test_a_hung_rank_is_ended(tmp_path: Path) -> None:
    with pytest.raises(RanksError, match="rank 0 did not end in time"):
        run_ranks(sleep_long, tmp_path, 1, timeout_s=2)
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_ranks_end_with_their_parent(tmp_path: Path, sent: signal.Signals) -> None:
    said = tmp_path / "said"
    said.mkdir()
    script = tmp_path / "parent.py"
    script.write_text(
        "import signal\n"
        "from pathlib import Path\n"
        "from test_demo_launch import run_ranks, sleep_long\n"
        "if __name__ == '__main__':\n"
        # Whoever runs the tests in the background made all their processes ignore it.
        "    signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"    run_ranks(sleep_long, Path({str(said)!r}), 2, timeout_s=60)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    with subprocess.Popen(
        [sys.executable, str(script)],
        env=environment,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as parent:
        ranks = pids(said, 2)
        if sent == signal.SIGINT:
            os.killpg(parent.pid, sent)  # as a terminal does
        else:
            parent.send_signal(sent)
        assert parent.wait(100) != 0
    assert_all_end(ranks)
