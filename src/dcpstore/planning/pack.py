"""Which items go into which object, and in how large parts that is sent."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["plan_objects", "plan_part_bytes"]

_MIB = 1 << 20
_LEAST_PART_BYTES = 8 * _MIB  # 0.08 s of a 100 MB/s connection, about twice a request's delay


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


def plan_part_bytes(total_bytes: int, num_objects: int, *, max_parts: int, most_bytes: int) -> int:
    """Choose the size of parts so that all connections end at about the same time.

    Parts go out in rounds of ``max_parts``. Where the last round is a part or two, the others
    wait for it: 1 GiB in 67 parts of 16 MiB takes three rounds of 32, and in parts of 12 MiB
    three shorter ones.

    Args:
        total_bytes: Of all objects.
        num_objects: Each of which may end with a short part.
        max_parts: Parts in flight.
        most_bytes: Size of a part where there are many.

    Returns:
        ``most_bytes``, or fewer whole MiB: as many as the same number of rounds takes.
    """
    least_bytes = min(_LEAST_PART_BYTES, most_bytes)
    num_rounds = -(-(total_bytes + num_objects * most_bytes) // (max_parts * most_bytes))
    num_parts = max(1, num_rounds * max_parts - num_objects)
    even_bytes = -(-total_bytes // num_parts // _MIB) * _MIB
    return min(most_bytes, max(least_bytes, even_bytes))
