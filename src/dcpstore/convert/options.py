"""The arguments that all converters share, checked in one place."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, TypedDict

from dcpstore.convert.output import Shares, share_budget
from dcpstore.convert.selection import DtypeRule, Selection, select
from dcpstore.plan.rules import Rename
from dcpstore.ranks import RankGroup
from dcpstore.ranks.agreement import Ranks, join_ranks
from dcpstore.report import Meter, ProgressCallback, show_progress


class ConversionOptions(TypedDict, total=False):
    """What every converter takes by keyword; `dcpstore.convert` says what each means."""

    keys: Sequence[str]
    exclude: Sequence[str]
    rename: Rename | None
    dtype: DtypeRule
    source_options: Mapping[str, Any] | None
    target_options: Mapping[str, Any] | None
    budget_bytes: int
    overwrite: bool
    process_group: Ranks
    deadline_s: float
    progress: ProgressCallback | bool | None


@dataclass(slots=True)
class Conversion:
    """What a caller asked of a converter: where from, where to, and `ConversionOptions`.

    Attributes:
        selection: Of keys, names and dtypes.
        shares: Of the memory.

    Raises:
        ConfigError: If an option is of a wrong type, or the budget is too small.
    """

    source: str | os.PathLike[str]
    target: str | os.PathLike[str]
    keys: Sequence[str] = ()
    exclude: Sequence[str] = ()
    rename: Rename | None = None
    dtype: DtypeRule = None
    source_options: Mapping[str, Any] | None = None
    target_options: Mapping[str, Any] | None = None
    budget_bytes: int = 256 << 20
    overwrite: bool = False
    process_group: Ranks = None
    deadline_s: float = 24 * 3600.0
    progress: ProgressCallback | bool | None = None
    selection: Selection = field(init=False)
    shares: Shares = field(init=False)

    def __post_init__(self) -> None:
        self.selection = select(self.keys, self.exclude, self.rename, self.dtype)
        self.shares = share_budget(self.budget_bytes)

    def join(self) -> AbstractContextManager[RankGroup]:
        """Open the group of the ranks that convert together. Collective."""
        return join_ranks(self.process_group, 0, self.deadline_s, action="convert", url=self.target)

    def show_progress(
        self, group: RankGroup, action: str = "convert"
    ) -> AbstractContextManager[Meter]:
        """Make the meter that the caller asked for."""
        return show_progress(action, self.progress, is_coordinator=group.is_coordinator)
