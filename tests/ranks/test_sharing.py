"""What several ranks want is fetched once: bytes, requests, memory and failures, on threads."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
import torch
from parts import Shelf, by_rows

from dcpstore import CorruptError, LoadPlanner, RankFailures, StoreError
from dcpstore.testing import StoreFault

KIB, MIB = 1 << 10, 1 << 20


def full(number: int, rows: int = 500, columns: int = 200) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(number))


def replicated(_rank: int, _size: int) -> dict[str, Any]:
    """What DDP holds: 1.2 MB, all of it everywhere."""
    return {f"w{number}": full(number) for number in range(3)}


def own(rank: int, _size: int) -> dict[str, Any]:
    """What no other rank holds."""
    return {f"own{rank}.{number}": full(10 * rank + number) for number in range(3)}


def hybrid(rank: int, size: int) -> dict[str, Any]:
    """What HSDP holds: two replica groups, each of which shards by rows."""
    shard = rank % (size // 2)
    return {f"w{number}": by_rows(full(number, 900), shard, size // 2) for number in range(4)}


def tensor_parallel(rank: int, size: int) -> dict[str, Any]:
    """Sharded weights, and norms that all have."""
    state: dict[str, Any] = {f"norm{number}": full(number, 1, 3000) for number in range(20)}
    return state | {f"w{number}": by_rows(full(number, 900), rank, size) for number in range(2)}


def pairwise(rank: int, size: int) -> dict[str, Any]:
    """A tensor for every two ranks: each rank shares with each other one alone."""
    pairs = [(a, b) for b in range(size) for a in range(b)]
    return {f"{a}+{b}": full(10 * a + b, 60) for a, b in pairs if rank in (a, b)}


def num_bytes(state: dict[str, Any]) -> int:
    return sum(tensor.nbytes for tensor in state.values())


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


# --- bytes and requests -----------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 8, 16])
def test_replicated_ranks_fetch_each_byte_once(shelf: Shelf, size: int) -> None:
    shelf.save(4, replicated)
    results = shelf.load(size, replicated, request_bytes=64 * KIB).values()
    unique = num_bytes(replicated(0, size))
    assert unique <= shelf.fetched_bytes <= 1.02 * unique
    asked = Counter(request.verb for request in shelf.requests())
    assert asked.keys() == {"get", "get_range"}, "neither LIST nor HEAD"
    assert [request.key for request in shelf.requests(verb="get")] == [".metadata"]
    shares = [result.rank.fetched_bytes for result in results]
    assert max(shares) - min(shares) <= 128 * KIB, "the ranks did not share the work evenly"
    for result in results:
        assert result.job.fetched_bytes == shelf.fetched_bytes
        assert result.job.received_bytes == pytest.approx(unique * (size - 1), rel=0.02)
        assert result.rank.needed_bytes == unique


@pytest.mark.parametrize("share", ["auto", "always", "never"])
def test_a_load_in_the_same_layout_touches_only_the_ranks_own_objects(
    shelf: Shelf, share: str
) -> None:
    shelf.save(4, own)
    results = shelf.load(4, own, share=share).values()
    for rank, result in enumerate(results):
        keys = {request.key for request in shelf.requests(rank, "get_range")}
        assert keys
        assert all(key.startswith(f"__{rank}_") for key in keys), keys
        assert result.rank.received_bytes == 0
        assert "not shared" in result.sharing
    assert len(shelf.requests(verb="get")) == 1


def test_replica_groups_share_within_their_shard(shelf: Shelf) -> None:
    shelf.save(8, hybrid)
    results = shelf.load(8, hybrid, request_bytes=64 * KIB).values()
    unique = num_bytes({key: full(n, 900) for n, key in enumerate(hybrid(0, 8))})
    assert unique <= shelf.fetched_bytes <= 1.02 * unique
    for rank, result in enumerate(results):
        other = results[(rank + 4) % 8].rank
        # What one replica fetched, the other received; nobody else had a part in it.
        assert result.rank.received_bytes == other.fetched_bytes


def test_norms_are_shared_and_sharded_weights_are_not(shelf: Shelf) -> None:
    shelf.save(4, tensor_parallel)
    results = shelf.load(4, tensor_parallel, share="always").values()
    norms, weights = 20 * 3000 * 4, 2 * 900 * 200 * 4
    assert shelf.fetched_bytes <= 1.02 * (norms + weights)
    for result in results:
        assert result.rank.received_bytes + result.rank.fetched_bytes >= norms
        # Neighbours share the checksum blocks in which one's rows end and the other's begin.
        assert result.rank.received_bytes <= 1.02 * norms + 2 * 2 * 4096


# --- the policy -------------------------------------------------------------------------------


def small(_rank: int, _size: int) -> dict[str, Any]:
    return {"w": full(1, 50)}


@pytest.mark.parametrize(
    ("share", "make", "factor", "reason"),
    [
        ("never", replicated, 4, r"not shared: share='never'"),
        ("always", replicated, 1, r"shared: 4 ranks want (\d+) bytes, (\d+) of them unique"),
        ("auto", replicated, 1, r"shared: 4 ranks want (\d+) bytes, (\d+) of them unique"),
        ("always", small, 1, r"shared: 4 ranks want 160000 bytes, 40000 of them unique"),
        ("auto", small, 4, r"not shared: it would save 120000 bytes, less than 1048576"),
        ("always", own, 4, r"not shared: no two ranks want the same bytes"),
    ],
)
def test_the_policy_decides_and_the_result_explains(
    shelf: Shelf, share: str, make: Any, factor: int, reason: str
) -> None:
    shelf.save(4, make)
    results = shelf.load(4, make, share=share).values()
    assert shelf.fetched_bytes == pytest.approx(factor * num_bytes(make(0, 4)), rel=0.02)
    for result in results:
        assert re.search(reason, result.sharing), result.sharing
        assert result.sharing in str(result)


def test_one_rank_shares_with_nobody(shelf: Shelf) -> None:
    shelf.save(1, small)
    (result,) = shelf.load(1, small, share="always").values()
    assert result.sharing == "not shared: one rank"


# --- what the ranks tell each other -----------------------------------------------------------


def test_of_ranks_that_want_the_same_one_says_what(shelf: Shelf) -> None:
    shelf.save(4, hybrid)
    shelf.load(8, hybrid, request_bytes=4 * KIB).values()
    names = [shelf.sent_bytes[rank]["plan sharing"] for rank in range(8)]
    wants = [shelf.sent_bytes[rank]["merge wants"] for rank in range(8)]
    assert max(names) < 200, "a name, not the ranges"
    assert all(one > 1000 for one in wants[:4]), "nobody said what the shard's replicas want"
    assert all(one < 200 for one in wants[4:]), "a replica repeated what another had said"


def test_a_load_like_an_earlier_one_is_not_planned_again(shelf: Shelf) -> None:
    planners = [LoadPlanner() for _ in range(4)]
    shelf.save(4, replicated)
    first = shelf.load(4, replicated, planners=planners).values()
    again = shelf.load(4, replicated, planners=planners).values()
    assert not any(sent["merge wants"] for sent in shelf.sent_bytes.values())
    fewer = shelf.load(4, lambda rank, size: {"w0": full(0)}, planners=planners).values()
    finer = shelf.load(4, replicated, planners=planners, request_bytes=64 * KIB).values()
    never = shelf.load(4, replicated, planners=planners, share="never").values()
    assert [r.is_plan_cached for r in first] == [False] * 4
    assert [r.is_plan_cached for r in again] == [True] * 4
    assert not any(r.is_plan_cached for r in [*fewer, *finer, *never]), "another plan was taken"
    assert all("plan cached" in str(result) for result in again)


# --- bounds -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("budget_bytes", "request_bytes"),
    [
        (512 * KIB, 64 * KIB),
        (128 * KIB, 64 * KIB),
        (128 * KIB, 4 * KIB),
        (64 * KIB, 64 * KIB),
        (64 * KIB, 50_000),
    ],
)
@pytest.mark.parametrize("make", [replicated, hybrid, tensor_parallel, pairwise])
def test_no_rank_holds_more_than_its_budget(
    shelf: Shelf, make: Any, budget_bytes: int, request_bytes: int
) -> None:
    shelf.save(4, make)
    options = {"budget_bytes": budget_bytes, "request_bytes": request_bytes}
    results = shelf.load(4, make, share="always", **options).values()
    for result in results:
        assert result.sharing.startswith("shared")
        assert 0 < result.rank.peak_bytes <= budget_bytes
    longest = max(r.end - r.start for r in shelf.requests(verb="get_range"))
    assert longest <= request_bytes


def test_bundles_end_where_objects_end_and_where_requests_would_be_too_long(shelf: Shelf) -> None:
    shelf.save(1, lambda rank, size: {f"t{n}": full(n, 30, 101) for n in range(60)})
    make = lambda rank, size: {f"t{n}": full(n, 30, 101) for n in range(59, -1, -1)}  # noqa: E731
    shelf.load(3, make, share="always", request_bytes=32 * KIB, budget_bytes=256 * KIB).values()
    requests = shelf.requests(verb="get_range")
    assert len({request.key for request in requests}) > 1, "one object only"
    assert max(r.end - r.start for r in requests) <= 32 * KIB
    assert sum(r.end - r.start for r in requests) <= 1.1 * 60 * 30 * 101 * 4


# --- failures ---------------------------------------------------------------------------------


def test_damaged_bytes_are_named_on_all_ranks(shelf: Shelf) -> None:
    shelf.save(4, replicated)
    (key,) = {i.key for i in shelf.shared.list() if i.key.startswith("__2_0.")} or {""}
    data = bytearray(shelf.shared.get(key).data)
    data[len(data) // 2] ^= 4
    shelf.shared.put(key, data)
    run = shelf.load(4, replicated, share="always", request_bytes=64 * KIB)
    assert sorted(run.errors) == [0, 1, 2, 3]
    for error in run.errors.values():
        assert isinstance(error, RankFailures)
        (cause,) = error.exceptions.values()
        assert isinstance(cause, CorruptError)
        assert cause.key == key
        assert cause.fqn is not None
        assert cause.start <= len(data) // 2 < cause.end
        assert key in str(error)


def test_a_bit_that_flips_once_on_the_way_is_fetched_again(shelf: Shelf) -> None:
    shelf.save(4, replicated)
    flip = {rank: [StoreFault("flip", verb="get_range", bit=999)] for rank in range(4)}
    shelf.load(4, replicated, share="always", faults=flip, request_bytes=64 * KIB).values()


@pytest.mark.parametrize("fetcher", [0, 3])
def test_a_fetcher_that_is_refused_names_itself_and_the_object_on_all_ranks(
    shelf: Shelf, fetcher: int
) -> None:
    shelf.save(4, replicated)
    denied = {fetcher: [StoreFault("denied", verb="get_range", key="__1_", times=None)]}
    run = shelf.load(4, replicated, share="always", faults=denied, request_bytes=16 * KIB)
    assert sorted(run.errors) == [0, 1, 2, 3]
    for error in run.errors.values():
        assert isinstance(error, RankFailures)
        assert list(error.causes) == [fetcher]
        cause = error.exceptions[fetcher]
        assert isinstance(cause, StoreError)
        assert cause.denied
        assert cause.key is not None
        assert cause.key.startswith("__1_")
        assert "share" in error.step


def test_what_a_failed_load_planned_is_forgotten(shelf: Shelf) -> None:
    planners = [LoadPlanner() for _ in range(4)]
    shelf.save(4, replicated)
    shelf.load(4, replicated, planners=planners).values()
    refused = {2: [StoreFault("denied", verb="get_range", times=None)]}
    assert shelf.load(4, replicated, planners=planners, faults=refused).errors
    after = shelf.load(4, replicated, planners=planners).values()
    assert not any(result.is_plan_cached for result in after)
