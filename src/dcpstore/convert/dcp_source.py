"""The checkpoint that a converter reads: its metadata read once, and opened on every rank."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from dcpstore.collectives import RankGroup, steps
from dcpstore.config import ReadConfig
from dcpstore.discovery import Discovered, discover
from dcpstore.folder import Folder
from dcpstore.reading import Checkpoint
from dcpstore.store.base import Store

__all__ = ["open_source"]


def open_source(
    group: RankGroup,
    url: str | os.PathLike[str],
    options: Mapping[str, Any] | None,
    config: ReadConfig,
    find: Callable[[Store, ReadConfig], Discovered] = discover,
) -> Checkpoint:
    """Open a checkpoint on all ranks; the coordinator reads what tells about it. Collective.

    Raises:
        RankFailures: On every rank, if there is no checkpoint or any rank cannot open it.
    """
    folder = Folder(url, options, config)
    try:
        found = steps.broadcast(group, "read metadata", lambda: find(folder.open(), config))
        opened: list[Checkpoint] = []
        steps.barrier(
            group, "open metadata", lambda: opened.append(Checkpoint(folder, found, config))
        )
    except BaseException:
        folder.close()
        raise
    return opened[0]
