"""What the steps of filling a slab cost: first touch, copy, checksum.

``python -m benchmarks.fill_cost`` prints CPU seconds per GiB of each.
"""

from __future__ import annotations

import itertools
import os

import crc32c
import numpy as np

_SLAB_BYTES = 16 << 20
_NUM_SLABS = 16
_PER_GIB = (1 << 30) / (_SLAB_BYTES * _NUM_SLABS)


def _cpu_s() -> float:
    times = os.times()
    return times.user + times.system


def main() -> None:
    source = np.random.default_rng(0).integers(0, 255, _SLAB_BYTES * _NUM_SLABS, dtype=np.uint8)
    parts = source.reshape(_NUM_SLABS, _SLAB_BYTES)
    slabs = [np.empty(_SLAB_BYTES, np.uint8) for _ in range(_NUM_SLABS)]
    marks = [_cpu_s()]
    for _ in ("touch and copy", "copy"):
        for slab, part in zip(slabs, parts, strict=True):
            slab[:] = part
        marks.append(_cpu_s())
    for slab in slabs:
        crc32c.crc32c(slab.data)
    marks.append(_cpu_s())
    both, copy, checksum = (_PER_GIB * (b - a) for a, b in itertools.pairwise(marks))
    print(f"first touch {both - copy:.2f}, copy {copy:.2f}, CRC32C {checksum:.2f} CPU s per GiB")


if __name__ == "__main__":
    main()
