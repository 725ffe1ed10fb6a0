"""What a checkpoint holds and where it lies, told from its metadata alone.

Of ours and of safetensors files without torch; a stock checkpoint's pickle needs it. One GET
for a checkpoint with DCP's metadata (two if its manifest is an object of its own), two per file
for safetensors; of a ``torch.save`` file the directory and the pickle. No data is read.

`render_plot` makes a page that shows how the bytes of a checkpoint spread over ranks and objects:
one file with everything in it, no network, no library. The page is ``plot_page.html`` with a JSON
document in place of its mark. *Lanes* are the ranks that wrote the checkpoint, or its objects
where their names tell no rank; adjacent lanes are joined where there are more than `MAX_LANES`,
so that 20,000 tensors of 1,024 ranks still make a page of some 20 MB.
"""

from __future__ import annotations

import fnmatch
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib.resources import files as package_files
from itertools import chain
from math import prod
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from dcpstore.audit.listing import natural_order
from dcpstore.config import ReadConfig
from dcpstore.errors import NotFoundError
from dcpstore.format.dtypes import DTYPES, dtype_name
from dcpstore.format.manifest import ItemId, Manifest, StoredItem
from dcpstore.format.safetensors import TensorInFile
from dcpstore.format.seal import Facts, rank_of
from dcpstore.read.discovery import Discovered, discover, sealed_ranks
from dcpstore.read.safetensors import read_header
from dcpstore.store.base import Store
from dcpstore.text import collector_paused, count_text

if TYPE_CHECKING:
    import torch

    from dcpstore.read.torch_file import TorchFile


FileLayout: TypeAlias = Literal["dcpstore", "dcp", "safetensors", "torch_file"]


@dataclass(frozen=True, slots=True)
class Shard:
    """One stored piece of a key.

    Attributes:
        object_key: The object that holds it.
        start: First byte of its record there.
        stored_bytes: Length of its record, headers included.
        num_bytes: Of its elements; the record's where that is not known.
        offsets: First element in the whole tensor, per dimension; empty for a value.
        sizes: Its shape in elements; empty for a value.
    """

    object_key: str
    start: int
    stored_bytes: int
    num_bytes: int
    offsets: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()

    @property
    def rank(self) -> int | None:
        """The rank that wrote it, where the object's name tells."""
        return rank_of(self.object_key)


@dataclass(frozen=True, slots=True)
class Described:
    """One key of the checkpoint.

    Attributes:
        key: Its flattened name.
        dtype: Name of its dtype; empty for a value.
        sizes: Shape of the whole tensor in elements; empty for a value.
        shards: Its stored pieces.
        is_in_state_dict: False for an item that a planner stored beside the state dict.
    """

    key: str
    dtype: str
    sizes: tuple[int, ...]
    shards: tuple[Shard, ...]
    is_in_state_dict: bool = True

    @property
    def is_tensor(self) -> bool:
        """Whether it is a tensor, and not any other value."""
        return bool(self.dtype)

    @property
    def num_elements(self) -> int:
        """Elements of the tensor; 0 for a value."""
        return prod(self.sizes) if self.is_tensor else 0

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor's elements in memory; of a value, as stored."""
        row = DTYPES.get(self.dtype)
        if self.is_tensor and row is not None:
            return prod(self.sizes) * row.item_bytes
        return sum(shard.num_bytes for shard in self.shards)

    @property
    def stored_bytes(self) -> int:
        """Bytes of its records, headers included."""
        return sum(shard.stored_bytes for shard in self.shards)


@dataclass(frozen=True, slots=True)
class DescribedAttachment:
    """A file that was sealed with the checkpoint.

    Attributes:
        name: Its own.
        object_key: The object that holds it.
        start: First byte there.
        num_bytes: Its length.
    """

    name: str
    object_key: str
    start: int
    num_bytes: int

    @property
    def rank(self) -> int | None:
        """The rank that wrote it, where the object's name tells."""
        return rank_of(self.object_key)


@dataclass(frozen=True, slots=True)
class DescribedObject:
    """A data object.

    Attributes:
        key: Relative to the checkpoint's folder.
        rank: That wrote it, where the name tells.
        num_items: Records and attachments in it.
        stored_bytes: Of these.
        num_bytes: Of the object, where the metadata tell.
    """

    key: str
    rank: int | None
    num_items: int
    stored_bytes: int
    num_bytes: int | None


@dataclass(frozen=True, slots=True)
class Description:
    """A checkpoint.

    Attributes:
        url: Of its folder or file.
        layout: Who wrote it.
        entries: Its keys, in their natural order.
        objects: Its data objects, by rank and name.
        save_id: Of the save, where it is ours.
        info: What the writer left for people.
        remarks: What a reader should know.
        attachments: Files that were sealed with it, in the natural order of their names.
        facts: Step, run and metrics that were sealed with it.
        user_metadata: What its users sealed with it.
    """

    url: str
    layout: FileLayout
    entries: tuple[Described, ...]
    objects: tuple[DescribedObject, ...]
    save_id: str | None = None
    info: Mapping[str, Any] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()
    attachments: tuple[DescribedAttachment, ...] = ()
    facts: Facts = field(default_factory=Facts)
    user_metadata: Mapping[str, Any] = field(default_factory=dict)


def describe(store: Store, config: ReadConfig) -> Description:
    """Describe the checkpoint in a folder.

    Raises:
        NotFoundError: If there is none.
        CorruptError: If its metadata are damaged, or a pickle that names more than data.
        IncompatibleError: If a newer dcpstore wrote it.
        StoreError: If the store refuses.
    """
    try:
        found = discover(store, config)
    except NotFoundError as error:
        sealed = [discover(store, config, rank=rank) for rank in sealed_ranks(store)]
        if not sealed:
            raise NotFoundError(f"{error}. `dcpstore ls` shows what lies below a URL") from error
        with collector_paused():
            return _merge(store.url, [_describe(one, config) for one in sealed])
    with collector_paused():
        return _describe(found, config)


def describe_file(store: Store, name: str) -> Description:
    """Describe one safetensors file of a folder, whatever else lies there.

    Raises:
        NotFoundError: If there is no such file.
        CorruptError: If it is none, or damaged.
    """
    found = {name: read_header(store, name).tensors}
    return _of_files(f"{store.url.rstrip('/')}/{name}", found)


def collect(
    entries: Iterable[Described],
    sizes: Mapping[str, int | None] | None = None,
    attachments: Iterable[DescribedAttachment] = (),
) -> tuple[DescribedObject, ...]:
    """Count what each object holds.

    Args:
        entries: Keys with their shards.
        sizes: Objects that are known, with their size; also those that hold nothing.
        attachments: Which lie in objects too.
    """
    known = dict(sizes or {})
    counts: dict[str, list[int]] = {key: [0, 0] for key in known}
    shards = ((one.object_key, one.stored_bytes) for entry in entries for one in entry.shards)
    for key, num_bytes in chain(shards, ((one.object_key, one.num_bytes) for one in attachments)):
        count = counts.setdefault(key, [0, 0])
        count[0] += 1
        count[1] += num_bytes
    objects = (
        DescribedObject(key, rank_of(key), num_items, stored_bytes, known.get(key))
        for key, (num_items, stored_bytes) in counts.items()
    )
    return tuple(sorted(objects, key=lambda one: natural_order(one.key)))


def _describe(discovered: Discovered, config: ReadConfig) -> Description:
    if discovered.manifest is not None:
        facts = discovered.seal.facts if discovered.seal is not None else None
        manifest = discovered.decode_manifest(config.max_metadata_bytes)
        return replace(_of_manifest(discovered.url, manifest), facts=facts or Facts())
    if discovered.files is not None:
        return _of_files(discovered.url, discovered.files)
    return _of_metadata(discovered.url, discovered.open(config))


def _of_manifest(url: str, manifest: Manifest) -> Description:
    shards = _shards_by_key(manifest.items)
    entries = [
        Described(
            key=entry.fqn,
            dtype=_dtype_in(entry.properties) if entry.properties is not None else "",
            sizes=entry.sizes,
            shards=tuple(shards.get(entry.fqn, ())),
            is_in_state_dict=entry.in_state_dict,
        )
        for entry in manifest.entries
    ]
    attachments = [
        DescribedAttachment(name, item.key, item.payload.start, item.payload.num_bytes)
        for name, item in manifest.attachments.items()
    ]
    sizes = {one.key: one.size_bytes for one in manifest.objects}
    info = dict(manifest.info)
    user_metadata = info.pop("user_metadata", {})
    found = _finish(url, "dcpstore", entries, sizes, attachments)
    return replace(found, save_id=manifest.save_id, info=info, user_metadata=user_metadata)


def _of_metadata(url: str, metadata: Any) -> Description:
    """Describe what torch's ``Metadata`` names; its classes are not imported here."""
    items = {
        ItemId(index.fqn, None if index.offset is None else tuple(index.offset)): item
        for index, item in metadata.storage_data.items()
    }
    chunk_sizes = {
        ItemId(fqn, tuple(chunk.offsets)): tuple(chunk.sizes)
        for fqn, entry in metadata.state_dict_metadata.items()
        for chunk in getattr(entry, "chunks", ())
    }
    dtypes = {
        fqn: str(entry.properties.dtype).removeprefix("torch.")
        for fqn, entry in metadata.state_dict_metadata.items()
        if hasattr(entry, "chunks")
    }
    shards = _shards_by_key(items, chunk_sizes, dtypes)
    entries = [
        Described(
            key=fqn,
            dtype=dtypes.get(fqn, ""),
            sizes=tuple(entry.size) if fqn in dtypes else (),
            shards=tuple(shards.get(fqn, ())),
        )
        for fqn, entry in metadata.state_dict_metadata.items()
    ]
    return _finish(url, "dcp", entries)


def _of_files(url: str, files: Mapping[str, Iterable[TensorInFile]]) -> Description:
    pieces: dict[str, list[tuple[str, TensorInFile]]] = {}
    for name, tensors in files.items():
        for tensor in tensors:
            pieces.setdefault(tensor.fqn, []).append((name, tensor))
    entries = []
    for key, found in pieces.items():
        ends = ([o + n for o, n in zip(t.offsets, t.sizes, strict=True)] for _, t in found)
        entries.append(
            Described(
                key=key,
                dtype=found[0][1].dtype,
                sizes=tuple(map(max, *ends)) if len(found) > 1 else found[0][1].sizes,
                shards=tuple(_shard_of_file(name, tensor) for name, tensor in found),
            )
        )
    return _finish(url, "safetensors", entries, dict.fromkeys(files))


def _shard_of_file(name: str, tensor: TensorInFile) -> Shard:
    num_bytes = tensor.payload.num_bytes
    return Shard(name, tensor.payload.start, num_bytes, num_bytes, tensor.offsets, tensor.sizes)


def _shards_by_key(
    items: Mapping[ItemId, StoredItem],
    chunk_sizes: Mapping[ItemId, tuple[int, ...]] | None = None,
    dtypes: Mapping[str, str] | None = None,
) -> dict[str, list[Shard]]:
    found: dict[str, list[Shard]] = {}
    for one, item in items.items():
        sizes = (chunk_sizes or {}).get(one, item.sizes)
        num_bytes = item.payload.num_bytes
        row = DTYPES.get((dtypes or {}).get(one.fqn, ""))
        if row is not None:
            num_bytes = prod(sizes) * row.item_bytes
        found.setdefault(one.fqn, []).append(
            Shard(
                object_key=item.key,
                start=item.record.start,
                stored_bytes=item.record.num_bytes,
                num_bytes=num_bytes,
                offsets=one.offsets or (),
                sizes=sizes,
            )
        )
    return found


def _finish(
    url: str,
    layout: FileLayout,
    entries: list[Described],
    sizes: Mapping[str, int | None] | None = None,
    attachments: Iterable[DescribedAttachment] = (),
) -> Description:
    entries.sort(key=lambda entry: natural_order(entry.key))
    files = tuple(sorted(attachments, key=lambda one: natural_order(one.name)))
    objects = collect(entries, sizes, files)
    return Description(url, layout, tuple(entries), objects, attachments=files)


def _merge(url: str, parts: list[Description]) -> Description:
    """Join what ranks sealed each for itself (``use_collectives=False``)."""
    entries = [entry for part in parts for entry in part.entries]
    sizes = {one.key: one.num_bytes for part in parts for one in part.objects}
    remark = (
        f"sealed by {count_text(len(parts), 'rank')}, each for itself: keys may come once per rank"
    )
    attachments = [one for part in parts for one in part.attachments]
    found = _finish(url, parts[0].layout, entries, sizes, attachments)
    return replace(found, remarks=(remark,), facts=parts[0].facts)


@lru_cache(maxsize=64)  # thousands of tensors share a few texts
def _dtype_in(properties: str) -> str:
    return str(json.loads(properties)["dtype"])


# --- torch.save files ----------------------------------------------------------------------


def describe_torch_file(
    url: str, *, storage_options: Mapping[str, Any] | None = None, config: ReadConfig | None = None
) -> Description:
    """Describe a ``torch.save`` file. Only what ``weights_only=True`` allows is unpickled.

    Keys are those that DCP would give the saved state dict.

    Raises:
        NotFoundError: If there is no such file.
        CorruptError: If it is damaged or names more than data.
        IncompatibleError: If it has the form of torch before 1.6, or another.
    """
    # Here, so that whoever describes a checkpoint of ours does not wait for torch.
    import torch

    from dcpstore.read.torch_file import open_torch_file
    from dcpstore.torch_private import flatten_state_dict

    with open_torch_file(url, storage_options=storage_options, config=config) as file:
        state = file.value if isinstance(file.value, Mapping) else {"root": file.value}
        flat, _ = flatten_state_dict(dict(state))
        name = file.url.rsplit("/", 1)[-1]
        entries = [
            _of_torch_tensor(file, name, key, value)
            if isinstance(value, torch.Tensor)
            else Described(key, "", (), ())
            for key, value in flat.items()
        ]
        entries.sort(key=lambda entry: natural_order(entry.key))
        stored_bytes = sum(storage.num_bytes for storage in file.storages.values())
        held = DescribedObject(name, None, len(file.storages), stored_bytes, file.size_bytes)
        tensors = (value for value in flat.values() if isinstance(value, torch.Tensor))
        counts = Counter(file.storage_key(tensor) for tensor in tensors)
        num_sharing = sum(n for key, n in counts.items() if key is not None and n > 1)
        remark = f"{num_sharing} tensors share storage with others: their stored bytes count twice"
        return Description(
            url=file.url,
            layout="torch_file",
            entries=tuple(entries),
            objects=(held,),
            remarks=(remark,) if num_sharing else (),
        )


def _of_torch_tensor(file: TorchFile, name: str, key: str, tensor: torch.Tensor) -> Described:
    shards: tuple[Shard, ...] = ()
    sizes = tuple(tensor.shape)
    place = file.place(tensor)
    if place is not None:
        storage, num_bytes = file.storages[place.storage_key], place.span().num_bytes
        start, offsets = storage.member.header_offset, (0,) * len(sizes)
        shards = (Shard(name, start, storage.num_bytes, num_bytes, offsets, sizes),)
    return Described(key, dtype_name(tensor.dtype), sizes, shards)


# --- choosing and adding up ------------------------------------------------------------------

Order: TypeAlias = Literal["key", "bytes", "shards", "dtype", "shape"]


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over keys.

    Attributes:
        num_tensors: Keys that are tensors.
        num_values: Keys that are not.
        num_elements: Of the tensors.
        num_shards: Stored pieces of both.
        num_bytes: Of the tensors in memory and of the values as stored.
        stored_bytes: Of their records.
        num_bytes_by_dtype: Bytes in memory per dtype, the largest first.
    """

    num_tensors: int
    num_values: int
    num_elements: int
    num_shards: int
    num_bytes: int
    stored_bytes: int
    num_bytes_by_dtype: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Branch:
    """A prefix of keys, with all that lies below it.

    Attributes:
        name: The part that it adds to the prefix around it; several where nothing forks.
        prefix: The whole prefix.
        totals: Of all keys below it.
        branches: The prefixes right below it.
        entries: The keys right below it.
    """

    name: str
    prefix: str
    totals: Totals
    branches: tuple[Branch, ...]
    entries: tuple[Described, ...]


def select(
    entries: Iterable[Described], keys: Sequence[str] = (), exclude: Sequence[str] = ()
) -> tuple[Described, ...]:
    """Return the entries that patterns choose, as `dcpstore.plan.rules.KeyRules` does.

    Args:
        entries: Keys of a checkpoint.
        keys: Patterns of keys (``fnmatch``); all if empty.
        exclude: Patterns of keys to leave out; stronger than ``keys``.
    """
    return tuple(
        entry
        for entry in entries
        if (not keys or any(fnmatch.fnmatchcase(entry.key, pattern) for pattern in keys))
        and not any(fnmatch.fnmatchcase(entry.key, pattern) for pattern in exclude)
    )


def sort_entries(
    entries: Iterable[Described], order: Order, *, is_reversed: bool = False
) -> tuple[Described, ...]:
    """Order entries; by bytes and by shards the largest come first."""
    keys: dict[str, Callable[[Described], Any]] = {
        "key": lambda _: 0,
        "bytes": lambda entry: -entry.num_bytes,
        "shards": lambda entry: -len(entry.shards),
        "dtype": lambda entry: entry.dtype,
        "shape": lambda entry: entry.sizes,
    }
    found = sorted(entries, key=lambda entry: natural_order(entry.key))
    found.sort(key=keys[order])
    return tuple(reversed(found) if is_reversed else found)


def sum_up(entries: Iterable[Described]) -> Totals:
    """Add entries up."""
    entries = list(entries)
    tensors = [entry for entry in entries if entry.is_tensor]
    by_dtype: Counter[str] = Counter()
    for entry in tensors:
        by_dtype[entry.dtype] += entry.num_bytes
    return Totals(
        num_tensors=len(tensors),
        num_values=len(entries) - len(tensors),
        num_elements=sum(entry.num_elements for entry in tensors),
        num_shards=sum(len(entry.shards) for entry in entries),
        num_bytes=sum(entry.num_bytes for entry in entries),
        stored_bytes=sum(entry.stored_bytes for entry in entries),
        num_bytes_by_dtype=dict(sorted(by_dtype.items(), key=lambda pair: (-pair[1], pair[0]))),
    )


def build_outline(entries: Sequence[Described]) -> Branch:
    """Arrange keys by the parts that their dots separate."""
    return _branch("", "", entries, 0)


def _branch(name: str, prefix: str, entries: Sequence[Described], depth: int) -> Branch:
    """Make the branch of a prefix of ``depth`` parts, and all below it."""
    groups: dict[str, list[Described]] = {}
    own: list[Described] = []
    for entry in entries:
        parts = entry.key.split(".", depth + 1)
        if len(parts) == depth + 1:
            own.append(entry)
        else:
            groups.setdefault(parts[depth], []).append(entry)
    if depth and not own and len(groups) == 1:
        ((part, found),) = groups.items()
        return _branch(f"{name}.{part}", f"{prefix}.{part}", found, depth + 1)
    branches = tuple(
        _branch(part, f"{prefix}.{part}" if depth else part, found, depth + 1)
        for part, found in sorted(groups.items(), key=lambda pair: natural_order(pair[0]))
    )
    return Branch(name, prefix, sum_up(entries), branches, tuple(own))


MAX_LANES = 128
_MARK = "/*DATA*/null"
_MAX_OBJECTS = 2048  # more columns than a screen has pixels say nothing more


def render_plot(description: Description, entries: Sequence[Described]) -> str:
    """Return the page.

    Args:
        description: The checkpoint.
        entries: Those of its keys that the page is about.
    """
    page = package_files(__package__).joinpath("plot_page.html").read_text(encoding="utf-8")
    # As text of a script element, where "</" or "<!--" would end or change it.
    data = json.dumps(_data(description, entries), separators=(",", ":")).replace("<", "\\u003c")
    before, after = page.split(_MARK)
    return f"{before}{data}{after}"


def _data(description: Description, entries: Sequence[Described]) -> dict[str, Any]:
    unit, lanes, lane_of = _lanes(description, entries)
    dtypes: dict[str, int] = {}
    rows = [
        [
            entry.key,
            dtypes.setdefault(entry.dtype or "value", len(dtypes)),
            "x".join(map(str, entry.sizes)) if entry.is_tensor else "-",
            entry.num_bytes,
            len(entry.shards),
            _cells(entry, lane_of),
        ]
        for entry in entries
    ]
    return {
        "url": description.url,
        "layout": description.layout,
        "save_id": description.save_id,
        "num_keys": len(description.entries),
        "unit": unit,
        "lanes": lanes,
        "num_objects": len(description.objects),
        "num_ranks": len({one.rank for one in description.objects if one.rank is not None}),
        "dtypes": list(dtypes),
        "objects": _objects(description, entries),
        "rows": rows,
    }


def _lanes(
    description: Description, entries: Sequence[Described]
) -> tuple[str, list[str], dict[str, int]]:
    """Return what a lane is, the names of all lanes, and the lane of each object."""
    used = {shard.object_key for entry in entries for shard in entry.shards}
    objects = [one for one in description.objects if one.key in used]
    ranks = {one.key: one.rank for one in objects if one.rank is not None}
    unit, names = "object", {one.key: one.key for one in objects}
    if objects and len(ranks) == len(objects):
        by_rank = sorted(ranks.items(), key=lambda pair: pair[1])
        unit, names = "rank", {key: str(rank) for key, rank in by_rank}
    order = list(dict.fromkeys(names.values()))
    width = max(1, -(-len(order) // MAX_LANES))
    joined = [order[start : start + width] for start in range(0, len(order), width)]
    number = {name: at for at, part in enumerate(joined) for name in part}
    return (
        unit,
        [part[0] if len(part) == 1 else f"{part[0]} to {part[-1]}" for part in joined],
        {key: number[name] for key, name in names.items()},
    )


def _cells(entry: Described, lane_of: Mapping[str, int]) -> list[int]:
    """Return ``[lane, bytes, lane, bytes, ...]`` of a key."""
    found: dict[int, int] = {}
    for shard in entry.shards:
        lane = lane_of[shard.object_key]
        found[lane] = found.get(lane, 0) + shard.num_bytes
    return [number for cell in sorted(found.items()) for number in cell]


def _objects(description: Description, entries: Iterable[Described]) -> list[list[Any]]:
    """Return ``[name, rank, items, bytes]`` per object, adjacent ones joined if too many."""
    empty = dict.fromkeys(one.key for one in description.objects if not one.num_items)
    rows = [[one.key, one.rank, one.num_items, one.stored_bytes] for one in collect(entries, empty)]
    width = max(1, -(-len(rows) // _MAX_OBJECTS))
    return [_join(rows[start : start + width]) for start in range(0, len(rows), width)]


def _join(rows: Sequence[Sequence[Any]]) -> list[Any]:
    if len(rows) == 1:
        return list(rows[0])
    name = f"{rows[0][0]} and {len(rows) - 1} more"
    return [name, rows[0][1], sum(row[2] for row in rows), sum(row[3] for row in rows)]
