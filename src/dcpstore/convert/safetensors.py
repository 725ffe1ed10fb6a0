"""`dcp_to_safetensors` and `safetensors_to_dcp`.

DCP to safetensors, on all ranks:

1. (coordinator) read the source's metadata; all ranks plan the same files from it. The rule is
   Hugging Face's: tensors in their order, a new file where the next tensor would make the file
   larger than the limit, a tensor larger than that in a file of its own
2. (coordinator) look whether files are in the way
3. (all ranks) write a share of the files each, every file once, front to back
4. (coordinator) put the index, which makes several files a checkpoint

File names are fixed by convention, so a folder cannot hold the old and the new checkpoint side by
side as ours do. But it never holds a mix of two under an index. What a reader meets while one
replaces the other:

=====================  =============================================================
new: one file          the old checkpoint, then, by one put, the new one
new: several files     the old one; from the removal of its index on, none that
                       readers find; from the put of the new index on, the new one
=====================  =============================================================

Safetensors to DCP is a save (see `dcpstore.saving`) whose tensors are read when their turn comes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from math import prod
from typing import Literal

import torch
from torch.distributed.checkpoint.metadata import TensorProperties
from typing_extensions import Unpack

from dcpstore.config import ReadConfig, WriteConfig
from dcpstore.convert.dcp.sink import SinkEntry, casts_of, write_checkpoint
from dcpstore.convert.dcp.source import Block, Content, open_source, plan_blocks, read_blocks
from dcpstore.convert.options import Conversion, ConversionOptions
from dcpstore.convert.output import (
    Outputs,
    fetched_by_all,
    is_surely_unpublished,
    put_file,
)
from dcpstore.convert.selection import ConvertResult, Selection
from dcpstore.errors import (
    AlreadyExistsError,
    ConfigError,
    CorruptError,
    IncompatibleError,
    NotFoundError,
)
from dcpstore.format.dtypes import dtype_name
from dcpstore.format.safetensors import FileHeader, FileLayout, file_dtype, plan_file
from dcpstore.ranks import RankGroup, steps
from dcpstore.read.checkpoint import Checkpoint
from dcpstore.read.discovery import Discovered
from dcpstore.read.safetensors import (
    INDEX_FILE,
    find_files,
    flaws_of_index,
    read_header,
    read_headers,
    read_index,
)
from dcpstore.report import Meter, Phases
from dcpstore.store.base import Store
from dcpstore.store.folder import Folder, file_location
from dcpstore.write.commit import Proof, sweep
from dcpstore.write.upload import ObjectStream

SINGLE_FILE = "model.safetensors"
"""The key of the file where there is but one."""


@dataclass(frozen=True, slots=True)
class FilePlan:
    """One file.

    Attributes:
        key: Its name in the folder.
        layout: Its header, and where each tensor lies.
        tensors: By name.
    """

    key: str
    layout: FileLayout
    tensors: Mapping[str, SinkEntry]


@dataclass(frozen=True, slots=True)
class FolderPlan:
    """A Hugging Face folder.

    Attributes:
        files: In the order of their numbers.
        index: Content of the index; None for a single file.
    """

    files: tuple[FilePlan, ...]
    index: bytes | None = None

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of all files, the index included."""
        return (*(file.key for file in self.files), *([INDEX_FILE] if self.index else []))


def check_formats(tensors: Iterable[SinkEntry]) -> None:
    """Check that the format can hold every tensor.

    Raises:
        IncompatibleError: Naming the keys that it cannot, and what to do.
    """
    refused = [t for t in tensors if not _fits(t)]
    if refused:
        shown = ", ".join(f"{t.fqn!r} ({dtype_name(t.dtype)})" for t in refused[:5])
        more = f" and {len(refused) - 5} more" if len(refused) > 5 else ""
        raise IncompatibleError(
            f"safetensors files cannot hold {shown}{more}. Leave them out with exclude=[...], or"
            " convert them with dtype=: torch.complex64 for complex numbers, or a dtype per"
            " pattern of keys. Nothing was written"
        )


def _fits(tensor: SinkEntry) -> bool:
    is_pair = tensor.dtype == getattr(torch, "float4_e2m1fn_x2", None)
    return file_dtype(dtype_name(tensor.dtype)) is not None and not (is_pair and not tensor.sizes)


def plan_folder(
    tensors: Sequence[SinkEntry], max_shard_bytes: int, about: Mapping[str, str]
) -> FolderPlan:
    """Plan the files of a folder.

    Args:
        tensors: In the order of the state dict.
        max_shard_bytes: Most bytes of tensors in one file, unless one tensor is larger.
        about: Texts for the ``__metadata__`` of each file.

    Raises:
        ConfigError: If a file's header would be longer than readers take, or the limit is none.
    """
    if max_shard_bytes < 1:
        raise ConfigError(f"max_shard_bytes={max_shard_bytes} must be at least 1")
    bins = _fill(tensors, max_shard_bytes)
    count = len(bins)
    names = [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
    if count == 1:
        names = [SINGLE_FILE]
    files = tuple(_plan_file(*one, about) for one in zip(names, bins, strict=True))
    if count == 1:
        return FolderPlan(files)
    weight_map = {name: file.key for file in files for name in file.tensors}
    total = sum(tensor.num_bytes for tensor in tensors)
    index = {
        "metadata": {"total_size": total},
        "weight_map": {tensor.name: weight_map[tensor.name] for tensor in tensors},
    }
    return FolderPlan(files, json.dumps(index, indent=2, ensure_ascii=False).encode() + b"\n")


def _fill(tensors: Sequence[SinkEntry], max_bytes: int) -> list[list[SinkEntry]]:
    """Fill files in order; a tensor larger than a file does not end the one before it."""
    bins: list[list[SinkEntry]] = []
    current: list[SinkEntry] = []
    held_bytes = 0
    for tensor in tensors:
        if tensor.num_bytes > max_bytes:
            bins.append([tensor])
            continue
        if current and held_bytes + tensor.num_bytes > max_bytes:
            bins.append(current)
            current, held_bytes = [], 0
        current.append(tensor)
        held_bytes += tensor.num_bytes
    if current or not bins:
        bins.append(current)
    return bins


def _plan_file(key: str, tensors: Sequence[SinkEntry], about: Mapping[str, str]) -> FilePlan:
    try:
        layout = plan_file({t.name: (dtype_name(t.dtype), t.sizes) for t in tensors}, about)
    except ValueError as error:
        raise ConfigError(f"{key}: {error}. Lower max_shard_bytes") from error
    return FilePlan(key, layout, {tensor.name: tensor for tensor in tensors})


def share_files(files: Sequence[FilePlan], num_ranks: int) -> list[list[FilePlan]]:
    """Deal files out to ranks: the largest first, to the rank with the fewest bytes so far."""
    shares: list[list[FilePlan]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for file in sorted(files, key=lambda one: (-one.layout.size_bytes, one.key)):
        rank = loads.index(min(loads))
        shares[rank].append(file)
        loads[rank] += file.layout.size_bytes
    return shares


@dataclass(frozen=True, slots=True)
class Choice:
    """What is to be written.

    Attributes:
        tensors: In the order of the source.
        aliases: Key of the source that is not written, and the key that it equals.
        about: Texts for each file's ``__metadata__``.
        skipped: Key of the source, and why it is left out.
        cast: Key of the source, and the names of its old and its new dtype.
    """

    tensors: tuple[SinkEntry, ...]
    aliases: Mapping[str, str] = field(default_factory=dict)
    about: Mapping[str, str] = field(default_factory=dict)
    skipped: Mapping[str, str] = field(default_factory=dict)
    cast: Mapping[str, tuple[str, str]] = field(default_factory=dict)


def choose_tensors(
    checkpoint: Checkpoint,
    selection: Selection,
    tied: Mapping[str, str],
    values: Literal["skip", "error"],
) -> Choice:
    """Choose what is written. Pure; the same on all ranks.

    Raises:
        ConfigError: If the selection or ``tied`` does not fit the checkpoint.
        IncompatibleError: If the format cannot hold something of it.
        CorruptError: If the checkpoint does not hold all of a tensor.
    """
    names = selection.names(checkpoint.keys)
    entries = checkpoint.tensors
    others = [fqn for fqn in names if fqn not in entries]
    if others and values == "error":
        raise IncompatibleError(
            f"{len(others)} chosen keys hold values, not tensors, such as {others[0]!r}:"
            " safetensors files cannot hold them. Leave them out with exclude=[...] or"
            " values='skip'"
        )
    tensors = [
        _out_tensor(checkpoint, fqn, names[fqn], selection) for fqn in names if fqn in entries
    ]
    if not tensors:
        raise ConfigError(
            f"nothing to convert: {checkpoint.url} has no tensor among the chosen keys"
        )
    checkpoint.require_whole(one.fqn for one in tensors)
    aliases = _find_aliases(checkpoint, tensors, tied)
    kept = tuple(one for one in tensors if one.fqn not in aliases)
    check_formats(kept)
    skipped = dict.fromkeys(others, "not a tensor")
    skipped.update((fqn, f"equals {other}") for fqn, other in aliases.items())
    return Choice(
        kept,
        aliases,
        {"format": "pt", **{names[fqn]: names[other] for fqn, other in aliases.items()}},
        skipped,
        casts_of(checkpoint, kept),
    )


def _out_tensor(checkpoint: Checkpoint, fqn: str, name: str, selection: Selection) -> SinkEntry:
    if checkpoint.is_opaque(fqn):
        kind = checkpoint.tensors[fqn].properties
        raise IncompatibleError(
            f"{fqn!r} is a {dtype_name(kind.dtype)} tensor that is more than its elements"
            f" ({kind.layout}): safetensors files cannot hold it. Leave it out with exclude=[...]"
        )
    entry = checkpoint.tensors[fqn]
    properties = TensorProperties(dtype=selection.dtype_of(fqn, entry.properties.dtype))
    return SinkEntry(name, fqn, (name,), properties, tuple(entry.size))


def _find_aliases(
    checkpoint: Checkpoint, tensors: list[SinkEntry], tied: Mapping[str, str]
) -> dict[str, str]:
    """Return which keys are not written, and which key each of them equals."""
    by_fqn = {one.fqn: one for one in tensors}
    for alias, kept in tied.items():
        for fqn in (alias, kept):
            if fqn not in by_fqn:
                raise ConfigError(f"tied: {fqn!r} is no tensor among the chosen keys")
        absent, whole = by_fqn[alias], by_fqn[kept]
        alike = (absent.dtype, absent.sizes) == (whole.dtype, whole.sizes)
        if kept in tied or not alike:
            raise ConfigError(
                f"tied: {alias!r} cannot stand for {kept!r}:"
                + (" that one is tied itself" if kept in tied else " shape or dtype differ")
            )
    aliases = dict(tied)
    first: dict[object, str] = {}
    for tensor in tensors:
        place = _place(checkpoint, tensor)
        if tensor.fqn not in aliases and place is not None:
            other = first.setdefault(place, tensor.fqn)
            if other != tensor.fqn:
                aliases[tensor.fqn] = other
    return aliases


def _place(checkpoint: Checkpoint, tensor: SinkEntry) -> object | None:
    """Return what is the same for two keys that share the same stored bytes; None if empty."""
    items = checkpoint.items_of(tensor.fqn)
    if not tensor.num_bytes:
        return None
    return (tensor.dtype, tensor.sizes, tuple((item.key, item.record) for item in items))


def compare_tied(
    checkpoint: Checkpoint,
    aliases: Mapping[str, str],
    dtypes: Mapping[str, torch.dtype],
    block_bytes: int,
) -> None:
    """Read tied tensors and compare them, bit by bit. One rank.

    Args:
        checkpoint: The source.
        aliases: As in `Choice`.
        dtypes: What each kept tensor is converted to.
        block_bytes: Memory for blocks; see `read_blocks`.

    Raises:
        IncompatibleError: Naming the first pair that differs.
    """
    for alias, kept in aliases.items():
        pairs = _pairs(checkpoint, alias, kept, dtypes[kept], block_bytes // 2)
        with read_blocks(checkpoint, pairs, block_bytes) as contents:
            are_tied = all(_next_is_equal(content, contents) for _, content in contents)
        if not are_tied:
            raise IncompatibleError(
                f"{alias!r} and {kept!r} are not tied in {checkpoint.url}: their values differ."
                " Nothing was written"
            )


def _pairs(
    checkpoint: Checkpoint, alias: str, kept: str, dtype: torch.dtype, block_bytes: int
) -> Iterator[Block]:
    one = plan_blocks(checkpoint, alias, dtype, block_bytes)
    other = plan_blocks(checkpoint, kept, dtype, block_bytes)
    if [(b.offsets, b.sizes) for b in one] != [(b.offsets, b.sizes) for b in other]:
        sizes = tuple(checkpoint.tensors[kept].size)
        num_bytes = prod(sizes) * dtype.itemsize
        whole = Block(kept, "box", (0,) * len(sizes), sizes, dtype, num_bytes)
        one, other = [replace(whole, fqn=alias)], [whole]
    for pair in zip(one, other, strict=True):
        yield from pair


def _next_is_equal(content: Content, contents: Iterator[tuple[Block, Content]]) -> bool:
    assert isinstance(content, torch.Tensor)
    one = content.clone()  # its memory is the next's
    _, other = next(contents)
    assert isinstance(other, torch.Tensor)
    return torch.equal(_bytes(one), _bytes(other))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


_MAX_LOOKS = 16


def prepare_folder(store: Store, plan: FolderPlan, *, overwrite: bool) -> list[str]:
    """Make ready to write the files. Coordinator only.

    Returns:
        The files of the checkpoint that is being replaced, as far as its index names them.

    Raises:
        AlreadyExistsError: If a file is in the way, or another Hugging Face checkpoint lies
            there, and they may not be replaced. Nothing was changed.
    """
    looked_for = sorted({*plan.keys, INDEX_FILE, SINGLE_FILE})
    present = _present(store, looked_for)
    if present and not overwrite:
        raise AlreadyExistsError(
            f"{store.url} already holds {present[0]}"
            + (f" and {len(present) - 1} more files of that kind" if len(present) > 1 else "")
            + ". Convert to another folder, or pass overwrite=True to replace what is there."
            " Nothing was written"
        )
    replaced = _files_of_index(store) if INDEX_FILE in present else []
    if SINGLE_FILE in present:
        replaced.append(SINGLE_FILE)
    if plan.index is not None and INDEX_FILE in present:
        store.delete_many([INDEX_FILE])
    return replaced


def finish_folder(
    store: Store, plan: FolderPlan, replaced: Sequence[str], *, overwrite: bool
) -> None:
    """Make the new files the checkpoint, and remove those of the old. Coordinator only."""
    stale = [key for key in replaced if key not in plan.keys]
    if plan.index is None:
        if replaced:
            sweep(store, [INDEX_FILE], Proof.REPLACED, why="the replaced checkpoint")
    else:
        if SINGLE_FILE in stale:
            store.delete_many([SINGLE_FILE])  # Hugging Face's loaders would prefer it
        put_file(store, INDEX_FILE, plan.index, overwrite=overwrite)
    sweep(store, stale, Proof.REPLACED, why="the replaced checkpoint")


def _present(store: Store, keys: Sequence[str]) -> list[str]:
    def is_there(key: str) -> bool:
        try:
            store.head(key)
        except NotFoundError:
            return False
        return True

    with ThreadPoolExecutor(_MAX_LOOKS, "dcpstore-look") as executor:
        found = executor.map(is_there, keys)
        return [key for key, there in zip(keys, found, strict=True) if there]


def _files_of_index(store: Store) -> list[str]:
    """Return the files in the folder that its index names; none if it is damaged."""
    with suppress(CorruptError):
        names = set((read_index(store) or {}).values())
        return sorted(name for name in names if name.endswith(".safetensors") and "/" not in name)
    return []


_STEP_PUBLISH = "write the index"


@dataclass(slots=True)
class FilesJob:
    """One rank's way through a conversion to safetensors.

    Args:
        group: The ranks.
        conversion: The options.
        checkpoint: The source, open on every rank.
        folder: The target.
        meter: Counts the bytes handed to the store.
    """

    _group: RankGroup
    _conversion: Conversion
    _checkpoint: Checkpoint
    _folder: Folder
    _meter: Meter
    _phases: Phases = field(default_factory=Phases)
    _written: Mapping[str, int] = field(default_factory=dict)

    def run(
        self, max_shard_bytes: int, tied: Mapping[str, str], values: Literal["skip", "error"]
    ) -> ConvertResult:
        """Convert. All ranks; arguments and errors as for `dcp_to_safetensors`."""
        with self._phases.phase("plan"):
            choice, plan = self._plan(max_shard_bytes, tied, values)
            store = self._folder.open()
            replaced = steps.broadcast(
                self._group,
                "look at the target",
                lambda: prepare_folder(store, plan, overwrite=self._conversion.overwrite),
            )
        with self._phases.phase("write"):
            try:
                self._write(store, plan, replaced)
            except BaseException as error:
                if not self._conversion.overwrite and is_surely_unpublished(
                    error, self._group, _STEP_PUBLISH
                ):
                    sweep(store, self._written, Proof.NOT_BEGUN, why="this failed conversion")
                raise
        return self._result(choice, plan)

    def _plan(
        self, max_shard_bytes: int, tied: Mapping[str, str], values: Literal["skip", "error"]
    ) -> tuple[Choice, FolderPlan]:
        """Plan the files; the same on all ranks."""

        def plan() -> tuple[Choice, FolderPlan]:
            choice = choose_tensors(self._checkpoint, self._conversion.selection, tied, values)
            return choice, plan_folder(choice.tensors, max_shard_bytes, choice.about)

        choice, folder_plan = steps.each(self._group, "plan the files", plan)
        dtypes = {tensor.fqn: tensor.dtype for tensor in choice.tensors}
        named = {alias: kept for alias, kept in choice.aliases.items() if alias in tied}
        steps.broadcast(
            self._group,
            "compare tied tensors",
            lambda: compare_tied(
                self._checkpoint, named, dtypes, self._conversion.shares.block_bytes
            ),
        )
        return choice, folder_plan

    def _write(self, store: Store, plan: FolderPlan, replaced: Sequence[str]) -> None:
        own = share_files(plan.files, self._group.size)[self._group.rank]
        steps.each(self._group, "write the files", lambda: self._write_files(store, own))
        steps.broadcast(
            self._group,
            _STEP_PUBLISH,
            lambda: finish_folder(store, plan, replaced, overwrite=self._conversion.overwrite),
        )

    def _write_files(self, store: Store, files: Sequence[FilePlan]) -> None:
        if not files:
            return
        self._meter.expect(sum(file.layout.size_bytes for file in files))
        outputs = Outputs(
            store,
            budget_bytes=self._conversion.shares.output_bytes,
            largest_bytes=max(file.layout.size_bytes for file in files),
            overwrite=self._conversion.overwrite,
            meter=self._meter,
        )
        with outputs:
            for file in files:
                with outputs.write(file.key) as stream:
                    self._fill(stream, file)
        self._written = outputs.objects

    def _fill(self, stream: ObjectStream, file: FilePlan) -> None:
        stream.write(file.layout.header)
        blocks = self._blocks(file)
        with read_blocks(self._checkpoint, blocks, self._conversion.shares.block_bytes) as contents:
            for _, content in contents:
                assert isinstance(content, torch.Tensor)
                stream.write_tensor(content)
        if stream.tell() != file.layout.size_bytes:
            raise CorruptError(
                f"{file.key}: {stream.tell()} bytes were read for a file of"
                f" {file.layout.size_bytes}",
                key=file.key,
            )

    def _blocks(self, file: FilePlan) -> Iterator[Block]:
        for placed in file.layout.tensors:
            tensor = file.tensors[placed.fqn]
            yield from plan_blocks(
                self._checkpoint, tensor.fqn, tensor.dtype, self._conversion.shares.block_bytes
            )

    def _result(self, choice: Choice, plan: FolderPlan) -> ConvertResult:
        fetched_bytes = fetched_by_all(self._group, self._checkpoint.stats.fetched_bytes)
        objects = {file.key: file.layout.size_bytes for file in plan.files}
        if plan.index is not None:
            objects[INDEX_FILE] = len(plan.index)
        return ConvertResult(
            source=self._checkpoint.url,
            target=self._folder.url,
            num_tensors=len(choice.tensors),
            tensor_bytes=sum(tensor.num_bytes for tensor in choice.tensors),
            objects=objects,
            skipped=choice.skipped,
            cast=choice.cast,
            fetched_bytes=fetched_bytes,
            seconds=dict(self._phases.seconds),
        )


def dcp_to_safetensors(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    max_shard_bytes: int = 5 * 10**9,
    tied: Mapping[str, str] | None = None,
    values: Literal["skip", "error"] = "skip",
    **options: Unpack[ConversionOptions],
) -> ConvertResult:
    """Turn a checkpoint into a folder of safetensors files, as Hugging Face lays it out.

    ```python
    dcp_to_safetensors("s3://run/step-100", "gs://hub/my-model", keys=["model.*"],
                       rename={"model.": ""}, dtype=torch.bfloat16)
    ```

    Writes ``model.safetensors``, or ``model-00001-of-0000N.safetensors`` and so on with a
    ``model.safetensors.index.json``. Tensors are assembled by ranges, in blocks of rows; each
    file is written once, in order, without local disk. All ranks of the group may call it
    together; each writes a share of the files. Nothing is found under a final name before it
    is whole, and the index comes last; a failure removes the files that were written. Replacing
    a checkpoint of several files, there is none for readers until the new index is put.

    Arguments that are not listed are those of every converter: see `dcpstore.convert`.

    Args:
        source: Folder of a checkpoint, by ours or by stock DCP.
        target: Folder for the files.
        max_shard_bytes: Most bytes of tensors per file, unless one tensor is larger.
        tied: Keys that are not written, as they equal another one, which is: ``{"lm_head.weight":
            "model.embed.weight"}``. They are compared, and noted in each file's metadata as the
            safetensors package does. Keys that share the very same stored bytes are tied
            without being named.
        values: What to do with values that are not tensors, which the format cannot hold:
            leave them out and say so in the result, or raise.
        overwrite: Replace files that exist, and a Hugging Face checkpoint that lies there.

    Raises:
        NotFoundError: If there is no checkpoint at ``source``.
        AlreadyExistsError: If ``target`` holds such files and ``overwrite`` is False.
        IncompatibleError: If a tensor has a dtype that the format does not know, if tied keys
            differ, or if there are values and ``values="error"``. Nothing was written.
        ConfigError: If the arguments do not fit together or match no key.
        RankFailures: On every rank of several, if any failed.
    """
    conversion = Conversion(source, target, **options)
    if values not in ("skip", "error"):
        raise ConfigError(f"values={values!r} must be 'skip' or 'error'")
    with (
        conversion.join() as group,
        conversion.show_progress(group) as meter,
        closing(Folder(target, conversion.target_options, WriteConfig())) as folder,
        open_source(group, conversion) as checkpoint,
    ):
        job = FilesJob(group, conversion, checkpoint, folder, meter)
        return job.run(max_shard_bytes, dict(tied or {}), values)


def safetensors_to_dcp(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    object_bytes: int = 256 << 20,
    **options: Unpack[ConversionOptions],
) -> ConvertResult:
    """Turn safetensors files into a checkpoint that DCP and ours load into any layout.

    ```python
    safetensors_to_dcp("s3://hub/my-model", "s3://run/start", rename=lambda key: f"model.{key}")
    ```

    Files are read by ranges and need no local disk. A tensor larger than a block is stored in
    several chunks. The checkpoint exists when it is sealed, as after `dcpstore.save`; an
    interrupted conversion leaves none. All ranks of the group may call it together; each
    converts a share of the bytes. The format has no checksums, so what was damaged in the files
    before stays damaged; the new checkpoint has them.

    Arguments that are not listed are those of every converter: see `dcpstore.convert`.

    Args:
        source: One file whose name ends with ``.safetensors``, or a folder: with an index,
            with a ``model.safetensors``, or with any such files (shards by DCP's Hugging Face
            writer are joined).
        target: Folder of the new checkpoint.
        object_bytes: Target size of data objects.

    Returns:
        What was done. Names that the files declare to equal another (tied tensors that were
        stored once) are keys of the checkpoint again.

    Raises:
        NotFoundError: If there are no such files.
        CorruptError: If a header or the index is not what the format allows: tensors that
            overlap or lie outside the file, an impossible length, an unknown dtype.
        AlreadyExistsError: If ``target`` holds a checkpoint and ``overwrite`` is False.
        RankFailures: On every rank of several, if any failed.
    """
    conversion = Conversion(source, target, **options)
    with conversion.join() as group:
        is_file = os.fspath(source).endswith(".safetensors")
        folder, key = file_location(source) if is_file else (source, None)
        found_aliases: dict[str, str] = {}

        def find(store: Store, config: ReadConfig) -> Discovered:
            headers = _read_files(store, config, key)
            found_aliases.update(_aliases(headers))
            files = {name: header.tensors for name, header in headers.items()}
            return Discovered(store.url, next(iter(files)), files=files)

        with open_source(group, replace(conversion, source=folder), find) as checkpoint:
            aliases = steps.broadcast(group, "read aliases", lambda: found_aliases)
            return write_checkpoint(
                group,
                conversion,
                checkpoint,
                _entries(checkpoint, conversion.selection, aliases),
                object_bytes=object_bytes,
            )


def _read_files(store: Store, config: ReadConfig, key: str | None) -> Mapping[str, FileHeader]:
    """Read and check the header of one file, or all of a folder; a HEAD and two GETs per file.

    Raises:
        NotFoundError: If there is no such file.
        CorruptError: If a header or the index is not what the format allows, or a file is
            missing that the index or the names of the others promise.
    """
    if key is not None:
        return {key: read_header(store, key, store.head(key).size_bytes)}
    files = find_files(store)
    if not files.keys:
        raise NotFoundError(
            f"{store.url} holds no {INDEX_FILE} and no *.safetensors; name the folder of the files"
            " or one file that ends with .safetensors"
        )
    headers = read_headers(store, files, config, check_sizes=True)
    tensors = {name: header.tensors for name, header in headers.items()}
    for flaw in flaws_of_index(files.weight_map, tensors):
        if flaw.kind == "missing":
            raise flaw.as_error()
    owner: dict[tuple[str, tuple[int, ...]], str] = {}
    for name, found in tensors.items():
        for one in found:
            other = owner.setdefault((one.fqn, one.offsets), name)
            if other != name:  # shards of one tensor differ in their offsets
                raise CorruptError(
                    f"{store.url}: {one.fqn!r} is both in {other} and in {name}",
                    key=name,
                    fqn=one.fqn,
                )
    return headers


def _aliases(headers: Mapping[str, FileHeader]) -> dict[str, str]:
    """Return names that the files declare to equal another: tied tensors that are stored once."""
    names = {one.fqn for header in headers.values() for one in header.tensors}
    return {
        alias: kept
        for header in headers.values()
        for alias, kept in header.about.items()
        if kept in names and alias not in names
    }


def _entries(
    checkpoint: Checkpoint, selection: Selection, aliases: Mapping[str, str]
) -> list[SinkEntry]:
    """Return the keys to write; the names of a file are flat, dots included."""
    tensors = checkpoint.tensors
    entries = []
    for fqn, name in selection.names([*checkpoint.keys, *aliases]).items():
        source = aliases.get(fqn, fqn)
        saved = tensors[source]
        properties = TensorProperties(dtype=selection.dtype_of(fqn, saved.properties.dtype))
        entries.append(SinkEntry(name, source, (name,), properties, tuple(saved.size)))
    return entries
