"""`dcp_to_dcp`: a checkpoint from one place to another, as it is or written anew."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from dcpstore.config import WriteConfig
from dcpstore.convert.dcp.mirror import Mirror, MirrorOfOurs, MirrorOfStock, mirror
from dcpstore.convert.dcp.sink import SinkEntry, write_checkpoint
from dcpstore.convert.dcp.source import open_source
from dcpstore.convert.output import Shares, share_budget
from dcpstore.convert.selection import ConvertResult, DtypeRule, Selection, select
from dcpstore.errors import ConfigError
from dcpstore.format.manifest import Path
from dcpstore.format.metadata import planner_paths_of
from dcpstore.plan.rules import Rename
from dcpstore.ranks import RankGroup
from dcpstore.ranks.agreement import Ranks, join_ranks
from dcpstore.read.checkpoint import Checkpoint
from dcpstore.report import Meter, Phases, ProgressCallback, show_progress
from dcpstore.store.folder import Folder
from dcpstore.write.writer import ObjectStoreWriter


def dcp_to_dcp(
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

    Args:
        source: Folder of a checkpoint, by ours or by stock DCP.
        target: Folder of the copy.
        keys: Patterns of keys to copy (``fnmatch``); all if empty.
        exclude: Patterns of keys to leave out.
        rename: From the source's key to the copy's.
        dtype: As for `dcp_to_safetensors`.
        object_bytes: Target size of data objects; 256 MiB where None.
        reencode: Write anew although nothing else changes: a stock checkpoint becomes one of
            ours, with checksums.
        verify: Read each object back after a copy byte by byte. Without, their sizes are
            compared; where the provider copies, no data is read at all.
        source_options: fsspec's options for the source's protocol.
        target_options: fsspec's options for the target's protocol.
        budget_bytes: Memory for bytes on their way, per rank.
        overwrite: Replace a checkpoint that exists; it stays loadable until the copy is sealed.
            A stock checkpoint replaces another only with ``reencode``.
        process_group: The ranks that work together; None for all, or for this process alone.
        deadline_s: Most seconds that one step may take before ranks that wait give up.
        progress: A callback on every rank; True for a bar on the coordinator; None for one if
            standard error is a terminal.

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
            folder = Folder(target, target_options, WriteConfig())
            showing = show_progress("copy", progress, is_coordinator=group.is_coordinator)
            try:
                with showing as meter:
                    return _mirror(
                        group,
                        checkpoint,
                        folder,
                        _Settings(target_options, shares, overwrite, verify),
                        meter,
                    )
            finally:
                folder.close()


@dataclass(frozen=True, slots=True)
class _Settings:
    """What the caller of a copy byte by byte chose."""

    options: Mapping[str, Any] | None
    shares: Shares
    overwrite: bool
    verify: bool


def _mirror(
    group: RankGroup, checkpoint: Checkpoint, folder: Folder, settings: _Settings, meter: Meter
) -> ConvertResult:
    phases = Phases()
    how: Mirror = MirrorOfStock(checkpoint, folder.open())
    if checkpoint.discovered.manifest is not None:
        writer = ObjectStoreWriter(
            folder.url,
            storage_options=settings.options,
            overwrite=settings.overwrite,
            config=settings.shares.write_config(settings.shares.block_bytes),
        )
        how = MirrorOfOurs(checkpoint, writer)
    with phases.phase("copy"):
        copied = mirror(
            group,
            how,
            checkpoint.store,
            folder.open(),
            shares=settings.shares,
            meter=meter,
            overwrite=settings.overwrite,
            verify=settings.verify,
        )
    tensors = checkpoint.tensors.values()
    return ConvertResult(
        source=checkpoint.url,
        target=folder.url,
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
