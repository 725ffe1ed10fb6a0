"""What four gloo processes ask of S3 when they load, by the server's own log."""

from __future__ import annotations

from collections import Counter

import pytest
import save_load_ranks as ranks

from dcpstore.testing import MotoServer

pytestmark = pytest.mark.xdist_group("ranks")

OWN_BYTES, NORM_BYTES, SHARED_BYTES = 50_000 * 4, 3000 * 4, 400_000 * 4


@pytest.fixture
def place(bucket: str, moto_server: MotoServer, request) -> tuple[str, dict]:
    """A folder of the test's own, and the options that reach it."""
    moto_server.clear_requests()
    return f"{bucket}/sharing/{request.node.name}", moto_server.storage_options()


def load_and_count(pool, place, server: MotoServer, kind: str, size: int):
    """Load on ``size`` ranks; return the results, the requests by kind, and the data requests."""
    pool.run(size, ranks.save_counted, kind, *place)
    saving = Counter(request.operation for request in server.requests())
    assert saving.keys() <= {"GetObject", "PutObject"}, "a first save lists and deletes nothing"
    server.clear_requests()
    results = pool.run(size, ranks.load_counted, kind, *place)
    requests = server.requests()
    data = [request for request in requests if request.key.endswith(".distcp")]
    rest = [request for request in requests if not request.key.endswith(".distcp")]
    assert {request.operation for request in requests} == {"GetObject"}, "neither LIST nor HEAD"
    names = [request.key.rpartition("/")[2] for request in rest]
    assert names == [".metadata"], "one GET, whatever the number of ranks"
    assert sum(request.num_bytes_out for request in data) == results[0].job.fetched_bytes
    return results, data


@pytest.mark.parametrize("size", [1, 4])
def test_replicated_processes_fetch_each_byte_once(
    pool, place, moto_server: MotoServer, size: int
) -> None:
    results, data = load_and_count(pool, place, moto_server, "replicated", size)
    unique = SHARED_BYTES + NORM_BYTES
    assert unique <= sum(request.num_bytes_out for request in data) <= 1.02 * unique
    for result in results:
        assert result.rank.fetched_bytes <= unique / size + 300_000
        assert result.job == results[0].job


def test_a_load_in_the_same_layout_touches_only_the_ranks_own_objects(
    pool, place, moto_server: MotoServer
) -> None:
    results, data = load_and_count(pool, place, moto_server, "own", 4)
    by_rank = Counter(request.key.rpartition("/")[2].split("_")[2] for request in data)
    assert by_rank == {str(rank): 1 for rank in range(4)}
    assert [result.rank.fetched_bytes for result in results] == [OWN_BYTES] * 4
    assert all("not shared" in result.sharing for result in results)


def test_shared_and_own_bytes_are_each_fetched_once(pool, place, moto_server: MotoServer) -> None:
    results, data = load_and_count(pool, place, moto_server, "both", 4)
    unique = SHARED_BYTES + NORM_BYTES + 4 * OWN_BYTES
    assert unique <= sum(request.num_bytes_out for request in data) <= 1.02 * unique
    never = pool.run(4, ranks.load_counted, "both", *place, "never")
    assert never[0].job.fetched_bytes >= 4 * SHARED_BYTES
    assert results[0].job.needed_bytes == never[0].job.needed_bytes
