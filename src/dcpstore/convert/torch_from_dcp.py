"""`dcp_to_torch_save`: a DCP checkpoint, of whatever layout, becomes one ``torch.save`` file.

1. (coordinator) rebuild the structure with stand-ins; choose, rename and cast its leaves
2. decide what each storage of the file is made of, and pickle the structure: now the file's
   every byte but the tensors' is known
3. write the file front to back: storages stream through in blocks of rows, those ahead being
   read while some are written
4. the upload is completed: the file appears

One object is written front to back by one process: the parts of a multipart upload belong to
the process that began it, in every engine, and the bytes of other ranks would have to travel
to it. So the coordinator converts and the other ranks wait for its result.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import groupby
from math import prod
from typing import Any

import torch

from dcpstore.collectives import steps
from dcpstore.config import WriteConfig
from dcpstore.convert.dcp_blocks import Block, plan_blocks, read_blocks
from dcpstore.convert.dcp_memory import Shares, share_budget
from dcpstore.convert.output import Outputs
from dcpstore.convert.result import ConvertResult
from dcpstore.convert.selection import DtypeRule, Selection, select
from dcpstore.convert.torch_contents import Assembled, Content, Member, Rows, plan_contents
from dcpstore.convert.torch_layout import read_record, storage_bytes
from dcpstore.convert.torch_pickle import (
    PickledStructure,
    StorageViews,
    is_stand_in,
    pickle_structure,
)
from dcpstore.convert.torch_stored import StoredStructure, open_stored
from dcpstore.convert.torch_structure import Recast, rearrange
from dcpstore.convert.torch_zip import TorchZipWriter, overhead_bytes
from dcpstore.errors import ConfigError, CorruptError
from dcpstore.folder import Folder
from dcpstore.format.copying import as_bytes
from dcpstore.format.dtypes import dtype_name
from dcpstore.keys import METADATA_KEY, save_id_of
from dcpstore.planners.rules import Rename
from dcpstore.progress import Meter, ProgressCallback, show_progress
from dcpstore.protocol import Ranks, join_ranks, plain_cause_of_one
from dcpstore.reading import BoxRead, Checkpoint, open_checkpoint
from dcpstore.report import Phases
from dcpstore.store.location import file_location, parse_location

__all__ = ["dcp_to_torch_save"]


def dcp_to_torch_save(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    keys: Sequence[str] = (),
    exclude: Sequence[str] = (),
    rename: Rename | None = None,
    dtype: DtypeRule = None,
    weights_only: bool = True,
    source_options: Mapping[str, Any] | None = None,
    target_options: Mapping[str, Any] | None = None,
    budget_bytes: int = 256 << 20,
    overwrite: bool = False,
    process_group: Ranks = None,
    deadline_s: float = 24 * 3600.0,
    progress: ProgressCallback | bool | None = None,
) -> ConvertResult:
    """Turn a DCP checkpoint into one ``torch.save`` file.

    ```python
    dcp_to_torch_save("s3://run/step-100", "gs://hub/model.pt", keys=["model.*"])
    ```

    The file is laid out as torch's own writer does it: ``torch.load`` opens it with
    ``weights_only=True``, and with ``mmap=True``. Tensors are assembled by ranges, in blocks of
    rows; the file is written once, in order, without local disk, and appears when it is whole.
    All ranks of a group may call this together; the coordinator converts.

    Args:
        source: Folder of a checkpoint: ours, stock DCP's, or of safetensors files.
        target: The file: a URL, or a local path.
        keys: Patterns of flattened keys to convert (``fnmatch``); all if empty.
        exclude: Patterns of keys to leave out.
        rename: From the checkpoint's key to the file's: a map of keys and of prefixes that end
            with ``.``, or a function. Dots of a new name lead through nested dictionaries.
        dtype: Converts the tensors of its kind (floating point, complex, integer): one dtype
            for all, or one per pattern of keys.
        weights_only: Allow in the checkpoint's values what ``torch.load(weights_only=True)``
            allows. False runs whatever code they name: only for checkpoints that you trust.
        source_options: fsspec's options for the source's protocol.
        target_options: fsspec's options for the target's protocol.
        budget_bytes: Memory for tensors on their way. Values that are not tensors are held
            beside it, and, one at a time, tensors that are not stored row by row in the file:
            transposed ones, and several that share a storage without one that covers it.
        overwrite: Replace a file that exists.
        process_group: The ranks that wait together; None for all, or for this process alone.
        deadline_s: Most seconds that the ranks that wait will do so.
        progress: A callback on the coordinator; True for a bar there; None for one if standard
            error is a terminal.

    Raises:
        NotFoundError: If there is no checkpoint at ``source``.
        AlreadyExistsError: If ``target`` exists and ``overwrite`` is False.
        CorruptError: If the checkpoint is damaged, or a value names something that is not
            allowed; it was not run.
        IncompatibleError: If it holds what no such file can.
        ConfigError: If the arguments do not fit together or match no key.
        RankFailures: On every rank of several, if any failed.
    """
    selection = select(keys, exclude, rename, dtype)
    shares = share_budget(budget_bytes)
    folder_url, key = file_location(target)
    _refuse_same(source, target)
    joining = join_ranks(process_group, 0, deadline_s, action="convert", url=target)
    with joining as group, ExitStack() as stack:
        showing = show_progress("convert", progress, is_coordinator=group.is_coordinator)
        stack.enter_context(plain_cause_of_one(group))
        meter = stack.enter_context(showing)

        def convert() -> ConvertResult:
            folder = Folder(folder_url, target_options, WriteConfig())
            config = shares.read_config()
            with open_checkpoint(source, storage_options=source_options, config=config) as opened:
                try:
                    job = _ToFile(opened, folder, key, shares, meter, overwrite=overwrite)
                    return job.run(selection, weights_only=weights_only)
                finally:
                    folder.close()

        return steps.broadcast(group, "convert", convert)


def _refuse_same(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Refuse a target that is the source, or has the name of one of its objects."""
    folder, key = file_location(target)
    inside = parse_location(folder).url == parse_location(source).url
    is_part = key.endswith((METADATA_KEY, ".distcp")) or save_id_of(key) is not None
    if parse_location(target).url == parse_location(source).url or (inside and is_part):
        raise ConfigError(
            f"the target {parse_location(target).url} is the source or a part of it; write to"
            " another place"
        )


class _ToFile:
    """The coordinator's way through a conversion."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        folder: Folder,
        key: str,
        shares: Shares,
        meter: Meter,
        *,
        overwrite: bool,
    ) -> None:
        self._checkpoint = checkpoint
        self._folder = folder
        self._key = key
        self._shares = shares
        self._meter = meter
        self._overwrite = overwrite
        self._phases = Phases()
        self._records: tuple[str | None, list[memoryview]] = (None, [])
        self._archive = b""
        self._cast: dict[str, tuple[str, str]] = {}

    def run(self, selection: Selection, *, weights_only: bool) -> ConvertResult:
        with self._phases.phase("plan"):
            self._checkpoint.require_whole(filter(selection.rules.takes, self._checkpoint.keys))
            stored = open_stored(self._checkpoint, weights_only=weights_only)
            names = selection.names(list(stored.leaves.values))
            tensors, recast = self._cast_tensors(stored, names, selection)
            replaced = {fqn: tensors[fqn] for fqn in self._cast}
            structure = rearrange(
                stored.value, stored.leaves, names, replaced, selection.rules.takes
            )
            whole = _whole_storages(stored, names)
            lengths = {**stored.num_bytes, **recast.num_bytes}
            views, contents = plan_contents(tensors, whole, lengths)
            pickled = pickle_structure(structure, views)
            self._archive = stored.archive
        with self._phases.phase("write"):
            objects = self._write(pickled, views, contents)
        taken = [fqn for fqn in self._checkpoint.keys if fqn in names]
        num_tensors = sum(fqn in self._checkpoint.tensors for fqn in taken)
        return ConvertResult(
            source=self._checkpoint.url,
            target=f"{self._folder.url.rstrip('/')}/{self._key}",
            num_tensors=num_tensors,
            num_values=len(taken) - num_tensors,
            tensor_bytes=sum(prod(one.size()) * one.dtype.itemsize for one in tensors.values()),
            objects=objects,
            cast=self._cast,
            fetched_bytes=self._checkpoint.stats.fetched_bytes,
            seconds=dict(self._phases.seconds),
        )

    def _cast_tensors(
        self, stored: StoredStructure, names: Mapping[str, str], selection: Selection
    ) -> tuple[dict[str, torch.Tensor], Recast]:
        """Return the stand-in of each strided tensor that takes part, in its new dtype."""
        views = StorageViews(stored.num_bytes)
        recast = Recast(views)
        tensors: dict[str, torch.Tensor] = {}
        for fqn in names:
            value = stored.leaves.values[fqn]
            if not isinstance(value, torch.Tensor) or not is_stand_in(value, views):
                continue
            dtype = selection.dtype_of(fqn, value.dtype)
            if dtype != value.dtype:
                self._cast[fqn] = (dtype_name(value.dtype), dtype_name(dtype))
                value = recast.cast(value, dtype)
            tensors[fqn] = value
        return tensors, recast

    # --- writing ---------------------------------------------------------------------------

    def _write(
        self, pickled: PickledStructure, views: StorageViews, contents: Mapping[int, Content]
    ) -> dict[str, int]:
        sizes = {
            key: pickled.held[one].nbytes() if one in pickled.held else views.num_bytes(one)
            for key, one in pickled.storages.items()
        }
        total = sum(sizes.values()) + len(pickled.data) + overhead_bytes(len(sizes))
        self._meter.expect(total)
        outputs = Outputs(
            self._folder.open(),
            budget_bytes=self._shares.output_bytes,
            largest_bytes=total,
            overwrite=self._overwrite,
            meter=self._meter,
        )
        outputs.check_absent([self._key])
        with outputs, outputs.write(self._key) as stream:
            writer = TorchZipWriter(stream)
            writer.write_pickle(pickled.data)
            self._write_storages(writer, pickled, contents, sizes)
            writer.finish()
        return outputs.objects

    def _write_storages(
        self,
        writer: TorchZipWriter,
        pickled: PickledStructure,
        contents: Mapping[int, Content],
        sizes: Mapping[str, int],
    ) -> None:
        """Write all storages in order; neighbours that stream through are read as one stream."""
        rows = [(key, one, contents.get(one)) for key, one in pickled.storages.items()]
        for streams, run in groupby(rows, key=lambda row: isinstance(row[2], Rows)):
            if streams:
                self._stream(writer, [(key, one) for key, _, one in run], sizes)
                continue
            for key, identity, content in run:
                held = pickled.held.get(identity)
                data = self._whole(content, sizes[key]) if held is None else storage_bytes(held)
                with writer.storage(key, sizes[key]):
                    writer.write(data)

    def _stream(
        self,
        writer: TorchZipWriter,
        run: Sequence[tuple[str, Content | None]],
        sizes: Mapping[str, int],
    ) -> None:
        counts: list[int] = []

        def blocks() -> Iterator[Block]:
            for _, content in run:
                assert isinstance(content, Rows)
                planned = plan_blocks(
                    self._checkpoint, content.fqn, content.dtype, self._shares.block_bytes
                )
                counts.append(len(planned))
                yield from planned

        with read_blocks(self._checkpoint, blocks(), self._shares.block_bytes) as coming:
            for number, (key, _) in enumerate(run):
                with writer.storage(key, sizes[key]):
                    first = next(coming)  # its tensor is planned by now
                    _write_block(writer, first[1])
                    for _ in range(counts[number] - 1):
                        _write_block(writer, next(coming)[1])

    def _whole(self, content: Content | None, num_bytes: int) -> memoryview:
        """Return the bytes of a storage that does not stream through."""
        if isinstance(content, Member):
            found = self._record(content.fqn)
            if content.number >= len(found) or found[content.number].nbytes != num_bytes:
                raise CorruptError(
                    f"{self._checkpoint.url}: the record of {content.fqn!r} does not hold the"
                    " tensors that the structure says",
                    fqn=content.fqn,
                )
            return found[content.number]
        assert isinstance(content, Assembled)
        memory = torch.zeros(num_bytes, dtype=torch.uint8, device="cpu")
        self._checkpoint.read_boxes(
            [
                BoxRead(fqn, (0,) * stand_in.dim(), content.target(stand_in, memory))
                for fqn, stand_in in content.parts
            ]
        )
        return memoryview(memory.numpy())  # type: ignore[arg-type]

    def _record(self, fqn: str | None) -> list[memoryview]:
        """Return the storages of a record; the last one asked for is kept."""
        if self._records[0] != fqn or not self._records[1]:
            data = self._archive
            if fqn is not None:
                (index,) = self._indices(fqn)
                data = self._checkpoint.read_item_bytes([index])[fqn]
            self._records = (fqn, read_record(data, f"{self._checkpoint.url}: {fqn or 'archive'}"))
        return self._records[1]

    def _indices(self, fqn: str) -> list[Any]:
        return [one for one in self._checkpoint.metadata.storage_data if one.fqn == fqn]


def _whole_storages(stored: StoredStructure, names: Mapping[str, str]) -> dict[int, Member]:
    """Return the storages that are found whole in a record that takes part."""
    whole = {identity: Member(None, number) for number, identity in enumerate(stored.extra)}
    for fqn, storages in stored.members.items():
        if fqn in names:
            whole.update((one, Member(fqn, number)) for number, one in enumerate(storages))
    return whole


def _write_block(writer: TorchZipWriter, content: object) -> None:
    assert isinstance(content, torch.Tensor)
    writer.write(memoryview(as_bytes(content).numpy()))  # type: ignore[arg-type]
