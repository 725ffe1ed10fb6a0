"""``dcpstore convert``: between checkpoints, safetensors, and files of torch.save."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from dcpstore.cli.connection import open_given_store, read_connection
from dcpstore.cli.conversion import add_conversion_arguments, parse_size, run_conversion
from dcpstore.cli.output import ExitCode, Output
from dcpstore.errors import ConfigError

if TYPE_CHECKING:
    from dcpstore.convert import ConvertResult

DESCRIPTION = """\
Convert a checkpoint to safetensors (Hugging Face's layout) or to one file of torch.save, or one
of these to a checkpoint, by ranges, in bounded memory and without local disk. Nothing stands
under its final name before it is whole. What SOURCE_URL is, is found out; what TARGET_URL is to
be is told by its name (.pt, .pth and .bin are files of torch.save), by --to, or is a checkpoint."""

EXAMPLES = """\
dcpstore convert s3://bucket/run/step-100 gs://hub/model.pt --keys 'model.*'
dcpstore convert s3://bucket/run/step-100 /data/hf --to safetensors \\
    --keys 'model.*' --rename model.= --dtype bfloat16 --shard-size 5GB
dcpstore convert /data/hf s3://bucket/run/step-0             # and back
torchrun --no-python --nproc-per-node 4 dcpstore convert s3://a/step-1 s3://b/hf --to safetensors"""

Form: TypeAlias = Literal["dcp", "safetensors", "torch"]

_TORCH_FILES = (".pt", ".pth", ".bin", ".ckpt")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_conversion_arguments(parser)
    parser.add_argument("--to", choices=("dcp", "safetensors", "torch"), help="what to make")
    parser.add_argument(
        "--shard-size",
        type=parse_size,
        metavar="SIZE",
        help="of safetensors files (5GB); of a checkpoint's objects (256MiB)",
    )
    parser.add_argument(
        "--allow-pickle",
        action="store_true",
        help="run code that a file of torch.save or a value names; only if you trust it",
    )


def run(args: argparse.Namespace, out: Output) -> ExitCode:
    """Convert; see `dcpstore.convert`."""
    found, wanted = _form_of_source(args, out), _form_of_target(args)
    convert, options = _choose(found, wanted, args)
    return run_conversion(convert, args, out, action="convert", options=options)


def _form_of_source(args: argparse.Namespace, out: Output) -> Form:
    name = args.source.rstrip("/").rsplit("/", 1)[-1]
    if name.endswith(".safetensors"):
        return "safetensors"
    if name.endswith(_TORCH_FILES[:3]):
        return "torch"
    from dcpstore.read.discovery import discover

    connection = read_connection(args, args.source, out, "source")
    with open_given_store(connection) as store:
        return "dcp" if discover(store, connection.read_config).files is None else "safetensors"


def _form_of_target(args: argparse.Namespace) -> Form:
    if args.to is not None:
        form: Form = args.to
        return form
    return "torch" if args.target.endswith(_TORCH_FILES) else "dcp"


def _choose(
    found: Form, wanted: Form, args: argparse.Namespace
) -> tuple[Callable[..., ConvertResult], dict[str, Any]]:
    """Return the converter between two forms and the options that are its own."""
    from dcpstore import convert

    sized = args.shard_size is not None
    trust = {"weights_only": not args.allow_pickle}
    if wanted == "torch" and found != "torch":
        if sized:
            raise ConfigError("--shard-size: a file of torch.save is always one file")
        return convert.dcp_to_torch_save, trust
    if args.allow_pickle and found != "torch":
        raise ConfigError("--allow-pickle: safetensors and checkpoints of tensors need none")
    if found == "torch" and wanted == "dcp":
        if sized:
            raise ConfigError("--shard-size does not apply from a file of torch.save")
        return convert.torch_save_to_dcp, trust
    if found == "safetensors" and wanted == "dcp":
        return convert.safetensors_to_dcp, {"object_bytes": args.shard_size} if sized else {}
    if found == "dcp" and wanted == "safetensors":
        return convert.dcp_to_safetensors, {"max_shard_bytes": args.shard_size} if sized else {}
    if found == "dcp":
        raise ConfigError(
            "both are checkpoints: use `dcpstore copy`, or say --to safetensors or --to torch"
        )
    raise ConfigError(
        f"there is no way from {found} to {wanted} in one step: convert to a checkpoint first"
    )
