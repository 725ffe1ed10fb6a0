"""What a conversion did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dcpstore.text import count_text, names_text, size_text, table, times

__all__ = ["ConvertResult"]


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
        num_server_copies: How many of the objects the provider copied by itself.
        server_copied_bytes: Their size.
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
    num_server_copies: int = 0
    server_copied_bytes: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def stored_bytes(self) -> int:
        """Bytes of all objects written."""
        return sum(self.objects.values())

    def __str__(self) -> str:
        num_objects = count_text(len(self.objects), "object")
        rows = {
            "from": self.source,
            "tensors": f"{self.num_tensors} of {size_text(self.tensor_bytes)}",
            "values": str(self.num_values),
            "stored": f"{size_text(self.stored_bytes)} in {num_objects}",
            "fetched": size_text(self.fetched_bytes),
            **self._server_row(),
            "skipped": names_text(self.skipped),
            "cast": names_text(self.cast),
            **times(self.seconds),
        }
        return table(f"written to {self.target}", rows)

    def _server_row(self) -> dict[str, str]:
        if not self.num_server_copies:
            return {}
        count = count_text(self.num_server_copies, "object")
        return {"by server": f"{size_text(self.server_copied_bytes)} in {count}"}
