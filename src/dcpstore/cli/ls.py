"""``dcpstore ls``: the checkpoints below a URL."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict
from datetime import datetime, timezone
from typing import Any

from dcpstore.audit.listing import ListedCheckpoint, Listing, list_checkpoints
from dcpstore.cli.connection import add_connection_arguments, open_given_store, read_connection
from dcpstore.cli.output import ExitCode, Output, format_age, table
from dcpstore.text import count_text, size_text

DESCRIPTION = """\
List the checkpoints below a URL, and what interrupted saves left there, in the natural order
of their names. Sends one LIST and opens no object. A checkpoint without a seal cannot be
loaded; `dcpstore prune` removes it."""

EXAMPLES = """\
dcpstore ls s3://bucket/run
dcpstore ls /data/run --json | jq -r '.checkpoints[] | select(.sealed) | .url' | tail -1
dcpstore ls gs://public-bucket/run --anon
dcpstore ls s3://bucket/run --endpoint-url http://localhost:9000 --profile minio"""

_SEALED = {True: "yes", False: "no", None: "-"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("url", metavar="RUN_URL", help="URL or local folder")
    add_connection_arguments(parser)


def run(args: argparse.Namespace, out: Output) -> ExitCode:
    """List; see `dcpstore.audit.listing.list_checkpoints`."""
    with open_given_store(read_connection(args, args.url, out)) as store:
        listing = list_checkpoints(store)
    now = datetime.now(timezone.utc)
    out.result("dcpstore.ls/1", _document(listing, now), _lines(listing, now))
    others = listing.num_other_objects
    num_unsealed = sum(one.sealed is False for one in listing.checkpoints)
    out.note(
        f"{count_text(len(listing.checkpoints), 'checkpoint')} at {listing.url},"
        f" {num_unsealed} not sealed"
        + (f"; {count_text(others, 'other object')}" if others else "")
    )
    return ExitCode.OK


def _document(listing: Listing, now: datetime) -> dict[str, Any]:
    return {**asdict(listing), "checkpoints": [_fields(one, now) for one in listing.checkpoints]}


def _fields(one: ListedCheckpoint, now: datetime) -> dict[str, Any]:
    age_s = None if one.modified is None else round((now - one.modified).total_seconds())
    return {**asdict(one), "age_s": age_s}


def _lines(listing: Listing, now: datetime) -> Iterator[str]:
    return table(
        ("CHECKPOINT", "LAYOUT", "SEALED", "SIZE", "OBJECTS", "AGE", ""),
        (
            (
                one.name or ".",
                one.layout,
                _SEALED[one.sealed],
                "?" if one.num_bytes is None else size_text(one.num_bytes),
                "?" if one.num_objects is None else str(one.num_objects),
                format_age(one.modified, now),
                one.remark,
            )
            for one in listing.checkpoints
        ),
        right=(3, 4, 5),
    )
