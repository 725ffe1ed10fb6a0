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
new one. Its bytes are those of `dcpstore.format.seal`. See ``docs/design/003-commit-protocol.md``.

Objects are deleted only with a `Proof` that nothing refers to them, nor can come to. A put that
was not answered may take effect at any time, so that reading the old ``.metadata``, or none,
proves nothing while there is one. Without a proof the outcome is `CommitUnknownError`, and
everything stays.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from typing_extensions import Buffer

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
from dcpstore.format.manifest import decode
from dcpstore.format.seal import Facts, Seal, get_manifest, make_metadata, read_seal, save_id_of
from dcpstore.store.base import IfMatch, PutMode, Store


def keys_named_in(store: Store, data: memoryview, *, key: str, folder: str = "") -> set[str]:
    """Return the keys that a metadata object refers to, relative to its folder.

    Asked before anything is deleted: metadata that are damaged or strange say nothing of what
    they referred to, and are an error.

    Args:
        store: Rooted at the checkpoint's folder, or above it.
        data: The metadata object, by any writer.
        key: Its name in the folder, for messages.
        folder: The checkpoint's, below the store's root; empty, or with a slash at its end.

    Raises:
        CorruptError: If it is damaged, or its manifest is.
        CheckpointError: If its manifest cannot be read.
    """
    seal = read_seal(data)
    if seal is None:
        return _named_in_pickle(data, key)
    manifest = decode(get_manifest(store, data, seal, folder=folder), key=seal.manifest_key or key)
    named = {one.key for one in manifest.objects}
    named.update(item.key for _, item in manifest.stored)
    return named if seal.manifest_key is None else {*named, seal.manifest_key}


def _named_in_pickle(data: memoryview, key: str) -> set[str]:
    # Here, since what refers to nothing but a manifest is read without waiting for torch.
    from torch.distributed.checkpoint.metadata import Metadata

    from dcpstore.format.metadata import stock_items
    from dcpstore.format.stock import load_metadata_pickle

    metadata = load_metadata_pickle(data, key=key)
    if not isinstance(metadata, Metadata):
        raise CorruptError(f"it holds a {type(metadata).__name__}, not DCP metadata", key=key)
    named = {item.key for item in stock_items(metadata).values()}
    if any(save_id_of(one) is not None for one in named):
        raise CorruptError("it was written by dcpstore and has lost its footer", key=key)
    return named


logger = logging.getLogger(__name__)

_ATTEMPTS = 6
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


class Proof(Enum):
    """Why nothing refers to some objects, nor can come to, so that they may be deleted."""

    NOT_BEGUN = "no put that would refer to them was begun, nor will be"
    REFUSED = "every such put was refused, and a later read shows that none took effect"
    SUPERSEDED = "something else is there now, which the store does not let a late put replace"
    REPLACED = "what referred to them was replaced by what does not"
    RETIRED = "the checkpoint that they belong to was removed, its metadata first"


class _Seen(Enum):
    OURS = auto()
    AS_FOUND = auto()
    OTHER = auto()
    GONE = auto()
    UNREADABLE = auto()


class ConditionalPut:
    """Puts one object if nobody changed it meanwhile, and finds out what came of it.

    A put that failed is settled by reading back. `proof` tells whether that was possible.

    Args:
        store: Where to put it.
        key: Of the object.
        found: What is to be replaced; None to create.
        config: Whether the store must honour preconditions, and how long to keep trying: no
            attempt begins later than ``retry_deadline_s`` after the first.
        sleep: Waits between attempts, in seconds.
        clock: Monotonic seconds.
    """

    _action = "putting the object"

    def __init__(
        self,
        store: Store,
        key: str,
        found: Found | None,
        config: WriteConfig | None = None,
        *,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._key = key
        self._found = found
        self._config = config or WriteConfig()
        self._sleep = sleep
        self._clock = clock
        self._is_unanswered = False  # an attempt may have taken effect, or may still do so
        self._is_unconditional = False  # such an attempt had no precondition
        self._why_unreadable: CheckpointError | None = None
        self.proof: Proof | None = Proof.NOT_BEGUN
        """Why the object is certainly not there, once `put` raised; None while it may be."""
        self.was_acknowledged = False
        """Whether the store itself said that this put took effect."""

    def put(self, data: Buffer) -> str | None:
        """Put the object, and return its ETag once it is there.

        Raises:
            AlreadyExistsError: If there is another object and none was expected.
            ConflictError: If the object to replace was replaced or removed.
            StoreError: If the store refused for certain.
            CommitUnknownError: If it could not be found out whether it is there.
        """
        view = memoryview(data).cast("B")
        mode = self._mode(view)
        self.proof = None
        num_refusals = 0
        end_s = self._clock() + self._config.retry_deadline_s
        for attempt in range(_ATTEMPTS):
            try:
                etag = self._store.put(self._key, view, mode=mode)
            except CheckpointError as error:
                last = error
            else:
                self.was_acknowledged = True
                return etag
            self._note(last, mode)
            seen, etag = self._look(view)
            if seen is _Seen.OURS:
                return etag
            if seen is _Seen.OTHER or seen is _Seen.GONE:
                return self._settle(view, seen, self._conflict(last))
            # S3 answers 409 while another conditional put of the key is under way.
            is_refusal = isinstance(last, AlreadyExistsError | ConflictError)
            num_refusals += is_refusal
            may_pass = num_refusals < _MAX_REFUSALS if is_refusal else _is_retryable(last)
            if seen is _Seen.AS_FOUND and not may_pass:
                is_about_condition = is_refusal or isinstance(last, ConfigError)
                has_other_way = mode != "overwrite" and is_about_condition
                needs_none = has_other_way and not self._config.require_conditional_put
                if needs_none and (is_refusal or not self._is_unanswered):
                    mode = "overwrite"  # it was just seen that all is as it was found
                elif not self._is_unanswered:
                    return self._settle(
                        view, seen, self._unsupported(last) if has_other_way else last
                    )
            if self._clock() >= end_s:
                break
            self._sleep(random.uniform(0, min(5.0, 0.1 * 2**attempt)))
        if is_refusal and seen is _Seen.AS_FOUND:
            return self._settle(view, seen, self._unsupported(last))
        failed = f"{self._store.url}: {self._action} failed ({last}); nothing was changed"
        return self._settle(view, seen, self._refused(failed, last))

    def _mode(self, data: memoryview) -> PutMode:
        if self._found is None:
            return "create"
        if self._found.etag is not None:
            return IfMatch(self._found.etag)
        seen, _ = self._look(data)
        if seen is not _Seen.AS_FOUND:
            raise self._why_unreadable or self._conflict(None)
        return "overwrite"

    def _note(self, error: CheckpointError, mode: PutMode) -> None:
        if not error.refused:
            self._is_unanswered = True
            self._is_unconditional |= not self._store.capabilities.decides(mode)

    def _look(self, data: memoryview) -> tuple[_Seen, str | None]:
        """Read what is there, and return its ETag too."""
        try:
            now = probe(self._store, self._key, denied_is_absent=False)
            if now is not None and self._is_ours(now, data):
                return _Seen.OURS, now.etag
        except CheckpointError as error:
            self._why_unreadable = error
            return _Seen.UNREADABLE, None
        if _may_be_unchanged(self._found, now):
            return _Seen.AS_FOUND, None
        return (_Seen.GONE if now is None else _Seen.OTHER), None

    def _is_ours(self, now: Found, data: memoryview) -> bool:
        """Tell whether what is there is what was put.

        Raises:
            CheckpointError: If that cannot be told, as what was read is damaged or not whole.
        """
        return now.data == data

    def _settle(self, data: memoryview, seen: _Seen, error: CheckpointError) -> str | None:
        """Return if the object is there after all; else raise, with a proof if there is one.

        A store may answer 404 once for what exists, so what is concluded from is seen twice.
        Against a put that is unanswered only what is there counts, and not that nothing is.
        """
        again, etag = self._look(data)
        if again is _Seen.OURS:
            return etag
        if again is seen and seen is not _Seen.UNREADABLE:
            if not self._is_unanswered:
                self.proof = Proof.REFUSED
            elif seen is _Seen.OTHER and not self._is_unconditional:
                self.proof = Proof.SUPERSEDED
        if self.proof is None:
            raise self._unknown(error) from error
        raise error

    def _unsupported(self, cause: CheckpointError) -> StoreError:
        return self._refused(
            f"the store refused to put {self._key} under a precondition that holds: {cause}."
            " It does not support conditional puts (If-Match, If-None-Match) as S3, GCS and"
            " Azure do. If no other job writes to this URL, save with"
            " WriteConfig(require_conditional_put=False)",
            cause,
        )

    def _refused(self, message: str, cause: CheckpointError) -> StoreError:
        error = StoreError(message, key=self._key, refused=True)
        error.__cause__ = cause
        return error

    def _conflict(self, cause: CheckpointError | None) -> CheckpointError:
        """Return the error for an object that somebody else put, replaced or removed."""
        error = (AlreadyExistsError if self._found is None else ConflictError)(
            f"{self._store.url}: another writer put {self._key} meanwhile; its object was kept"
        )
        error.__cause__ = cause
        return error

    def _unknown(self, cause: CheckpointError) -> CommitUnknownError:
        unreadable = self._why_unreadable
        also = "" if unreadable is None else f"; reading it back failed too: {unreadable}"
        return CommitUnknownError(
            f"the put of {self._key} at {self._store.url} was sent, and whether it took effect, or"
            f" may still do so, could not be found out ({cause}{also}). {self._advice()}"
        )

    def _advice(self) -> str:
        return "Look at what is there. No object was deleted"


class Sealer(ConditionalPut):
    """Makes one checkpoint exist. Coordinator only; arguments are those of `ConditionalPut`."""

    _action = "sealing the checkpoint"
    _save_id = ""
    made: frozenset[str] = frozenset()
    """Keys that `put_sealed` may have put beside the metadata."""

    def put_sealed(
        self, save_id: str, pickled: bytes, manifest: bytes, facts: Facts | None = None
    ) -> None:
        """Put manifest and metadata, and return once the checkpoint exists.

        If it raises, `proof` tells whether the objects of this save may be deleted.

        Raises:
            AlreadyExistsError: If a checkpoint appeared meanwhile and none was expected.
            ConflictError: If the checkpoint to overwrite was replaced or removed meanwhile.
            StoreError: If the store refused for certain; nothing was sealed.
            CommitUnknownError: If it could not be found out whether it was sealed.
        """
        most_bytes = self._config.embed_manifest_bytes
        seal, data = make_metadata(
            save_id, pickled, manifest, embed_manifest_bytes=most_bytes, facts=facts
        )
        self._save_id = save_id
        if seal.manifest_key is not None:
            self.made = frozenset([seal.manifest_key])
            self._store.put(seal.manifest_key, manifest)
        self.put(data)

    def _is_ours(self, now: Found, data: memoryview) -> bool:
        del data  # whose id says the same
        if now.seal is None and not (self._found is not None and now.data == self._found.data):
            # Another writer's metadata, or ours cut short or damaged, which raises.
            keys_named_in(self._store, now.data, key=self._key)
        return now.seal is not None and now.seal.save_id == self._save_id

    def _conflict(self, cause: CheckpointError | None) -> CheckpointError:
        if self._found is None:
            error: CheckpointError = AlreadyExistsError(
                f"another save sealed a checkpoint at {self._store.url} while this one was"
                " being written; theirs was kept and this one discarded"
            )
        else:
            error = ConflictError(
                f"the checkpoint at {self._store.url} was replaced or removed by another writer"
                " while this save was overwriting it; what is there now was kept and this save"
                " discarded"
            )
        error.__cause__ = cause
        return error

    def _advice(self) -> str:
        return (
            "The checkpoint there is the old one or the new one, whole in either case:"
            f" `dcpstore show {self._store.url}` prints the id of the save that is there, and that"
            f" of this save is {self._save_id}. No object was deleted; `dcpstore prune` removes"
            " what no checkpoint refers to once it is a day old"
        )


def _may_be_unchanged(found: Found | None, now: Found | None) -> bool:
    """Tell whether what is there may be what was found, so that a put of it may still act.

    The put's precondition is about the ETag. Bytes that differ do not prove another object: an
    answer may have been cut short and look whole.
    """
    if found is None or now is None:
        return found is now
    return now.data == found.data or (found.etag is not None and now.etag in (None, found.etag))


def _is_retryable(error: CheckpointError) -> bool:
    return isinstance(error, StoreError) and error.retryable


def prove_superseded(store: Store, found: Found | None, now: Found | None) -> Proof | None:
    """Prove from what is there that a put which may still be under way cannot take effect.

    Args:
        store: That decides on the put's precondition.
        found: What the put is to replace; None where it is to create.
        now: What is there, which the put did not make.
    """
    if found is not None and found.etag is None:
        return None
    mode: PutMode = "create" if found is None else IfMatch(found.etag or "")
    if now is None or _may_be_unchanged(found, now):
        return None
    return Proof.SUPERSEDED if store.capabilities.decides(mode) else None


def sweep(store: Store, keys: Iterable[str], proof: Proof, *, why: str) -> Sequence[str]:
    """Delete objects that no sealed checkpoint refers to; never raises for a store's refusal.

    Args:
        store: Rooted at the checkpoint's folder.
        keys: What to delete.
        proof: Why nothing refers to them. There is no default: whoever deletes has to say.
        why: For the warning if some of them stay.

    Returns:
        The keys that may still be there.
    """
    doomed = sorted(set(keys))
    if not doomed:
        return ()
    logger.debug("%s: deleting %d object(s): %s", store.url, len(doomed), proof.value)
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
