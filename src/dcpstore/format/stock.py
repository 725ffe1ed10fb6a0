"""Open a pickled ``.metadata`` without running or believing what lies in the bucket.

Torch pickles its checkpoint metadata. Unpickling may call any function that the bytes name,
change any object that they can get hold of, and take any time and memory. So:

1. `dcpstore.format.opcodes` measures the program and rewrites it so that nothing is hashed
2. Python's unpickler runs it; what it may name stands for a class of such metadata, and holds
   what it is given
3. what comes out is checked, part by part, and the real objects are made of it

Torch-free as long as no pickle is opened.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain, islice
from math import prod
from operator import gt
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dcpstore.config import MAX_METADATA_BYTES
from dcpstore.errors import CorruptError
from dcpstore.format.opcodes import SET_MARK, BadPickleError, without_hashing
from dcpstore.text import collector_paused

if TYPE_CHECKING:
    import torch


_METADATA = "torch.distributed.checkpoint.metadata"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"
_SHARDED = "torch.distributed._shard.sharded_tensor.metadata"
_MAX_DIMENSIONS = 64  # as many as torch can iterate over
_MAX_DEPTH = 64  # of what a planner keeps
_MAX_PATH = 4096  # characters; as long as Linux takes them
_MAX_SHOWN = 80  # characters of a name in a message


class _Refused(pickle.UnpicklingError):
    """A name that metadata have no use for."""


class _Damaged(ValueError):
    """What was unpickled is not what metadata are made of.

    Args:
        message: What was found and where.
        fqn: The state-dict key it belongs to, where known.
    """

    def __init__(self, message: str, fqn: str | None = None) -> None:
        super().__init__(message)
        self.fqn = fqn


# --- what stands for the classes of metadata -------------------------------------------------
# Lists that hold what they are given and have no attributes: nothing of them can be changed but
# their contents, and they are neither hashed nor compared. The unpickler makes and fills them
# without calling Python. It sets attributes from dicts only, and the program makes none.


class _Pairs(list[Any]):
    """A dict as its keys and values in turn, or a set as `dcpstore.format.opcodes` says."""

    __slots__ = ()
    __setstate__ = list.extend  # how the rewritten program adds one pair


class _Ordered(_Pairs):
    """The same of an ordered dict, which is empty at first."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        if type(state) is tuple:  # a pair; else attributes, of which metadata have no use
            self.extend(state)


class _Record(list[Any]):
    """An instance of one of torch's classes. Its one element is what it is to be made of."""

    __slots__ = ()
    __setstate__ = list.append


class _Index(_Record):
    __slots__ = ()


class _StorageInfo(_Record):
    __slots__ = ()


class _Chunk(_Record):
    __slots__ = ()


class _Properties(_Record):
    __slots__ = ()


class _ShardedProperties(_Record):
    __slots__ = ()


class _Tensor(_Record):
    __slots__ = ()


class _Value(_Record):
    __slots__ = ()


class _Whole(_Record):
    __slots__ = ()


class _StorageMeta(_Record):
    __slots__ = ()


class _Other(_Record):
    """Of a class of other writers."""

    __slots__ = ()


class _Set(_Record):
    """A set by the list of its members."""

    __slots__ = ()


class _FrozenSet(_Record):
    """A frozenset by the list of its members."""

    __slots__ = ()


class _Call:
    """A function that a pickle may call."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *arguments: Any) -> Any:
        return self._function(*arguments)


def _wrapped(kind: type[_Record], members: Any = ()) -> _Record:
    found = kind()
    found.append(members)
    return found


def _memory_format(number: Any) -> torch.memory_format:
    import torch

    formats = (torch.contiguous_format, torch.channels_last, torch.preserve_format)
    if type(number) is not int or not 0 <= number < len(formats):
        raise _Damaged("a memory format is none of torch's")
    return formats[number]


def _layout(name: Any) -> torch.layout:
    found = _layouts().get(name) if type(name) is str else None
    if found is None:
        raise _Damaged("a layout is none of torch's")
    return found


@lru_cache(maxsize=1)
def _layouts() -> Mapping[str, torch.layout]:
    import torch

    values = vars(torch).values()
    return {str(value): value for value in values if isinstance(value, torch.layout)}


def _path(*parts: Any) -> str:
    # A foreign system's path class cannot be made here, and none is needed.
    if len(parts) > _MAX_PATH or not all(type(part) is str for part in parts):
        raise _Damaged("a path has parts that are no texts")
    if sum(map(len, parts)) > _MAX_PATH:
        raise _Damaged(f"a path is longer than {_MAX_PATH} characters")
    return str(PurePosixPath(*parts))


# Everything that torch 2.0 to 2.14 puts into a checkpoint's metadata.
_ALLOWED: Mapping[tuple[str, str], Any] = {
    (_METADATA, "BytesStorageMetadata"): _Value,
    (_METADATA, "ChunkStorageMetadata"): _Chunk,
    (_METADATA, "Metadata"): _Whole,
    (_METADATA, "MetadataIndex"): _Index,
    (_METADATA, "StorageMeta"): _StorageMeta,
    (_METADATA, "TensorProperties"): _Properties,
    (_METADATA, "TensorStorageMetadata"): _Tensor,
    (_METADATA, "_MEM_FORMAT_ENCODING"): _Call(_memory_format),
    (_FILESYSTEM, "_StorageInfo"): _StorageInfo,
    (_FILESYSTEM, "_StoragePrefix"): _Other,
    ("torch.distributed.checkpoint._hf_utils", "_HFStorageInfo"): _Other,
    (_SHARDED, "TensorProperties"): _ShardedProperties,
    (_SHARDED, "MEM_FORMAT_ENCODING"): _Call(_memory_format),
    # Immutable, made without calling Python, and it copies nothing: slice(None, sizes, None).
    ("torch", "Size"): slice,
    ("torch.serialization", "_get_layout"): _Call(_layout),
    ("collections", "OrderedDict"): _Ordered,
    **{
        (module, name): kind
        for module in ("builtins", "__builtin__")
        for name, kind in (
            ("set", _Call(lambda *members: _wrapped(_Set, *members))),
            ("frozenset", _Call(lambda *members: _wrapped(_FrozenSet, *members))),
        )
    },
    **{
        (module, name): _Call(_path)
        for module, names in (
            ("pathlib", "Path PosixPath PurePosixPath WindowsPath PureWindowsPath"),
            ("pathlib._local", "PosixPath WindowsPath"),
        )
        for name in names.split()
    },
}


class _Unpickler(pickle.Unpickler):
    """An unpickler that knows only the names above and torch's dtypes."""

    def find_class(self, module: str, name: str) -> Any:
        found = _ALLOWED.get((module, name))
        if found is not None:
            return found
        if module == "torch" and "." not in name:
            import torch

            value = getattr(torch, name, None)
            if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
                return value
        raise _Refused(f"{module}.{name}")

    persistent_load = _Pairs


def load_metadata_pickle(
    data: bytes | memoryview,
    *,
    key: str,
    allow_pickle: bool = False,
    max_bytes: int = MAX_METADATA_BYTES,
) -> Any:
    """Unpickle a ``.metadata`` object.

    Args:
        data: The object's bytes; anything after the pickle is ignored.
        key: Its name, for messages.
        allow_pickle: Use plain pickle, which runs whatever the bytes name, and believe it.
        max_bytes: Most memory that what the bytes make may take, by an estimate.

    Returns:
        Torch's ``Metadata``, whose every part is of the type and in the range that torch's own
        writers give it; what a planner keeps beside it is made of plain data.

    Raises:
        CorruptError: If the bytes name a global that metadata has no use for, are no pickle, or
            make anything but metadata. Nothing that they name was called.
    """
    try:
        if allow_pickle:
            return pickle.loads(data)  # noqa: S301 - the caller asked for it by name
        with collector_paused():
            program = without_hashing(bytes(data), max_bytes=max_bytes)
            found = _Unpickler(io.BytesIO(program)).load()
            del program
            return _Gate(len(data)).metadata(found)
    except _Refused as error:
        raise CorruptError(
            f"{key} names {error}, which checkpoint metadata has no use for; it was not run."
            " If you wrote this checkpoint yourself with a planner that keeps objects of its"
            " own there, load it with ReadConfig(allow_pickle=True)",
            key=key,
        ) from error
    except (_Damaged, BadPickleError) as error:
        fqn = error.fqn if isinstance(error, _Damaged) else None
        message = f"{key} is no checkpoint metadata, or is damaged: {error}"
        raise CorruptError(message, key=key, fqn=fqn) from error
    except Exception as error:
        text = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
        raise CorruptError(f"{key} is no checkpoint metadata: {text}", key=key) from error


# --- the gate ----------------------------------------------------------------------------------


class _Gate:
    """Makes torch's metadata of what stands for them, and refuses what is none.

    Works on columns of many records. What the pickle shares is counted as often as it is used,
    so that no part is looked at more often than a program of that length makes parts.

    Args:
        num_parts: Most parts.
    """

    def __init__(self, num_parts: int) -> None:
        from torch.distributed.checkpoint import metadata

        self._torch = metadata
        self._num_parts = num_parts
        self._num_seen = 0

    def metadata(self, found: Any) -> Any:
        if type(found) is not _Whole:
            raise _Damaged(f"it holds {_kind(found)}, not DCP metadata")
        fields = self._fields(found, "the metadata")
        entries = self._entries(fields.get("state_dict_metadata"))
        made = self._torch.Metadata(entries)
        made.storage_data = self._storage_data(fields.get("storage_data"), entries)
        made.planner_data = self._planner_data(fields.get("planner_data"))
        meta, version = fields.get("storage_meta"), fields.get("version")
        made.storage_meta = None if meta is None else self._storage_meta(meta)
        if not (version is None or type(version) is str):
            raise _Damaged(f"the metadata's version is {_kind(version)}")
        made.version = version
        return made

    # --- tensors and values --------------------------------------------------------------

    def _entries(self, found: Any) -> dict[str, Any]:
        if type(found) not in (_Pairs, _Ordered) or len(found) % 2:
            raise _Damaged(f"state_dict_metadata is {_kind(found)}, not a dict")
        fqns, values = found[::2], found[1::2]
        _check_types(fqns, {str}, "a key of state_dict_metadata", None)
        _check_types(values, {_Tensor, _Value}, "the entry", fqns)
        self._count(len(fqns))
        entries: dict[str, Any] = dict.fromkeys(fqns)
        tensors = [row for row, value in enumerate(values) if type(value) is _Tensor]
        made = self._tensors([fqns[row] for row in tensors], [values[row] for row in tensors])
        for fqn, value in zip(fqns, values, strict=True):
            is_tensor = type(value) is _Tensor
            entries[fqn] = next(made) if is_tensor else self._torch.BytesStorageMetadata()
        return entries

    def _tensors(self, fqns: list[str], records: list[Any]) -> Iterator[Any]:
        names = ("properties", "size", "chunks")
        properties, sizes, chunks = self._columns(records, _Tensor, names, "the tensor", fqns)
        shapes = self._shapes(sizes, "the shape", fqns)
        _check_types(chunks, {list}, "the list of chunks", fqns)
        self._count(sum(map(len, chunks)))
        made = self._properties(properties, fqns)
        for fqn, one, size in zip(fqns, made, shapes.sizes, strict=True):
            if prod(size) * one.dtype.itemsize >= 1 << 63:
                raise _Damaged(f"{_shown(fqn)} has the impossible shape {tuple(size)}", fqn)
        boxes = iter(self._chunks(fqns, shapes, chunks))
        for one, size, held in zip(made, shapes.sizes, chunks, strict=True):
            yield self._torch.TensorStorageMetadata(one, size, list(islice(boxes, len(held))))

    def _chunks(self, fqns: list[str], shapes: _Shapes, chunks: list[list[Any]]) -> list[Any]:
        """Make the chunks of all tensors, one tensor after the other."""
        owners = np.repeat(np.arange(len(chunks)), list(map(len, chunks)))
        names = [fqns[owner] for owner in owners.tolist()]
        records = list(chain.from_iterable(chunks))
        columns = self._columns(records, _Chunk, ("offsets", "sizes"), "a chunk", names)
        offsets = self._shapes(columns[0], "the offset of a chunk", names)
        sizes = self._shapes(columns[1], "the shape of a chunk", names)
        whole = shapes.rows(owners)
        is_bad = (offsets.ranks != whole.ranks) | (sizes.ranks != whole.ranks)
        if is_bad.any():
            raise _at("a chunk", "has another rank than the tensor", names, is_bad.argmax())
        is_bad = sizes.flat > whole.flat - offsets.flat
        if is_bad.any():
            row = np.searchsorted(np.cumsum(sizes.ranks), is_bad.argmax(), "right")
            raise _at("a chunk", "reaches past the tensor", names, row)
        kind = self._torch.ChunkStorageMetadata
        made = [object.__new__(kind) for _ in records]
        for one, offset, size in zip(made, offsets.sizes, sizes.sizes, strict=True):
            one.__dict__ = {"offsets": offset, "sizes": size}
        return made

    def _properties(self, records: list[Any], fqns: list[str]) -> list[Any]:
        import torch
        from torch.distributed._shard.sharded_tensor import metadata as sharded

        kinds: dict[type, Any] = {
            _Properties: self._torch.TensorProperties,
            _ShardedProperties: sharded.TensorProperties,
        }
        _check_types(records, set(kinds), "the properties", fqns)
        types = [torch.dtype, torch.layout, bool, torch.memory_format, bool]
        made = []
        for fqn, record in zip(fqns, records, strict=True):
            state = record[0] if len(record) == 1 else None
            if type(state) is not tuple or len(state) != 5 or list(map(type, state)) != types:
                raise _Damaged(f"the properties of {_shown(fqn)} are not a tensor's", fqn)
            made.append(one := kinds[type(record)].__new__(kinds[type(record)]))
            names = ("dtype", "layout", "requires_grad", "memory_format", "pin_memory")
            one.__dict__.update(zip(names, state, strict=True))
        return made

    # --- where items lie -----------------------------------------------------------------

    def _storage_data(self, found: Any, entries: Mapping[str, Any]) -> Any:
        if found is None:  # refused when an item is looked for
            return None
        if type(found) not in (_Pairs, _Ordered) or len(found) % 2:
            raise _Damaged(f"storage_data is {_kind(found)}: it does not say where items lie")
        self._count(len(found))
        indices = self._indices(found[::2], entries)
        places = self._places(found[1::2], [one.fqn for one in indices])
        return dict(zip(indices, places, strict=True))

    def _indices(self, records: list[Any], entries: Mapping[str, Any]) -> list[Any]:
        what = "a key of storage_data"
        names = ("fqn", "offset", "index")
        fqns, offsets, hints = self._columns(records, _Index, names, what, None)
        _check_types(fqns, {str}, "the name in " + what, None)
        _check_types(hints, {int, type(None)}, "the hint in " + what, fqns)
        rows = [row for row, offset in enumerate(offsets) if offset is not None]
        named = [fqns[row] for row in rows]
        shapes = self._shapes([offsets[row] for row in rows], "the offset in " + what, named)
        # Also so that nobody makes up many offsets whose hashes are the same: there are fewer
        # elements in a tensor than hashes.
        wholes = [getattr(entries.get(fqn), "size", None) for fqn in named]
        for fqn, offset, whole in zip(named, shapes.sizes, wholes, strict=True):
            if whole is None:
                is_outside = prod(one + 1 for one in offset) >= 1 << 63
            else:
                is_outside = len(offset) != len(whole) or any(map(gt, offset, whole))
            if is_outside:
                raise _Damaged(f"an index of {_shown(fqn)} lies outside the tensor", fqn)
        inside: list[Any] = [None] * len(fqns)
        for row, offset in zip(rows, shapes.sizes, strict=True):
            inside[row] = offset
        kind = self._torch.MetadataIndex
        made = [object.__new__(kind) for _ in records]
        for one, fqn, offset, hint in zip(made, fqns, inside, hints, strict=True):
            one.__dict__.update(fqn=fqn, offset=offset, index=hint)
        return made

    def _places(self, records: list[Any], fqns: list[str]) -> list[Any]:
        from torch.distributed.checkpoint.filesystem import _StorageInfo as Info

        what = "the place"
        names = ("relative_path", "offset", "length", "transform_descriptors")
        columns = self._columns(records, _StorageInfo, names, what, fqns)
        paths, starts, lengths, transforms = columns
        _check_types(paths, {str}, "the file", fqns)
        for numbers in (starts, lengths):
            _check_types(numbers, {int}, what, fqns)
            if numbers and not 0 <= min(numbers) <= max(numbers) < 1 << 62:
                row = next(row for row, one in enumerate(numbers) if not 0 <= one < 1 << 62)
                raise _at(what, "is an impossible range", fqns, row)
        _check_types(transforms, {type(None), list, tuple}, "the list of transforms", fqns)
        made = [object.__new__(Info) for _ in records]
        for one, *values in zip(made, paths, starts, lengths, strict=True):
            one.__dict__ = dict(zip(names, values, strict=False))
        for row, texts in enumerate(transforms):
            if texts is not None:
                self._count(len(texts))
                _check_types(texts, {str}, "a transform", [fqns[row]] * len(texts))
                made[row].transform_descriptors = texts
        return made

    def _storage_meta(self, found: Any) -> Any:
        if type(found) is not _StorageMeta:
            raise _Damaged(f"the storage's facts are {_kind(found)}")
        fields = self._fields(found, "the storage's facts")
        modules = fields.get("modules", [])
        texts = [fields.get(name) for name in ("checkpoint_id", "save_id", "load_id")]
        _check_types(texts, {str, type(None)}, "a name of the storage", None)
        _check_types([modules], {list}, "the list of the storage's modules", None)
        self._count(len(modules))
        _check_types(modules, {str}, "a module of the storage", None)
        checkpoint_id, save_id, load_id = texts
        return self._torch.StorageMeta(checkpoint_id, save_id, load_id, list(modules))

    # --- what a planner keeps --------------------------------------------------------------

    def _planner_data(self, found: Any) -> Any:
        if type(found) is _Pairs and len(found) % 2 == 0:
            fqns, paths = found[::2], found[1::2]
            if set(map(type, paths)) <= {tuple} and set(map(type, fqns)) <= {str}:
                self._count(sum(map(len, paths)))
                if set(map(type, chain.from_iterable(paths))) <= {str, int}:
                    return dict(zip(fqns, paths, strict=True))
        return self._plain(found, 0)

    def _plain(self, found: Any, depth: int) -> Any:
        """Return plain data, made of dicts and sets again; refuse all else."""
        kind = type(found)
        if found is None or kind in _SCALARS:
            return found
        if depth > _MAX_DEPTH:
            raise _Damaged(f"the planner's data are nested more than {_MAX_DEPTH} times")
        if kind in (list, tuple):
            self._count(len(found))
            return kind(self._plain(one, depth + 1) for one in found)
        if kind is slice:
            return self._shapes([found], "a shape", None).sizes[0]
        if kind in (_Set, _FrozenSet) and len(found) == 1 and type(found[0]) in (list, tuple):
            return self._members(found[0], is_frozen=kind is _FrozenSet)
        if kind is _Pairs and len(found) == 2 and found[1] == SET_MARK and type(found[0]) is tuple:
            return self._members(found[0], is_frozen=True)
        if kind is _Pairs and found and found[0] == SET_MARK:
            return self._members(found[1:], is_frozen=False)
        if kind in (_Pairs, _Ordered) and len(found) % 2 == 0:
            self._count(len(found))
            _check_types(found[::2], {*_SCALARS, type(None)}, "a key of the planner's data", None)
            values = [self._plain(one, depth + 1) for one in found[1::2]]
            pairs = zip(found[::2], values, strict=True)
            return dict(pairs) if kind is _Pairs else OrderedDict(pairs)
        import torch

        if isinstance(found, torch.dtype | torch.layout | torch.memory_format):
            return found
        raise _Damaged(f"the planner's data hold {_kind(found)}")

    def _members(self, members: Sequence[Any], *, is_frozen: bool) -> Any:
        self._count(len(members))
        _check_types(members, {*_SCALARS, type(None)}, "a member of a set", None)
        return (frozenset if is_frozen else set)(members)

    # --- parts ---------------------------------------------------------------------------

    def _count(self, num_parts: int) -> None:
        self._num_seen += num_parts
        if self._num_seen > self._num_parts:
            raise _Damaged("its parts are shared so often that it would never be read to its end")

    def _fields(self, found: Any, what: str) -> dict[str, Any]:
        state = found[0] if len(found) == 1 else None
        if type(state) is not _Pairs or len(state) % 2:
            raise _Damaged(f"{what} are no record with fields")
        self._count(len(state))
        _check_types(state[::2], {str}, f"a field of {what}", None)
        return dict(zip(state[::2], state[1::2], strict=True))

    def _columns(
        self,
        records: list[Any],
        kind: type[_Record],
        names: Sequence[str],
        what: str,
        fqns: Sequence[str] | None,
    ) -> list[list[Any]]:
        """Return the fields of records of one kind by name; None for those that are not there.

        Args:
            records: Counted already.
            kind: Of all of them.
            names: Of the fields.
            what: Such a record, for messages.
            fqns: The key that each belongs to, for messages.
        """
        _check_types(records, {kind}, what, fqns)
        if not set(map(len, records)) <= {1}:
            row = next(row for row, one in enumerate(records) if len(one) != 1)
            raise _at(what, "has no fields", fqns, row)
        states = list(chain.from_iterable(records))
        _check_types(states, {_Pairs}, f"what {what} is made of", fqns)
        order = states[0][::2] if states else []
        width = 2 * len(order)
        if set(map(type, order)) <= {str} and set(map(len, states)) <= {width}:
            flat = list(chain.from_iterable(states))
            if all(flat[2 * i :: width].count(name) == len(states) for i, name in enumerate(order)):
                found = {name: flat[2 * i + 1 :: width] for i, name in enumerate(order)}
                return [found.get(name) or [None] * len(states) for name in names]
        self._count(sum(map(len, states)))
        rows = []
        for row, state in enumerate(states):
            if len(state) % 2 or not set(map(type, state[::2])) <= {str}:
                raise _at(what, "has fields without names", fqns, row)
            rows.append(dict(zip(state[::2], state[1::2], strict=True)))
        return [[row.get(name) for row in rows] for name in names]

    def _shapes(self, column: list[Any], what: str, fqns: Sequence[str] | None) -> _Shapes:
        import torch

        _check_types(column, {slice}, what, fqns)
        rows = [one.stop for one in column]
        _check_types(rows, {tuple}, what, fqns)
        ranks = np.fromiter(map(len, rows), np.int64, len(rows))
        if (ranks > _MAX_DIMENSIONS).any():
            row = int(ranks.argmax())
            raise _at(what, f"has {ranks[row]} dimensions", fqns, row)
        for row, one in enumerate(rows) if not _are_numbers(rows) else ():
            if not _are_numbers([one]):
                raise _at(what, "is not made of natural numbers", fqns, row)
        flat = np.fromiter(chain.from_iterable(rows), np.int64, int(ranks.sum()))
        return _Shapes(list(map(torch.Size, rows)), ranks, flat)


class _Shapes(NamedTuple):
    """Shapes or offsets, also as one array of all their numbers."""

    sizes: list[torch.Size]
    ranks: npt.NDArray[np.int64]
    flat: npt.NDArray[np.int64]

    def rows(self, wanted: npt.NDArray[np.int64]) -> _Shapes:
        """Return some of them, in this order and as often as they are named; without sizes."""
        ends = np.cumsum(self.ranks)
        ranks = self.ranks[wanted]
        starts = (ends - self.ranks)[wanted]
        firsts = np.cumsum(ranks) - ranks
        at = np.arange(int(ranks.sum())) + np.repeat(starts - firsts, ranks)
        return _Shapes([], ranks, self.flat[at])


_SCALARS = frozenset({bool, int, float, str, bytes})


def _are_numbers(rows: Sequence[tuple[Any, ...]]) -> bool:
    if not set(map(type, chain.from_iterable(rows))) <= {int}:
        return False
    least = min(chain.from_iterable(rows), default=0)
    return least >= 0 and max(chain.from_iterable(rows), default=0) < 1 << 63


def _check_types(
    column: Sequence[Any], kinds: set[type], what: str, fqns: Sequence[str] | None
) -> None:
    if not set(map(type, column)) <= kinds:
        row = next(row for row, one in enumerate(column) if type(one) not in kinds)
        raise _at(what, f"is {_kind(column[row])}", fqns, row)


def _at(what: str, wrong: str, fqns: Sequence[str] | None, row: Any) -> _Damaged:
    fqn = None if fqns is None else fqns[int(row)]
    return _Damaged(f"{what} {wrong}" if fqn is None else f"{what} of {_shown(fqn)} {wrong}", fqn)


def _kind(value: Any) -> str:
    """Name what a value is, and never the value: it may be endless."""
    kind = type(value)
    if issubclass(kind, _Record):
        return f"a record of the kind {kind.__name__.strip('_')}"
    named = {_Pairs: "a dict", _Ordered: "a dict", slice: "a shape", type(None): "missing"}
    return named.get(kind, f"a {kind.__name__}")


def _shown(text: str) -> str:
    return repr(text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "...")
