"""The look whether a checkpoint exists already, under way while the save is planned."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from dcpstore import keys
from dcpstore.commit import Found, probe
from dcpstore.errors import AlreadyExistsError
from dcpstore.store.base import Store

__all__ = ["Look"]


class Look:
    """A look at the metadata of one checkpoint, in a thread of its own.

    One request's delay, which planning hides. Its outcome must be known before anything is
    written. One that nobody asks for its outcome ends by itself.

    Args:
        store: Rooted at the checkpoint's folder.
        metadata_key: Of the metadata to be sealed.
        overwrite: Whether a checkpoint may be there.
    """

    def __init__(self, store: Store, metadata_key: str, *, overwrite: bool) -> None:
        self._store = store
        self._metadata_key = metadata_key
        self._overwrite = overwrite
        executor = ThreadPoolExecutor(2, "dcpstore-look")
        self._found = executor.submit(probe, store, metadata_key)
        is_of_all = metadata_key == keys.METADATA_KEY
        self._of_all = None if is_of_all else executor.submit(probe, store, keys.METADATA_KEY)
        executor.shutdown(wait=False)

    def found(self) -> Found | None:
        """Return the checkpoint to overwrite, or None where there is none. Waits.

        Raises:
            AlreadyExistsError: If one exists that may not be replaced.
            StoreError: If the store cannot be reached.
        """
        found = self._found.result()
        if self._of_all is not None and self._of_all.result() is not None:
            raise AlreadyExistsError(
                f"{self._store.url} holds a checkpoint that all ranks saved together;"
                " a save with use_collectives=False cannot replace it. Save to another URL"
                " or delete it first"
            )
        if found is not None and not self._overwrite:
            raise AlreadyExistsError(
                f"{self._store.url} already holds a checkpoint. Save to another URL, or"
                " pass overwrite=True to replace it. Nothing was written"
            )
        return found
