"""`dcp_to_dcp`: a checkpoint from one place to another, as it is or written anew."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from math import prod
from typing import Any

from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from dcpstore.config import WriteConfig
from dcpstore.convert.dcp.mirror import Mirror, MirrorOfOurs, MirrorOfStock, Transfer, mirror
from dcpstore.convert.dcp.sink import SinkEntry, write_checkpoint
from dcpstore.convert.dcp.source import open_source
from dcpstore.convert.output import share_budget
from dcpstore.convert.selection import ConvertResult, DtypeRule, Selection, select
from dcpstore.errors import ConfigError
from dcpstore.format.manifest import Path
from dcpstore.format.metadata import planner_paths_of
from dcpstore.plan.rules import Rename
from dcpstore.ranks import RankGroup
from dcpstore.ranks.agreement import Ranks, join_ranks
from dcpstore.read.checkpoint import Checkpoint
from dcpstore.report import Phases, ProgressCallback, show_progress
from dcpstore.store.folder import Folder
from dcpstore.write.writer import ObjectStoreWriter


def dcp_to_dcp(  # noqa: D417 - the rest are those of every converter
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    keys: Sequence[str] = (),
    exclude: Sequence[str] = (),
    rename: Rename | None = None,
    dtype: DtypeRule = None,
    object_bytes: int | None = None,
    reencode: bool = False,
    verify: bool = True,
    source_options: Mapping[str, Any] | None = None,
    target_options: Mapping[str, Any] | None = None,
    budget_bytes: int = 256 << 20,
    overwrite: bool = False,
    process_group: Ranks = None,
    deadline_s: float = 24 * 3600.0,
    progress: ProgressCallback | bool | None = None,
) -> ConvertResult:
    """Copy a checkpoint to another folder, bucket or provider; change it on the way if asked to.

    ```python
    dcp_to_dcp("s3://run/step-100", "gs://archive/step-100")
    dcp_to_dcp("s3://run/step-100", "s3://run/weights", keys=["model.*"], dtype=torch.bfloat16)
    ```

    With nothing to change, data objects are copied byte by byte, by the provider alone where both
    URLs are S3's or Google's and have equal options, else through this process. Those of a
    checkpoint of ours get fresh names, and the copy is sealed as after `dcpstore.save`; a
    checkpoint by a stock writer keeps every name, and its ``.metadata`` is put last. Each copy is
    read back: blocks are compared with their checksums, bytes that have none with the source's.
    With any of ``keys``, ``exclude``, ``rename``, ``dtype``, ``object_bytes`` or ``reencode`` the
    checkpoint is written anew, in our own form, whoever wrote it. An interrupted copy leaves no
    checkpoint. All ranks of the group may call it together; each copies a share of the bytes.

    Arguments that are not listed are those of every converter: see `dcpstore.convert`.

    Args:
        source: Folder of a checkpoint, by ours or by stock DCP.
        target: Folder of the copy.
        object_bytes: Target size of data objects; 256 MiB where None.
        reencode: Write anew although nothing else changes: a stock checkpoint becomes one of
            ours, with checksums.
        verify: Read each object back after a copy byte by byte. Without, their sizes are
            compared; where the provider copies, no data is read at all.
        overwrite: Replace a checkpoint that exists; it stays loadable until the copy is sealed.
            A stock checkpoint replaces another only with ``reencode``.

    Raises:
        NotFoundError: If there is no checkpoint at ``source``.
        AlreadyExistsError: If ``target`` holds one that may not be replaced. Nothing was written.
        CorruptError: If stored bytes are not those that were saved, or a copy reads back
            differently. Nothing was sealed.
        ConfigError: If ``source`` holds safetensors files, or the arguments match no key.
        RankFailures: On every rank of several, if any failed.
    """
    selection = select(keys, exclude, rename, dtype)
    shares = share_budget(budget_bytes)
    changes = bool(reencode or keys or exclude or rename or selection.dtypes or object_bytes)
    joining = join_ranks(process_group, 0, deadline_s, action="convert", url=target)
    with joining as group:
        opening = open_source(group, source, source_options, shares.read_config())
        with opening as checkpoint:
            if checkpoint.discovered.files is not None:
                raise ConfigError(
                    f"{checkpoint.url} holds safetensors files: use safetensors_to_dcp"
                )
            if changes:
                return write_checkpoint(
                    group,
                    checkpoint,
                    _entries(checkpoint, selection),
                    target,
                    shares=shares,
                    object_bytes=object_bytes or WriteConfig().object_bytes,
                    options=target_options,
                    overwrite=overwrite,
                    progress=progress,
                )
            showing = show_progress("copy", progress, is_coordinator=group.is_coordinator)
            with closing(Folder(target, target_options, WriteConfig())) as folder, showing as meter:
                transfer = Transfer(
                    checkpoint.store, folder.open(), shares, meter, overwrite, verify
                )
                return _mirror(group, checkpoint, folder.url, transfer, target_options)


def _mirror(
    group: RankGroup,
    checkpoint: Checkpoint,
    target: str,
    transfer: Transfer,
    options: Mapping[str, Any] | None,
) -> ConvertResult:
    """Copy byte by byte. The objects of ours get fresh names, so none replaces another."""
    phases = Phases()
    how: Mirror = MirrorOfStock(checkpoint, transfer.target)
    if checkpoint.discovered.manifest is not None:
        writer = ObjectStoreWriter(
            target,
            storage_options=options,
            overwrite=transfer.overwrite,
            config=transfer.shares.write_config(transfer.shares.block_bytes),
        )
        how = MirrorOfOurs(checkpoint, writer)
    with phases.phase("copy"):
        copied = mirror(group, how, transfer)
    tensors = checkpoint.tensors.values()
    return ConvertResult(
        source=checkpoint.url,
        target=target,
        num_tensors=len(tensors),
        num_values=len(checkpoint.keys) - len(tensors),
        tensor_bytes=sum(prod(one.size) * one.properties.dtype.itemsize for one in tensors),
        objects=copied.objects,
        fetched_bytes=copied.fetched_bytes,
        num_server_copies=len(copied.by_server),
        server_copied_bytes=sum(copied.objects[key] for key in copied.by_server),
        seconds=phases.seconds,
    )


def _entries(checkpoint: Checkpoint, selection: Selection) -> list[SinkEntry]:
    """Return the keys to write, each at its place in the nested state dict."""
    known = planner_paths_of(checkpoint.metadata.planner_data) or {}
    entries = []
    for fqn, name in selection.names(checkpoint.keys).items():
        path: Path = known.get(fqn, (fqn,)) if name == fqn else tuple(name.split("."))
        entry = checkpoint.metadata.state_dict_metadata[fqn]
        if not isinstance(entry, TensorStorageMetadata):
            entries.append(SinkEntry(name, fqn, path))
            continue
        saved = entry.properties.dtype
        dtype = saved if checkpoint.is_opaque(fqn) else selection.dtype_of(fqn, saved)
        properties = replace(entry.properties, dtype=dtype)
        entries.append(SinkEntry(name, fqn, path, properties, tuple(entry.size)))
    return entries
