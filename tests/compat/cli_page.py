"""The terminal of docs/cli.md: the commands on the page, run against an embedded S3.

``python tests/compat/cli_page.py`` writes what the commands print now into the page.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

import dcpstore
from dcpstore.cli.main import main
from dcpstore.testing import MotoServer, S3Client
from dcpstore.testing.ranks import run_ranks

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"
_BLOCK = re.compile(r"```console\n(.*?)```", re.DOTALL)
# What differs from run to run: ids, and numbers with their units, ages and columns.
_SAVE_ID = re.compile(r"\b[0-9a-f]{16}\b")
_VARYING = re.compile(r"\bnow\b|-?\d[\d.,:]*( ?([kKMGT]?i?B|m?s|min|h|d)(/s)?\b)?|[ =-]{2,}")


def state(step: int) -> dict[str, object]:
    """A small model and its optimizer, another at every step."""
    source = torch.Generator().manual_seed(step)

    def tensor(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=source)

    shapes = {f"layers.{number}.{name}": (256, 256) for number in range(4) for name in ("wq", "wo")}
    shapes["embed.weight"] = (1000, 256)
    return {
        "model": {name: tensor(*sizes) for name, sizes in shapes.items()},
        "optim": {
            "state": {
                name: {"exp_avg": tensor(*sizes), "exp_avg_sq": tensor(*sizes), "step": step}
                for name, sizes in shapes.items()
            }
        },
        "step": step,
    }


def fill(client: S3Client) -> None:
    """Two steps that four ranks saved, and what a third left that was interrupted."""
    for step in (100, 200):

        def save(group: object, step: int = step) -> object:
            url, metrics = f"s3://bucket/run/step-{step}", {"val_loss": 3 - step / 200}
            return dcpstore.save(state(step), url, metrics=metrics, process_group=group)

        run_ranks(4, save, deadline_s=120).values()
    client.put("run/step-300/__0_0.0123456789abcdef.distcp", bytes(3 << 20))


def blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yield each command on a page, and what stands below it."""
    for block in _BLOCK.findall(text):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            yield command, output.rstrip("\n")


def run(command: str) -> str:
    """Run a command of the page here; return what a terminal would show, and its exit code."""
    words = shlex.split(command, comments=True)
    assert words[0] == "dcpstore", command
    out = io.StringIO()
    code = main(words[1:], stdout=out, stderr=out)
    text = out.getvalue().rstrip("\n").replace(Path.cwd().as_uri(), "file:///data")
    return text if code == 0 else f"{text}\n[exit code {code}]"


def constant_part(output: str) -> list[str]:
    """Return the words of each line that are the same in every run."""
    lines = _SAVE_ID.sub("#", output).splitlines()
    return [" ".join(_VARYING.sub(" # ", line).split()) for line in lines]


@contextmanager
def bucket(server: MotoServer, environment: Callable[[str, str], None]) -> Iterator[None]:
    """Buckets of the page on an embedded S3 that commands find by the environment."""
    with tempfile.TemporaryDirectory() as folder:
        for name, value in {
            "AWS_ENDPOINT_URL": server.endpoint_url,
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
            "COLUMNS": "100",
        }.items():
            environment(name, value)
        server.create_bucket("archive")
        fill(server.create_bucket("bucket"))
        before = Path.cwd()
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)


def rewrite() -> None:
    text = PAGE.read_text()
    with MotoServer() as server, bucket(server, os.environ.__setitem__):
        outputs = iter([f"$ {command}\n{run(command)}\n" for command, _ in blocks(text)])

    def renew(match: re.Match[str]) -> str:
        count = len(re.findall(r"^\$ ", match[1], re.MULTILINE))
        return "```console\n" + "\n".join(next(outputs) for _ in range(count)) + "```"

    PAGE.write_text(_BLOCK.sub(renew, text))


if __name__ == "__main__":
    rewrite()
