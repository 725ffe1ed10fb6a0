"""Carry waves from the rank that reads to the ranks that want them.

One step of the group per wave, and one more; reading goes on in threads meanwhile::

    root     step 0: wave 0 read?    step 1: send 0, wave 1 read?    step 2: send 1, ...
    others   step 0: -               step 1: receive 0, take         step 2: receive 1, ...
    threads  read 0 ...............  read 1 .......................  read 2 ...

A wave is sent only after a step in which every rank was well: that the file cannot be read
is known to all ranks before anybody waits for its bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TypeAlias

import numpy as np

from dcpstore.collectives import Pending, RankGroup, steps
from dcpstore.fetch import ReadStats
from dcpstore.torch_save_reader.waves import Leg, Portion

__all__ = ["Begin", "Messages", "Take", "carry"]

Messages: TypeAlias = Sequence[memoryview]
"""The bytes of a wave's messages, by number."""

Begin: TypeAlias = Callable[[int], "Future[Messages]"]
"""Begins to read a wave, by number."""

Take: TypeAlias = Callable[[Portion, memoryview], None]
"""Takes a portion's bytes, valid for the call. In the thread that calls `carry`."""


def carry(
    group: RankGroup,
    waves: Sequence[Sequence[Leg]],
    take: Take,
    begin: Begin | None,
    stats: ReadStats,
) -> None:
    """Carry all waves. All ranks.

    Args:
        group: The ranks that load together; lanes are open where a message leaves its rank.
        waves: This rank's legs, by wave.
        take: Takes what this rank wants.
        begin: On the rank that reads; None on the others.
        stats: Counts bytes received, and those held outside the budget of requests.

    Raises:
        RankFailures: On every rank, if any failed to read, to carry or to take.
    """
    messages: Messages = ()
    reading = begin(0) if begin is not None and waves else None
    for number in range(len(waves) + 1):
        read: list[memoryview] = []
        work = partial(_trade_and_read, group, take, stats)
        legs = waves[number - 1] if number else ()
        steps.barrier(group, _name(number), partial(work, legs, messages, reading, read))
        messages = read
        is_last = number + 1 >= len(waves)
        reading = None if begin is None or is_last else begin(number + 1)


def _name(number: int) -> str:
    return f"read wave {number}" if not number else f"carry wave {number - 1}, read wave {number}"


def _trade_and_read(
    group: RankGroup,
    take: Take,
    stats: ReadStats,
    legs: Sequence[Leg],
    messages: Messages,
    reading: Future[Messages] | None,
    read: list[memoryview],
) -> None:
    """Carry one wave, then wait until the next is read."""
    _trade(group, legs, messages, take, stats)
    if reading is not None:
        read += reading.result()
    held = sum(message.nbytes for message in (*messages, *read))
    stats.peak_bytes = max(stats.peak_bytes, held)


def _trade(
    group: RankGroup, legs: Sequence[Leg], messages: Messages, take: Take, stats: ReadStats
) -> None:
    """Send and receive the messages of a wave, pass them on, and take this rank's portions.

    Between two ranks, sends and receives match in the order in which they are posted: both
    sides post in the order of the messages.
    """
    receives: list[tuple[memoryview, Pending | None]] = []
    sends: list[Pending] = []
    for leg in legs:
        if leg.source is None:
            receives.append((messages[leg.message], None))
            sends += [group.post_send(messages[leg.message], to) for to in leg.forwards]
        else:
            into = np.empty(leg.num_bytes, np.uint8).data
            receives.append((into, group.post_receive(into, leg.source)))
    stats.peak_bytes = max(stats.peak_bytes, sum(data.nbytes for data, _ in receives))
    for leg, (data, pending) in zip(legs, receives, strict=True):
        if pending is not None:
            pending.wait(group.deadline_s)
            stats.received_bytes += leg.num_bytes
            sends += [group.post_send(data, to) for to in leg.forwards]
        for portion in leg.portions:
            take(portion, data[portion.start : portion.start + portion.num_bytes])
    for sent in sends:
        sent.wait(group.deadline_s)
