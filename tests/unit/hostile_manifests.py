"""Manifests that were changed and sealed again, with checksums that are right."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import crc32c
import numpy as np

from dcpstore.format.seal import get_manifest, make_metadata, read_seal
from dcpstore.store import open_store

Fields: TypeAlias = dict[str, Any]
Columns: TypeAlias = dict[str, Any]
"""Arrays by name, or ``(dtype, count, stored bytes)`` for a column that is not what it tells."""
Change: TypeAlias = Callable[[Fields, Columns], object]

JUNK: tuple[Any, ...] = (None, True, 0, -1, 1.5, 2**70, "", "x", [], {}, [[]], "\x1b[2J", "\ud800")


def packed(column: np.ndarray) -> bytes:
    return zlib.compress(column.tobytes(), 1)


def take_apart(data: bytes) -> tuple[Fields, Columns]:
    """Return the header without its columns, and the columns as arrays to write to."""
    _, _, header_bytes = struct.unpack_from("<8sII", data)
    fields = json.loads(data[16 : 16 + header_bytes])
    at = 16 + header_bytes
    columns: Columns = {}
    for name, dtype, _, num_bytes in fields.pop("columns"):
        columns[name] = np.frombuffer(zlib.decompress(data[at : at + num_bytes]), dtype).copy()
        at += num_bytes
    return fields, columns


def changed(data: bytes, change: Change) -> bytes:
    """Change an encoded manifest and make its checksum right again."""
    fields, columns = take_apart(data)
    change(fields, columns)
    parts = {
        name: one if isinstance(one, tuple) else (one.dtype.name, len(one), packed(one))
        for name, one in columns.items()
    }
    described = [[name, dtype, count, len(part)] for name, (dtype, count, part) in parts.items()]
    text = json.dumps({"columns": described, **fields}).encode()
    stored = b"".join(part for _, _, part in parts.values())
    body = data[:12] + struct.pack("<I", len(text)) + text + stored
    return body + struct.pack("<I", crc32c.crc32c(body))


def reseal(folder: Path, change: Change) -> None:
    """Change the manifest of a checkpoint and seal it again, as whoever may write there can."""
    store = open_store(folder)
    data = store.get(".metadata").data
    seal = read_seal(data)
    assert seal is not None
    manifest = changed(get_manifest(store, data, seal), change)
    pickled = bytes(data[: seal.pickle_bytes])
    _, sealed = make_metadata(
        seal.save_id, pickled, manifest, embed_manifest_bytes=1 << 30, facts=seal.facts
    )
    (folder / ".metadata").write_bytes(sealed)


def every_change(data: bytes) -> Iterator[tuple[str, Change]]:
    """Yield several hundred changes of a manifest: each column and field, each kind of damage."""
    fields, columns = take_apart(data)
    for name, column in columns.items():
        yield from _changes_of_column(name, column)
    for name in fields:
        for value in JUNK:
            yield f"{name} is {value!r}", lambda f, _, n=name, v=value: f.update({n: v})
        yield f"no {name}", lambda f, _, n=name: f.pop(n)
    for row in range(len(fields["strings"])):
        for text in (
            "",
            "\n\n",
            "float64",
            "int8",
            "save",
            "nn",
            "\x1b]0;x\x07",
            "\ud800",
            "9" * 99,
        ):
            yield (
                f"string {row} is {text!r}",
                lambda f, _, r=row, t=text: f["strings"].__setitem__(r, t),
            )
    for block_bytes in (4096, 8192, 1 << 40, 1 << 62):
        yield f"blocks of {block_bytes}", lambda f, _, b=block_bytes: f.update(block_bytes=b)
    fqns = [pair[0] for pair in json.loads(columns["planner_paths"].tobytes())]
    for path in ([], [0], [-1], [1 << 40], [10**30], ["x"] * 500, [""], ["\ud800"], ["a", 0, "b"]):
        for chosen in (fqns[:1], fqns, [*fqns, "none"]):
            text = json.dumps([[fqn, path] for fqn in chosen])
            yield (
                f"{len(chosen)} paths are {path!r:.60}",
                lambda _, c, t=text: c.update(planner_paths=np.frombuffer(t.encode(), np.uint8)),
            )


def _changes_of_column(name: str, column: np.ndarray) -> Iterator[tuple[str, Change]]:
    def put(what: str, make: Callable[[np.ndarray], Any]) -> tuple[str, Change]:
        return f"{name}: {what}", lambda _, columns: columns.update({name: make(columns[name])})

    limits = np.iinfo(column.dtype)
    for row in sorted({0, len(column) // 2, len(column) - 1}):
        if not 0 <= row < len(column):
            continue
        before = int(column[row])
        for value in (0, 1, 2, -1, -2, before + 1, before - 1, 1 << 31, 1 << 40, limits.max):
            if limits.min <= value <= limits.max and value != before:
                yield put(f"row {row} is {value}", lambda c, r=row, v=value: _with(c, r, v))
        if name.endswith(".text"):
            for text in (b"../../x", b"/etc/a", b"\x1b[31m\x07", b"\xe2\x80\xae", b"a\nb", b"\0"):
                yield put(f"{text!r} at {row}", lambda c, r=row, t=text: _with_text(c, r, t))
    yield put("backwards", lambda c: c[::-1].copy())
    yield put("all zeros", lambda c: c * 0)
    yield put("all the first", lambda c: c[:1].repeat(len(c)))
    yield put("one row less", lambda c: c[:-1])
    yield put("one row more", lambda c: np.concatenate([c, c[:1]]))
    yield put("no rows", lambda c: c[:0])
    yield put("of floats", lambda c: np.full(len(c), np.nan))
    yield put("wider", lambda c: c.astype(np.int64 if c.dtype != np.int64 else np.int32))
    yield put("rows beyond it", lambda c: (c.dtype.name, len(c) + 1, packed(c)))
    yield put("a huge count", lambda c: (c.dtype.name, 1 << 40, packed(c)))
    yield put("no zlib", lambda c: (c.dtype.name, len(c), b"\0" * 40))
    yield f"{name}: gone", lambda _, columns: columns.pop(name)


def _with(column: np.ndarray, row: int, value: int) -> np.ndarray:
    column[row] = value
    return column


def _with_text(column: np.ndarray, row: int, text: bytes) -> np.ndarray:
    part = np.frombuffer(text, np.uint8)[: len(column) - row]
    column[row : row + len(part)] = part
    return column
