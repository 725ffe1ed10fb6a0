"""When a save is given up before its seal: it was cancelled, or its time is over."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from time import monotonic

from dcpstore.errors import AbandonedError, ConfigError

_SHARE_FOR_THE_SEAL = 0.1
_MOST_FOR_THE_SEAL_S = 3.0
# What the first half of a step leaves to its second, of all it has; see `dcpstore.ranks.exchange`.
_STEP_SHARE, _MOST_OF_A_STEP_S = 0.25, 10.0


class Cutoff:
    """One rank's say in whether a save goes on. Thread-safe.

    ::

        begun            writing           must end by            end
        |--------------------------------------|---- the seal ----|
        '- cancel() ends it ------------- close() '- cancel() comes too late

    Args:
        total_s: Seconds from now within which the save must be sealed; None for as long as it
            takes.
        clock: Monotonic seconds.

    Raises:
        ConfigError: If there is no time at all.
    """

    def __init__(
        self, total_s: float | None = None, clock: Callable[[], float] = monotonic
    ) -> None:
        if total_s is not None and not total_s > 0:
            raise ConfigError(f"total_deadline_s must be positive, not {total_s}")
        self.total_s = total_s
        self._clock = clock
        self._lock = threading.Lock()
        self._is_cancelled = False
        self._is_closed = False
        self._end_s = math.inf if total_s is None else clock() + total_s

    def cancel(self) -> bool:
        """Give the save up; tell whether that comes in time."""
        with self._lock:
            self._is_cancelled |= not self._is_closed
            return not self._is_closed

    def close(self) -> None:
        """From here on `cancel` comes too late.

        Raises:
            AbandonedError: If it came before, or there is no time left.
        """
        self.end()
        self.check()

    def end(self) -> None:
        """From here on `cancel` comes too late: the save is over."""
        with self._lock:
            self._is_closed = True

    def left_s(self) -> float:
        """Return the seconds until the save must be sealed; infinite if it has no deadline."""
        return max(0.0, self._end_s - self._clock())

    @property
    def is_late(self) -> bool:
        """Whether there is no time left but what the seal takes."""
        if self.total_s is None:
            return False
        return self.left_s() <= min(_SHARE_FOR_THE_SEAL * self.total_s, _MOST_FOR_THE_SEAL_S)

    @property
    def is_over(self) -> bool:
        """Whether nothing more is to be begun."""
        return self._is_cancelled or self.is_late

    def check(self) -> None:
        """Go on.

        Raises:
            AbandonedError: If nothing more is to be begun.
        """
        if self._is_cancelled:
            raise AbandonedError("the save was cancelled before its seal. Nothing was sealed")
        if self.is_late:
            raise AbandonedError(self.lateness)

    @property
    def lateness(self) -> str:
        """What to say of a save that was late."""
        return (
            f"the save could not be sealed within total_deadline_s={self.total_s:g} and was given"
            " up. Nothing was sealed. Give it more time, or save less"
        )

    def step_deadline_s(self, most_s: float) -> float:
        """Return the deadline of a step of ranks in which they hear of each other in time."""
        left_s = max(self.left_s(), 0.1)
        return min(most_s, left_s + min(_STEP_SHARE * left_s, _MOST_OF_A_STEP_S))
