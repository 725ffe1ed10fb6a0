"""Whether what lies in a checkpoint's folder is what was saved: every object, every block.

1. read the metadata; what is damaged there is a finding like any other
2. list the folder (or look each object up, where listing is refused); compare sizes
3. compare chunks with their tensors
4. read every byte that has a checksum, once, with many requests in flight
5. read the metadata again if something was gone: another save may have replaced it all

Kinds of checkpoints differ in what they let us check:

===========  ==========================================================================
dcpstore     CRC32C per block of every payload, and the bytes around it: every byte
stock DCP    zip's CRC32 of every member of every record. Not covered: records that a stream
             extension transformed, values that are no zip archive, records saved with
             ``set_crc32_options(False)``
safetensors  headers, sizes and index; values have no checksum in that format
===========  ==========================================================================
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import monotonic
from typing import Any, TypeAlias

from dcpstore.audit.contents import FileContents, Sealed, SealedContents, open_sealed
from dcpstore.audit.scan import Finding, Inventory, Scanner, in_order, take_inventory
from dcpstore.config import ReadConfig
from dcpstore.errors import ConflictError, CorruptError, NotFoundError
from dcpstore.format.seal import METADATA_KEY, save_id_of
from dcpstore.read.discovery import discover, sealed_ranks
from dcpstore.report import ProgressCallback, show_progress
from dcpstore.store import open_store
from dcpstore.store.base import ByteRange, ObjectInfo, Store
from dcpstore.store.folder import Folder
from dcpstore.text import count_text, size_text, table

Contents: TypeAlias = SealedContents | FileContents


def open_contents(store: Store, config: ReadConfig) -> tuple[Contents, list[Finding]]:
    """Read the metadata of the folder's checkpoint, or of each rank's.

    Returns:
        What the folder should hold, and what is wrong with the metadata themselves.

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
            return FileContents(store), []
        seals.append(open_sealed(discovered, config))
    except CorruptError as error:
        if (error.key or "").endswith(".safetensors"):
            return FileContents(store), []
        findings.append(_damage(error))
    except NotFoundError:
        ranks = sealed_ranks(store)
        if not ranks:
            raise
        for rank in ranks:
            try:
                seals.append(open_sealed(discover(store, config, rank=rank), config))
            except CorruptError as error:
                findings.append(_damage(error))
    return SealedContents(seals, config), findings


def _damage(error: CorruptError) -> Finding:
    span = None
    if error.start is not None and error.end is not None:
        span = ByteRange(error.start, error.end)
    return Finding("metadata", str(error), error.key or METADATA_KEY, error.fqn, span)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What `verify_checkpoint` found.

    Attributes:
        url: Of the checkpoint.
        layout: ``"dcpstore"``, ``"dcp"`` (a stock writer's) or ``"safetensors"``.
        findings: Everything that is wrong, by object and place. Empty for a sound checkpoint.
        leftovers: Objects of saves of ours that were never sealed, or were replaced. They
            cost storage and harm nobody.
        others: Objects in the folder that the checkpoint does not refer to and dcpstore did
            not write.
        notes: What was not checked and why, and what is unusual; for people.
        num_keys: Keys of the state dict.
        num_items: Stored chunks and values.
        num_attachments: Files that were sealed with it.
        num_objects: Objects that the checkpoint refers to.
        checked_bytes: Bytes compared with a checksum or with what they must be.
        fetched_bytes: Bytes asked of the store.
        num_requests: Ranged GETs, retries not counted.
        peak_bytes: Most fetched bytes held at a time.
        elapsed_s: Seconds the whole took.
    """

    url: str
    layout: str
    findings: tuple[Finding, ...]
    leftovers: tuple[ObjectInfo, ...] = ()
    others: tuple[ObjectInfo, ...] = ()
    notes: tuple[str, ...] = ()
    num_keys: int = 0
    num_items: int = 0
    num_attachments: int = 0
    num_objects: int = 0
    checked_bytes: int = 0
    fetched_bytes: int = 0
    num_requests: int = 0
    peak_bytes: int = 0
    elapsed_s: float = 0.0

    @property
    def is_sound(self) -> bool:
        """Whether nothing is wrong, as far as could be checked."""
        return not self.findings

    def summary(self) -> str:
        """Describe everything but the findings, in a few lines."""
        rate = size_text(self.fetched_bytes / self.elapsed_s) if self.elapsed_s else "0 B"
        found = count_text(len(self.findings), "finding")
        return "\n".join(
            [
                table(
                    f"{self.url}: " + ("sound" if self.is_sound else f"DAMAGED, {found}"),
                    {
                        "layout": self.layout,
                        "keys, items, objects": f"{self.num_keys:,}, {self.num_items:,},"
                        f" {self.num_objects:,}",
                        "checked": size_text(self.checked_bytes),
                        "read": f"{size_text(self.fetched_bytes)} in"
                        f" {count_text(self.num_requests, 'request')}, {self.elapsed_s:.1f} s,"
                        f" {rate}/s",
                        **self._extra_rows(),
                    },
                ),
                *(f"  note: {note}" for note in self.notes),
            ]
        )

    def _extra_rows(self) -> dict[str, str]:
        rows = {"attachments": f"{self.num_attachments:,}"} if self.num_attachments else {}
        return rows | {
            name: f"{count_text(len(found), 'object')},"
            f" {size_text(sum(info.size_bytes for info in found))}"
            for name, found in (("leftovers", self.leftovers), ("others", self.others))
            if found
        }


def verify_checkpoint(
    url: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    config: ReadConfig | None = None,
    progress: ProgressCallback | bool | None = False,
    store_opener: Callable[..., Store] = open_store,
) -> Verification:
    """Compare everything in a checkpoint's folder with its metadata. Changes nothing.

    Reads all data once, with the concurrency and within the byte budget of ``config``.
    Single process; any number of them may verify at the same time.

    Args:
        url: Folder of the checkpoint, by any writer.
        storage_options: fsspec's options for its protocol.
        config: Requests in flight, byte budget, retries, trust.
        progress: As for `dcpstore.load`.
        store_opener: Opens the store, for tests.

    Raises:
        NotFoundError: If there is no checkpoint.
        ConflictError: If another save replaced the checkpoint meanwhile.
        IncompatibleError: If a newer dcpstore wrote it.
        StoreError: If the store refuses the metadata, or fails for good.
    """
    config = config or ReadConfig()
    began = monotonic()
    folder = Folder(url, storage_options, config, store_opener)
    try:
        with show_progress("verify", progress, is_coordinator=True) as meter:
            store = folder.open()
            contents, findings = open_contents(store, config)
            needed = contents.data_keys | contents.metadata_keys
            inventory = take_inventory(store, needed, max_requests=config.max_requests)
            meter.expect(_expected_bytes(contents, inventory))
            scanner = Scanner(store, config, meter)
            findings += contents.examine(store, inventory, scanner)
            if any(one.kind == "missing" for one in findings):
                _reject_replaced(store, contents, config)
    finally:
        folder.close()
    extra = [info for key, info in sorted(inventory.objects.items()) if key not in needed]
    notes = list(contents.notes())
    if not inventory.is_listed:
        notes.insert(
            0,
            "the store does not let these credentials list: each object was looked up by itself,"
            " and leftovers could not be seen",
        )
    return Verification(
        url=folder.url,
        layout=contents.layout,
        findings=in_order(findings),
        leftovers=tuple(info for info in extra if save_id_of(info.key) is not None),
        others=tuple(info for info in extra if save_id_of(info.key) is None),
        notes=tuple(notes),
        num_keys=contents.num_keys,
        num_items=contents.num_items,
        num_attachments=contents.num_attachments,
        num_objects=len(contents.data_keys),
        checked_bytes=contents.checked_bytes,
        fetched_bytes=scanner.fetched_bytes,
        num_requests=scanner.num_requests,
        peak_bytes=scanner.peak_bytes,
        elapsed_s=monotonic() - began,
    )


def _expected_bytes(contents: Contents, inventory: Inventory) -> int:
    if contents.layout == "safetensors":
        return 0
    found = (inventory.objects.get(key) for key in contents.data_keys)
    return sum(info.size_bytes for info in found if info is not None)


def _reject_replaced(store: Store, contents: Contents, config: ReadConfig) -> None:
    """Tell an object that was lost from one that an overwrite swept while we looked."""
    now, _ = open_contents(store, config)
    if now.metadata_keys != contents.metadata_keys or now.data_keys != contents.data_keys:
        raise ConflictError(
            f"{store.url}: another save replaced the checkpoint while it was being verified;"
            " verify again"
        )
