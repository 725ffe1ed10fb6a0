"""Changes to stored bytes that keep most of their structure, drawn from a random source."""

from __future__ import annotations

import copy
import json
import pickletools
import random
import struct
from collections.abc import Sequence
from typing import Any

INTEGERS = (0, 1, 2, 7, 255, 256, 65535, 1 << 31, (1 << 32) - 1, (1 << 63) - 1, 1 << 63, -1)
VALUES: tuple[Any, ...] = (
    *INTEGERS, 1 << 70, -(1 << 70), 0.5, 1e308, float("nan"), float("inf"), None, True, "", "a",
    "..", "/etc/passwd", "\x1b[2J", "a" * 5000, "\0", "\ud800", [], {}, [[]], {"a": {"a": 1}},
)  # fmt: skip

# Pieces of a pickle that push one value, or work on what is there.
SNIPPETS = (
    b"N", b"\x88", b"K\x01", b"J\xff\xff\xff\xff", b"G\x7f\xf8\0\0\0\0\0\0", b"X\x01\0\0\0a",
    b"\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7f", b"\x8a\x10" + b"\xff" * 15 + b"\x7f", b")",
    b"]", b"}", b"\x8f", b"(", b"t", b"\x85", b"\x86", b"\x87", b"u", b"s", b"e", b"a", b"R",
    b"\x81", b"b", b"h\0", b"h\x01", b"q\0", b"j\x05\0\0\0", b"r\0\0\0\x10", b"\x94", b"0", b"1",
    b"2", b"Q", b"(N}X\x08\0\0\0__hash__Ns\x86b", b"h\0h\0\x86q\0" * 25, b"(l", b"cbuiltins\nset\n",
    b"ccollections\nOrderedDict\n", b"ctorch\nSize\n", b"c_codecs\nencode\n", b"cos\nsystem\n",
    b"cbuiltins\nbytearray\n\x8a\x05\0\0\0\0\x02\x85R", b"\x8b\xff\xff\xff\x7f", b"(K\x01K\x02t",
    b"\x8d\xff\xff\xff\xff\xff\xff\xff\x7f", b"\x96\0\0\0\0\x02\0\0\0", b".",
    b"ctorch.distributed.checkpoint.metadata\nMetadataIndex\n",
)  # fmt: skip


def mutated_bytes(data: bytes, rng: random.Random) -> bytes:
    """Flip, cut, repeat and overwrite some bytes."""
    found = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
        at = rng.randrange(len(found) + 1)
        match rng.randrange(6):
            case 0 if at < len(found):
                found[at] ^= 1 << rng.randrange(8)
            case 1:
                del found[at : at + rng.choice((1, 4, 100))]
            case 2:
                found[at:at] = found[at : at + rng.choice((1, 8, 200))]
            case 3:
                width = rng.choice("BHIQ")
                number = rng.choice(INTEGERS) % (1 << 8 * struct.calcsize("<" + width))
                new = struct.pack("<" + width, number)
                found[at : at + len(new)] = new
            case 4:
                del found[at:]
            case _:
                found[at:at] = rng.choice(SNIPPETS)
    return bytes(found)


def instructions_of(pickled: bytes) -> list[bytes]:
    """Cut a pickle into its instructions."""
    starts = [at for _, _, at in pickletools.genops(pickled)]
    return [pickled[a:b] for a, b in zip(starts, [*starts[1:], len(pickled)], strict=True)]


def mutated_pickle(instructions: Sequence[bytes], rng: random.Random) -> bytes:
    """Change, repeat, drop, swap and add instructions of a pickle."""
    found = list(instructions)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        at, other = rng.randrange(len(found)), rng.randrange(len(found))
        match rng.randrange(7):
            case 0:
                found[at] = rng.choice(SNIPPETS)
            case 1:
                found.insert(at, rng.choice(SNIPPETS))
            case 2:
                del found[at : at + rng.choice((1, 2, 5))]
            case 3:
                found[at], found[other] = found[other], found[at]
            case 4:
                found[at:at] = found[other : other + rng.choice((1, 10, 60))]
            case 5:
                found[at] = found[at][:1] + mutated_bytes(found[at][1:], rng)
            case _:  # a value in the place of a value
                found[at] = rng.choice(SNIPPETS[:12])
        if not found:
            return b"."
    return b"".join(found)


def mutated_json(value: Any, rng: random.Random) -> Any:
    """Replace, drop, repeat or rename some part of a JSON value."""
    found = copy.deepcopy(value)
    for _ in range(rng.choice((1, 1, 2, 4))):
        places: list[tuple[Any, Any]] = []
        _collect(found, places)
        if not places:
            return copy.deepcopy(rng.choice(VALUES))
        holder, key = rng.choice(places)
        match rng.randrange(4):
            case 0:
                del holder[key]
            case 1 if isinstance(holder, dict):
                holder[str(rng.choice(VALUES))] = holder.pop(key)
            case 2:
                holder[key] = [holder[key]] * rng.choice((1, 2, 50))
            case _:
                holder[key] = copy.deepcopy(rng.choice(VALUES))
    return found


def _collect(value: Any, places: list[tuple[Any, Any]]) -> None:
    keys = value if isinstance(value, dict) else range(len(value)) if type(value) is list else ()
    for key in keys:
        places.append((value, key))
        _collect(value[key], places)


def as_json(value: Any, rng: random.Random) -> bytes:
    """Write JSON, sometimes with a name twice, and rarely with other bytes in it."""
    text = json.dumps(value, allow_nan=True).encode("utf-8", "surrogatepass")
    if rng.random() < 0.1:
        text = mutated_bytes(text, rng)
    return text
