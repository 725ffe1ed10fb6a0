"""``dcpstore copy``: a checkpoint from one place to another."""

from __future__ import annotations

import argparse

from dcpstore.cli.convert import add_conversion_arguments, parse_size, run_conversion
from dcpstore.cli.output import ExitCode, Output

DESCRIPTION = """\
Copy a checkpoint between folders, buckets and providers, in bounded memory. With nothing to
change its objects are copied byte by byte, by S3 or Google themselves where the same options
reach both sides, and read back; with any of --keys, --exclude, --rename, --dtype,
--object-size or --reencode it is written anew, with checksums. There is no checkpoint at
TARGET_URL before the copy is whole."""

EXAMPLES = """\
dcpstore copy s3://bucket/run/step-100 gs://archive/step-100
dcpstore copy s3://bucket/run/step-100 /data/weights --keys 'model.*' --dtype bfloat16
dcpstore copy /data/stock s3://bucket/step-0 --reencode      # gives a stock one checksums
torchrun --no-python --nproc-per-node 4 dcpstore copy s3://a/step-1 s3://b/step-1"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_conversion_arguments(parser)
    parser.add_argument("--reencode", action="store_true", help="write it anew in our own form")
    parser.add_argument("--object-size", type=parse_size, metavar="SIZE", help="of the new objects")
    parser.add_argument("--no-verify", action="store_true", help="do not read the copy back")


def run(args: argparse.Namespace, out: Output) -> ExitCode:
    """Copy; see `dcpstore.convert.dcp_to_dcp`."""
    from dcpstore.convert import dcp_to_dcp

    options = {
        "reencode": args.reencode,
        "object_bytes": args.object_size,
        "verify": not args.no_verify,
    }
    return run_conversion(dcp_to_dcp, args, out, action="copy", options=options)
