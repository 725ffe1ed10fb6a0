"""Python's indexing of a tensor as a box: which elements to read, and which dimensions to drop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from dcpstore.errors import ConfigError

__all__ = ["Selected", "Slices", "resolve_slices"]

Slices: TypeAlias = Any
"""What may stand between brackets: an int, a slice of step 1, ``...``, or a tuple of these."""


@dataclass(frozen=True, slots=True)
class Selected:
    """A box of a tensor.

    Attributes:
        offsets: First element in each dimension.
        sizes: Elements in each dimension of the tensor.
        dropped: Dimensions that an int chose from; the answer has them no more.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dropped: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the answer."""
        return tuple(size for dim, size in enumerate(self.sizes) if dim not in self.dropped)


def resolve_slices(sizes: Sequence[int], slices: Slices) -> Selected:
    """Turn an index into a box, as numpy's basic indexing does.

    Args:
        sizes: Shape of the whole tensor.
        slices: As between brackets; None for everything.

    Raises:
        ConfigError: If a step is not 1, an int is outside the tensor, there are more indices
            than dimensions, or an index is of another kind.
    """
    indices = _expand(() if slices is None else slices, len(sizes))
    extents = [
        _extent(index, size, dim)
        for dim, (size, index) in enumerate(zip(sizes, indices, strict=True))
    ]
    return Selected(
        tuple(start for start, _ in extents),
        tuple(length for _, length in extents),
        tuple(dim for dim, index in enumerate(indices) if not isinstance(index, slice)),
    )


def _expand(slices: Slices, num_dims: int) -> list[Any]:
    """Fill up to one index per dimension."""
    given = list(slices) if isinstance(slices, tuple | list) else [slices]
    places = [at for at, index in enumerate(given) if index is Ellipsis]
    if len(places) > 1:
        raise ConfigError("an index can have a single '...'")
    num_given = len(given) - len(places)
    if num_given > num_dims:
        raise ConfigError(f"{num_given} indices are too many for a tensor of {num_dims} dimensions")
    at = places[0] if places else len(given)
    return [*given[:at], *[slice(None)] * (num_dims - num_given), *given[at + 1 :]]


def _extent(index: Any, size: int, dim: int) -> tuple[int, int]:
    """Return the first element and the number of elements of one dimension."""
    if isinstance(index, slice):
        if index.step not in (None, 1):
            raise ConfigError(
                f"the slice of dimension {dim} has step {index.step}; only step 1 is read from a"
                " store. Read the range and take every n-th element of it"
            )
        start, stop, _ = index.indices(size)
        return start, max(stop - start, 0)
    if isinstance(index, bool) or not hasattr(index, "__index__"):
        raise ConfigError(
            f"dimension {dim} is indexed by a {type(index).__name__}; write an int, a slice"
            " such as slice(0, 10), or ..."
        )
    at = index.__index__()
    if not -size <= at < size:
        raise ConfigError(f"index {at} of dimension {dim} is outside its {size} elements")
    return at % size, 1
