"""What a checkpoint of a kind must hold, and how its bytes can be judged."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from dcpstore.audit.findings import Finding
from dcpstore.audit.inventory import Inventory
from dcpstore.audit.scan import Scanner
from dcpstore.store.base import Store

__all__ = ["Contents"]


class Contents(Protocol):
    """The contents of one folder, as its metadata tell them."""

    @property
    def layout(self) -> str:
        """``"dcpstore"``, ``"dcp"`` or ``"safetensors"``."""

    @property
    def num_keys(self) -> int:
        """Keys of the state dict."""

    @property
    def num_items(self) -> int:
        """Stored chunks and values."""

    @property
    def data_keys(self) -> frozenset[str]:
        """Objects that must be there, the metadata left out."""

    @property
    def metadata_keys(self) -> frozenset[str]:
        """Objects that hold the metadata."""

    @property
    def checked_bytes(self) -> int:
        """Bytes compared so far with a checksum or with what they must be."""

    def examine(self, store: Store, inventory: Inventory, scanner: Scanner) -> Iterator[Finding]:
        """Compare everything with the metadata; yield what is wrong, in no order."""

    def notes(self) -> Iterator[str]:
        """Yield what was not checked and why, and what is unusual."""
