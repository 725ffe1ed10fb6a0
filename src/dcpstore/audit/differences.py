"""One difference between two checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = ["Difference", "DifferenceKind"]

DifferenceKind: TypeAlias = Literal["only left", "only right", "kind", "shape", "dtype", "value"]


@dataclass(frozen=True, slots=True)
class Difference:
    """A key that is not the same in both.

    Attributes:
        fqn: The key.
        kind: ``only left``, ``only right``; ``kind``: a tensor here and a value there;
            ``shape``, ``dtype``; or ``value``: the same in all of these, with other contents.
        left: What is on the left, for people; empty where nothing is.
        right: On the right.
        detail: How values differ.
    """

    fqn: str
    kind: DifferenceKind
    left: str = ""
    right: str = ""
    detail: str = ""

    def __str__(self) -> str:
        if self.kind == "only left":
            return f"only left   {self.fqn!r}: {self.left}"
        if self.kind == "only right":
            return f"only right  {self.fqn!r}: {self.right}"
        said = self.detail or f"{self.left} | {self.right}"
        return f"{self.kind:<10}  {self.fqn!r}: {said}"
