"""``dcpstore ls``: the checkpoints below a URL."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from typing import Any

from dcpstore.audit.listing import ListedCheckpoint, Listing, list_checkpoints
from dcpstore.cli.connection import add_connection_arguments, open_given_store, read_connection
from dcpstore.cli.output import (
    ExitCode,
    Output,
    format_age,
    format_metrics,
    metrics_document,
    table,
)
from dcpstore.manager.run import Run
from dcpstore.text import count_text, size_text

DESCRIPTION = """\
List the checkpoints below a URL, and what interrupted saves left there, in the natural order
of their names. Sends one LIST and opens no object. A checkpoint without a seal cannot be
loaded; `dcpstore prune` removes it. With --long, also the metrics and pins of a run's steps."""

EXAMPLES = """\
dcpstore ls s3://bucket/run
dcpstore ls s3://bucket/run --long           # with metrics and pins
dcpstore ls /data/run --json | jq -r '.checkpoints[] | select(.sealed) | .url' | tail -1
dcpstore ls gs://public-bucket/run --anon
dcpstore ls s3://bucket/run --endpoint-url http://localhost:9000 --profile minio"""

_SEALED = {True: "yes", False: "no", None: "-"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("url", metavar="RUN_URL", help="URL or local folder")
    parser.add_argument(
        "-l",
        "--long",
        action="store_true",
        help="also step, metrics and pins, if RUN_URL is a run: one small request per step",
    )
    add_connection_arguments(parser)


def run(args: argparse.Namespace, out: Output) -> ExitCode:
    """List; see `dcpstore.audit.listing.list_checkpoints`."""
    connection = read_connection(args, args.url, out)
    known = None
    if args.long:
        with Run(connection.url, connection.storage_options, connection.config) as at:
            listing = list_checkpoints(at.store)
            known = _Known({}, set()) if listing.was_refused else _Known.of(at)
    else:
        with open_given_store(connection) as store:
            listing = list_checkpoints(store)
    now = datetime.now(timezone.utc)
    out.result("dcpstore.ls/1", _document(listing, known, now), _lines(listing, known, now))
    others = listing.num_other_objects
    num_unsealed = sum(one.sealed is False for one in listing.checkpoints)
    out.note(
        f"{count_text(len(listing.checkpoints), 'checkpoint')} at {listing.url},"
        f" {num_unsealed} not sealed"
        + (f"; {count_text(others, 'other object')}" if others else "")
    )
    return ExitCode.OK


@dataclass(frozen=True, slots=True)
class _Known:
    """What a run knows of its steps, by folder."""

    metrics: Mapping[str, Mapping[str, float]]
    pins: Collection[str]

    @classmethod
    def of(cls, run: Run) -> _Known:
        records = run.records()
        return cls({one.folder: one.metrics for one in run.facts(records)}, run.pins(records))

    def metrics_of(self, one: ListedCheckpoint) -> Mapping[str, float]:
        return self.metrics.get(_folder_of(one), {})

    def is_pinned(self, one: ListedCheckpoint) -> bool:
        return _folder_of(one) in self.pins


def _folder_of(one: ListedCheckpoint) -> str:
    """Return the folder of a run that a checkpoint lies in; others put theirs deeper."""
    return one.name.partition("/")[0]


def _document(listing: Listing, known: _Known | None, now: datetime) -> dict[str, Any]:
    fields = [_fields(one, known, now) for one in listing.checkpoints]
    return {**asdict(listing), "checkpoints": fields}


def _fields(one: ListedCheckpoint, known: _Known | None, now: datetime) -> dict[str, Any]:
    age_s = None if one.modified is None else round((now - one.modified).total_seconds())
    fields = {**asdict(one), "age_s": age_s}
    if known is not None:
        fields["metrics"] = metrics_document(known.metrics_of(one))
        fields["pinned"] = known.is_pinned(one)
    return fields


def _lines(listing: Listing, known: _Known | None, now: datetime) -> Iterator[str]:
    def more(one: ListedCheckpoint) -> tuple[str, ...]:
        if known is None:
            return ()
        step = "-" if one.step is None else str(one.step)
        return step, format_metrics(known.metrics_of(one)), "yes" * known.is_pinned(one)

    titles = () if known is None else ("STEP", "METRICS", "PINNED")
    return table(
        ("CHECKPOINT", "LAYOUT", "SEALED", "SIZE", "OBJECTS", "AGE", *titles, ""),
        (
            (
                one.name or ".",
                one.layout,
                _SEALED[one.sealed],
                "?" if one.num_bytes is None else size_text(one.num_bytes),
                "?" if one.num_objects is None else str(one.num_objects),
                format_age(one.modified, now),
                *more(one),
                one.remark,
            )
            for one in listing.checkpoints
        ),
        right=(3, 4, 5, 6) if titles else (3, 4, 5),
    )
