"""From a folder to what it should hold; damaged metadata become findings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from dcpstore.audit.contents import Contents
from dcpstore.audit.findings import Finding
from dcpstore.audit.safetensors_files import open_files
from dcpstore.audit.sealed import Sealed, SealedContents, open_sealed
from dcpstore.config import ReadConfig
from dcpstore.discovery import discover
from dcpstore.errors import CorruptError, NotFoundError, StoreError
from dcpstore.keys import METADATA_KEY
from dcpstore.ranges import ByteRange
from dcpstore.store.base import Store

__all__ = ["Opened", "open_contents"]

_RANK_KEY = re.compile(r"__(\d+)\.metadata")


@dataclass(frozen=True, slots=True)
class Opened:
    """What the metadata say, and what is wrong with the metadata.

    Attributes:
        contents: What the folder should hold.
        findings: What is wrong with the metadata themselves.
    """

    contents: Contents
    findings: tuple[Finding, ...]


def open_contents(store: Store, config: ReadConfig) -> Opened:
    """Read the metadata of the folder's checkpoint, or of each rank's.

    Raises:
        NotFoundError: If there is no checkpoint.
        IncompatibleError: If a newer dcpstore wrote it.
        StoreError: If the store refuses.
    """
    seals: list[Sealed] = []
    findings: list[Finding] = []
    try:
        discovered = discover(store, config)
        if discovered.files is not None:
            return Opened(open_files(store), ())
        seals.append(open_sealed(discovered, config))
    except CorruptError as error:
        if (error.key or "").endswith(".safetensors"):
            return Opened(open_files(store), ())
        findings.append(_damage(error))
    except NotFoundError:
        ranks = sorted(_ranks(store))
        if not ranks:
            raise
        for rank in ranks:
            try:
                seals.append(open_sealed(discover(store, config, rank=rank), config))
            except CorruptError as error:
                findings.append(_damage(error))
    return Opened(SealedContents(seals, config), tuple(findings))


def _damage(error: CorruptError) -> Finding:
    span = None
    if error.start is not None and error.end is not None:
        span = ByteRange(error.start, error.end)
    return Finding("metadata", str(error), error.key or METADATA_KEY, error.fqn, span)


def _ranks(store: Store) -> Iterator[int]:
    """Yield the ranks that sealed checkpoints of their own (``use_collectives=False``)."""
    try:
        for info in store.list():
            match = _RANK_KEY.fullmatch(info.key)
            if match:
                yield int(match[1])
    except StoreError as error:
        if not error.denied:
            raise
