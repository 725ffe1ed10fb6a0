"""The commit protocol: how a checkpoint comes to exist in one request.

Every key of a save carries a fresh save id, so nothing that a sealed checkpoint refers to
is ever overwritten. The coordinator commits in this order:

1. `probe`: read ``.metadata`` before anything is written; remember its ETag.
2. All ranks put their data objects.
3. `put_sealed`: put ``.metadata``, with the manifest in it, under a precondition: create if
   step 1 found none, compare-and-swap on its ETag if the caller said overwrite. A large
   manifest is an object of its own, put first.
4. `sweep`: delete the objects that the old ``.metadata`` named.

A crash before the put of ``.metadata`` leaves the old checkpoint, a crash after it the
new one. Its bytes are those of `dcpstore.seal`. See ``docs/design/003-commit-protocol.md``.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from dcpstore.config import WriteConfig
from dcpstore.errors import (
    AlreadyExistsError,
    CheckpointError,
    CommitUnknownError,
    ConfigError,
    ConflictError,
    CorruptError,
    NotFoundError,
    StoreError,
)
from dcpstore.seal import Seal, make_metadata, read_seal
from dcpstore.store.base import IfMatch, PutMode, Store

__all__ = ["Found", "Sealer", "probe", "sweep"]

logger = logging.getLogger(__name__)

_SEAL_ATTEMPTS = 6
_MAX_REFUSALS = 3  # of a precondition that holds, until the store is taken to have none


@dataclass(frozen=True, slots=True)
class Found:
    """A ``.metadata`` that exists.

    Attributes:
        data: Its bytes.
        etag: The store's version mark, for compare-and-swap.
        seal: Its footer; None if somebody else's writer made it.
    """

    data: memoryview
    etag: str | None
    seal: Seal | None


def probe(store: Store, key: str, *, denied_is_absent: bool = True) -> Found | None:
    """Look whether a checkpoint exists.

    A refusal counts as absence: without permission to list, S3 answers 403 for a missing
    object. The precondition of the seal decides in the end. Who is about to delete
    something must pass ``denied_is_absent=False``.

    Raises:
        StoreError: If the store cannot be reached.
        NotFoundError: Never; absence is None.
    """
    try:
        fetched = store.get(key)
    except NotFoundError:
        return None
    except StoreError as error:
        if error.denied and denied_is_absent:
            return None
        raise
    try:
        seal = read_seal(fetched.data)
    except CorruptError:
        seal = None  # it is there, damaged: to be overwritten or refused like any other
    return Found(fetched.data, fetched.etag, seal)


class Sealer:
    """Makes one checkpoint exist. Coordinator only.

    Args:
        store: Rooted at the checkpoint's folder.
        key: Of the metadata object.
        found: What `probe` saw; None to create.
        config: Where the manifest lies, and whether the store must honour preconditions.
        sleep: Waits between attempts, in seconds.
    """

    def __init__(
        self,
        store: Store,
        key: str,
        found: Found | None,
        config: WriteConfig | None = None,
        *,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._store = store
        self._key = key
        self._found = found
        self._config = config or WriteConfig()
        self._sleep = sleep
        self.made: frozenset[str] = frozenset()
        """Keys that `put_sealed` may have put beside the metadata."""

    def put_sealed(self, save_id: str, pickled: bytes, manifest: bytes) -> None:
        """Put manifest and metadata, and return once the checkpoint exists.

        Raises:
            AlreadyExistsError: If a checkpoint appeared meanwhile and none was expected.
            ConflictError: If the checkpoint to overwrite was replaced or removed meanwhile.
            StoreError: If the store refused for certain; nothing was sealed.
            CommitUnknownError: If the answer was lost and could not be found out.
        """
        most_bytes = self._config.embed_manifest_bytes
        seal, data = make_metadata(save_id, pickled, manifest, embed_manifest_bytes=most_bytes)
        if seal.manifest_key is not None:
            self.made = frozenset([seal.manifest_key])
            self._store.put(seal.manifest_key, manifest)
        self._seal(save_id, data)

    def _seal(self, save_id: str, data: bytes) -> None:
        mode = self._mode()
        maybe_sent = False  # whether an attempt whose answer was lost may yet take effect
        num_refusals = 0
        for attempt in range(_SEAL_ATTEMPTS):
            try:
                self._store.put(self._key, data, mode=mode)
            except (AlreadyExistsError, ConfigError, ConflictError, StoreError) as error:
                last = error
                maybe_sent = maybe_sent or _is_ambiguous(error)
                if self._was_sealed(save_id, error, maybe_sent=maybe_sent):
                    return
                # S3 answers 409 while another conditional put of the key is under way.
                is_refusal = isinstance(error, AlreadyExistsError | ConflictError)
                num_refusals += is_refusal
                may_pass = num_refusals < _MAX_REFUSALS if is_refusal else _is_retryable(error)
                if not may_pass:
                    mode = self._without_condition(error, mode, maybe_sent=maybe_sent)
            else:
                return
            self._sleep(random.uniform(0, min(5.0, 0.1 * 2**attempt)))
        raise (self._unknown(last) if maybe_sent else self._not_sealed(last)) from last

    def _mode(self) -> PutMode:
        if self._found is None:
            return "create"
        if self._found.etag is not None:
            return IfMatch(self._found.etag)
        return self._compare_then_put()

    def _was_sealed(self, save_id: str, error: CheckpointError, *, maybe_sent: bool) -> bool:
        """Find out whether a put that failed took effect; False if all is as it was found.

        Raises:
            AlreadyExistsError: If there is another checkpoint and none was expected.
            ConflictError: If the checkpoint to overwrite was replaced or removed.
            StoreError: If the put was denied.
            CommitUnknownError: If it cannot be read. Whatever the put's error says then, an
                engine or a proxy may have sent it twice.
        """
        if isinstance(error, StoreError) and error.denied and not maybe_sent:
            raise error
        try:
            now = probe(self._store, self._key)
        except CheckpointError as unreadable:
            raise self._unknown(unreadable) from error
        if now is not None and now.seal is not None and now.seal.save_id == save_id:
            return True
        if not self._is_as_found(now):
            raise self._conflict(error)
        return False

    def _is_as_found(self, now: Found | None) -> bool:
        before = self._found
        if now is None or before is None:
            return now is before
        return now.data == before.data

    def _without_condition(
        self, error: CheckpointError, mode: PutMode, *, maybe_sent: bool
    ) -> PutMode:
        """Return the mode to try on a store that refuses although all is as it was found."""
        if maybe_sent:
            raise self._unknown(error) from error
        if isinstance(error, AlreadyExistsError) and self._found is None:
            raise self._conflict(error)  # it is there, and we may not read it
        if mode == "overwrite":
            raise error
        if self._config.require_conditional_put:
            raise StoreError(
                f"the store refused to put {self._key} under a precondition that holds: {error}."
                " It does not support conditional puts (If-Match, If-None-Match) as S3, GCS and"
                " Azure do. If no other job writes to this URL, save with"
                " WriteConfig(require_conditional_put=False)",
                key=self._key,
            ) from error
        return self._compare_then_put()

    def _compare_then_put(self) -> PutMode:
        if not self._is_as_found(probe(self._store, self._key)):
            raise self._conflict(None)
        return "overwrite"

    def _conflict(self, cause: CheckpointError | None) -> CheckpointError:
        if self._found is None:
            error: CheckpointError = AlreadyExistsError(
                f"another save sealed a checkpoint at {self._store.url} while this one was"
                " being written; theirs was kept and this one discarded"
            )
        else:
            error = ConflictError(
                f"the checkpoint at {self._store.url} was replaced or removed by somebody else"
                " while this save was overwriting it; what is there now was kept and this save"
                " discarded"
            )
        error.__cause__ = cause
        return error

    def _not_sealed(self, cause: CheckpointError) -> CheckpointError:
        return StoreError(
            f"{self._store.url}: sealing the checkpoint failed ({cause}); nothing was sealed",
            key=self._key,
        )

    def _unknown(self, cause: CheckpointError) -> CheckpointError:
        return CommitUnknownError(
            f"the put of {self._key} at {self._store.url} was sent, and whether it took effect"
            f" could not be found out ({cause}). The checkpoint there is the old one or the new"
            " one, whole in either case; load it to see which. No object was deleted"
        )


def _is_ambiguous(error: CheckpointError) -> bool:
    return isinstance(error, StoreError) and error.retryable and not error.throttled


def _is_retryable(error: CheckpointError) -> bool:
    return isinstance(error, StoreError) and error.retryable


def sweep(store: Store, keys: Iterable[str], *, why: str) -> Sequence[str]:
    """Delete objects that no sealed checkpoint refers to; never raises for a store's refusal.

    Args:
        store: Rooted at the checkpoint's folder.
        keys: What to delete. Only keys that the caller knows to be unreferenced.
        why: For the warning if some of them stay.

    Returns:
        The keys that may still be there.
    """
    doomed = sorted(set(keys))
    if not doomed:
        return ()
    try:
        store.delete_many(doomed)
    except CheckpointError as error:
        logger.warning(
            "%s: could not delete %d object(s) of %s, such as %s (%s). They cost storage and"
            " nothing else; delete them when you may",
            store.url,
            len(doomed),
            why,
            doomed[0],
            error,
        )
        return doomed
    return ()
