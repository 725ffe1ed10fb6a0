"""What the coordinator sends back: which of its items a rank keeps.

On the wire (little-endian)::

    u8 version  u8 flags  u32 num_items  u32 mask_bytes  16-byte digest of the answered plan
    mask: plain or zlib bits, one per item, first item in the highest bit; none if all are kept
    hints, if asked for: zlib of one i4 per kept item
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntFlag

import numpy as np

from dcpstore.errors import CorruptError
from dcpstore.planning.exchange.columns import Ints
from dcpstore.planning.exchange.wire import DIGEST_BYTES

__all__ = ["Decision", "encode_decisions"]

_VERSION = 1
_PREFIX = struct.Struct(f"<BBII{DIGEST_BYTES}s")


class _Flag(IntFlag):
    ALL = 1
    DEFLATED = 2
    HINTS = 4


@dataclass(frozen=True, slots=True, eq=False)
class Decision:
    """The part of its plan that a rank carries out.

    Attributes:
        is_kept: Per item of the rank's plan, whether this rank writes it.
        plan_digest: Name of the packed plan that this answers.
        hints: Per kept item, its position among the chunks of its tensor in the metadata
            (0 for values); None if the coordinator was not asked for it.
    """

    is_kept: Ints
    plan_digest: bytes
    hints: Ints | None = None

    @property
    def num_kept(self) -> int:
        """How many items this rank writes."""
        return int(np.count_nonzero(self.is_kept))

    def to_bytes(self) -> bytes:
        """Return the bytes to send."""
        flags, mask = _encode_mask(self.is_kept)
        return _join(flags, mask, len(self.is_kept), self.plan_digest, self.hints)

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> Decision:
        """Read what was sent.

        Raises:
            CorruptError: If these are not the bytes of a decision.
        """
        try:
            version, flags, num_items, mask_bytes, digest = _PREFIX.unpack_from(data)
            if version != _VERSION:
                raise CorruptError(f"a decision has version {version}, expected {_VERSION}")
            end = _PREFIX.size + mask_bytes
            is_kept = _mask(data[_PREFIX.size : end], flags, num_items)
            if not flags & _Flag.HINTS:
                return cls(is_kept, digest)
            hints = np.frombuffer(zlib.decompress(data[end:]), "<i4").astype(np.int64)
            if len(hints) != np.count_nonzero(is_kept):
                raise ValueError(f"{len(hints)} hints")
        except (struct.error, zlib.error, ValueError) as error:
            raise CorruptError(f"a decision is damaged: {error!r}") from error
        return cls(is_kept, digest, hints)


def encode_decisions(
    is_kept: Sequence[Ints], digests: Sequence[bytes], hints: Sequence[Ints] | None
) -> tuple[bytes, ...]:
    """Return the bytes of each rank's decision; equal masks are packed once.

    Args:
        is_kept: Per rank, as in `Decision`.
        digests: Per rank, the name of its packed plan.
        hints: Per rank and item (not only the kept ones), or None for none.
    """
    masks: dict[bytes, tuple[_Flag, bytes]] = {}
    encoded = []
    for rank, kept in enumerate(is_kept):
        bits = kept.tobytes()
        found = masks.get(bits)
        if found is None:
            found = masks[bits] = _encode_mask(kept)
        of_kept = None if hints is None else hints[rank][kept]
        encoded.append(_join(*found, len(kept), digests[rank], of_kept))
    return tuple(encoded)


def _encode_mask(is_kept: Ints) -> tuple[_Flag, bytes]:
    if bool(is_kept.all()):
        return _Flag.ALL, b""
    mask = np.packbits(is_kept).tobytes()
    deflated = zlib.compress(mask, 6)
    return (_Flag.DEFLATED, deflated) if len(deflated) < len(mask) else (_Flag(0), mask)


def _join(flags: _Flag, mask: bytes, num_items: int, digest: bytes, hints: Ints | None) -> bytes:
    tail = b""
    if hints is not None:
        flags |= _Flag.HINTS
        tail = zlib.compress(hints.astype("<i4").tobytes(), 1)
    return _PREFIX.pack(_VERSION, flags, num_items, len(mask), digest) + mask + tail


def _mask(data: bytes | memoryview, flags: int, num_items: int) -> Ints:
    if flags & _Flag.ALL:
        return np.ones(num_items, bool)
    bits = zlib.decompress(data) if flags & _Flag.DEFLATED else data
    if len(bits) != (num_items + 7) // 8:
        raise ValueError(f"{len(bits)} bytes for {num_items} items")
    return np.unpackbits(np.frombuffer(bits, np.uint8), count=num_items).astype(bool)
