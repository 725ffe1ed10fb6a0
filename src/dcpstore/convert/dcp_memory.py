"""How a converter's byte budget is shared among what it holds at a time.

::

    | fetched, not yet copied | block being written | block being read | parts on their way | rest |
           1/4                       1/8                   1/8                 3/8            1/8
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from dcpstore.config import ReadConfig, WriteConfig
from dcpstore.convert.output import part_bytes_for
from dcpstore.errors import ConfigError
from dcpstore.store.limits import limits_of

__all__ = ["Shares", "share_budget"]

_MIB = 1 << 20
_MIN_BUDGET_BYTES = 32 * _MIB  # 3/8 of it holds two of the smallest parts


@dataclass(frozen=True, slots=True)
class Shares:
    """What each stage may hold.

    Attributes:
        read_bytes: Fetched bytes not yet copied.
        block_bytes: One block of tensors; there are two.
        output_bytes: Parts of objects on their way to the store.
    """

    read_bytes: int
    block_bytes: int
    output_bytes: int

    def read_config(self, config: ReadConfig | None = None) -> ReadConfig:
        """Return how to read within the share; every cast is allowed, being asked for."""
        config = config or ReadConfig()
        return replace(
            config,
            budget_bytes=self.read_bytes,
            request_bytes=min(config.request_bytes, self.read_bytes // 4),
            casts="any",
        )

    def write_config(self, object_bytes: int, config: WriteConfig | None = None) -> WriteConfig:
        """Return how to write checkpoints within the share."""
        config = config or WriteConfig()
        largest_bytes = max(object_bytes, self.block_bytes)
        # The strictest limits: the store is not open yet.
        part_bytes = part_bytes_for(2 * largest_bytes, self.output_bytes, limits_of("s3"))
        return replace(
            config,
            budget_bytes=self.output_bytes,
            part_bytes=part_bytes,
            object_bytes=object_bytes,
            max_uploads=min(config.max_uploads, self.output_bytes // part_bytes),
        )


def share_budget(budget_bytes: int) -> Shares:
    """Divide a budget.

    Raises:
        ConfigError: If it is too small to do anything with.
    """
    if budget_bytes < _MIN_BUDGET_BYTES:
        raise ConfigError(
            f"budget_bytes={budget_bytes} is too small: a converter needs {_MIN_BUDGET_BYTES}"
        )
    eighth = budget_bytes // 8 // 4096 * 4096
    return Shares(2 * eighth, eighth, 3 * eighth)
