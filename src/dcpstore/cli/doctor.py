"""``dcpstore doctor``: whether a URL is fit for checkpoints."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from dcpstore.audit.doctor import DEFAULT_PROBE_BYTES, Check, Diagnosis, diagnose
from dcpstore.cli.connection import add_connection_arguments, read_connection
from dcpstore.cli.output import ExitCode, Output

DESCRIPTION = """\
Try every request that a save or a load makes, one by one: credentials, put, get, ranged get,
conditional puts (and whether the store honours them), multipart upload and abort, list, delete;
and measure latency, throughput and the difference of the clocks. Says what to fix. Touches no
checkpoint: its probes lie in a folder of their own, which it empties. Exit code 1 if anything
fails that a save or a load needs."""

EXAMPLES = """\
dcpstore doctor s3://bucket/run
dcpstore doctor s3://bucket/run --endpoint-url http://localhost:9000 --profile minio
dcpstore doctor s3://bucket/run/step-100 --read-only      # put nothing: may I load this?
dcpstore doctor gs://bucket/run --json | jq '.checks[] | select(.outcome != "ok")'"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("url", metavar="URL", help="where checkpoints lie or are to lie")
    parser.add_argument(
        "--read-only", action="store_true", help="put nothing; try what a load needs"
    )
    parser.add_argument(
        "--probe-mib",
        type=int,
        default=DEFAULT_PROBE_BYTES >> 20,
        metavar="N",
        help="size of the object sent and fetched to measure throughput, at least 10 (%(default)s)",
    )
    add_connection_arguments(parser)


def run(args: argparse.Namespace, out: Output) -> ExitCode:
    """Diagnose; see `dcpstore.audit.doctor.diagnose`."""
    connection = read_connection(args, args.url, out)

    def show(check: Check) -> None:
        for line in () if out.as_json else check.lines():
            out.line(line)

    found = diagnose(
        connection.url,
        storage_options=connection.storage_options,
        config=connection.config,
        probe_bytes=args.probe_mib << 20,
        read_only=args.read_only,
        on_check=show,
    )
    out.result("dcpstore.doctor/1", _document(found), found.summary())
    return ExitCode.OK if found.is_healthy else ExitCode.FINDING


def _document(found: Diagnosis) -> dict[str, Any]:
    return {
        "url": found.url,
        "healthy": found.is_healthy,
        "checks": [asdict(check) for check in found.checks],
        **asdict(found.measured),
        "left_behind": list(found.left_behind),
        "elapsed_s": round(found.elapsed_s, 3),
    }
