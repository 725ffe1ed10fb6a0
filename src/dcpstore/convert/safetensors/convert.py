"""`dcp_to_safetensors` and `safetensors_to_dcp`.

DCP to safetensors, on all ranks:

1. (coordinator) read the source's metadata; all ranks plan the same files from it
2. (coordinator) look whether files are in the way
3. (all ranks) write a share of the files each, every file once, front to back
4. (coordinator) put the index, which makes several files a checkpoint

Safetensors to DCP is a save (see `dcpstore.saving`) whose tensors are read when their turn comes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any, Literal

from torch.distributed.checkpoint.metadata import TensorProperties

from dcpstore.config import ReadConfig, WriteConfig
from dcpstore.convert.dcp.sink import SinkEntry, write_checkpoint
from dcpstore.convert.dcp.source import open_source
from dcpstore.convert.output import share_budget
from dcpstore.convert.safetensors.sink import FilesJob
from dcpstore.convert.selection import ConvertResult, DtypeRule, Selection, select
from dcpstore.errors import ConfigError, CorruptError, NotFoundError
from dcpstore.format.safetensors import FileHeader
from dcpstore.plan.rules import Rename
from dcpstore.ranks import steps
from dcpstore.ranks.agreement import Ranks, join_ranks
from dcpstore.read.checkpoint import Checkpoint
from dcpstore.read.discovery import Discovered
from dcpstore.read.safetensors import (
    INDEX_FILE,
    find_files,
    flaws_of_index,
    read_header,
    read_headers,
)
from dcpstore.report import ProgressCallback, show_progress
from dcpstore.store.base import Store
from dcpstore.store.folder import Folder, file_location


def dcp_to_safetensors(  # noqa: D417 - the rest are those of every converter
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    keys: Sequence[str] = (),
    exclude: Sequence[str] = (),
    rename: Rename | None = None,
    dtype: DtypeRule = None,
    max_shard_bytes: int = 5 * 10**9,
    tied: Mapping[str, str] | None = None,
    values: Literal["skip", "error"] = "skip",
    source_options: Mapping[str, Any] | None = None,
    target_options: Mapping[str, Any] | None = None,
    budget_bytes: int = 256 << 20,
    overwrite: bool = False,
    process_group: Ranks = None,
    deadline_s: float = 24 * 3600.0,
    progress: ProgressCallback | bool | None = None,
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
    selection = select(keys, exclude, rename, dtype)
    if values not in ("skip", "error"):
        raise ConfigError(f"values={values!r} must be 'skip' or 'error'")
    shares = share_budget(budget_bytes)
    joining = join_ranks(process_group, 0, deadline_s, action="convert", url=target)
    with joining as group:
        showing = show_progress("convert", progress, is_coordinator=group.is_coordinator)
        with (
            showing as meter,
            closing(Folder(target, target_options, WriteConfig())) as folder,
            open_source(group, source, source_options, shares.read_config()) as checkpoint,
        ):
            job = FilesJob(group, checkpoint, folder, shares, meter, overwrite)
            return job.run(selection, max_shard_bytes, dict(tied or {}), values)


def safetensors_to_dcp(  # noqa: D417 - the rest are those of every converter
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    keys: Sequence[str] = (),
    exclude: Sequence[str] = (),
    rename: Rename | None = None,
    dtype: DtypeRule = None,
    object_bytes: int = 256 << 20,
    source_options: Mapping[str, Any] | None = None,
    target_options: Mapping[str, Any] | None = None,
    budget_bytes: int = 256 << 20,
    overwrite: bool = False,
    process_group: Ranks = None,
    deadline_s: float = 24 * 3600.0,
    progress: ProgressCallback | bool | None = None,
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
    selection = select(keys, exclude, rename, dtype)
    shares = share_budget(budget_bytes)
    joining = join_ranks(process_group, 0, deadline_s, action="convert", url=target)
    with joining as group:
        is_file = os.fspath(source).endswith(".safetensors")
        folder, key = file_location(source) if is_file else (source, None)
        found_aliases: dict[str, str] = {}

        def find(store: Store, config: ReadConfig) -> Discovered:
            headers = _read_files(store, config, key)
            found_aliases.update(_aliases(headers))
            files = {name: header.tensors for name, header in headers.items()}
            return Discovered(store.url, next(iter(files)), files=files)

        opening = open_source(group, folder, source_options, shares.read_config(), find)
        with opening as checkpoint:
            aliases = steps.broadcast(group, "read aliases", lambda: found_aliases)
            return write_checkpoint(
                group,
                checkpoint,
                _entries(checkpoint, selection, aliases),
                target,
                shares=shares,
                object_bytes=object_bytes,
                options=target_options,
                overwrite=overwrite,
                progress=progress,
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
