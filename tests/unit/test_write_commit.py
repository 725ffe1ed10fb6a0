from __future__ import annotations

import copy
import itertools
import logging
import pickle
from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from dcpstore.config import WriteConfig
from dcpstore.errors import (
    AlreadyExistsError,
    CheckpointError,
    CommitUnknownError,
    ConfigError,
    ConflictError,
    NotFoundError,
    StoreError,
)
from dcpstore.format.seal import METADATA_KEY, data_key, manifest_key
from dcpstore.store import Store, open_store
from dcpstore.store.base import IfMatch
from dcpstore.store.retry import RetryingStore, RetryPolicy
from dcpstore.testing import FaultyStore, RecordingStore, StoreFault
from dcpstore.write import commit
from dcpstore.write.commit import Found, Proof, Sealer, probe, prove_superseded, sweep

PICKLED, MANIFEST = b"a pickle.", b"a manifest"
OURS, THEIRS, OLD = "a" * 16, "b" * 16, "c" * 16


@pytest.fixture
def store() -> Store:
    return open_store("memory://commit", engine="obstore")


def seal(store: Store, save_id: str, *, found=None, **knobs) -> Sealer:
    sealer = Sealer(store, METADATA_KEY, found, WriteConfig(**knobs), sleep=lambda _s: None)
    sealer.put_sealed(save_id, PICKLED, MANIFEST)
    return sealer


def sealed_by(store: Store) -> str | None:
    found = probe(store, METADATA_KEY)
    return found.seal.save_id if found is not None and found.seal is not None else None


class AfterPut:
    """A store on which something happens right after the first put of the metadata."""

    def __init__(self, inner: Store, then: Callable[[], None], error: Exception | None) -> None:
        self._inner = inner
        self._then = then
        self._error = error

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def put(self, key: str, data, *, mode="overwrite") -> str | None:
        etag = self._inner.put(key, data, mode=mode)
        if key == METADATA_KEY and self._error is not None:
            error, self._error = self._error, None
            self._then()
            raise error
        return etag


class NoConditions:
    """A store that refuses some put modes, whatever is there; counts nothing, keeps nothing.

    Args:
        inner: The store that does the work.
        refuse: Called with the mode of each put of the metadata; raises or returns.
    """

    def __init__(self, inner: Store, refuse: Callable[[object], None]) -> None:
        self._inner = inner
        self._refuse = refuse

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def put(self, key: str, data, *, mode="overwrite") -> str | None:
        if key == METADATA_KEY:
            self._refuse(mode)
        return self._inner.put(key, data, mode=mode)


def if_match_fails(mode: object) -> None:
    """Ceph compares a quoted ETag with an unquoted one."""
    if isinstance(mode, IfMatch):
        raise ConflictError("412 (scripted)")


def if_none_match_fails(mode: object) -> None:
    if mode == "create":
        raise AlreadyExistsError("412 (scripted)")


def not_implemented(mode: object) -> None:
    """Swift's S3 layer."""
    if mode != "overwrite":
        raise ConfigError("501 NotImplemented (scripted)")


# probe -------------------------------------------------------------------------------------


def test_probe_sees_nothing_ours_and_anybody_elses(store: Store) -> None:
    assert probe(store, METADATA_KEY) is None
    store.put(METADATA_KEY, b"by another writer")
    found = probe(store, METADATA_KEY)
    assert found is not None
    assert (bytes(found.data), found.seal) == (b"by another writer", None)
    assert found.etag == store.head(METADATA_KEY).etag
    seal(store, OURS, found=found)
    assert sealed_by(store) == OURS


def test_probe_takes_damaged_metadata_as_there_but_nobodys(store: Store) -> None:
    seal(store, OURS)
    data = bytearray(store.get(METADATA_KEY).data)
    data[0] ^= 1
    store.put(METADATA_KEY, bytes(data))
    found = probe(store, METADATA_KEY)
    assert found is not None
    assert found.seal is None
    seal(store, THEIRS, found=found)
    assert sealed_by(store) == THEIRS


def test_probe_takes_a_refusal_as_absence_and_other_failures_as_failures(store: Store) -> None:
    denied = FaultyStore(store, [StoreFault("denied", verb="get")])
    assert probe(denied, METADATA_KEY) is None
    broken = FaultyStore(store, [StoreFault("error", verb="get")])
    with pytest.raises(StoreError):
        probe(broken, METADATA_KEY)


# Sealing: the requests ---------------------------------------------------------------------


def test_a_first_save_creates_the_metadata_with_the_manifest_in_it(store: Store) -> None:
    recorded = RecordingStore(store)
    assert not seal(recorded, OURS, embed_manifest_bytes=len(MANIFEST)).made
    assert [(r.verb, r.key, r.mode) for r in recorded.requests] == [("put", METADATA_KEY, "create")]


@pytest.mark.parametrize("most_bytes", [0, len(MANIFEST) - 1])
def test_a_first_save_puts_a_large_manifest_and_then_creates_the_metadata(
    store: Store, most_bytes: int
) -> None:
    recorded = RecordingStore(store)
    assert seal(recorded, OURS, embed_manifest_bytes=most_bytes).made == {manifest_key(OURS)}
    assert [(r.verb, r.key, r.mode) for r in recorded.requests] == [
        ("put", manifest_key(OURS), "overwrite"),
        ("put", METADATA_KEY, "create"),
    ]


def test_an_overwrite_compares_and_swaps(store: Store) -> None:
    seal(store, OLD)
    recorded = RecordingStore(store)
    seal(recorded, OURS, found=probe(store, METADATA_KEY))
    assert [(r.verb, r.mode) for r in recorded.requests] == [("put", "match")]
    assert sealed_by(store) == OURS


def test_a_store_without_etags_is_compared_before_the_put(store: Store) -> None:
    seal(store, OLD)
    found = commit.Found(store.get(METADATA_KEY).data, None, None)
    recorded = RecordingStore(store)
    seal(recorded, OURS, found=found)
    assert [(r.verb, r.mode) for r in recorded.requests] == [("get", None), ("put", "overwrite")]
    with pytest.raises(ConflictError):
        seal(store, THEIRS, found=found)
    assert sealed_by(store) == OURS


def test_a_failed_put_of_the_manifest_seals_nothing(store: Store) -> None:
    faulty = FaultyStore(store, [StoreFault("error", verb="put", key=".dcpstore-")])
    with pytest.raises(StoreError):
        seal(faulty, OURS, embed_manifest_bytes=0)
    assert sealed_by(store) is None


# Sealing: other writers --------------------------------------------------------------------


def test_a_create_loses_to_whoever_sealed_first(store: Store) -> None:
    seal(store, THEIRS)
    with pytest.raises(AlreadyExistsError, match=r"another save sealed.*theirs was kept"):
        seal(store, OURS)
    assert sealed_by(store) == THEIRS


@pytest.mark.parametrize("what", ["replaced", "removed"])
def test_an_overwrite_of_what_is_no_longer_there_is_a_conflict(store: Store, what: str) -> None:
    seal(store, OLD)
    found = probe(store, METADATA_KEY)
    if what == "replaced":
        seal(store, THEIRS, found=found)
    else:
        store.delete_many([METADATA_KEY])
    with pytest.raises(ConflictError, match="replaced or removed by another writer"):
        seal(store, OURS, found=found)
    assert sealed_by(store) == (THEIRS if what == "replaced" else None)


# Sealing: lost answers ---------------------------------------------------------------------


@pytest.mark.parametrize("is_overwrite", [False, True])
def test_a_lost_answer_is_settled_by_reading_back(store: Store, is_overwrite: bool) -> None:
    if is_overwrite:
        seal(store, OLD)
    found = probe(store, METADATA_KEY)
    faulty = FaultyStore(store, [StoreFault("lost_ack", verb="put", key=METADATA_KEY)])
    recorded = RecordingStore(faulty)
    seal(recorded, OURS, found=found)
    assert sealed_by(store) == OURS
    assert recorded.counts == {"put": 1, "get": 1}


@pytest.mark.parametrize("is_overwrite", [False, True])
@pytest.mark.parametrize("times", [1, 3, 5])
def test_a_put_that_failed_without_effect_is_sent_again(
    store: Store, times: int, is_overwrite: bool
) -> None:
    if is_overwrite:
        seal(store, OLD)
    fault = StoreFault("error", verb="put", key=METADATA_KEY, times=times)
    seal(FaultyStore(store, [fault]), OURS, found=probe(store, METADATA_KEY))
    assert sealed_by(store) == OURS


def test_waits_between_attempts_grow_and_are_bounded(store: Store) -> None:
    waits: list[float] = []
    faulty = FaultyStore(store, [StoreFault("error", verb="put", key=METADATA_KEY, times=None)])
    sealer = Sealer(faulty, METADATA_KEY, None, sleep=waits.append)
    with pytest.raises(CheckpointError):
        sealer.put_sealed(OURS, PICKLED, MANIFEST)
    assert len(waits) == 6
    assert all(0 <= wait <= 0.1 * 2**number for number, wait in enumerate(waits))


def test_a_lost_answer_and_failing_reads_leave_the_outcome_unknown(store: Store) -> None:
    script = [
        StoreFault("lost_ack", verb="put", key=METADATA_KEY),
        StoreFault("error", verb="get", times=None),
    ]
    with pytest.raises(CommitUnknownError, match=r"old one or the new one, whole") as caught:
        seal(FaultyStore(store, script), OURS)
    assert "No object was deleted" in caught.value.message
    assert sealed_by(store) == OURS


def test_a_throttle_that_hid_a_success_is_no_certain_failure(store: Store) -> None:
    """S3 throttles before it acts; a proxy in front of another store may answer 503 after."""

    class Proxy:
        def __getattr__(self, name: str) -> object:
            return getattr(store, name)

        def put(self, key: str, data, *, mode="overwrite") -> str | None:
            etag = store.put(key, data, mode=mode)
            if key == METADATA_KEY:
                raise StoreError("503 ServiceUnavailable", retryable=True, throttled=True)
            return etag

        def get(self, key: str):
            raise StoreError("503 ServiceUnavailable", retryable=True, throttled=True)

    policy = RetryPolicy(max_attempts=3)
    once = RetryingStore(Proxy(), policy, sleep=lambda _s: None)  # type: ignore[arg-type]
    with pytest.raises(CommitUnknownError):
        seal(once, OURS)
    assert sealed_by(store) == OURS


def test_an_error_that_nothing_is_known_of_is_no_certain_failure(store: Store) -> None:
    def fail() -> None:
        raise AssertionError("unused")

    odd = AfterPut(store, lambda: None, StoreError("a wording that no table knows"))
    unreadable = FaultyStore(odd, [StoreFault("error", verb="get", times=None)])  # type: ignore[arg-type]
    with pytest.raises(CommitUnknownError):
        seal(unreadable, OURS)
    assert sealed_by(store) == OURS


def test_our_own_seal_that_we_may_not_read_is_not_taken_for_anothers(store: Store) -> None:
    script = [
        StoreFault("lost_ack", verb="put", key=METADATA_KEY),
        StoreFault("denied", verb="get", times=None),
    ]
    with pytest.raises(CommitUnknownError):
        seal(FaultyStore(store, script), OURS)
    assert sealed_by(store) == OURS


def test_a_seal_that_we_may_not_read_leaves_the_outcome_unknown(store: Store) -> None:
    """A proxy that sends a put twice makes our own seal look like somebody else's."""
    seal(store, THEIRS)
    unreadable = FaultyStore(store, [StoreFault("denied", verb="get", times=None)])
    with pytest.raises(CommitUnknownError, match=f"dcpstore show .* of this save is {OURS}"):
        seal(unreadable, OURS)
    assert sealed_by(store) == THEIRS


def test_a_denied_put_is_raised_as_it_is(store: Store) -> None:
    faulty = FaultyStore(store, [StoreFault("denied", verb="put", key=METADATA_KEY)])
    recorded = RecordingStore(faulty)
    with pytest.raises(StoreError) as caught:
        seal(recorded, OURS)
    assert caught.value.denied
    assert recorded.counts == {"put": 1, "get": 2}, "what is concluded from is seen twice"


@pytest.mark.parametrize("is_overwrite", [False, True])
def test_somebody_who_overwrote_us_before_we_read_back_is_a_conflict(
    store: Store, is_overwrite: bool
) -> None:
    if is_overwrite:
        seal(store, OLD)
    found = probe(store, METADATA_KEY)

    def overwrite() -> None:
        seal(store, THEIRS, found=probe(store, METADATA_KEY))

    lost = AfterPut(store, overwrite, StoreError("reset", retryable=True))
    with pytest.raises(ConflictError if is_overwrite else AlreadyExistsError):
        seal(lost, OURS, found=found)  # type: ignore[arg-type]
    assert sealed_by(store) == THEIRS


def test_a_put_that_lands_after_its_answer_was_lost_is_recognised(store: Store) -> None:
    """The first attempt is still on its way when we look; the second one meets it."""
    pending: list[Callable[[], None]] = []

    class Slow:
        def __getattr__(self, name: str) -> object:
            return getattr(store, name)

        def put(self, key: str, data, *, mode="overwrite") -> str | None:
            if key == METADATA_KEY and not pending:
                pending.append(lambda: store.put(key, data, mode=mode) and None)
                raise StoreError("timed out", retryable=True)
            if pending:
                pending[0]()
            return store.put(key, data, mode=mode)

    seal(Slow(), OURS)  # type: ignore[arg-type]
    assert sealed_by(store) == OURS


# Sealing: refused answers around a put that may have acted ------------------------------------

RESET = StoreError("connection reset", retryable=True)
SERVER_ERROR = StoreError("500 InternalError", retryable=True)
SLOW_DOWN = StoreError("503 SlowDown", retryable=True, throttled=True)
FORBIDDEN = StoreError("403 AccessDenied", denied=True, refused=True)
EXPIRED = StoreError("400 ExpiredToken", denied=True, refused=True)
SKEWED = StoreError("403 RequestTimeTooSkewed", denied=True, refused=True)
TOO_MANY = StoreError("429 TooManyRequests", retryable=True, throttled=True, refused=True)
GONE = NotFoundError("404 NoSuchKey")
LOST = ConflictError("412 PreconditionFailed")
TAKEN = AlreadyExistsError("412 PreconditionFailed")


class Scripted:
    """A store that answers requests for the metadata as told, and then as they are.

    Args:
        inner: The store that does the work.
        puts: Per put, whether it acts, and what is answered then.
        reads: Per read, what is answered instead of the object; None for the object.
    """

    def __init__(
        self,
        inner: Store,
        puts: Iterable[tuple[bool, Exception]] = (),
        reads: Iterable[Exception | None] = (),
    ) -> None:
        self._inner = inner
        self.puts = list(puts)
        self.reads = list(reads)

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def put(self, key: str, data, *, mode="overwrite") -> str | None:
        if key != METADATA_KEY or not self.puts:
            return self._inner.put(key, data, mode=mode)
        acts, error = self.puts.pop(0)
        if acts:
            self._inner.put(key, data, mode=mode)
        raise copy.copy(error)

    def get(self, key: str):
        error = self.reads.pop(0) if self.reads else None
        if error is not None:
            raise copy.copy(error)
        return self._inner.get(key)


def scripted(store: Store, puts, reads, is_overwrite: bool) -> tuple[Store, Found | None]:
    """A store that answers by a script, and the checkpoint that is to be overwritten."""
    if is_overwrite:
        seal(store, OLD)
    found = probe(store, METADATA_KEY)
    once = RetryingStore(Scripted(store, puts, reads), sleep=lambda _s: None)  # type: ignore[arg-type]
    return once, found


@pytest.mark.parametrize("is_overwrite", [False, True])
@pytest.mark.parametrize(
    ("puts", "reads"),
    [
        ([(True, RESET)], [FORBIDDEN]),
        ([(True, RESET)], [EXPIRED]),
        ([(True, SERVER_ERROR)], [SKEWED]),
        ([(True, RESET)], [GONE]),
        ([(True, FORBIDDEN)], []),
        ([(True, FORBIDDEN)], [GONE]),
        ([(True, EXPIRED)], [FORBIDDEN]),
        ([(True, TOO_MANY)], [GONE]),
        ([(True, LOST)], [GONE]),
        ([(True, SLOW_DOWN), (False, FORBIDDEN)], []),
        ([(False, RESET), (True, FORBIDDEN)], [None, GONE]),
    ],
)
def test_a_put_that_took_effect_is_recognised_whatever_was_answered(
    store: Store, puts, reads, is_overwrite: bool
) -> None:
    once, found = scripted(store, puts, reads, is_overwrite)
    seal(once, OURS, found=found)
    assert sealed_by(store) == OURS


@pytest.mark.parametrize(
    ("puts", "reads"),
    [
        # What was not answered may still take effect, whatever is refused and read later.
        ([(False, RESET)] + 9 * [(False, FORBIDDEN)], []),
        ([(False, SLOW_DOWN)] + 9 * [(False, FORBIDDEN)], []),
        (9 * [(False, SERVER_ERROR)], []),
        (9 * [(False, StoreError("a wording that no table knows"))], []),
        # Nothing is known of a refused put while what is there may not be read.
        (9 * [(False, FORBIDDEN)], 9 * [FORBIDDEN]),
        # An answer that was seen only once is not believed.
        ([(False, FORBIDDEN)], [None, FORBIDDEN]),
    ],
)
@pytest.mark.parametrize("is_overwrite", [False, True])
def test_without_a_proof_the_outcome_is_unknown(
    store: Store, puts, reads, is_overwrite: bool
) -> None:
    once, found = scripted(store, puts, reads, is_overwrite)
    sealer = Sealer(once, METADATA_KEY, found, sleep=lambda _s: None)
    with pytest.raises(CommitUnknownError, match="No object was deleted"):
        sealer.put_sealed(OURS, PICKLED, MANIFEST)
    assert sealer.proof is None


@pytest.mark.parametrize(
    ("puts", "error", "proof"),
    [
        (9 * [(False, FORBIDDEN)], StoreError, Proof.REFUSED),
        (99 * [(False, TOO_MANY)], StoreError, Proof.REFUSED),
        (9 * [(False, LOST)], StoreError, Proof.REFUSED),
    ],
)
def test_a_put_that_was_refused_for_certain_is_proven_not_to_be_there(
    store: Store, puts, error: type[Exception], proof: Proof
) -> None:
    seal(store, OLD)
    found = probe(store, METADATA_KEY)
    once = RetryingStore(Scripted(store, puts), sleep=lambda _s: None)  # type: ignore[arg-type]
    sealer = Sealer(once, METADATA_KEY, found, sleep=lambda _s: None)
    with pytest.raises(error) as caught:
        sealer.put_sealed(OURS, PICKLED, MANIFEST)
    assert sealer.proof is proof
    assert caught.value.refused
    assert sealed_by(store) == OLD


@pytest.mark.parametrize("is_honest", [True, False])
def test_an_unanswered_put_is_disproved_only_by_what_its_precondition_forbids(
    store: Store, is_honest: bool
) -> None:
    """Where the store decides nothing, a late put replaces whatever is there."""
    seal(store, OLD)
    found = probe(store, METADATA_KEY)
    scripted = Scripted(store, [(False, RESET)])
    scripted.capabilities = replace(store.capabilities, compare_and_swap=is_honest)  # type: ignore[attr-defined]
    seal(store, THEIRS, found=found)
    sealer = Sealer(scripted, METADATA_KEY, found, sleep=lambda _s: None)  # type: ignore[arg-type]
    with pytest.raises(ConflictError if is_honest else CommitUnknownError):
        sealer.put_sealed(OURS, PICKLED, MANIFEST)
    assert sealer.proof is (Proof.SUPERSEDED if is_honest else None)


def test_an_unanswered_put_is_not_disproved_by_absence(store: Store) -> None:
    seal(store, OLD)
    found = probe(store, METADATA_KEY)
    late = Scripted(store, [(False, RESET)] + 9 * [(False, LOST)], 9 * [GONE])
    sealer = Sealer(late, METADATA_KEY, found, sleep=lambda _s: None)  # type: ignore[arg-type]
    with pytest.raises(CommitUnknownError):
        sealer.put_sealed(OURS, PICKLED, MANIFEST)
    assert sealer.proof is None


def test_a_first_read_that_was_cut_short_does_not_make_the_old_metadata_anothers(
    store: Store,
) -> None:
    """A late put acts as long as the ETag is the one found, whatever bytes were read with it."""
    seal(store, OLD)
    whole = probe(store, METADATA_KEY)
    assert whole is not None
    cut_short = replace(whole, data=whole.data[:20], seal=None)
    lost = Scripted(store, 9 * [(False, RESET)])
    sealer = Sealer(lost, METADATA_KEY, cut_short, sleep=lambda _s: None)  # type: ignore[arg-type]
    with pytest.raises(CommitUnknownError):
        sealer.put_sealed(OURS, PICKLED, MANIFEST)
    assert sealer.proof is None
    assert prove_superseded(store, cut_short, whole) is None


def test_our_own_metadata_cut_short_on_its_way_back_are_not_taken_for_anothers(
    store: Store,
) -> None:
    seal(store, OLD)
    found = probe(store, METADATA_KEY)
    lost = Scripted(store, [(True, RESET)])
    script = [StoreFault("short", verb="get", num_bytes=10, times=None)]
    sealer = Sealer(FaultyStore(lost, script), METADATA_KEY, found, sleep=lambda _s: None)  # type: ignore[arg-type]
    with pytest.raises(CommitUnknownError):
        sealer.put_sealed(OURS, pickle.dumps(named_by(OURS)), MANIFEST)
    assert sealed_by(store) == OURS


def named_by(save_id: str) -> Metadata:
    """Metadata that refer to one object of a save."""
    place = _StorageInfo(data_key(0, 0, save_id), 0, 1)
    return Metadata({}, storage_data={MetadataIndex("x"): place})


def test_no_attempt_begins_after_the_deadline(store: Store) -> None:
    seconds = itertools.count(0, 100)
    recorded = RecordingStore(Scripted(store, 9 * [(False, RESET)]))  # type: ignore[arg-type]
    config = WriteConfig(retry_deadline_s=180)
    sealer = Sealer(
        recorded, METADATA_KEY, None, config, sleep=lambda _s: None, clock=lambda: next(seconds)
    )
    with pytest.raises(CommitUnknownError):
        sealer.put_sealed(OURS, PICKLED, MANIFEST)
    assert recorded.counts["put"] == 2


# Sealing: stores that cannot decide ---------------------------------------------------------


@pytest.mark.parametrize("refuse", [if_match_fails, not_implemented])
def test_an_overwrite_on_a_store_without_if_match_says_what_to_do(store: Store, refuse) -> None:
    seal(store, OLD)
    quirky = NoConditions(store, refuse)
    with pytest.raises(StoreError, match=r"require_conditional_put=False"):
        seal(quirky, OURS, found=probe(store, METADATA_KEY))  # type: ignore[arg-type]
    assert sealed_by(store) == OLD


@pytest.mark.parametrize("refuse", [if_match_fails, not_implemented])
def test_an_overwrite_without_if_match_works_on_request(store: Store, refuse) -> None:
    seal(store, OLD)
    quirky = NoConditions(store, refuse)
    found = probe(store, METADATA_KEY)
    seal(quirky, OURS, found=found, require_conditional_put=False)  # type: ignore[arg-type]
    assert sealed_by(store) == OURS
    with pytest.raises(ConflictError):
        seal(quirky, THEIRS, found=found, require_conditional_put=False)  # type: ignore[arg-type]
    assert sealed_by(store) == OURS


def test_a_first_save_without_if_none_match_says_what_to_do_or_works_on_request(
    store: Store,
) -> None:
    quirky = NoConditions(store, not_implemented)
    with pytest.raises(StoreError, match=r"require_conditional_put=False"):
        seal(quirky, OURS)  # type: ignore[arg-type]
    assert sealed_by(store) is None
    seal(quirky, OURS, require_conditional_put=False)  # type: ignore[arg-type]
    assert sealed_by(store) == OURS
    with pytest.raises(AlreadyExistsError):
        seal(quirky, THEIRS, require_conditional_put=False)  # type: ignore[arg-type]
    assert sealed_by(store) == OURS


def test_a_store_that_refuses_even_the_plain_put_gets_its_own_words(store: Store) -> None:
    def refuse(mode: object) -> None:
        raise StoreError("400 EntityTooLarge (scripted)", refused=True)

    quirky = NoConditions(store, refuse)
    with pytest.raises(StoreError, match="400"):
        seal(quirky, OURS, require_conditional_put=False)  # type: ignore[arg-type]
    assert sealed_by(store) is None


@pytest.mark.parametrize("error", [ConflictError, AlreadyExistsError])
def test_a_conflict_that_is_over_is_tried_again(store: Store, error: type[Exception]) -> None:
    """S3 answers 409 while another conditional put of the key is under way."""
    seal(store, OLD)
    refusals = [error("409 ConditionalRequestConflict"), error("409 ConditionalRequestConflict")]

    def refuse(mode: object) -> None:
        if refusals:
            raise refusals.pop()

    busy = NoConditions(store, refuse)
    seal(busy, OURS, found=probe(store, METADATA_KEY))  # type: ignore[arg-type]
    assert sealed_by(store) == OURS


# sweep ---------------------------------------------------------------------------------------


def test_sweep_deletes_each_key_once_in_one_request(store: Store) -> None:
    for key in "abc":
        store.put(key, b"")
    recorded = RecordingStore(store)
    assert sweep(recorded, ["b", "a", "a"], Proof.NOT_BEGUN, why="a test") == ()
    assert [info.key for info in store.list()] == ["c"]
    assert recorded.counts == {"delete_many": 1}


def test_sweep_of_nothing_sends_nothing(store: Store) -> None:
    recorded = RecordingStore(store)
    assert sweep(recorded, [], Proof.NOT_BEGUN, why="a test") == ()
    assert recorded.counts == {}


def test_sweep_that_is_refused_warns_and_says_what_is_left(store: Store, caplog) -> None:
    denied = FaultyStore(store, [StoreFault("denied", verb="delete_many")])
    with caplog.at_level(logging.WARNING, "dcpstore"):
        assert list(
            sweep(denied, ["b", "a"], Proof.REPLACED, why="the overwritten checkpoint")
        ) == ["a", "b"]
    for word in (store.url, "2 object(s)", "the overwritten checkpoint", "such as a", "denied"):
        assert word in caplog.text
