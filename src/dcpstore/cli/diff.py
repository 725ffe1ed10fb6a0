"""``dcpstore diff``: how two checkpoints differ."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from itertools import chain
from typing import TYPE_CHECKING, Any

from dcpstore.cli.connection import (
    add_connection_arguments,
    add_key_arguments,
    read_connection,
)
from dcpstore.cli.output import ExitCode, Output

if TYPE_CHECKING:
    from dcpstore.audit.diff import Comparison

DESCRIPTION = """\
Compare two checkpoints by any writers: keys, shapes, dtypes, and values to the last bit (a NaN
equals the same NaN; 0.0 and -0.0 differ). Where both were cut into the same chunks, checksums
tell and no data are read; the rest is read side by side in bounded memory. Exit code 0 if
they are equal, 1 if they differ."""

EXAMPLES = """\
dcpstore diff s3://bucket/run/step-100 s3://bucket/run/step-200
dcpstore diff s3://bucket/run/step-100 /data/copy --read-all
dcpstore diff run-a/step-9 run-b/step-9 --no-values --exclude 'optim.*'
dcpstore diff left right --json | jq -r '.differences[] | select(.kind == "shape") | .fqn'"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("left", metavar="LEFT_URL", help="of a checkpoint, or a local folder")
    parser.add_argument("right", metavar="RIGHT_URL", help="of another")
    parser.add_argument(
        "--no-values", action="store_true", help="keys, shapes and dtypes only; reads no data"
    )
    parser.add_argument(
        "--read-all",
        action="store_true",
        help="read all values, even where equal checksums (CRC32C per block) say enough",
    )
    add_key_arguments(parser)
    add_connection_arguments(parser, "left", "right")


def run(args: argparse.Namespace, out: Output) -> ExitCode:
    """Compare; see `dcpstore.audit.diff.compare_checkpoints`."""
    left = read_connection(args, args.left, out, "left")
    right = read_connection(args, args.right, out, "right")

    from dcpstore.audit.diff import compare_checkpoints
    from dcpstore.plan.rules import KeyRules

    with out.progress("diff") as progress:
        found = compare_checkpoints(
            left.url,
            right.url,
            left_options=left.storage_options,
            right_options=right.storage_options,
            config=left.config,
            rules=KeyRules(include=args.keys, exclude=args.exclude),
            values=not args.no_values,
            read_all=args.read_all,
            progress=progress,
        )
    lines = chain(found.summary().splitlines(), map(str, found.differences))
    out.result("dcpstore.diff/1", _document(found), lines)
    return ExitCode.OK if found.is_equal else ExitCode.FINDING


def _document(found: Comparison) -> dict[str, Any]:
    return {**asdict(found), "equal": found.is_equal, "elapsed_s": round(found.elapsed_s, 3)}
