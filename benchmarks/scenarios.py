"""The rows of the table: what is saved or loaded, over which link, by whom."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from benchmarks.link import Link
from benchmarks.want import Want

__all__ = ["LINKS", "SCENARIOS", "Scenario"]

MIB = 1 << 20
_ALL = Want()
_PEERS = {"save": ("s3torch-4", "msc-8"), "load": ("s3torch", "msc")}
_OURS = ("ours", "ours-fsspec")
_SAVERS = ("stock", "stock-8", "stock-hf", *_PEERS["save"], *_OURS, "bare")
_LOADERS = ("stock", "stock-hf", *_PEERS["load"], *_OURS, "bare")
_LIMITS = ("ours-8", "ours-128", "floor-8", "floor-32")
_RANKS = ("stock", "s3torch", "msc", "ours", "ours-shared")
_CLOUD = Link(latency_s=0.02, jitter_s=0.03, bytes_per_s=100e6)

LINKS: Mapping[str, Link] = MappingProxyType(
    {
        "cloud": _CLOUD,
        "fast": Link(),
        "tail": replace(_CLOUD, slow_share=0.01, slow_s=1.0),
        "bursts": replace(_CLOUD, burst_s=0.4, burst_every_s=2.0),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One row.

    Attributes:
        name: For the command line.
        title: For the table.
        action: ``save``, ``load``, ``train`` (a save in the background of a training loop)
            or ``convert``.
        kind: Of the state, see `benchmarks.states`.
        num_bytes: Size of the state.
        quick_bytes: Its size in a smoke test.
        link: Name in `LINKS`.
        store: ``s3``, or ``gs`` for Google's emulator, which has no link and counts nothing.
        want: What a load asks for, and how ranks cut the state.
        saved_ranks: Processes that save what is loaded.
        num_ranks: Processes that do what is measured.
        target: Of a conversion: ``pt`` or ``safetensors``.
        systems: Who is measured, in turn.
    """

    name: str
    title: str
    action: str
    kind: str
    num_bytes: int
    quick_bytes: int
    link: str = "cloud"
    store: str = "s3"
    want: Want = _ALL
    saved_ranks: int = 1
    num_ranks: int = 1
    target: str = ""
    systems: tuple[str, ...]

    def scaled(self, factor: float) -> Scenario:
        """Return the same row with a state of another size."""
        return replace(self, num_bytes=max(self.quick_bytes, int(self.num_bytes * factor)))

    def quick(self) -> Scenario:
        """Return the same row for a smoke test."""
        return replace(self, num_bytes=self.quick_bytes)


def _row(
    name: str, title: str, kind: str, mib: float, quick_mib: float, **more: object
) -> Scenario:
    action = str(more.pop("action", name.partition("-")[0]))
    systems = more.pop("systems", None) or ("stock", *_PEERS[action], *_OURS)
    return Scenario(
        name=name,
        title=title,
        action=action,
        kind=kind,
        num_bytes=int(mib * MIB),
        quick_bytes=int(quick_mib * MIB),
        systems=systems,  # type: ignore[arg-type]
        **more,  # type: ignore[arg-type]
    )


_SCALARS = 80_000 / MIB, 400 / MIB
_EXPERTS = 20_000 * 6.75 / 1024, 0.25
_ROWS, _COLUMNS = Want(shard_dim=0), Want(shard_dim=1)
_LAYERS = ("layers", 256, 2)
_HEDGED = {"systems": ("stock", *_PEERS["load"], *_OURS, "ours-once")}
_TO_GOOGLE = "save 64 MiB to Google's emulator"
_SAVE_MANY = {"systems": ("stock", *_PEERS["save"], *_OURS, "ours-shared")}
_LOAD_MANY = {"systems": ("stock", *_PEERS["load"], *_OURS, "ours-shared")}
_TRAINERS = ("stock", "stock-8", *_PEERS["save"], "ours", "ours-async", "ours-managed")
_GOOGLE = {"store": "gs", "link": "fast"}


def _reshard(name: str, title: str, want: Want, saved: int, loaded: int) -> Scenario:
    more = {"want": want, "saved_ranks": saved, "num_ranks": loaded, "systems": _RANKS}
    return _row(name, title, *_LAYERS, action="load", **more)


def _convert(name: str, title: str, target: str) -> Scenario:
    return _row(name, title, *_LAYERS, target=target, systems=("stock", "ours"))


SCENARIOS = (
    _row(
        "save",
        "save 1 GiB, tensors of 4 to 64 MiB",
        *("mixed", 1024, 24),
        systems=(*_SAVERS, "bare-crc"),
    ),
    _row(
        "load",
        "load the same, in the order saved",
        *("mixed", 1024, 24),
        systems=(*_LOADERS, *_LIMITS),
    ),
    _row(
        "save-fast",
        "save it to a near server",
        "mixed",
        1024,
        24,
        link="fast",
        systems=(*_SAVERS, "bare-crc"),
    ),
    _row(
        "load-fast",
        "load it from a near server",
        *("mixed", 1024, 24),
        link="fast",
        systems=(*_LOADERS, *_LIMITS),
    ),
    _row("save-model", "save 512 MiB of a bf16 model with fp32 moments", "model", 512, 4),
    _row("load-model", "load it", "model", 512, 4),
    _row("load-64x4", "load 64 x 4 MiB, in the order saved", "even", 256, 8, systems=_LOADERS),
    _row("load-shuffled", "load 64 x 4 MiB, in another order than saved", "shuffled", 256, 8),
    _row("save-huge", "save one tensor of 512 MiB", "one", 512, 16),
    _row("load-huge", "load it", "one", 512, 16),
    _row("save-experts", "save 20,000 small tensors, 132 MiB", "experts", *_EXPERTS, **_SAVE_MANY),
    _row("load-experts", "load them", "experts", *_EXPERTS, **_LOAD_MANY),
    _row("save-scalars", "save 20,000 scalars", "scalars", *_SCALARS, **_SAVE_MANY),
    _row("load-scalars", "load 20,000 scalars", "scalars", *_SCALARS, **_LOAD_MANY),
    _row("load-one", "load one tensor of 1 MiB out of 40", "small", 40, 40, want=Want(is_one=True)),
    _row(
        "reshard-rows",
        "1/8 of the rows of a 128 MiB tensor saved whole",
        *("one", 128, 8),
        action="load",
        want=_ROWS,
    ),
    _row(
        "reshard-columns-long",
        "1/8 of the columns of 241 MiB saved whole, in runs of 2 MiB",
        *("long_runs", 256, 32),
        action="load",
        want=_COLUMNS,
    ),
    _row(
        "reshard-columns-short",
        "1/8 of the columns of 128 MiB saved whole, in runs of 4 KiB",
        *("short_runs", 128, 4),
        action="load",
        want=_COLUMNS,
    ),
    _reshard("rows-4-2", "256 MiB in rows, saved by 4 ranks, loaded by 2", _ROWS, 4, 2),
    _reshard("rows-2-4", "256 MiB in rows, saved by 2 ranks, loaded by 4", _ROWS, 2, 4),
    _reshard("columns-4-2", "256 MiB in columns, saved by 4 ranks, loaded by 2", _COLUMNS, 4, 2),
    _reshard("columns-2-4", "256 MiB in columns, saved by 2 ranks, loaded by 4", _COLUMNS, 2, 4),
    _row(
        "load-replicated",
        "8 ranks that each load all of 128 MiB",
        *("layers", 128, 2),
        num_ranks=8,
        systems=_RANKS,
    ),
    _row(
        "train",
        "the second save of 384 MiB in the background of a training loop",
        *("model", 384, 4),
        systems=_TRAINERS,
    ),
    _row(
        "train-4",
        "the same by 4 ranks that hold a quarter each",
        *("layers", 384, 4),
        action="train",
        num_ranks=4,
        systems=_TRAINERS,
    ),
    _row(
        "load-tail",
        "load 512 MiB, 1% of answers late by 1 s",
        "mixed",
        512,
        24,
        link="tail",
        **_HEDGED,
    ),
    _row("save-tail", "save 512 MiB, 1% of answers late by 1 s", "mixed", 512, 24, link="tail"),
    _row("load-bursts", "load 256 MiB through bursts of 503", "even", 256, 8, link="bursts"),
    _row("save-bursts", "save 256 MiB through bursts of 503", "even", 256, 8, link="bursts"),
    # Without stock's: its rename takes half a minute of gcsfs's retries on this emulator.
    _row("save-gs", _TO_GOOGLE, "even", 64, 8, systems=("ours-fsspec",), **_GOOGLE),
    _row("load-gs", "load it", "even", 64, 8, systems=("stock", "ours-fsspec"), **_GOOGLE),
    _convert("convert-pt", "convert 256 MiB to a .pt file", "pt"),
    _convert("convert-safetensors", "convert 256 MiB to safetensors", "safetensors"),
)
