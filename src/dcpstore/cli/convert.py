"""``dcpstore convert``: between checkpoints, safetensors, and files of torch.save.

``dcpstore copy`` takes its arguments, its ranks and its result from here.
"""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from dcpstore.cli.connection import (
    add_connection_arguments,
    add_key_arguments,
    open_given_store,
    read_connection,
)
from dcpstore.cli.output import ExitCode, Output
from dcpstore.errors import AlreadyExistsError, ConfigError

if TYPE_CHECKING:
    import torch

    from dcpstore.convert import ConvertResult

DESCRIPTION = """\
Convert a checkpoint to safetensors (Hugging Face's layout) or to one file of torch.save, or one
of these to a checkpoint, by ranges, in bounded memory and without local disk. Nothing stands
under its final name before it is whole. What SOURCE_URL is, is found out; what TARGET_URL is to
be is recognised by its name (.pt, .pth and .bin are files of torch.save) or said by --to; else
it is a checkpoint."""

EXAMPLES = """\
dcpstore convert s3://bucket/run/step-100 gs://hub/model.pt --keys 'model.*'
dcpstore convert s3://bucket/run/step-100 /data/hf --to safetensors \\
    --keys 'model.*' --rename model.= --dtype bfloat16 --shard-size 5GB
dcpstore convert /data/hf s3://bucket/run/step-0             # and back
torchrun --no-python --nproc-per-node 4 dcpstore convert s3://a/step-1 s3://b/hf --to safetensors"""

Form: TypeAlias = Literal["dcp", "safetensors", "torch"]

# The function of dcpstore.convert, and its option that --shard-size sets.
_CONVERTERS: dict[tuple[Form, Form], tuple[str, str | None]] = {
    ("dcp", "torch"): ("dcp_to_torch_save", None),
    ("safetensors", "torch"): ("dcp_to_torch_save", None),
    ("torch", "dcp"): ("torch_save_to_dcp", None),
    ("safetensors", "dcp"): ("safetensors_to_dcp", "object_bytes"),
    ("dcp", "safetensors"): ("dcp_to_safetensors", "max_shard_bytes"),
}
_TORCH_FILES = (".pt", ".pth", ".bin", ".ckpt")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)
_UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


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
        return "dcp" if discover(store, connection.config).files is None else "safetensors"


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

    if found == wanted == "dcp":
        raise ConfigError(
            "both are checkpoints: use `dcpstore copy`, or say --to safetensors or --to torch"
        )
    if (found, wanted) not in _CONVERTERS:
        raise ConfigError(
            f"there is no way from {found} to {wanted} in one step: convert to a checkpoint first"
        )
    name, size_option = _CONVERTERS[found, wanted]
    options: dict[str, Any] = {}
    if args.shard_size is not None:
        if size_option is None:
            raise ConfigError("--shard-size does not apply to or from a file of torch.save")
        options[size_option] = args.shard_size
    if "torch" in (found, wanted):
        options["weights_only"] = not args.allow_pickle
    elif args.allow_pickle:
        raise ConfigError("--allow-pickle: safetensors and checkpoints of tensors need none")
    return getattr(convert, name), options


# --- shared with ``dcpstore copy`` --------------------------------------------------------


def add_conversion_arguments(parser: argparse.ArgumentParser) -> None:
    """Add source and target, the choice of keys, and how to reach both sides."""
    parser.add_argument("source", metavar="SOURCE_URL", help="what is there")
    parser.add_argument("target", metavar="TARGET_URL", help="what is to be")
    parser.add_argument("--overwrite", action="store_true", help="replace what is at TARGET_URL")
    choice = parser.add_argument_group("what is converted")
    add_key_arguments(choice)
    choice.add_argument(
        "--rename",
        action="append",
        default=[],
        metavar="OLD=NEW",
        help="of a key, or of a prefix that ends with a dot ('model.=' drops it); repeatable",
    )
    choice.add_argument(
        "--dtype",
        action="append",
        default=[],
        metavar="[GLOB=]DTYPE",
        help="of the tensors of its kind, such as bfloat16; repeatable with a GLOB",
    )
    parser.add_argument(
        "--budget", type=parse_size, default=256 << 20, metavar="SIZE", help="memory (256MiB)"
    )
    add_connection_arguments(parser, "source", "target")


def parse_size(text: str) -> int:
    """Return bytes: ``256MiB`` counts in 1024s, ``5GB`` in 1000s, ``100`` in bytes."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: write 256MiB or 5GB")
    number, unit, binary = match.groups()
    num_bytes = float(number) * (1024 if binary else 1000) ** _UNITS[unit.lower()]
    if not 1 <= num_bytes < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no size of at least a byte")
    return int(num_bytes)


def run_conversion(
    convert: Callable[..., ConvertResult],
    args: argparse.Namespace,
    out: Output,
    *,
    action: str,
    options: Mapping[str, Any],
) -> ExitCode:
    """Call a converter and print what it did; under torchrun, with all ranks together.

    Args:
        convert: One of `dcpstore.convert`.
        args: Of the command.
        out: Its streams.
        action: ``"convert"`` or ``"copy"``: names the progress and the document.
        options: The converter's own options.
    """
    source = read_connection(args, args.source, out, "source")
    target = read_connection(args, args.target, out, "target")
    with _ranks_of_torchrun() as is_coordinator:
        if not is_coordinator:
            out.quiet = True
        with out.progress(action) as progress, _in_words_of_options():
            result = convert(
                source.url,
                target.url,
                keys=args.keys,
                exclude=args.exclude,
                rename=_renames(args.rename) or None,
                dtype=_dtypes(args.dtype),
                source_options=source.storage_options,
                target_options=target.storage_options,
                budget_bytes=args.budget,
                overwrite=args.overwrite,
                progress=progress,
                **options,
            )
    if is_coordinator:
        out.result(f"dcpstore.{action}/1", _document(result), str(result).splitlines())
    return ExitCode.OK


@contextmanager
def _ranks_of_torchrun() -> Iterator[bool]:
    """Join the ranks that torchrun started; yields whether this one speaks for all."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2 or "MASTER_ADDR" not in os.environ:
        yield True
        return
    import torch.distributed as dist

    dist.init_process_group("gloo")
    try:
        yield dist.get_rank() == 0
    finally:
        dist.destroy_process_group()


@contextmanager
def _in_words_of_options() -> Iterator[None]:
    """Name the option where the library names its argument."""
    try:
        yield
    except AlreadyExistsError as error:
        text = error.message.replace("pass overwrite=True", "give --overwrite")
        raise AlreadyExistsError(text) from error


def _renames(given: Sequence[str]) -> dict[str, str]:
    found = {}
    for text in given:
        old, equals, new = text.partition("=")
        if not equals or not old:
            raise ConfigError(f"--rename {text!r}: write OLD=NEW")
        found[old] = new
    return found


def _dtypes(given: Sequence[str]) -> torch.dtype | dict[str, torch.dtype] | None:
    from dcpstore.format.dtypes import dtype_from_name

    found: dict[str, torch.dtype] = {}
    for text in given:
        pattern, equals, name = text.rpartition("=")
        try:
            found[pattern if equals else "*"] = dtype_from_name(name)
        except ValueError as error:
            raise ConfigError(f"--dtype {text}: {error}") from error
    return found or None


def _document(result: ConvertResult) -> dict[str, Any]:
    seconds = {name: round(value, 3) for name, value in result.seconds.items()}
    return {**asdict(result), "stored_bytes": result.stored_bytes, "seconds": seconds}
