"""``dcpstore show``: what a checkpoint holds."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dcpstore.audit.describe import (
    Branch,
    Described,
    Description,
    Totals,
    build_outline,
    describe,
    describe_file,
    describe_torch_file,
    select,
    sort_entries,
    sum_up,
)
from dcpstore.cli.connection import (
    Connection,
    add_connection_arguments,
    add_key_arguments,
    open_given_store,
    read_connection,
)
from dcpstore.cli.output import ExitCode, Output, table
from dcpstore.errors import ConfigError, NotFoundError
from dcpstore.format.seal import METADATA_KEY, save_id_of
from dcpstore.text import count_text, size_text

DESCRIPTION = """\
Show the tensors and values of a checkpoint with shape, dtype, shards and bytes, and where they
lie; and what was sealed with them: attachments, step, metrics and users' metadata. Reads the
metadata and no data. URL names a checkpoint's folder (ours, stock DCP, or safetensors), one
.safetensors file, or one file of torch.save (.pt, .pth, .bin)."""

EXAMPLES = """\
dcpstore show s3://bucket/run/step-100 --tree --depth 2      # totals per prefix
dcpstore show s3://bucket/run/step-100 --keys 'model.*' --sort bytes --limit 10
dcpstore show s3://bucket/run/step-100 --keys '*.wq.weight' --shards
dcpstore show s3://bucket/run/step-100 --plot spread.html    # bytes over ranks and objects
dcpstore show model.pt --json | jq '.totals.num_bytes'"""

_MOST_TEXT = 400  # of users' metadata, for people
_TORCH_FILES = (".pt", ".pth", ".bin", ".ckpt")


@dataclass(frozen=True, slots=True)
class _Shown:
    """A checkpoint and those of its keys that were asked for."""

    description: Description
    entries: tuple[Described, ...]
    totals: Totals


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("url", metavar="URL", help="of a checkpoint or a file, or a local path")
    choice = parser.add_argument_group("which keys, in which order")
    add_key_arguments(choice)
    choice.add_argument(
        "--sort", choices=("key", "bytes", "shards", "dtype", "shape"), default="key"
    )
    choice.add_argument("--reverse", action="store_true", help="the other way around")
    choice.add_argument("--limit", type=_count, metavar="N", help="no more than the first N")
    form = parser.add_argument_group("form")
    form.add_argument("--tree", action="store_true", help="by prefix, with totals")
    form.add_argument("--depth", type=_count, metavar="N", help="levels of --tree")
    form.add_argument("--shards", action="store_true", help="where every piece lies")
    form.add_argument("--objects", action="store_true", help="what every object holds")
    form.add_argument(
        "--plot",
        type=Path,
        metavar="FILE.html",
        help="write a page that shows how bytes spread over ranks and objects",
    )
    add_connection_arguments(parser)


def run(args: argparse.Namespace, out: Output) -> ExitCode:
    """Show; see `dcpstore.audit.describe.describe`."""
    description = _describe(read_connection(args, args.url, out))
    chosen = select(description.entries, args.keys, args.exclude)
    if not chosen and (args.keys or args.exclude):
        raise NotFoundError(
            f"none of the {len(description.entries)} keys of {description.url} is chosen by"
            " --keys and --exclude (quote patterns, so that the shell leaves them alone)"
        )
    entries = sort_entries(chosen, args.sort, is_reversed=args.reverse)[: args.limit]
    shown = _Shown(description, entries, sum_up(entries))
    for remark in description.remarks:
        out.note(f"note: {remark}")
    if args.plot is not None:
        _plot(shown, args.plot)
    out.result("dcpstore.show/1", _document(shown, args), _lines(shown, args))
    if args.plot is not None:
        out.note(f"wrote {args.plot}")
    return ExitCode.OK


def _describe(connection: Connection) -> Description:
    """Describe the file that the URL's name tells of, or else the folder."""
    around, _, name = connection.url.rstrip("/").rpartition("/")
    if name == METADATA_KEY or name.endswith(".distcp") or save_id_of(name):
        raise ConfigError(
            f"{name} is one object of a checkpoint, which is a folder: write {around}"
        )
    if name.endswith(".safetensors"):
        return _describe_file(connection)
    if name.endswith(_TORCH_FILES):
        with contextlib.suppress(NotFoundError):  # a folder may have such a name, too
            return describe_torch_file(
                connection.url,
                storage_options=connection.storage_options,
                config=connection.config,
            )
    with open_given_store(connection) as store:
        return describe(store, connection.config)


def _describe_file(connection: Connection) -> Description:
    from dcpstore.store.folder import file_location

    folder, name = file_location(connection.url)
    with open_given_store(replace(connection, url=folder)) as store:
        return describe_file(store, name)


def _plot(shown: _Shown, path: Path) -> None:
    from dcpstore.audit.describe import render_plot

    page = render_plot(shown.description, shown.entries)
    half_done = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        half_done.write_text(page, encoding="utf-8")
        half_done.replace(path)
    finally:
        half_done.unlink(missing_ok=True)


# --- for people --------------------------------------------------------------------------


def _lines(shown: _Shown, args: argparse.Namespace) -> Iterator[str]:
    description = shown.description
    yield _title(description)
    yield ""
    if args.tree:
        yield from _tree_lines(build_outline(shown.entries), args.depth)
    elif args.shards:
        yield from _shard_lines(shown.entries)
    elif not args.objects:
        yield from _entry_lines(shown.entries)
    if args.objects:
        yield from _object_lines(description)
    yield ""
    if description.attachments:
        yield from _attachment_lines(description, with_places=args.shards)
        yield ""
    yield from _fact_lines(description)
    yield from _total_lines(shown)


def _title(description: Description) -> str:
    words = [description.url, description.layout]
    if description.save_id:
        words.append(f"save {description.save_id}")
    if "torch" in description.info:
        words.append(f"torch {description.info['torch']}")
    return "  ".join(words)


def _entry_lines(entries: Sequence[Described]) -> Iterator[str]:
    rows = (
        (
            entry.key,
            entry.dtype or "value",
            _shape(entry),
            str(len(entry.shards)),
            size_text(entry.num_bytes),
        )
        for entry in entries
    )
    return table(("KEY", "DTYPE", "SHAPE", "SHARDS", "BYTES"), rows, right=(3, 4))


def _shard_lines(entries: Sequence[Described]) -> Iterator[str]:
    rows = (
        (
            entry.key,
            str(list(shard.offsets)) if entry.is_tensor else "-",
            str(list(shard.sizes)) if entry.is_tensor else "-",
            "-" if shard.rank is None else str(shard.rank),
            shard.object_key,
            str(shard.start),
            str(shard.stored_bytes),
        )
        for entry in entries
        for shard in entry.shards
    )
    header = ("KEY", "OFFSETS", "SIZES", "RANK", "OBJECT", "START", "LENGTH")
    return table(header, rows, right=(3, 5, 6))


def _object_lines(description: Description) -> Iterator[str]:
    rows = (
        (
            one.key,
            "-" if one.rank is None else str(one.rank),
            str(one.num_items),
            size_text(one.stored_bytes),
            "?" if one.num_bytes is None else size_text(one.num_bytes),
        )
        for one in description.objects
    )
    return table(("OBJECT", "RANK", "ITEMS", "USED", "SIZE"), rows, right=(1, 2, 3, 4))


def _attachment_lines(description: Description, *, with_places: bool) -> Iterator[str]:
    header = ("ATTACHMENT", "RANK", "BYTES", "OBJECT", "START")
    rows = (
        (
            one.name,
            "-" if one.rank is None else str(one.rank),
            size_text(one.num_bytes),
            one.object_key,
            str(one.start),
        )
        for one in description.attachments
    )
    if with_places:
        return table(header, rows, right=(1, 2, 4))
    return table(header[:3], (row[:3] for row in rows), right=(1, 2))


def _fact_lines(description: Description) -> Iterator[str]:
    facts = description.facts
    told = {} if facts.step is None else {"step": str(facts.step)}
    if facts.run is not None:
        told["run"] = facts.run
    told |= {name: f"{value:.6g}" for name, value in facts.metrics.items()}
    if told:
        yield ", ".join(f"{name} {value}" for name, value in told.items())
    if description.user_metadata:
        text = json.dumps(description.user_metadata)
        short = text if len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT]}... (--json shows all)"
        yield f"user metadata {short}"


def _tree_lines(root: Branch, depth: int | None) -> Iterator[str]:
    rows = [("(all)", str(root.totals.num_shards), size_text(root.totals.num_bytes), "")]
    rows += _tree_rows(root, 0, depth)
    return table(("PREFIX", "SHARDS", "BYTES", ""), rows, right=(1, 2))


def _tree_rows(
    branch: Branch, level: int, depth: int | None
) -> Iterator[tuple[str, str, str, str]]:
    if depth is not None and level >= depth:
        return
    indent = "  " * level
    for one in branch.branches:
        totals = one.totals
        count = count_text(totals.num_tensors + totals.num_values, "key")
        size = size_text(totals.num_bytes)
        yield f"{indent}{one.name}.", str(totals.num_shards), size, count
        yield from _tree_rows(one, level + 1, depth)
    for entry in branch.entries:
        name = entry.key.rsplit(".", 1)[-1]
        what = f"{entry.dtype} {_shape(entry)}" if entry.is_tensor else "value"
        yield f"{indent}{name}", str(len(entry.shards)), size_text(entry.num_bytes), what


def _total_lines(shown: _Shown) -> Iterator[str]:
    totals, description = shown.totals, shown.description
    num_shown, num_keys = len(shown.entries), len(description.entries)
    of_all = "" if num_shown == num_keys else f" (shown: {num_shown} of {num_keys} keys)"
    yield (
        f"{count_text(totals.num_tensors, 'tensor')} with"
        f" {count_text(totals.num_elements, 'element')},"
        f" {count_text(totals.num_values, 'value')}: {size_text(totals.num_bytes)} in"
        f" {count_text(totals.num_shards, 'shard')}{of_all}"
    )
    if totals.num_bytes_by_dtype:
        yield ", ".join(
            f"{name} {size_text(size)}" for name, size in totals.num_bytes_by_dtype.items()
        )
    ranks = {one.rank for one in description.objects if one.rank is not None}
    by_ranks = f" by {count_text(len(ranks), 'rank')}" if ranks else ""
    stored = size_text(sum(one.stored_bytes for one in description.objects))
    yield f"{count_text(len(description.objects), 'object')}{by_ranks} with {stored}"
    if description.attachments:
        attached = size_text(sum(one.num_bytes for one in description.attachments))
        yield f"{count_text(len(description.attachments), 'attachment')} with {attached}"


def _shape(entry: Described) -> str:
    return f"[{', '.join(map(str, entry.sizes))}]" if entry.is_tensor else "-"


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


# --- for programs ------------------------------------------------------------------------


def _document(shown: _Shown, args: argparse.Namespace) -> dict[str, Any]:
    description = shown.description
    document = {
        "url": description.url,
        "layout": description.layout,
        "save_id": description.save_id,
        "info": dict(description.info),
        "remarks": list(description.remarks),
        "totals": asdict(shown.totals),
        "num_keys": len(description.entries),
        "entries": [_entry(entry, with_shards=args.shards) for entry in shown.entries],
        "objects": [asdict(one) for one in description.objects],
        "attachments": [{**asdict(one), "rank": one.rank} for one in description.attachments],
        **description.facts.as_json(),
        "user_metadata": dict(description.user_metadata),
    }
    if args.tree:
        document["tree"] = _branch(build_outline(shown.entries), args.depth)
    return document


def _entry(entry: Described, *, with_shards: bool) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "key": entry.key,
        "kind": "tensor" if entry.is_tensor else "value",
        "dtype": entry.dtype or None,
        "shape": list(entry.sizes) if entry.is_tensor else None,
        "num_shards": len(entry.shards),
        "num_bytes": entry.num_bytes,
        "stored_bytes": entry.stored_bytes,
        "in_state_dict": entry.is_in_state_dict,
    }
    if with_shards:
        fields["shards"] = [
            {
                "offsets": list(shard.offsets),
                "sizes": list(shard.sizes),
                "rank": shard.rank,
                "object": shard.object_key,
                "start": shard.start,
                "stored_bytes": shard.stored_bytes,
            }
            for shard in entry.shards
        ]
    return fields


def _branch(branch: Branch, depth: int | None) -> dict[str, Any]:
    fields: dict[str, Any] = {"prefix": branch.prefix, **asdict(branch.totals)}
    if depth is None or depth > 0:
        below = None if depth is None else depth - 1
        fields["keys"] = [entry.key for entry in branch.entries]
        fields["branches"] = [_branch(one, below) for one in branch.branches]
    return fields
