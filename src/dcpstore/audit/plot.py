"""A page that shows how the bytes of a checkpoint spread over ranks and objects.

One file with everything in it: no network, no library. The page is ``plot_page.html`` with a
JSON document in place of its mark. *Lanes* are the ranks that wrote the checkpoint, or its
objects where their names tell no rank; adjacent lanes are joined where there are more than
`MAX_LANES`, so that 20,000 tensors of 1,024 ranks still make a page of some 20 MB.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from dcpstore.audit.description import Described, Description

__all__ = ["MAX_LANES", "render_plot"]

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
