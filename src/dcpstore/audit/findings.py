"""What an audit found wrong: each finding with its object, key and byte range."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from dcpstore.ranges import ByteRange
from dcpstore.text import printable

__all__ = ["Finding", "FindingKind", "in_order"]

FindingKind: TypeAlias = Literal[
    "missing",
    "truncated",
    "resized",
    "checksum",
    "framing",
    "metadata",
    "incomplete",
    "mismatch",
    "unreadable",
]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong with a stored checkpoint.

    Attributes:
        kind: ``missing``: an object is gone. ``truncated``: an object ends before bytes that
            the metadata names. ``resized``: an object is longer than it was. ``checksum``:
            bytes are not those that were saved. ``framing``: the bytes around a tensor's
            elements are damaged; stock torch needs them. ``metadata``: the metadata are
            damaged. ``incomplete``: stored chunks do not make up their tensor.
            ``mismatch``: what an object holds is not what the metadata say.
            ``unreadable``: the store refuses to give an object.
        message: What was found, and what was expected.
        key: The object, relative to the checkpoint's folder.
        fqn: The state dict's key, where one is concerned.
        span: Bytes of the object; None where no bytes are concerned.
    """

    kind: FindingKind
    message: str
    key: str | None = None
    fqn: str | None = None
    span: ByteRange | None = None

    def __str__(self) -> str:
        where = [self.key or "the checkpoint"]
        if self.span is not None:
            where.append(f"bytes [{self.span.start}, {self.span.end})")
        if self.fqn is not None:
            where.append(repr(self.fqn))
        return printable(f"{self.kind}: {', '.join(where)}: {self.message}", keep="\n")


def in_order(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Sort by object and place; findings that say the same of adjacent bytes become one."""
    merged: list[Finding] = []
    for one in sorted(set(findings), key=_place):
        if merged and _continues(merged[-1], one):
            assert merged[-1].span is not None
            assert one.span is not None
            span = ByteRange(merged[-1].span.start, one.span.end)
            merged[-1] = replace(merged[-1], span=span)
        else:
            merged.append(one)
    return tuple(merged)


def _place(one: Finding) -> tuple[str, int, int, str, str, str]:
    start, end = one.span or (-1, -1)
    return one.key or "", start, end, one.fqn or "", one.kind, one.message


def _continues(before: Finding, one: Finding) -> bool:
    if before.span is None or one.span is None or before.span.end != one.span.start:
        return False
    return (before.kind, before.key, before.fqn, before.message) == (
        one.kind,
        one.key,
        one.fqn,
        one.message,
    )
