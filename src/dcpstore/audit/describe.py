"""Which checkpoints lie below a URL, told from names alone: one LIST and no torch.

Objects are grouped by folder. A folder is a checkpoint if one of these lies right in it:

=====================================  ============  =======================
name                                   layout        what it says
=====================================  ============  =======================
``.dcpstore-{save_id}``                dcpstore      large manifest of a save
``__{rank}_{n}.{save_id}.distcp``      dcpstore      data of a save
``*.distcp``                           dcp           data of a stock writer
``.metadata``                          either        the checkpoint is sealed
``__{rank}.metadata``                  either        a rank's part is sealed
``*.safetensors``                      safetensors   there is no seal
=====================================  ============  =======================

What a checkpoint holds and where it lies, told from its metadata alone.

Of ours and of safetensors files without torch; a stock checkpoint's pickle needs it. One GET
for a checkpoint with DCP's metadata (two if its manifest is an object of its own), two per file
for safetensors; no data is read.

Keys of a checkpoint chosen, ordered, and summed up by prefix. Pure functions.

A page that shows how the bytes of a checkpoint spread over ranks and objects.

One file with everything in it: no network, no library. The page is ``plot_page.html`` with a
JSON document in place of its mark. *Lanes* are the ranks that wrote the checkpoint, or its
objects where their names tell no rank; adjacent lanes are joined where there are more than
`MAX_LANES`, so that 20,000 tensors of 1,024 ranks still make a page of some 20 MB.
"""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from importlib.resources import files
from math import prod
from typing import Any, Literal, TypeAlias

from dcpstore.config import ReadConfig
from dcpstore.errors import NotFoundError, StoreError
from dcpstore.format.dtypes import DTYPES
from dcpstore.format.keys import METADATA_KEY, save_id_of
from dcpstore.format.manifest import ItemId, Manifest, StoredItem
from dcpstore.format.safetensors import TensorInFile
from dcpstore.read.discovery import Discovered, discover
from dcpstore.read.safetensors import read_header
from dcpstore.store.base import ObjectInfo, Store
from dcpstore.text import collector_paused, count_text
from dcpstore.write.commit import probe

Layout: TypeAlias = Literal["dcpstore", "dcp", "safetensors"]

_RANK_SEAL_NAME = re.compile(r"__\d+\.metadata")
_NUMBER = re.compile(r"(\d+)")


@dataclass(frozen=True, slots=True)
class ListedCheckpoint:
    """A folder with a checkpoint, or with what an interrupted save left.

    Attributes:
        name: Path below the listed URL; empty for the URL itself.
        url: Of the checkpoint.
        layout: Who wrote it.
        is_sealed: Whether it can be loaded; None for safetensors, which have no seal.
        step: The last number in its name; None if there is none.
        num_objects: Objects below the folder; None where the store refused to list.
        num_bytes: Their size; None likewise.
        modified: When it was sealed, else when its newest object was put; None if unknown.
        remark: What a reader should know; empty as a rule.
    """

    name: str
    url: str
    layout: Layout
    is_sealed: bool | None
    step: int | None
    num_objects: int | None
    num_bytes: int | None
    modified: datetime | None
    remark: str = ""


@dataclass(frozen=True, slots=True)
class Listing:
    """What lies below a URL.

    Attributes:
        url: That was listed.
        checkpoints: In the natural order of their names (step-9 before step-10).
        num_other_objects: Objects that belong to no checkpoint.
        was_refused: Whether the store refused to list, so that only the URL itself was
            looked at.
    """

    url: str
    checkpoints: tuple[ListedCheckpoint, ...]
    num_other_objects: int = 0
    was_refused: bool = False


def list_checkpoints(store: Store) -> Listing:
    """List the checkpoints below a store's root, the root included.

    One LIST. Where the store refuses it, one GET tells whether the root is a checkpoint.

    Raises:
        NotFoundError: If there is no checkpoint and no leftover of one.
        StoreError: If the store fails, or refuses both.
    """
    try:
        objects = list(store.list())
    except StoreError as error:
        if not error.denied:
            raise
        return _look_without_listing(store, error)
    except NotFoundError as error:
        raise NotFoundError(f"nothing lies at {store.url}: {error}") from error
    listing = _group(store.url, objects)
    if not listing.checkpoints:
        raise NotFoundError(_say_nothing_found(store.url, objects))
    return listing


def _look_without_listing(store: Store, refusal: StoreError) -> Listing:
    try:
        found = probe(store, METADATA_KEY, denied_is_absent=False)
    except StoreError:
        found = None
    if found is None:
        raise StoreError(
            f"{refusal}. Listing needs the permission to list the bucket (s3:ListBucket,"
            " storage.objects.list). Without it, give the URL of one checkpoint",
            denied=True,
        ) from refusal
    only = ListedCheckpoint(
        name="",
        url=store.url,
        layout="dcpstore" if found.seal is not None else "dcp",
        is_sealed=True,
        step=_step_of(store.url.rsplit("/", 1)[-1]),
        num_objects=None,
        num_bytes=None,
        modified=None,
        remark="the store refused to list",
    )
    return Listing(store.url, (only,), was_refused=True)


def _say_nothing_found(url: str, objects: list[ObjectInfo]) -> str:
    if not objects:
        return f"nothing lies at {url}: no object's key starts with it. Check the URL"
    more = f" and {len(objects) - 1} more" if len(objects) > 1 else ""
    return (
        f"no checkpoint lies at or below {url}: {objects[0].key}{more} belong to none."
        " A checkpoint is a folder with .metadata, *.distcp or *.safetensors"
    )


def _group(url: str, objects: Iterable[ObjectInfo]) -> Listing:
    """Tell the checkpoints of a listing apart."""
    folders: dict[str, list[ObjectInfo]] = {}
    for info in objects:
        folders.setdefault(info.key.rpartition("/")[0], []).append(info)
    layouts = {name: layout for name, inside in folders.items() if (layout := _layout_of(inside))}
    members: dict[str, list[ObjectInfo]] = {name: [] for name in layouts}
    num_other = 0
    for name, inside in folders.items():
        owner = next((parent for parent in _parents(name) if parent in layouts), None)
        if owner is None:
            num_other += len(inside)
        else:
            members[owner] += inside
    checkpoints = [
        _describe_folder(url, name, layout, folders[name], members[name])
        for name, layout in layouts.items()
    ]
    return Listing(
        url, tuple(sorted(checkpoints, key=lambda one: natural_order(one.name))), num_other
    )


def _parents(folder: str) -> Iterator[str]:
    """Yield a folder and those around it, from the inside out; the root is empty."""
    while folder:
        yield folder
        folder = folder.rpartition("/")[0]
    yield ""


def _layout_of(inside: Iterable[ObjectInfo]) -> Layout | None:
    names = [_base(info.key) for info in inside]
    if any(save_id_of(name) for name in names):
        return "dcpstore"
    if any(name == METADATA_KEY or name.endswith(".distcp") for name in names):
        return "dcp"
    if any(_RANK_SEAL_NAME.fullmatch(name) for name in names):
        return "dcp"
    return "safetensors" if any(name.endswith(".safetensors") for name in names) else None


def _describe_folder(
    url: str, name: str, layout: Layout, inside: list[ObjectInfo], members: list[ObjectInfo]
) -> ListedCheckpoint:
    seals = _seals(inside)
    is_sealed, remark = _judge(layout, seals)
    times = [info.modified for info in (seals.values() or members) if info.modified is not None]
    return ListedCheckpoint(
        name=name,
        url=f"{url.rstrip('/')}/{name}" if name else url,
        layout=layout,
        is_sealed=is_sealed,
        step=_step_of(name or url.rsplit("/", 1)[-1]),
        num_objects=len(members),
        num_bytes=sum(info.size_bytes for info in members),
        modified=max(times, default=None),
        remark=remark,
    )


def _seals(inside: Iterable[ObjectInfo]) -> Mapping[str, ObjectInfo]:
    """Return the metadata of the checkpoint, or of its ranks if it has none of its own."""
    found = {_base(info.key): info for info in inside}
    if METADATA_KEY in found:
        return {METADATA_KEY: found[METADATA_KEY]}
    return {name: info for name, info in found.items() if _RANK_SEAL_NAME.fullmatch(name)}


def _judge(layout: Layout, seals: Mapping[str, ObjectInfo]) -> tuple[bool | None, str]:
    if layout == "safetensors":
        return None, ""
    empty = [name for name, info in seals.items() if info.size_bytes == 0]
    if empty:
        return False, f"its {empty[0]} is empty"
    if METADATA_KEY in seals or not seals:
        return bool(seals), ""
    return True, f"sealed by {count_text(len(seals), 'rank')}, each for itself"


def _base(key: str) -> str:
    return key.rpartition("/")[2]


def _step_of(name: str) -> int | None:
    """Return the last number of the innermost folder that has one."""
    for part in reversed(name.split("/")):
        numbers: list[str] = _NUMBER.findall(part)
        if numbers:
            return int(numbers[-1])
    return None


def natural_order(name: str) -> tuple[tuple[str, int], ...]:
    """Return a sort key by which step-9 comes before step-10."""
    parts = _NUMBER.split(name)
    return tuple(("", int(part)) if at % 2 else (part, 0) for at, part in enumerate(parts))


FileLayout: TypeAlias = Literal["dcpstore", "dcp", "safetensors", "torch_file"]

_RANK_OF = re.compile(r"(?:.*/)?__(\d+)_\d+\.")
_RANK_SEAL = re.compile(r"__(\d+)\.metadata")


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
        return _rank_of(self.object_key)


@dataclass(frozen=True, slots=True)
class Described:
    """One key of the checkpoint.

    Attributes:
        key: Its flattened name.
        dtype: Name of its dtype; empty for a value.
        sizes: Shape of the whole tensor in elements; empty for a value.
        is_tensor: Whether it is a tensor, and not any other value.
        shards: Its stored pieces.
        is_in_state_dict: False for an item that a planner stored beside the state dict.
    """

    key: str
    dtype: str
    sizes: tuple[int, ...]
    is_tensor: bool
    shards: tuple[Shard, ...]
    is_in_state_dict: bool = True

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
class DescribedObject:
    """A data object.

    Attributes:
        key: Relative to the checkpoint's folder.
        rank: That wrote it, where the name tells.
        num_items: Records in it.
        stored_bytes: Of these records.
        size_bytes: Of the object, where the metadata tell.
    """

    key: str
    rank: int | None
    num_items: int
    stored_bytes: int
    size_bytes: int | None


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
    """

    url: str
    layout: FileLayout
    entries: tuple[Described, ...]
    objects: tuple[DescribedObject, ...]
    save_id: str | None = None
    info: Mapping[str, Any] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()


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
        sealed = [discover(store, config, rank=rank) for rank in _sealed_ranks(store)]
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
    entries: Iterable[Described], sizes: Mapping[str, int | None] | None = None
) -> tuple[DescribedObject, ...]:
    """Count what each object holds.

    Args:
        entries: Keys with their shards.
        sizes: Objects that are known, with their size; also those that hold nothing.
    """
    known = dict(sizes or {})
    counts: dict[str, list[int]] = {key: [0, 0] for key in known}
    for entry in entries:
        for shard in entry.shards:
            count = counts.setdefault(shard.object_key, [0, 0])
            count[0] += 1
            count[1] += shard.stored_bytes
    objects = (
        DescribedObject(key, _rank_of(key), num_items, stored_bytes, known.get(key))
        for key, (num_items, stored_bytes) in counts.items()
    )
    return tuple(sorted(objects, key=lambda one: natural_order(one.key)))


def _describe(discovered: Discovered, config: ReadConfig) -> Description:
    if discovered.manifest is not None:
        return _of_manifest(discovered.url, discovered.decode_manifest(config.max_metadata_bytes))
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
            is_tensor=entry.properties is not None,
            shards=tuple(shards.get(entry.fqn, ())),
            is_in_state_dict=entry.in_state_dict,
        )
        for entry in manifest.entries
    ]
    sizes = {one.key: one.size_bytes for one in manifest.objects}
    return _finish(url, "dcpstore", entries, sizes, save_id=manifest.save_id, info=manifest.info)


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
            is_tensor=fqn in dtypes,
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
                is_tensor=True,
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
    *,
    save_id: str | None = None,
    info: Mapping[str, Any] | None = None,
) -> Description:
    entries.sort(key=lambda entry: natural_order(entry.key))
    return Description(
        url, layout, tuple(entries), collect(entries, sizes), save_id, dict(info or {})
    )


def _merge(url: str, parts: list[Description]) -> Description:
    """Join what ranks sealed each for itself (``use_collectives=False``)."""
    entries = [entry for part in parts for entry in part.entries]
    sizes = {one.key: one.size_bytes for part in parts for one in part.objects}
    joined = _finish(url, parts[0].layout, entries, sizes)
    remark = (
        f"sealed by {count_text(len(parts), 'rank')}, each for itself: keys may come once per rank"
    )
    return Description(joined.url, joined.layout, joined.entries, joined.objects, remarks=(remark,))


def _sealed_ranks(store: Store) -> list[int]:
    try:
        matches = [_RANK_SEAL.fullmatch(info.key) for info in store.list()]
    except NotFoundError:
        return []
    except StoreError as error:
        if not error.denied:
            raise
        return []
    return sorted(int(match[1]) for match in matches if match)


@lru_cache(maxsize=64)  # thousands of tensors share a few texts
def _dtype_in(properties: str) -> str:
    return str(json.loads(properties)["dtype"])


@lru_cache(maxsize=4096)
def _rank_of(object_key: str) -> int | None:
    match = _RANK_OF.match(object_key)
    return int(match[1]) if match else None


def iter_shards(entries: Iterable[Described]) -> Iterator[tuple[Described, Shard]]:
    """Yield every stored piece with its key."""
    for entry in entries:
        for shard in entry.shards:
            yield entry, shard


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
        by_dtype: Bytes in memory per dtype, the largest first.
    """

    num_tensors: int
    num_values: int
    num_elements: int
    num_shards: int
    num_bytes: int
    stored_bytes: int
    by_dtype: tuple[tuple[str, int], ...]


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
    found = sorted(entries, key=lambda entry: natural_order(entry.key))
    if order == "bytes":
        found.sort(key=lambda entry: -entry.num_bytes)
    elif order == "shards":
        found.sort(key=lambda entry: -len(entry.shards))
    elif order == "dtype":
        found.sort(key=lambda entry: entry.dtype)
    elif order == "shape":
        found.sort(key=lambda entry: entry.sizes)
    return tuple(reversed(found) if is_reversed else found)


def sum_up(entries: Iterable[Described]) -> Totals:
    """Add entries up."""
    num_tensors = num_values = num_elements = num_shards = num_bytes = stored_bytes = 0
    by_dtype: dict[str, int] = {}
    for entry in entries:
        size_bytes = entry.num_bytes
        if entry.is_tensor:
            num_tensors += 1
            num_elements += entry.num_elements
            by_dtype[entry.dtype] = by_dtype.get(entry.dtype, 0) + size_bytes
        else:
            num_values += 1
        num_shards += len(entry.shards)
        num_bytes += size_bytes
        stored_bytes += entry.stored_bytes
    largest_first = tuple(sorted(by_dtype.items(), key=lambda pair: (-pair[1], pair[0])))
    return Totals(
        num_tensors, num_values, num_elements, num_shards, num_bytes, stored_bytes, largest_first
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
    page = files(__package__).joinpath("plot_page.html").read_text(encoding="utf-8")
    # As text of a script element, where "</" or "<!--" would end or change it.
    data = json.dumps(_data(description, entries), separators=(",", ":")).replace("<", "\\u003c")
    before, after = page.split(_MARK)
    return f"{before}{data}{after}"


@dataclass(frozen=True, slots=True)
class _Lanes:
    """The columns of the page.

    Attributes:
        unit: What a lane is: ``"rank"`` or ``"object"``.
        names: Of each lane.
        of_object: The lane of each object.
    """

    unit: str
    names: tuple[str, ...]
    of_object: Mapping[str, int]


def _data(description: Description, entries: Sequence[Described]) -> dict[str, Any]:
    lanes = _lanes(description, entries)
    dtypes: dict[str, int] = {}
    rows = [
        [
            entry.key,
            dtypes.setdefault(entry.dtype or "value", len(dtypes)),
            "x".join(map(str, entry.sizes)) if entry.is_tensor else "-",
            entry.num_bytes,
            len(entry.shards),
            _cells(entry, lanes),
        ]
        for entry in entries
    ]
    return {
        "url": description.url,
        "layout": description.layout,
        "save_id": description.save_id,
        "num_keys": len(description.entries),
        "unit": lanes.unit,
        "lanes": lanes.names,
        "num_objects": len(description.objects),
        "num_ranks": len({one.rank for one in description.objects if one.rank is not None}),
        "dtypes": list(dtypes),
        "objects": _objects(description, entries),
        "rows": rows,
    }


def _lanes(description: Description, entries: Sequence[Described]) -> _Lanes:
    used = {shard.object_key for entry in entries for shard in entry.shards}
    objects = [one for one in description.objects if one.key in used]
    if objects and all(one.rank is not None for one in objects):
        unit = "rank"
        order = sorted({one.rank for one in objects if one.rank is not None})
        at = {rank: number for number, rank in enumerate(order)}
        places = {one.key: at[one.rank] for one in objects if one.rank is not None}
        names = [str(rank) for rank in order]
    else:
        unit, names = "object", [one.key for one in objects]
        places = {name: number for number, name in enumerate(names)}
    width = max(1, -(-len(names) // MAX_LANES))
    joined = [names[start : start + width] for start in range(0, len(names), width)]
    return _Lanes(
        unit,
        tuple(part[0] if len(part) == 1 else f"{part[0]} to {part[-1]}" for part in joined),
        {key: place // width for key, place in places.items()},
    )


def _cells(entry: Described, lanes: _Lanes) -> list[int]:
    """Return ``[lane, bytes, lane, bytes, ...]`` of a key."""
    found: dict[int, int] = {}
    for shard in entry.shards:
        lane = lanes.of_object[shard.object_key]
        found[lane] = found.get(lane, 0) + shard.num_bytes
    return [number for cell in sorted(found.items()) for number in cell]


def _objects(description: Description, entries: Iterable[Described]) -> list[list[Any]]:
    """Return ``[name, rank, items, bytes]`` per object, adjacent ones joined if too many."""
    counts: dict[str, list[int]] = {}
    for entry in entries:
        for shard in entry.shards:
            count = counts.setdefault(shard.object_key, [0, 0])
            count[0] += 1
            count[1] += shard.stored_bytes
    rows = [
        [one.key, one.rank, *counts.get(one.key, (0, 0))]
        for one in description.objects
        if one.key in counts or not one.num_items
    ]
    width = max(1, -(-len(rows) // _MAX_OBJECTS))
    return [_join(rows[start : start + width]) for start in range(0, len(rows), width)]


def _join(rows: Sequence[Sequence[Any]]) -> list[Any]:
    if len(rows) == 1:
        return list(rows[0])
    name = f"{rows[0][0]} and {len(rows) - 1} more"
    return [name, rows[0][1], sum(row[2] for row in rows), sum(row[3] for row in rows)]
