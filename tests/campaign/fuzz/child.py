"""A process that parses one input after the other, within limits, and tells what came of it.

The parent writes one line of JSON per input, the child answers with one. An input that takes
more than 5 s of CPU ends the child by SIGPROF; one that takes more address space gets a
MemoryError or ends it; the peak of resident memory is in the answer.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import random
import resource
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

CPU_SECONDS = 5.0
MEMORY_BYTES = 256 << 20
# Address space is not memory: allocators and threads reserve what they never touch.
_SPARE_BYTES = 2 << 30


def main() -> None:
    """Serve inputs until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what the commands print
    warnings.simplefilter("ignore")
    from campaign.fuzz.parsers import PARSERS

    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        root = Path(folder)
        parsers = {name: make(root / name.replace(" ", "-")) for name, make in PARSERS.items()}
        for parser in parsers.values():  # whatever is imported or cached at first use is so now
            for number in range(4):
                with contextlib.suppress(Exception):
                    parser.run(parser.seed_input(random.Random(number)), random.Random(number))
        limit = _status("VmSize") + MEMORY_BYTES + _SPARE_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        print(json.dumps({"ready": list(parsers)}), file=answers, flush=True)
        for line in sys.stdin:
            ask = json.loads(line)
            parser = parsers[ask["parser"]]
            rng = random.Random(ask["seed"])
            data = parser.make(rng)
            if ask.get("wants_made"):
                answer = {"made": base64.b64encode(data).decode()}
            else:
                given = ask.get("data")
                data = data if given is None else base64.b64decode(given)
                planted = _PLANTED.get(ask.get("plants"))
                draws = None if ask.get("is_plain") else random.Random(rng.getrandbits(32))
                answer = _judged(planted or parser, data, draws)
            print(json.dumps(answer), file=answers, flush=True)


def _judged(parser: Any, data: bytes, draws: random.Random | None) -> dict[str, Any]:
    from dcpstore.errors import CorruptError, IncompatibleError, NotFoundError

    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    answer: dict[str, Any] = {"outcome": "accepted"}
    errors = io.StringIO()
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
            parser.run(data, draws)
    except (CorruptError, IncompatibleError, NotFoundError) as error:
        str(error)
        answer = {"outcome": type(error).__name__}
    except BaseException as error:
        answer = {"outcome": "finding", "what": f"{type(error).__name__}: {str(error)[:300]}"}
    signal.setitimer(signal.ITIMER_PROF, 0)
    grown = _status("VmHWM") - before
    if grown > MEMORY_BYTES:
        answer = {"outcome": "finding", "what": f"took {grown >> 20} MiB ({answer})"}
    return answer


class _Planted:
    """A parser with a fault, to see that faults are seen."""

    def __init__(self, fault: Callable[[], object]) -> None:
        self._fault = fault

    def run(self, data: bytes, draws: random.Random | None) -> None:
        self._fault()


def _hang() -> None:
    while True:
        pass


_PLANTED = {
    "hangs": _Planted(_hang),
    "eats memory": _Planted(lambda: bytes(bytearray(b"x") * (300 << 20))),
    "raises": _Planted(lambda: {}["x"]),
    "dies": _Planted(lambda: os.kill(os.getpid(), signal.SIGSEGV)),
}


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) << 10
    raise KeyError(name)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    main()
