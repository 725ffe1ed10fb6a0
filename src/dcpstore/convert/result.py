"""What a conversion did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["ConvertResult"]

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_MOST_NAMED = 3


@dataclass(frozen=True, slots=True)
class ConvertResult:
    """What a conversion did. The same on all ranks.

    Attributes:
        source: URL of what was read.
        target: URL of what was written.
        num_tensors: Tensors written, under their own name each.
        num_values: Values that are not tensors, written likewise.
        tensor_bytes: Bytes of the tensors' elements as written.
        objects: Every object written and its size in bytes, keys relative to the folder of
            ``target``.
        skipped: Key of the source, and why it was not written although nobody excluded it.
        cast: Key of the source, and the names of its old and its new dtype.
        fetched_bytes: Bytes asked of the source by all ranks.
        seconds: Per phase, of the coordinator.
    """

    source: str
    target: str
    num_tensors: int
    num_values: int = 0
    tensor_bytes: int = 0
    objects: Mapping[str, int] = field(default_factory=dict)
    skipped: Mapping[str, str] = field(default_factory=dict)
    cast: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    fetched_bytes: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def stored_bytes(self) -> int:
        """Bytes of all objects written."""
        return sum(self.objects.values())

    def __str__(self) -> str:
        rows = {
            "from": self.source,
            "tensors": f"{self.num_tensors} of {_size(self.tensor_bytes)}",
            "values": str(self.num_values),
            "stored": f"{_size(self.stored_bytes)} in {len(self.objects)} objects",
            "fetched": _size(self.fetched_bytes),
            "skipped": _names(self.skipped),
            "cast": _names(self.cast),
            **{f"{name} time": f"{value:.2f} s" for name, value in self.seconds.items()},
        }
        width = max(map(len, rows))
        lines = [f"  {name:<{width}}  {text}" for name, text in rows.items()]
        return "\n".join([f"converted to {self.target}", *lines])


def _names(names: Mapping[str, object]) -> str:
    if not names:
        return "none"
    shown = ", ".join(list(names)[:_MOST_NAMED])
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return f"{len(names)}: {shown}{more}"


def _size(num_bytes: float) -> str:
    for unit in _UNITS:
        if num_bytes < 1024 or unit == _UNITS[-1]:
            break
        num_bytes /= 1024
    return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
