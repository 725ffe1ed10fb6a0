"""`torch_save_to_dcp`: a ``torch.save`` file, in any store, becomes a DCP checkpoint.

1. (all ranks) open the file: its directory and its pickle; see that all opened the same one
2. (all ranks) choose what becomes what: pure, the same everywhere
3. a save (see `dcpstore.saving`): each rank reads a run of the file, ahead of writing it
4. (all ranks) compare the checksums of what was read whole; (coordinator) see that the file is
   still the same
5. (coordinator) seal
"""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch

from dcpstore.collectives import RankGroup, steps
from dcpstore.config import ReadConfig, WriteConfig
from dcpstore.convert.dcp_memory import Shares, share_budget
from dcpstore.convert.result import ConvertResult
from dcpstore.convert.selection import DtypeRule, Selection, select
from dcpstore.convert.torch_choice import FileChoice, OpaqueTensor, choose
from dcpstore.convert.torch_layout import LAYOUT_KEY, encode_layout, write_record
from dcpstore.convert.torch_pickle import PickledStructure
from dcpstore.convert.torch_planner import FileSavePlanner, SharingWriter, share_of
from dcpstore.convert.torch_source import ReadAhead
from dcpstore.errors import ConfigError, ConflictError
from dcpstore.planners.rules import Rename
from dcpstore.progress import Meter, Progress, ProgressCallback, show_progress
from dcpstore.protocol import Ranks, join_ranks, plain_cause_of_one
from dcpstore.report import Phases, SaveResult
from dcpstore.saving import save
from dcpstore.store.location import parse_location
from dcpstore.torch_file import TorchFile, open_torch_file

__all__ = ["torch_save_to_dcp"]

_NO_VALUE = b"\x80\x02N."  # the pickle of None, of a record that is there for its storages


def torch_save_to_dcp(
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
    """Turn a ``torch.save`` file into a DCP checkpoint.

    ```python
    torch_save_to_dcp("s3://hub/model.pt", "gs://run/step-0", rename={"state_dict.": "model."})
    ```

    The file is read by ranges, without local disk; no tensor need be held whole. All ranks
    of the group may call it together; each converts a share. Keys are those that ``dcp.save``
    would give, and stock DCP loads the checkpoint. Tensors that are the very same elements
    are stored once. `dcp_to_torch_save` restores the structure, types of containers, shared
    storages and all.

    Args:
        source: The file: a URL, or a local path. It holds a dictionary.
        target: Folder for the checkpoint.
        keys: Patterns of flattened keys to convert (``fnmatch``); all if empty.
        exclude: Patterns of keys to leave out.
        rename: From the file's key to the checkpoint's: a map of keys and of prefixes
            that end with ``.``, or a function.
        dtype: Converts the tensors of its kind (floating point, complex, integer): one dtype
            for all, or one per pattern of keys.
        weights_only: Allow in the file what ``torch.load(weights_only=True)`` allows, with
            ``torch.serialization.add_safe_globals`` honoured. False runs whatever code the
            file names: only for files that you trust.
        source_options: fsspec's options for the source's protocol.
        target_options: fsspec's options for the target's protocol.
        budget_bytes: Memory for tensors on their way, per rank. Values that are not tensors,
            with the tensors in them, are held beside it, one at a time; so are sparse tensors.
        overwrite: Replace a checkpoint that exists.
        process_group: The ranks that work together; None for all, or for this process alone.
        deadline_s: Most seconds that one step may take before ranks that wait give up.
        progress: A callback on every rank; True for a bar on the coordinator; None for one if
            standard error is a terminal.

    Raises:
        NotFoundError: If there is no such file.
        AlreadyExistsError: If ``target`` holds a checkpoint and ``overwrite`` is False.
        IncompatibleError: If it is no ``torch.save`` file of a dictionary; says what it is. Or
            if it holds what DCP cannot.
        CorruptError: If the file is damaged, or names something that is not allowed; it was
            not run.
        ConflictError: If the file was replaced meanwhile. Nothing was sealed.
        ConfigError: If the arguments do not fit together or match no key.
        RankFailures: On every rank of several, if any failed.
    """
    selection = select(keys, exclude, rename, dtype)
    shares = share_budget(budget_bytes)
    _refuse_same(source, target)
    joining = join_ranks(process_group, 0, deadline_s, action="convert", url=target)
    with joining as group, ExitStack() as stack:
        showing = show_progress("convert", progress, is_coordinator=group.is_coordinator)
        stack.enter_context(plain_cause_of_one(group))
        meter = stack.enter_context(showing)
        phases = Phases()
        with phases.phase("open"):
            file = _open(group, source, source_options, weights_only=weights_only)
            stack.enter_context(file)
        job = _ToCheckpoint(group, file, shares, meter, phases)
        return job.run(selection, target, target_options, overwrite=overwrite)


def _refuse_same(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    if parse_location(source).url == parse_location(target).url:
        raise ConfigError(f"source and target are both {parse_location(source).url}")


def _open(
    group: RankGroup,
    source: str | os.PathLike[str],
    options: Mapping[str, Any] | None,
    *,
    weights_only: bool,
) -> TorchFile:
    """Open the file on every rank. Collective."""
    opened: list[TorchFile] = []

    def open_it() -> tuple[int, str | None]:
        file = open_torch_file(source, storage_options=options, weights_only=weights_only)
        opened.append(file)
        return file.info.size_bytes, file.info.etag

    try:
        seen = steps.all_gather(group, "open the source", open_it)
        if len(set(seen)) > 1:
            raise ConflictError(
                f"{opened[0].url} was replaced while ranks opened it: they found files of"
                f" {sorted({size for size, _ in seen})} bytes. Start again"
            )
    except BaseException:
        for file in opened:
            file.close()
        raise
    return opened[0]


@dataclass(slots=True)
class _Forward:
    """Tells a meter of a conversion what a save says of its progress."""

    meter: Meter
    done_bytes: int = 0
    total_bytes: int = 0

    def __call__(self, state: Progress) -> None:
        self.meter.expect(state.total_bytes - self.total_bytes)
        self.meter.advance(state.done_bytes - self.done_bytes)
        self.done_bytes, self.total_bytes = state.done_bytes, state.total_bytes


class _ToCheckpoint:
    """One rank's way through a conversion."""

    def __init__(
        self, group: RankGroup, file: TorchFile, shares: Shares, meter: Meter, phases: Phases
    ) -> None:
        self._group = group
        self._file = file
        self._shares = shares
        self._meter = meter
        self._phases = phases

    def run(
        self,
        selection: Selection,
        target: str | os.PathLike[str],
        options: Mapping[str, Any] | None,
        *,
        overwrite: bool,
    ) -> ConvertResult:
        with self._phases.phase("plan"):
            choice = self._choose(selection)
            positions = {key: one.member.header_offset for key, one in self._file.storages.items()}
            share = share_of(
                choice.tensors,
                positions,
                rank=self._group.rank,
                num_ranks=self._group.size,
                max_item_bytes=self._shares.block_bytes,
            )
        ahead = ReadAhead(
            self._file,
            share.boxes,
            budget_bytes=self._shares.read_bytes + 2 * self._shares.block_bytes,
            request_bytes=min(ReadConfig().request_bytes, self._shares.read_bytes // 4),
        )

        def check() -> None:
            if self._group.is_coordinator:
                self._file.check_unchanged()
            ahead.check_crcs()

        writer = SharingWriter(
            target,
            aliases=choice.aliases,
            check=check,
            storage_options=options,
            overwrite=overwrite,
            config=self._shares.write_config(WriteConfig().object_bytes),
        )
        planner = FileSavePlanner(
            choice, share, ahead, self._read_opaque, lambda key: self._read_bytes(choice, key)
        )
        with ahead:
            saved = save(
                {},
                process_group=self._group,
                storage_writer=writer,
                planner=planner,
                progress=_Forward(self._meter),
            )
        return self._result(choice, saved, writer, ahead)

    def _choose(self, selection: Selection) -> FileChoice:
        chosen: list[FileChoice] = []
        steps.barrier(
            self._group,
            "choose the keys",
            lambda: chosen.append(choose(self._file, selection)),
        )
        return chosen[0]

    # --- what is no strided tensor ---------------------------------------------------------

    def _read_storage(self, identity: int) -> memoryview:
        key = self._file.identities[identity]
        data = self._file.read_storage(key)
        self._file.check_crc(key, zlib.crc32(data))
        return data

    def _read_opaque(self, one: OpaqueTensor) -> torch.Tensor:
        record = write_record(one.record, self._read_storage)
        tensor: torch.Tensor = torch.load(io.BytesIO(record), weights_only=True)
        return tensor

    def _read_bytes(self, choice: FileChoice, key: str) -> bytes:
        if key != LAYOUT_KEY:
            return write_record(choice.values[key], self._read_storage)
        archive = b""
        if choice.extra:
            storages = {str(number): one for number, one in enumerate(choice.extra)}
            record = PickledStructure(_NO_VALUE, storages, {}, (), frozenset())
            archive = write_record(record, self._read_storage)
        return encode_layout(replace(choice.layout, archive=archive))

    # --- the end ---------------------------------------------------------------------------

    def _result(
        self, choice: FileChoice, saved: SaveResult, writer: SharingWriter, ahead: ReadAhead
    ) -> ConvertResult:
        fetched = steps.all_gather(self._group, "finish", lambda: ahead.fetched_bytes)
        objects = steps.broadcast(self._group, "report", lambda: dict(writer.objects))
        places = [*choice.tensors, *choice.aliases]
        named = {**choice.tensors, **{a: choice.tensors[n] for a, n in choice.aliases.items()}}
        return ConvertResult(
            source=self._file.url,
            target=str(writer.checkpoint_id),
            num_tensors=len(places) + len(choice.opaques),
            num_values=len(choice.values),
            tensor_bytes=sum(_num_bytes(one.place.sizes, one.dtype) for one in named.values()),
            objects=objects,
            skipped=choice.skipped,
            cast=choice.cast,
            fetched_bytes=sum(fetched),
            seconds={**self._phases.seconds, **saved.seconds},
        )


def _num_bytes(sizes: Sequence[int], dtype: torch.dtype) -> int:
    return torch.Size(sizes).numel() * dtype.itemsize
