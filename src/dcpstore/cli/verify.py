"""``dcpstore verify``: whether a checkpoint is what was saved."""

from __future__ import annotations

import argparse
from itertools import chain
from typing import TYPE_CHECKING, Any

from dcpstore.cli.connection import add_connection_arguments, read_connection
from dcpstore.cli.output import ExitCode, Output

if TYPE_CHECKING:
    from dcpstore.audit.scan import Finding
    from dcpstore.audit.verify import Verification
    from dcpstore.store.base import ObjectInfo

DESCRIPTION = """\
Compare everything in a checkpoint's folder with its metadata: sizes, and the checksum of every
block. Reads all data once and changes nothing. All findings are listed, each with its object,
key and byte range. Checkpoints of stock DCP are compared with the CRC32 in their records;
safetensors folders have no checksums, so only their structure is. Exit code 1 if anything is
wrong; leftovers of other saves are not."""

EXAMPLES = """\
dcpstore verify s3://bucket/run/step-100
dcpstore verify /data/run/step-100 --json | jq -r '.findings[] | "\\(.key) \\(.fqn)"'
dcpstore verify s3://bucket/run/step-100 --quiet && echo sound"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("url", metavar="URL", help="of the checkpoint, or a local folder")
    add_connection_arguments(parser)


def run(args: argparse.Namespace, out: Output) -> ExitCode:
    """Verify; see `dcpstore.audit.verify.verify_checkpoint`."""
    from dcpstore.audit.verify import verify_checkpoint

    connection = read_connection(args, args.url, out)
    with out.progress("verify") as progress:
        found = verify_checkpoint(
            connection.url,
            storage_options=connection.storage_options,
            config=connection.config,
            progress=progress,
        )
    lines = chain(found.summary().splitlines(), map(str, found.findings))
    out.result("dcpstore.verify/1", _document(found), lines)
    return ExitCode.OK if found.is_sound else ExitCode.FINDING


def _document(found: Verification) -> dict[str, Any]:
    return {
        "url": found.url,
        "sound": found.is_sound,
        "layout": found.layout,
        "num_keys": found.num_keys,
        "num_items": found.num_items,
        "num_attachments": found.num_attachments,
        "num_objects": found.num_objects,
        "checked_bytes": found.checked_bytes,
        "fetched_bytes": found.fetched_bytes,
        "num_requests": found.num_requests,
        "elapsed_s": round(found.elapsed_s, 3),
        "findings": [_finding(one) for one in found.findings],
        "leftovers": [_object(one) for one in found.leftovers],
        "others": [_object(one) for one in found.others],
        "notes": list(found.notes),
    }


def _finding(one: Finding) -> dict[str, Any]:
    start, end = one.span or (None, None)
    return {
        "kind": one.kind,
        "key": one.key,
        "fqn": one.fqn,
        "start": start,
        "end": end,
        "message": one.message,
    }


def _object(info: ObjectInfo) -> dict[str, Any]:
    return {"key": info.key, "num_bytes": info.size_bytes, "modified": info.modified}
