"""Jobs of `examples/train_fsdp2.py`: ranks that are forked, so that they start at once, and killed.

::

    test -- a line per job --> launcher, which imported torch --> rank 0, 1, 2, ...
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_fsdp2.py"
MOMENTS = ("staging", "uploading", "sealing", "deleting", "at any time")


@dataclass(frozen=True, slots=True)
class Kill:
    """When a rank kills itself, and all others with it.

    Attributes:
        moment: One of `MOMENTS`.
        rank: Who does; rank 0, where only that comes to it.
        number: At which time that it comes to it; or after how many tenths of a second.
        is_after: Whether after the request rather than before it.
        others_s: Seconds that the others live longer.
    """

    moment: str
    rank: int
    number: int
    is_after: bool
    others_s: float = 0.0


class Launcher:
    """Starts jobs, one at a time. A context manager.

    Args:
        log: File for what the ranks print.
    """

    def __init__(self, log: Path) -> None:
        self.log = log

    def __enter__(self) -> Launcher:
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
        return self

    def __exit__(self, *_: object) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()

    def run(
        self,
        num_ranks: int,
        run: Path,
        num_steps: int,
        kill: Kill | None = None,
        *,
        sigterm: int | None = None,
        timeout_s: float = 60,
    ) -> list[int]:
        """Train to a step, or until killed.

        Args:
            num_ranks: Ranks.
            run: Folder of the run.
            num_steps: Where training ends.
            kill: When it is killed.
            sigterm: Which rank gets SIGTERM once a step is sealed; its former handler prints.
            timeout_s: When all are killed, as they hang.

        Returns:
            How the ranks ended: 0, an exit code, or a signal below 0; -99 for one that hung.
        """
        asked = {
            "num_ranks": num_ranks,
            "arguments": [str(run), "--steps", str(num_steps)],
            "kill": None if kill is None else asdict(kill),
            "sigterm": sigterm,
            "timeout_s": timeout_s,
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(asked).encode() + b"\n")
        self._process.stdin.flush()
        ended: list[int] = json.loads(self._process.stdout.readline())
        return ended


# --- in the launcher --------------------------------------------------------------------------


def _serve() -> None:
    import torch._dynamo
    import torch.distributed.checkpoint.state_dict
    import torch.distributed.fsdp  # noqa: F401

    import dcpstore.manager.checkpoint_manager
    import dcpstore.ranks.torch_group  # noqa: F401

    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    for line in sys.stdin.buffer:
        answers.write(json.dumps(_job(**json.loads(line))).encode() + b"\n")
        answers.flush()


def _job(
    num_ranks: int,
    arguments: list[str],
    kill: dict[str, Any] | None,
    sigterm: int | None,
    timeout_s: float,
) -> list[int]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pids = []
    for rank in range(num_ranks):
        pid = os.fork()
        if not pid:
            if rank == sigterm:
                signal.signal(signal.SIGTERM, lambda *_: print("the former handler", flush=True))
            _rank(rank, num_ranks, port, arguments, None if kill is None else Kill(**kill))
        pids.append(pid)
    ends_s = time.monotonic() + timeout_s
    ended: dict[int, int] = {}
    while len(ended) < num_ranks:
        if sigterm is not None and any(Path(arguments[0]).glob("step-*/.metadata")):
            os.kill(pids[sigterm], signal.SIGTERM)
            sigterm = None
        for pid in [one for one in pids if one not in ended]:
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                ended[pid] = os.waitstatus_to_exitcode(status)
        is_late = time.monotonic() > ends_s
        if is_late or any(code not in (0, 143) for code in ended.values()):
            if kill is not None and not is_late:
                time.sleep(kill["others_s"])
            for pid in [one for one in pids if one not in ended]:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                ended[pid] = -99 if is_late else -signal.SIGKILL
        time.sleep(0.005)
    return [ended[pid] for pid in pids]


def _rank(rank: int, num_ranks: int, port: int, arguments: list[str], kill: Kill | None) -> None:
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(num_ranks),
        LOCAL_RANK=str(rank),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    code = 1
    try:
        import torch

        torch.set_num_threads(1)
        if kill is not None and kill.rank == rank:
            _arm(kill)
        sys.argv = [str(EXAMPLE), *arguments]
        runpy.run_path(str(EXAMPLE), run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _arm(kill: Kill) -> None:
    """Have this rank kill itself."""
    from dcpstore import CheckpointManager, Stager
    from dcpstore.store import open_store
    from passing_on import PassesOn

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(10)

    lock, num_times = threading.Lock(), 0

    def around(call: Callable[..., Any], is_it: Callable[..., bool], *args: Any, **kw: Any) -> Any:
        nonlocal num_times
        with lock:
            num_times += is_it(*args)
            is_now = is_it(*args) and num_times == kill.number
        if is_now and not kill.is_after:
            die()
        answer = call(*args, **kw)
        if is_now:
            die()
        return answer

    if kill.moment == "at any time":
        threading.Timer(kill.number / 10, die).start()
    elif kill.moment == "staging":
        begin_of = Stager.begin
        Stager.begin = lambda self, *args, **kw: around(  # type: ignore[method-assign]
            partial(begin_of, self), lambda *_: True, *args, **kw
        )
    else:
        verbs = ("delete_many",) if kill.moment == "deleting" else ("put", "put_parts")
        part = {"deleting": "", "sealing": ".metadata", "uploading": ".distcp"}[kill.moment]

        class Deadly(PassesOn):
            def __getattr__(self, name: str) -> Any:
                found = super().__getattr__(name)
                if name not in verbs:
                    return found
                return partial(around, found, lambda key, *_: part in str(key))

        defaults = CheckpointManager.__init__.__kwdefaults__
        defaults["store_opener"] = lambda *args, **kw: Deadly(open_store(*args, **kw))


if __name__ == "__main__":
    _serve()
