"""Which items go into which object."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["plan_objects"]


def plan_objects(sizes_bytes: Sequence[int], object_bytes: int) -> list[list[int]]:
    """Pack items, in their order, into objects of about ``object_bytes``.

    Order is kept, so that a load of the same layout reads each object from front to
    back. An item larger than ``object_bytes`` gets an object of its own, so that it does
    not hold up the seal of its neighbours.

    Args:
        sizes_bytes: Expected size of each item.
        object_bytes: Target size of an object.

    Returns:
        Positions of the items of each object. No object is empty.
    """
    objects: list[list[int]] = []
    room_bytes = -1
    for position, size in enumerate(sizes_bytes):
        if size <= room_bytes:
            objects[-1].append(position)
            room_bytes -= size
        else:
            objects.append([position])
            room_bytes = object_bytes - size
    return objects
