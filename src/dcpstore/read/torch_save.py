"""`BroadcastingTorchSaveReader`: a ``torch.save`` file as the source of a distributed load.

A file is read like a checkpoint with one object, whose items are tensors with any strides,
and one rank that may fetch (see `dcpstore.read.sharing`)::

    store --ranged GETs--> reading rank --waves of messages--> each rank: its part of each tensor

DCP calls the reader in this order; the steps are those of a group of ranks that it opens, or of
the group that `dcpstore.load` works in:

0. (all ranks) ``reset``, if the caller gave a checkpoint_id
1. (all ranks) ``read_metadata``. Step: the reading rank opens the file (its zip directory and
   its pickle, a few requests), and every rank is sent keys, and where the tensors lie
2. (all ranks) ``set_up_storage_reader``, ``prepare_local_plan``
3. (DCP's coordinator) ``prepare_global_plan``
4. (all ranks) ``read_data``. Steps: every rank says which values it wants, and learns where the
   reading rank put them; targets are checked; those of `dcpstore.read.sharing`; one to finish

With ``direct`` every rank opens the file and reads for itself, and the steps carry failures only.
"""

from __future__ import annotations

import io
import itertools
import os
import pickle
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future as TorchFuture

from dcpstore.config import ReadConfig
from dcpstore.errors import ConfigError, IncompatibleError
from dcpstore.format.dtypes import dtype_name, is_row_major
from dcpstore.format.manifest import StoredItem
from dcpstore.plan.wire import PlanCache
from dcpstore.ranks import RankGroup, SingleGroup, steps
from dcpstore.ranks.agreement import Ranks, join_ranks, plain_cause_of_one
from dcpstore.read.pump import ReadJob, ReadStats
from dcpstore.read.sharing import read_shared, share_wave_bytes
from dcpstore.read.targets import Target, resolve_targets
from dcpstore.read.torch_file import TensorPlace, TorchFile, open_torch_file
from dcpstore.report import Meter
from dcpstore.store import Capabilities, Store, open_store
from dcpstore.store.base import ByteRange
from dcpstore.store.folder import file_location
from dcpstore.text import indented, redact
from dcpstore.torch_private import flatten_state_dict

_FILE, _VALUES = "file", "values"  # the objects that a read job sees
_NOWHERE = ByteRange(0, 0)
_MOST_NAMED = 10
_SCALARS = (bool, int, float, complex, str, bytes, type(None))


# --- what a file holds ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Contents:
    """What all ranks know of a file, by the keys of a flattened state dict.

    Attributes:
        url: Of the file.
        paths: Way to each key in the nested state dict.
        tensors: Where tensors lie: byte of the file at which the storage starts (see
            `TorchFile.read_laid_out`), and the place in it.
        unreadable: What those tensors are of which no part can be read.
    """

    url: str
    paths: Mapping[str, Any]
    tensors: Mapping[str, tuple[int, TensorPlace]]
    unreadable: Mapping[str, str]

    def metadata(self) -> Metadata:
        """Return it as DCP's metadata: every tensor is one chunk."""
        entries: dict[str, Any] = dict.fromkeys(self.paths, BytesStorageMetadata())
        for fqn, (_, place) in self.tensors.items():
            size = torch.Size(place.sizes)
            chunk = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
            properties = TensorProperties(dtype=place.dtype)
            entries[fqn] = TensorStorageMetadata(properties, size, [chunk])
        return Metadata(entries, dict(self.paths), storage_meta=StorageMeta(self.url))

    def item(self, index: MetadataIndex) -> StoredItem:
        """Return a tensor from an offset on, or a value, whose bytes do not lie anywhere yet.

        A planner may have made up chunks; what it reads is counted from the chunk that it names.
        """
        if index.fqn not in self.tensors:
            return StoredItem(_VALUES, _NOWHERE, "bytes", _NOWHERE)
        start, place = self.tensors[index.fqn]
        offsets = index.offset or (0,) * len(place.sizes)
        sizes = tuple(size - first for size, first in zip(place.sizes, offsets, strict=True))
        span = place.span(offsets, sizes)
        payload = ByteRange(start + span.start, start + span.end)
        strides = None if is_row_major(sizes, place.strides) else place.strides
        dtype = dtype_name(place.dtype)
        return StoredItem(_FILE, payload, "raw", payload, dtype=dtype, sizes=sizes, strides=strides)

    def keys_like(self, fqn: str) -> list[str]:
        """Return a few keys of the file that a missing key may have meant."""
        last = fqn.rpartition(".")[2]
        near = [
            key
            for key in self.paths
            if key.endswith(f".{fqn}") or fqn.endswith(f".{key}") or key.startswith(f"{fqn}.")
        ]
        near += [key for key in self.paths if key.rpartition(".")[2] == last and key not in near]
        return (near or list(self.paths))[:3]


def flatten(value: Any, what: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Flatten a structure as DCP flattens a state dict; return its leaves and paths by key.

    Args:
        value: A dictionary.
        what: Where it comes from, for messages.

    Raises:
        IncompatibleError: If it is no dictionary, or two of its leaves have one key.
    """
    if not isinstance(value, Mapping):
        raise IncompatibleError(
            f"{what} holds a {type(value).__name__}, not a state dict: save a dictionary, such as"
            " module.state_dict() or {'name': value}"
        )
    try:
        return flatten_state_dict(dict(value))
    except ValueError as error:
        raise IncompatibleError(
            f"{what} has two entries that DCP gives one key, such as {{'a': {{'b': 1}}, 'a.b': 2}}"
            f" ({error}); rename one and save again"
        ) from error
    except RecursionError as error:
        raise IncompatibleError(f"{what} contains itself, which DCP cannot flatten") from error


def contents_of(file: TorchFile) -> tuple[Contents, dict[str, Any]]:
    """Flatten what a file holds; return where its tensors lie, and its values by key. No I/O.

    Raises:
        IncompatibleError: If it holds something else than a dictionary, or one whose keys
            cannot be told apart once flattened.
    """
    flat, paths = flatten(file.value, file.url)
    tensors: dict[str, tuple[int, TensorPlace]] = {}
    unreadable: dict[str, str] = {}
    values: dict[str, Any] = {}
    for fqn, value in flat.items():
        if not isinstance(value, torch.Tensor):
            values[fqn] = value
            continue
        place = file.place(value)
        if place is None:
            unreadable[fqn] = _describe(value)
        else:
            tensors[fqn] = file.laid_out_start(place.storage_key), place
    return Contents(file.url, paths, tensors, unreadable), values


def _describe(value: torch.Tensor) -> str:
    if value.layout != torch.strided:
        return f"a tensor of layout {str(value.layout).removeprefix('torch.')}"
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        return f"a {type(value).__name__}, which wraps other tensors"
    return "a tensor that was on the meta device when it was saved, without elements"


class FileSource:
    """The file as a store with two objects: `_FILE`, and `_VALUES` that were pickled for ranks.

    As much of a `Store` as a read job needs. Thread-safe.
    """

    capabilities = Capabilities(
        atomic_create=False, compare_and_swap=False, acknowledges_puts=False
    )

    def __init__(self, url: str, file: TorchFile | None) -> None:
        self.url = url
        self.file = file
        self.values = b""
        self.asked_bytes: list[int] = []

    def get_range(self, key: str, start: int, end: int) -> memoryview:
        """Return bytes ``[start, end)``; on a rank that reads."""
        if key == _VALUES:
            return memoryview(self.values)[start:end]
        assert self.file is not None
        self.asked_bytes.append(end - start)
        return self.file.read_laid_out(start, end)


def pickle_value(file: TorchFile, value: Any) -> bytes:
    """Return a value as ``torch.save`` writes it; tensors inside are read whole.

    Args:
        file: Where the value comes from.
        value: As the file's structure has it: tensors are stand-ins.

    Raises:
        IncompatibleError: If a tensor inside has no bytes in the file.
        CorruptError: As `TorchFile.read_box`.
    """
    stream = io.BytesIO()
    if type(value) not in _SCALARS:
        _WithTensors(stream, file).dump(value)
        value = pickle.loads(stream.getvalue())  # noqa: S301 - pickled by the line above
        stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


class _WithTensors(pickle.Pickler):
    """Pickles tensors in place of their stand-ins."""

    def __init__(self, stream: io.BytesIO, file: TorchFile) -> None:
        super().__init__(stream, protocol=5)
        self._file = file

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            tensor: Any = self._file.read_box(value)
            return tensor.__reduce_ex__(5)
        return NotImplemented


# --- what fits -------------------------------------------------------------------------------


def resolve(
    read_items: Sequence[ReadItem], planner: LoadPlanner, contents: Contents, config: ReadConfig
) -> list[Target]:
    """Ask the planner for every target, and check them all against the file.

    Raises:
        IncompatibleError: Naming each key that the file lacks, or whose kind, shape or dtype
            does not fit. No target was changed.
    """
    problems: dict[str, str] = {}
    for read_item in read_items:
        problem = _mismatch(read_item, planner, contents)
        if problem:
            problems.setdefault(read_item.storage_index.fqn, problem)
    if problems:
        raise IncompatibleError(_explain(problems, contents))
    items = {one.storage_index: contents.item(one.storage_index) for one in read_items}
    return resolve_targets(read_items, planner, items, Metadata({}), config.casts)


def _explain(problems: Mapping[str, str], contents: Contents) -> str:
    near = {
        fqn: f"; it has {', '.join(map(repr, contents.keys_like(fqn)))}"
        for fqn in itertools.islice(problems, _MOST_NAMED)
        if contents.paths and fqn not in contents.paths
    }
    told = [problem + near.get(fqn, "") for fqn, problem in problems.items()]
    return f"{contents.url} does not fit the state dict; nothing was loaded:" + indented(
        told, _MOST_NAMED
    )


def _mismatch(read_item: ReadItem, planner: LoadPlanner, contents: Contents) -> str | None:
    fqn = read_item.storage_index.fqn
    wants_value = read_item.type == LoadItemType.BYTE_IO
    if fqn in contents.unreadable:
        return (
            f"{fqn!r} is {contents.unreadable[fqn]} in the file, of which no part can be read;"
            " load the file with torch.load"
        )
    if fqn not in contents.paths:
        return f"{fqn!r} is not in the file"
    if (fqn not in contents.tensors) != wants_value:
        saved, wanted = ("a tensor", "a value") if wants_value else ("a value", "a tensor")
        return f"{fqn!r} is saved as {saved}, and the state dict has {wanted}"
    if wants_value:
        return None
    _, place = contents.tensors[fqn]
    wanted_sizes = _whole_sizes(read_item, planner)
    if wanted_sizes is not None and wanted_sizes != place.sizes:
        return f"{fqn!r} is saved with shape {place.sizes}, and the state dict has {wanted_sizes}"
    return _out_of_bounds(read_item, place)


def _whole_sizes(read_item: ReadItem, planner: LoadPlanner) -> tuple[int, ...] | None:
    """Return the shape that the planner takes the whole tensor for, if it tells.

    Planners that make up the metadata know nothing of the file's shapes: without this, a
    target that is smaller than the saved tensor would be given a part of it.
    """
    known: Any = getattr(planner, "metadata", None)
    entries = getattr(known, "state_dict_metadata", None) or {}
    entry = entries.get(read_item.storage_index.fqn)
    return tuple(entry.size) if isinstance(entry, TensorStorageMetadata) else None


def _out_of_bounds(read_item: ReadItem, place: TensorPlace) -> str | None:
    sizes, inner = read_item.lengths, read_item.storage_offsets
    outer = read_item.storage_index.offset
    if outer is None:
        outer = torch.Size([0] * len(place.sizes))
    if len(outer) == len(inner) == len(sizes) == len(place.sizes):
        rows = zip(outer, inner, sizes, place.sizes, strict=True)
        if all(min(a, b) >= 0 and a + b + size <= saved for a, b, size, saved in rows):
            return None
    return (
        f"{read_item.storage_index.fqn!r} is saved with shape {place.sizes}, and the plan reads"
        f" {tuple(sizes)} at {tuple(inner)} of its chunk at {tuple(outer)}"
    )


class SavedFlags:
    """A planner's place towards a read job: what was saved lazily is done before it is told.

    Args:
        planner: Told of complete targets.
        contents: Of the file.
    """

    def __init__(self, planner: LoadPlanner, contents: Contents) -> None:
        self._tensors = contents.tensors
        self._planner = planner
        self.load_bytes = planner.load_bytes

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Complete a target whose elements are all there."""
        _, place = self._tensors[read_item.storage_index.fqn]
        apply_flags(place, tensor)
        self._planner.commit_tensor(read_item, tensor)


def apply_flags(place: TensorPlace, out: torch.Tensor) -> None:
    """Repeat what was read of an expanded tensor; conjugate and negate what was saved so."""
    if not out.numel():
        return
    with torch.inference_mode(out.is_inference()):
        once = out
        for axis, (size, stride) in enumerate(zip(place.sizes, place.strides, strict=True)):
            if size > 1 and not stride:
                once = once.narrow(axis, 0, 1)
        if once is not out:
            out.copy_(once.clone())
        if place.is_conj:
            out.copy_(out.conj().resolve_conj())
        if place.is_neg:
            out.neg_()


# --- a load -------------------------------------------------------------------------------------


class LoadJob:
    """Opens the file for all ranks, then fills their targets. Every method is collective.

    Args:
        group: The ranks that load together; its coordinator is the rank that reads.
        open_file: Opens the file, to be closed by the caller's stack.
        config: Sizes, bounds and casts.
        is_direct: Whether every rank reads for itself.
    """

    def __init__(
        self,
        group: RankGroup,
        open_file: Callable[[], TorchFile],
        config: ReadConfig,
        *,
        is_direct: bool,
    ) -> None:
        self._group = group
        self._open_file = open_file
        self._config = config
        self._is_direct = is_direct
        self._file: TorchFile | None = None
        self._saved_values: dict[str, Any] = {}
        self._contents: Contents
        self._blobs: list[bytes] = []
        self.stats = ReadStats()

    def open(self) -> Contents:
        """Open the file; return what it holds, on every rank.

        Raises:
            RankFailures: On every rank, if the file cannot be opened.
        """

        def look() -> Contents:
            self._file = self._open_file()
            contents, self._saved_values = contents_of(self._file)
            return contents

        form = steps.each if self._is_direct else steps.broadcast
        self._contents = form(self._group, "open the torch.save file", look)
        return self._contents

    def read(self, finish_plan: Callable[[], LoadPlan], planner: LoadPlanner, meter: Meter) -> str:
        """Fill this rank's targets.

        Args:
            finish_plan: Returns this rank's plan; part of the first step.
            planner: Resolves targets, and is notified of complete ones.
            meter: Counts the bytes delivered.

        Returns:
            What ranks shared, in words.

        Raises:
            RankFailures: On every rank, if any failed.
        """
        targets: list[Target] = []

        def ask() -> list[str]:
            items = finish_plan().items
            targets.extend(resolve(items, planner, self._contents, self._config))
            return [target.fqn for target in targets if target.tensor is None]

        step = "plan what to read"
        places = (
            steps.each(self._group, step, lambda: self._place_values([ask()])[0])
            if self._is_direct
            else steps.reduce_scatter(self._group, step, ask, self._place_values)
        )
        source = FileSource(self._contents.url, self._file)
        source.values = b"".join(self._blobs)
        config = self._config
        if not self._is_direct:  # so that each message fits a wave
            most_bytes = min(config.request_bytes, share_wave_bytes(config))
            config = replace(config, request_bytes=most_bytes)
        with ExitStack() as stack:

            def prepare() -> ReadJob:
                job = ReadJob(cast("Store", source), config, Metadata({}), {}, meter=meter)
                stack.enter_context(job)
                for target in targets:
                    if target.tensor is None:
                        span = places[target.fqn]
                        target.item = replace(target.item, record=span, payload=span)
                job.plan(targets, towards_job)
                return job

            towards_job = cast("LoadPlanner", SavedFlags(planner, self._contents))
            job = steps.each(self._group, "check targets", prepare)
            self.stats = job.stats
            only = (self._group.coordinator,)
            sharing, _ = read_shared(
                self._group,
                job,
                towards_job,
                config,
                keys=(_FILE, _VALUES),
                policy="never" if self._is_direct else "always",
                cache=PlanCache(),
                readers=None if self._is_direct else dict.fromkeys((_FILE, _VALUES), only),
            )
            steps.each(self._group, "finish", self._file.check_unchanged if self._file else bool)
        self.stats.num_requests = len(source.asked_bytes)
        self.stats.fetched_bytes = sum(source.asked_bytes)
        return "not shared: every rank read for itself" if self._is_direct else sharing

    def _place_values(self, asked: Sequence[Collection[str]]) -> list[dict[str, ByteRange]]:
        """Pickle the values that ranks ask for, equal plain ones once; return where they lie."""
        assert self._file is not None, "the coordinator of the group is the rank that reads"
        places: dict[str, ByteRange] = {}
        same: dict[str, ByteRange] = {}
        end = 0
        for key in sorted(set().union(*asked)):
            value = self._saved_values[key]
            # 20,000 parameters have 20,000 step counters, and few numbers in them.
            is_plain = type(value) in (bool, int, float, type(None))
            name = repr(value) if is_plain else f"key {key}"
            if name not in same:
                self._blobs.append(pickle_value(self._file, value))
                start, end = end, end + len(self._blobs[-1])
                same[name] = ByteRange(start, end)
            places[key] = same[name]
        return [{key: places[key] for key in one} for one in asked]


class BroadcastingTorchSaveReader(StorageReader):
    """Load a ``torch.save`` file from an object store into any sharded state dict.

    A DCP ``StorageReader`` for ``dcp.load`` and `dcpstore.load`, with any planner: those of
    dcpstore and torch's `DynamicMetaLoadPlanner` alike. One rank reads, by ranged GETs of what
    any rank wants, and sends every other rank the part of each tensor that it holds, over
    connections of its own beside the process group. Values that are no tensors are sent to
    the ranks whose state dict has their key. No rank holds more than the budget beside its
    targets: tensors travel in pieces.

    Keys, kinds, shapes and dtypes are checked on all ranks before any tensor is read, so a
    mismatch changes nothing; whatever fails on one rank is raised on all of them. One object
    serves many loads, one at a time. Needs permission to get.

    Args:
        checkpoint_id: The file: a URL such as ``s3://bucket/model.pt``, or a local path. May
            be given to the load instead.
        coordinator_rank: The rank that reads, as a rank of the group. Any, also where DCP's
            own coordinator is another. `dcpstore.load` plans on this rank, too.
        storage_options: fsspec's options for the URL's protocol.
        config: Sizes, bounds, retries and casts. ``allow_pickle`` opens files that
            ``torch.load(weights_only=True)`` refuses, and runs the code they name.
        process_group: The ranks that load together; None for all, or for this process alone
            where torch.distributed is not initialised. The same group that ``dcp.load`` is
            given, which does not tell its reader. `dcpstore.load` brings its own.
        no_dist: Load in this process alone; pass it where ``dcp.load`` is passed it.
        direct: Every rank reads its own parts of tensors from the store, and only keys, shapes
            and values travel. Faster where ranks have bandwidth of their own to the store and
            each holds a part; replicated tensors are then read by every rank.
        deadline_s: Most seconds that one step (opening, a wave) may take.
        store_opener: Opens the store; tests pass one that injects faults.

    Raises:
        ConfigError: If the URL cannot be that of a file.
    """

    def __init__(
        self,
        checkpoint_id: str | os.PathLike[str] | None = None,
        coordinator_rank: int = 0,
        *,
        storage_options: Mapping[str, Any] | None = None,
        config: ReadConfig | None = None,
        process_group: Ranks = None,
        no_dist: bool = False,
        direct: bool = False,
        deadline_s: float = 600.0,
        store_opener: Callable[..., Store] = open_store,
    ) -> None:
        super().__init__()
        self.coordinator_rank = coordinator_rank
        self._options = dict(storage_options or {})
        self._config = config or ReadConfig()
        self._ranks: Ranks = SingleGroup(deadline_s) if no_dist else process_group
        self._is_direct = direct
        self._deadline_s = deadline_s
        self._opener = store_opener
        self._url: str | os.PathLike[str] | None = None
        self._lent: RankGroup | None = None
        self._group: RankGroup | None = None
        self._job: LoadJob | None = None
        self._stack = ExitStack()
        self.last_read: ReadStats | None = None
        """What this rank's last load did; None before it."""
        self.reset(checkpoint_id)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.checkpoint_id!r})"

    @property
    def checkpoint_id(self) -> str | None:
        """The file that the next load reads."""
        return None if self._url is None else redact(os.fspath(self._url))

    @property
    def config(self) -> ReadConfig:
        """Sizes, bounds, casts and trust."""
        return self._config

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Tell whether a URL or path can be that of a file that is served."""
        try:
            file_location(checkpoint_id)
        except ConfigError:
            return False
        return True

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Prepare for another load, from another file if one is given; options stay.

        Raises:
            ConfigError: If the URL cannot be that of a file.
        """
        self._end()
        if checkpoint_id is not None:
            file_location(checkpoint_id)
            self._url = checkpoint_id

    def join(self, group: RankGroup) -> None:
        """Take part in the steps of an open group in the next load. All ranks, before it.

        Args:
            group: Its coordinator reads. Stays open.

        Raises:
            ConfigError: If the coordinator is not ``coordinator_rank``.
        """
        if group.coordinator != self.coordinator_rank:
            raise ConfigError(
                f"the reader's coordinator_rank is {self.coordinator_rank}, and the group that"
                f" loads has {group.coordinator}; let them agree"
            )
        self._lent = group

    def read_metadata(self) -> Metadata:
        """Open the file on the reading rank; return what it holds, on every rank. Collective.

        Raises:
            ConfigError: If no file was named.
            RankFailures: On every rank of several, if the file cannot be opened. Where there is
                but one rank: the cause itself, as `open_torch_file` says.
        """
        self._end()
        url = self._url
        if url is None:
            raise ConfigError(
                "no file was named: pass checkpoint_id to the reader or to the load, such as"
                " s3://bucket/model.pt"
            )
        lent, self._lent = self._lent, None
        ranks = self._ranks if lent is None else lent
        with ExitStack() as stack:
            group = stack.enter_context(
                join_ranks(
                    ranks, self.coordinator_rank, self._deadline_s, action="torch.save", url=url
                )
            )

            def open_file() -> TorchFile:
                return stack.enter_context(self._open_file(url))

            job = LoadJob(group, open_file, self._config, is_direct=self._is_direct)
            with plain_cause_of_one(group):
                contents = job.open()
            self._group, self._job, self._stack = group, job, stack.pop_all()
        return contents.metadata()

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Do nothing: what the file holds is known, and a planner may have changed its view."""
        del metadata, is_coordinator, args, kwargs

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans. DCP's coordinator only."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> TorchFuture[None]:
        """Fill this rank's targets. Returns when all are there. Collective.

        Planner methods are called in the calling thread only.

        Raises:
            RankFailures: On every rank of several, if any failed.
            IncompatibleError: Where there is but one rank, like all below: if a key is not in
                the file, or its kind, shape or dtype does not fit; nothing was changed.
            ConflictError: If the file was replaced meanwhile.
            CorruptError: If the file is damaged.
            StoreError: If the store refuses.
        """
        self.read_planned(lambda: plan, planner, Meter("load"))
        future: TorchFuture[None] = TorchFuture()
        future.set_result(None)
        return future

    def read_planned(
        self, finish_plan: Callable[[], LoadPlan], planner: LoadPlanner, meter: Meter
    ) -> tuple[ReadStats, str]:
        """Do what `read_data` does, with a plan that is made in the first step. Collective.

        Args:
            finish_plan: Returns this rank's plan; if it raises, every rank is told.
            planner: Resolves targets, and is notified of complete ones.
            meter: Counts the bytes delivered.

        Returns:
            What this rank did, and what ranks shared, in words.

        Raises: as `read_data`.
        """
        group, job = self._group, self._job
        if group is None or job is None:
            raise ConfigError("read_metadata comes before read_data, once for every load")
        stack, self._stack = self._stack, ExitStack()
        self._group = self._job = None
        with stack, plain_cause_of_one(group):
            sharing = job.read(finish_plan, planner, meter)
        self.last_read = job.stats
        return job.stats, sharing

    def _end(self) -> None:
        """Leave the group of a load that did not come to its end."""
        stack, self._stack = self._stack, ExitStack()
        self._group = self._job = None
        stack.close()

    def _open_file(self, url: str | os.PathLike[str]) -> TorchFile:
        return open_torch_file(
            url,
            storage_options=self._options,
            weights_only=not self._config.allow_pickle,
            config=self._config,
            opener=self._opener,
        )
