"""`torch_save_to_dcp`: a ``torch.save`` file, in any store, becomes a DCP checkpoint.

Every rank has the file's structure and plans a share of it, a run of the file; tensors are
read when their turn to be written comes (see `dcpstore.convert.torch.source`). Tensors
that are the very same elements are written once: their keys name the same bytes of the same
object, which is all that DCP's format can say of sharing.

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
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from math import prod
from typing import Any, TypeAlias

import torch
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner import SavePlanner as DcpSavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from dcpstore.config import ReadConfig, WriteConfig
from dcpstore.convert.dcp.sink import StreamingPlanner, chunk_item
from dcpstore.convert.dcp.source import own_run
from dcpstore.convert.output import Shares, fetched_by_all, share_budget
from dcpstore.convert.selection import ConvertResult, DtypeRule, Selection, select
from dcpstore.convert.torch.source import ReadAhead, WantedBox, bands_of
from dcpstore.convert.torch.structure import (
    LAYOUT_KEY,
    Layout,
    Path,
    PickledStructure,
    Recast,
    StorageViews,
    encode_layout,
    flatten,
    is_stand_in,
    is_wrapper,
    pickle_structure,
    rearrange,
    view_of,
    write_record,
)
from dcpstore.errors import ConfigError, ConflictError, IncompatibleError
from dcpstore.format.dtypes import dtype_name
from dcpstore.plan.rules import Rename
from dcpstore.ranks import RankGroup, steps
from dcpstore.ranks.agreement import Ranks, join_ranks
from dcpstore.read.torch_file import TensorPlace, TorchFile, open_torch_file
from dcpstore.report import Meter, Phases, Progress, ProgressCallback, SaveResult, show_progress
from dcpstore.saving import save
from dcpstore.store.base import ByteRange
from dcpstore.store.folder import parse_location
from dcpstore.torch_private import storage_identity, validate_global_plan
from dcpstore.write.writer import ObjectStoreWriter


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """A strided tensor of the file and what becomes of it.

    Attributes:
        place: Where its elements lie.
        dtype: What they are converted to.
        requires_grad: As in the file.
    """

    place: TensorPlace
    dtype: torch.dtype
    requires_grad: bool


@dataclass(frozen=True, slots=True)
class OpaqueTensor:
    """A tensor that is more than its elements, such as a sparse one.

    Attributes:
        stand_in: What the file has for it.
        record: Its pickle.
    """

    stand_in: torch.Tensor
    record: PickledStructure


@dataclass(frozen=True, slots=True)
class FileChoice:
    """What is written, by key of the checkpoint.

    Attributes:
        names: Every key, in the order of the file's structure.
        paths: Where each lies in the structure.
        tensors: Strided tensors.
        aliases: Keys of tensors that are the very same as another one, which is in `tensors`.
        opaques: Other tensors.
        values: What is no tensor, pickled.
        layout: The structure, for the way back; its archive is still empty.
        extra: Identities of the storages that belong into its archive.
        skipped: Key of the file, and why it is not written.
        cast: Key of the file, and the names of its old and its new dtype.
    """

    names: Sequence[str]
    paths: Mapping[str, Path]
    tensors: Mapping[str, PlannedTensor]
    aliases: Mapping[str, str]
    opaques: Mapping[str, OpaqueTensor]
    values: Mapping[str, PickledStructure]
    layout: Layout
    extra: Sequence[int]
    skipped: Mapping[str, str]
    cast: Mapping[str, tuple[str, str]]


class _Chooser:
    """Chooses what of a file is written. Pure; the same on all ranks."""

    def __init__(self, file: TorchFile, selection: Selection) -> None:
        self._file = file
        self._leaves = flatten(file.value, file.url)
        self._names = selection.names(list(self._leaves.values))
        self._takes = selection.rules.takes
        lengths = {one: file.storages[key].num_bytes for one, key in file.identities.items()}
        self._recast = Recast(StorageViews(lengths))
        self._replaced, self._cast = self._cast_tensors(StorageViews(lengths), selection)
        self._views = StorageViews({**lengths, **self._recast.num_bytes})
        self._tensors: dict[str, PlannedTensor] = {}
        self._stand_ins: dict[str, torch.Tensor] = {}
        self._opaques: dict[str, OpaqueTensor] = {}
        self._values: dict[str, PickledStructure] = {}
        self._skipped: dict[str, str] = {}

    def _cast_tensors(
        self, views: StorageViews, selection: Selection
    ) -> tuple[dict[str, torch.Tensor], dict[str, tuple[str, str]]]:
        replaced, cast = {}, {}
        for fqn in self._names:
            value = self._leaves.values[fqn]
            if isinstance(value, torch.Tensor) and is_stand_in(value, views):
                dtype = selection.dtype_of(fqn, value.dtype)
                if dtype != value.dtype:
                    replaced[fqn] = self._recast.cast(value, dtype)
                    cast[fqn] = (dtype_name(value.dtype), dtype_name(dtype))
        return replaced, cast

    def run(self) -> FileChoice:
        """Choose.

        Raises:
            IncompatibleError: If the file holds what no DCP checkpoint can.
            ConfigError: If the selection does not fit the file.
        """
        structure = rearrange(
            self._file.value, self._leaves, self._names, self._replaced, self._takes
        )
        leaves = flatten(structure, self._file.url)
        written = set(self._names.values())
        # What is left out of a list leaves None there.
        odd = [k for k, one in leaves.values.items() if k not in written and one is not None]
        if odd or not written <= leaves.values.keys():
            raise ConfigError(
                f"rename makes keys ambiguous, such as {(odd or sorted(written))[0]!r}"
            )
        for fqn, name in self._names.items():
            self._sort_in(fqn, name)
        pickled = pickle_structure(structure, self._views)
        extra = self._extra(pickled)
        by_identity = {one: key for key, one in pickled.storages.items()}
        records = {**self._values, **{k: o.record for k, o in self._opaques.items()}}
        members = {
            name: [by_identity[one] for one in record.storages.values()]
            for name, record in records.items()
        }
        layout = Layout(pickled.data, members, [by_identity[one] for one in extra])
        written -= {self._names[fqn] for fqn in self._skipped}
        ordered = [name for name in leaves.values if name in written]
        primary, aliases = self._aliases()
        return FileChoice(
            names=ordered,
            paths={name: leaves.paths[name] for name in ordered},
            tensors=primary,
            aliases=aliases,
            opaques=self._opaques,
            values=self._values,
            layout=layout,
            extra=extra,
            skipped=self._skipped,
            cast=self._cast,
        )

    def _sort_in(self, fqn: str, name: str) -> None:
        value = self._leaves.values[fqn]
        if not isinstance(value, torch.Tensor):
            self._values[name] = pickle_structure(value, self._views)
            return
        if is_wrapper(value):
            raise IncompatibleError(
                f"{self._file.url}: {fqn!r} is a {type(value).__name__}, which holds other tensors;"
                " save what it holds as plain tensors, or leave it out with exclude="
            )
        place = self._file.place(value)
        made = self._replaced.get(fqn, value)
        if place is not None:
            self._tensors[name] = PlannedTensor(place, made.dtype, made.requires_grad)
            self._stand_ins[name] = made
        elif value.layout == torch.strided:
            self._skipped[fqn] = "a tensor on the meta device, which has no elements"
        else:
            self._opaques[name] = OpaqueTensor(value, pickle_structure(value, self._views))

    def _aliases(self) -> tuple[dict[str, PlannedTensor], dict[str, str]]:
        """Part tensors that are all the same from those that are there first."""
        primary: dict[str, PlannedTensor] = {}
        aliases: dict[str, str] = {}
        first: dict[tuple[TensorPlace, torch.dtype], str] = {}
        for name, tensor in self._tensors.items():
            same = first.setdefault((tensor.place, tensor.dtype), name)
            if same == name or 0 in tensor.place.sizes:
                primary[name] = tensor
            else:
                aliases[name] = same
        return primary, aliases

    def _extra(self, pickled: PickledStructure) -> list[int]:
        """Return the storages of which some bytes would be found under no key."""
        found = {one for value in self._values.values() for one in value.storages.values()}
        found |= {one for o in self._opaques.values() for one in o.record.storages.values()}
        covered = {view_of(stand_in) for stand_in in self._stand_ins.values()}
        odd = set(pickled.bare)
        odd |= {storage_identity(one) for one in pickled.stand_ins if view_of(one) not in covered}
        return [one for one in pickled.storages.values() if one in odd and one not in found]


Share: TypeAlias = "list[tuple[str, WantedBox]]"
"""What one rank writes: boxes in the order of the file, and the key of each."""


def share_of(choice: FileChoice, file: TorchFile, group: RankGroup, max_item_bytes: int) -> Share:
    """Return a rank's share: a run of the file, of whole tensors.

    Tensors larger than ``max_item_bytes`` are cut, so that none need be held whole.
    """
    wanted = []
    for name, tensor in choice.tensors.items():
        sizes = tensor.place.sizes
        wanted.append((name, WantedBox(tensor.place, (0,) * len(sizes), sizes)))

    def position(one: tuple[str, WantedBox]) -> tuple[int, ByteRange]:
        place = one[1].place
        return file.storages[place.storage_key].member.header_offset, place.span()

    wanted.sort(key=position)
    costs = [box.num_bytes for _, box in wanted]
    return [
        (name, part)
        for name, box in own_run(wanted, costs, group.rank, group.size)
        for part in ([box] if 0 in box.sizes else bands_of(box, max_item_bytes))
    ]


class FileSavePlanner(StreamingPlanner):
    """Plans and resolves one rank's share.

    Args:
        choice: What is written.
        share: Of this rank.
        read_ahead: Over the share's boxes.
        read_opaque: Reads a tensor that is more than its elements.
        read_bytes: Returns the bytes of a value, or of the layout, by key.
    """

    def __init__(
        self,
        choice: FileChoice,
        share: Share,
        read_ahead: ReadAhead,
        read_opaque: Callable[[OpaqueTensor], torch.Tensor],
        read_bytes: Callable[[str], bytes],
    ) -> None:
        super().__init__()
        self._choice = choice
        self._share = share
        self._read_ahead = read_ahead
        self._read_opaque = read_opaque
        self._read_bytes = read_bytes
        self._numbers: dict[tuple[str, tuple[int, ...]], int] = {
            (name, box.offsets): number for number, (name, box) in enumerate(share)
        }

    def create_local_plan(self) -> SavePlan:
        """Plan this rank's share; values and opaque tensors are the coordinator's."""
        items = [self._chunk(name, box) for name, box in self._share]
        if self.is_coordinator:
            items += [self._opaque(name, one) for name, one in self._choice.opaques.items()]
            keys = [*self._choice.values, LAYOUT_KEY]
            items += [WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO) for key in keys]
        return SavePlan(items)

    def _chunk(self, name: str, box: WantedBox) -> WriteItem:
        planned = self._choice.tensors[name]
        chunk = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
        properties = TensorProperties(dtype=planned.dtype, requires_grad=planned.requires_grad)
        is_whole = box.sizes == planned.place.sizes
        kind = WriteItemType.TENSOR if is_whole else WriteItemType.SHARD
        return chunk_item(name, chunk, properties, torch.Size(planned.place.sizes), kind)

    def _opaque(self, name: str, one: OpaqueTensor) -> WriteItem:
        size = one.stand_in.size()
        chunk = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
        properties = TensorProperties(dtype=one.stand_in.dtype, layout=one.stand_in.layout)
        return chunk_item(name, chunk, properties, size, WriteItemType.TENSOR)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Join the shares; name the keys that share their bytes with another. Coordinator only."""
        # Not the base's: shares are disjoint, and torch's search for replicas fails at some dtypes.
        plans, metadata = create_default_global_save_plan(all_plans)
        entries = metadata.state_dict_metadata
        for alias, name in self._choice.aliases.items():
            entries[alias] = entries[name]
        metadata.state_dict_metadata = {name: entries[name] for name in self._choice.names}
        metadata.planner_data = dict(self._choice.paths)
        problems = validate_global_plan(plans, metadata)
        if problems:
            raise IncompatibleError(f"the shares do not fit together: {problems[:3]}")
        return plans, metadata

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Read an item. Called by the writer, one at a time, in the order of the plan."""
        name = write_item.index.fqn
        if write_item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(self._read_bytes(name))
        if name in self._choice.opaques:
            return self._read_opaque(self._choice.opaques[name])
        offsets = write_item.index.offset
        assert offsets is not None
        tensor = self._read_ahead.take(self._numbers[name, tuple(offsets)])
        return tensor.to(self._choice.tensors[name].dtype)


class SharingWriter(ObjectStoreWriter):
    """A writer that seals some keys as other names of what is stored under another key.

    Args:
        url: Folder of the checkpoint.
        aliases: From such a key to the other.
        check: Called on every rank when its share is written, before anything is sealed.
        **settings: As of `ObjectStoreWriter`.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        aliases: Mapping[str, str],
        check: Callable[[], None],
        **settings: Any,
    ) -> None:
        super().__init__(url, **settings)
        self._names: dict[str, list[str]] = {}
        for alias, name in aliases.items():
            self._names.setdefault(name, []).append(alias)
        self._check = check
        self.objects: dict[str, int] = {}
        """Size of each data object; on the coordinator, when the checkpoint is sealed."""

    def write_data(self, plan: SavePlan, planner: DcpSavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's items, and say where the keys that share theirs lie."""
        results = super().write_data(plan, planner).wait()
        self._check()
        shared = [
            WriteResult(replace(one.index, fqn=alias), 0, one.storage_data)
            for one in results
            for alias in self._names.get(one.index.fqn, ())
        ]
        future: Future[list[WriteResult]] = Future()
        future.set_result([*results, *shared])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Seal the checkpoint. Coordinator only."""
        written = [one.storage_data.object for own in results for one in own]
        super().finish(metadata, results)
        self.objects = {one.key: one.size_bytes for one in written}


_NO_VALUE = b"\x80\x02N."  # the pickle of None, of a record that is there for its storages


def torch_save_to_dcp(  # noqa: D417 - the rest are those of every converter
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

    Arguments that are not listed are those of every converter: see `dcpstore.convert`.

    Args:
        source: The file: a URL, or a local path. It holds a dictionary.
        target: Folder for the checkpoint.
        weights_only: Allow in the file what ``torch.load(weights_only=True)`` allows, with
            ``torch.serialization.add_safe_globals`` honoured. False runs whatever code the
            file names: only for files that you trust.
        budget_bytes: Memory for tensors on their way, per rank. Values that are not tensors,
            with the tensors in them, are held beside it, one at a time; so are sparse tensors.

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
        meter = stack.enter_context(showing)
        phases = Phases()
        with phases.phase("open"):
            file = _open(group, stack, source, source_options, weights_only=weights_only)
        job = _ToCheckpoint(group, file, shares, meter, phases)
        return job.run(selection, target, target_options, overwrite=overwrite)


def _refuse_same(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    if parse_location(source).url == parse_location(target).url:
        raise ConfigError(f"source and target are both {parse_location(source).url}")


def _open(
    group: RankGroup,
    stack: ExitStack,
    source: str | os.PathLike[str],
    options: Mapping[str, Any] | None,
    *,
    weights_only: bool,
) -> TorchFile:
    """Open the file on every rank, for as long as the stack. Collective."""

    def open_it() -> TorchFile:
        file = open_torch_file(source, storage_options=options, weights_only=weights_only)
        return stack.enter_context(file)

    file = steps.each(group, "open the source", open_it)
    seen = steps.all_gather(
        group, "compare the source", lambda: (file.info.size_bytes, file.info.etag)
    )
    if len(set(seen)) > 1:
        raise ConflictError(
            f"{file.url} was replaced while ranks opened it: they found files of"
            f" {sorted({size for size, _ in seen})} bytes. Start again"
        )
    return file


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


@dataclass(slots=True)
class _ToCheckpoint:
    """One rank's way through a conversion."""

    _group: RankGroup
    _file: TorchFile
    _shares: Shares
    _meter: Meter
    _phases: Phases

    def run(
        self,
        selection: Selection,
        target: str | os.PathLike[str],
        options: Mapping[str, Any] | None,
        *,
        overwrite: bool,
    ) -> ConvertResult:
        with self._phases.phase("plan"):
            choice = steps.each(
                self._group, "choose the keys", lambda: _Chooser(self._file, selection).run()
            )
            share = share_of(choice, self._file, self._group, self._shares.block_bytes)
        ahead = ReadAhead(
            self._file,
            [box for _, box in share],
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
        fetched_bytes = fetched_by_all(self._group, ahead.fetched_bytes)
        objects = steps.broadcast(self._group, "report", lambda: dict(writer.objects))
        places = [*choice.tensors, *choice.aliases]
        named = {**choice.tensors, **{a: choice.tensors[n] for a, n in choice.aliases.items()}}
        return ConvertResult(
            source=self._file.url,
            target=str(writer.checkpoint_id),
            num_tensors=len(places) + len(choice.opaques),
            num_values=len(choice.values),
            tensor_bytes=sum(prod(t.place.sizes) * t.dtype.itemsize for t in named.values()),
            objects=objects,
            skipped=choice.skipped,
            cast=choice.cast,
            fetched_bytes=fetched_bytes,
            seconds={**self._phases.seconds, **saved.seconds},
        )
