"""Where a saved tensor lies in its file, as a row-major chunk that its boxes are boxes of.

Most tensors are views that a larger row-major chunk explains: dense ones, slices, and what a
transpose or a permute made of these::

    saved: shape (4, 3), strides (1, 6)     the chunk: 3 rows of 6, dimensions 1 and 0
                                            # # # # . .
                                            # # # # . .
                                            # # # # . .

What no such chunk explains (every n-th element, expanded, overlapping) is read as one run,
from a box's first to its last element, and picked apart in memory.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from dcpstore.torch_file import TensorPlace
from dcpstore.torch_save_reader.waves import Extent

__all__ = ["Chunk", "Source", "chunk_around"]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A row-major chunk of a storage that a tensor is a box of, starting with its first element.

    Attributes:
        sizes: Of the chunk.
        dims: The tensor's dimension per dimension of the chunk.
    """

    sizes: tuple[int, ...]
    dims: tuple[int, ...]

    def order(self, values: Sequence[int]) -> tuple[int, ...]:
        """Bring offsets or sizes of the tensor into the chunk's order."""
        return tuple(values[dim] for dim in self.dims)


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor of the file; keys that name the same elements share one.

    Attributes:
        place: Where its elements lie in which storage.
        chunk: The chunk around it; None if there is none.
    """

    place: TensorPlace
    chunk: Chunk | None = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "chunk", chunk_around(self.place))

    @property
    def extent(self) -> Extent:
        """What must be known of it to cut it."""
        place = self.place
        if self.chunk is not None:
            return Extent(place.sizes, place.dtype.itemsize, self.chunk.dims)
        num_elements = place.span().num_bytes // place.dtype.itemsize
        # While it is picked apart, the run lies in memory beside what is wanted of it.
        weight = 1 + math.ceil(num_elements / max(math.prod(place.sizes), 1))
        return Extent(place.sizes, place.dtype.itemsize, tuple(range(len(place.sizes))), weight)


def chunk_around(place: TensorPlace) -> Chunk | None:
    """Return the row-major chunk that a tensor is a box of; None if there is none."""
    sizes, strides = place.sizes, place.strides
    # A dimension of one element has no step, so that it may stand anywhere.
    ones = [dim for dim, size in enumerate(sizes) if size == 1]
    dims = sorted((d for d, size in enumerate(sizes) if size != 1), key=lambda d: -strides[d])
    if not dims:
        return Chunk((1,) * len(ones), tuple(ones))
    if strides[dims[-1]] != 1:
        return None
    chunk_sizes = [sizes[dims[0]]]
    for outer, inner in itertools.pairwise(dims):
        row, rest = divmod(strides[outer], strides[inner])
        if rest or row < sizes[inner]:
            return None
        chunk_sizes.append(row)
    return Chunk((1,) * len(ones) + tuple(chunk_sizes), (*ones, *dims))
