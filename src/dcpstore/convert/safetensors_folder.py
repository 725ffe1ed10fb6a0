"""A Hugging Face folder as a target: never a mix of two checkpoints under an index.

Its file names are fixed by convention, so a folder cannot hold the old and the new
checkpoint side by side as ours do. What a reader meets while one replaces the other:

=====================  =============================================================
new: one file          the old checkpoint, then, by one put, the new one
new: several files     the old one; from the removal of its index on, none that
                       readers find; from the put of the new index on, the new one
=====================  =============================================================
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from dcpstore.commit import Proof, sweep
from dcpstore.convert.output import MIN_OUTPUT_BYTES, Outputs
from dcpstore.convert.safetensors_layout import SINGLE_FILE, FolderPlan
from dcpstore.discovery import INDEX_FILE, read_index
from dcpstore.errors import AlreadyExistsError, CorruptError, NotFoundError
from dcpstore.store.base import Store

__all__ = ["Replaced", "finish_folder", "prepare_folder"]

_MAX_LOOKS = 16


@dataclass(frozen=True, slots=True)
class Replaced:
    """The files of the checkpoint that is being replaced, as far as its index names them."""

    keys: tuple[str, ...] = ()


def prepare_folder(store: Store, plan: FolderPlan, *, overwrite: bool) -> Replaced:
    """Make ready to write the files. Coordinator only.

    Raises:
        AlreadyExistsError: If a file is in the way, or another Hugging Face checkpoint lies
            there, and they may not be replaced. Nothing was changed.
    """
    looked_for = sorted({*plan.keys, INDEX_FILE, SINGLE_FILE})
    present = _present(store, looked_for)
    if present and not overwrite:
        raise AlreadyExistsError(
            f"{store.url} already holds {present[0]}"
            + (f" and {len(present) - 1} more files of that kind" if len(present) > 1 else "")
            + ". Convert to another folder, or pass overwrite=True to replace what is there."
            " Nothing was written"
        )
    replaced = Replaced(_files_of_index(store)) if INDEX_FILE in present else Replaced()
    if SINGLE_FILE in present:
        replaced = Replaced((*replaced.keys, SINGLE_FILE))
    if plan.index is not None and INDEX_FILE in present:
        store.delete_many([INDEX_FILE])
    return replaced


def finish_folder(store: Store, plan: FolderPlan, replaced: Replaced, *, overwrite: bool) -> None:
    """Make the new files the checkpoint, and remove those of the old. Coordinator only."""
    stale = [key for key in replaced.keys if key not in plan.keys]
    if plan.index is None:
        if replaced.keys:
            sweep(store, [INDEX_FILE], Proof.REPLACED, why="the replaced checkpoint")
    else:
        if SINGLE_FILE in stale:
            store.delete_many([SINGLE_FILE])  # Hugging Face's loaders would prefer it
        with (
            Outputs(
                store,
                budget_bytes=MIN_OUTPUT_BYTES,
                largest_bytes=len(plan.index),
                overwrite=overwrite,
            ) as outputs,
            outputs.write(INDEX_FILE) as stream,
        ):
            stream.write(plan.index)
    sweep(store, stale, Proof.REPLACED, why="the replaced checkpoint")


def _present(store: Store, keys: Sequence[str]) -> list[str]:
    def is_there(key: str) -> bool:
        try:
            store.head(key)
        except NotFoundError:
            return False
        return True

    with ThreadPoolExecutor(_MAX_LOOKS, "dcpstore-look") as executor:
        found = executor.map(is_there, keys)
        return [key for key, there in zip(keys, found, strict=True) if there]


def _files_of_index(store: Store) -> tuple[str, ...]:
    """Return the files in the folder that its index names; none if it is damaged."""
    with suppress(CorruptError):
        names = set((read_index(store) or {}).values())
        return tuple(sorted(name for name in names if _is_a_file_of_ours(name)))
    return ()


def _is_a_file_of_ours(name: str) -> bool:
    return name.endswith(".safetensors") and "/" not in name
