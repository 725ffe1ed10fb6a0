"""``dcpstore prune``: what saves left behind."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from datetime import datetime, timezone
from typing import Any

from dcpstore.audit.prune import (
    DEFAULT_AGE_S,
    Leftover,
    Place,
    Pruned,
    Rules,
    find_leftovers,
    remove,
)
from dcpstore.cli.connection import add_connection_arguments, read_connection
from dcpstore.cli.output import ExitCode, Output, exit_code_of, format_age, table
from dcpstore.text import count_text, size_text

DESCRIPTION = """\
Find what interrupted or replaced saves left below a URL: data objects and manifests that no
sealed checkpoint refers to, open multipart uploads, and probes of `dcpstore doctor`. Shows them
and deletes nothing unless --yes is given. Never touches what a checkpoint refers to, nor a
folder whose metadata cannot be read whole, nor one that a save wrote to lately."""

EXAMPLES = """\
dcpstore prune s3://bucket/run                     # show what is left over
dcpstore prune s3://bucket/run --yes               # delete it
dcpstore prune /data/run --older-than 2h --yes     # no save takes longer than that here
dcpstore prune s3://bucket/run --stock             # data objects of stock DCP too"""

_AGE = re.compile(r"(\d+(?:\.\d+)?)\s*(s|min|h|d)?")
_UNITS_S = {None: 1, "s": 1, "min": 60, "h": 3600, "d": 86400}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("url", metavar="URL", help="of a checkpoint or a run, or a local folder")
    parser.add_argument("--yes", "--delete", action="store_true", help="delete what is found")
    parser.add_argument(
        "--older-than",
        type=_read_age,
        default=DEFAULT_AGE_S,
        metavar="AGE",
        help="leave a folder alone that was written to within this time, such as 90min, 2h or 3d"
        " (24h). With 0, be sure that no save is running",
    )
    parser.add_argument(
        "--stock",
        action="store_true",
        help="also data objects of stock DCP that no metadata refer to",
    )
    add_connection_arguments(parser)


def run(args: argparse.Namespace, out: Output) -> ExitCode:
    """Find or prune; see `dcpstore.audit.prune`."""
    connection = read_connection(args, args.url, out)
    rules = Rules(older_than_s=args.older_than, include_stock=args.stock)
    with Place(connection.url, connection.storage_options, connection.config) as at:
        found = find_leftovers(at, rules)
        pruned = remove(at, found) if args.yes else Pruned(found, ())
    now = datetime.now(timezone.utc)
    out.result("dcpstore.prune/1", _document(pruned, args), _lines(pruned, args, now))
    for note in found.notes:
        out.warning(note)
    if pruned.failed:
        _, error = pruned.failed[0]
        code = exit_code_of(error)
        out.error(error, code)
        return code
    return ExitCode.OK


def _read_age(text: str) -> float:
    match = _AGE.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no age: write 90min, 2h or 3d")
    return float(match[1]) * _UNITS_S[match[2]]


def _lines(pruned: Pruned, args: argparse.Namespace, now: datetime) -> Iterator[str]:
    found = pruned.found
    failed = {one.key for one, _ in pruned.failed}
    removed = {one.key for one in pruned.removed}
    if found.removable:
        rows = [
            [
                one.kind,
                "-" if one.size_bytes is None else size_text(one.size_bytes),
                format_age(one.modified, now),
                "STILL THERE" if one.key in failed else "deleted" if one.key in removed else "",
                one.key,
            ]
            for one in found.removable
        ]
        yield from table(["kind", "size", "age", "", "key"], rows, right=[1, 2])
    for kept in found.kept:
        where = kept.folder or "the folder itself"
        yield f"kept in {where}: {count_text(len(kept.leftovers), 'leftover')}: {kept.reason}"
    if not args.yes:
        total = f"{count_text(len(found.removable), 'leftover')}, {size_text(found.num_bytes)}"
        yield f"{total}; nothing was deleted" + ("; --yes deletes them" if found.removable else "")
    else:
        yield (
            f"deleted {count_text(len(pruned.removed), 'leftover')},"
            f" {size_text(pruned.removed_bytes)}; {len(pruned.failed)} could not be deleted"
        )


def _document(pruned: Pruned, args: argparse.Namespace) -> dict[str, Any]:
    found = pruned.found
    return {
        "url": found.url,
        "dry_run": not args.yes,
        "removable": [_fields(one) for one in found.removable],
        "num_bytes": found.num_bytes,
        "kept": [
            {
                "folder": kept.folder,
                "reason": kept.reason,
                "leftovers": [_fields(one) for one in kept.leftovers],
            }
            for kept in found.kept
        ],
        "deleted": [one.key for one in pruned.removed],
        "failed": [{"key": one.key, "reason": str(why)} for one, why in pruned.failed],
        "notes": list(found.notes),
    }


def _fields(one: Leftover) -> dict[str, Any]:
    return {
        "kind": one.kind,
        "key": one.key,
        "num_bytes": one.size_bytes,
        "modified": one.modified,
    }
