"""The server is S3 as far as both engines can tell, and its faults happen as they are called."""

from __future__ import annotations

import http.client
from collections.abc import Iterator

import pytest

from campaign.schedule import ACTED, KINDS, LATE, REFUSED, Fault, Schedule
from campaign.server import Place, S3Server
from dcpstore.store import IfMatch, RetryPolicy, Store, open_store
from dcpstore.store.uploads import open_uploads_at
from dcpstore.testing import conformance

ONCE = RetryPolicy(max_attempts=1)


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with S3Server(stall_s=0.2) as running:
        yield running


def opened(server: S3Server, place: Place, engine: str, actor: str = "A0") -> Store:
    return open_store(place.url, storage_options=server.options(actor), engine=engine, retry=ONCE)


@pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("engine", ["obstore", "fsspec"])
def test_both_engines_conform_on_it(server: S3Server, engine: str, check) -> None:
    store = opened(server, server.open(Schedule("first_save")), engine)
    check(store)
    store.close()


@pytest.mark.parametrize("check", conformance.UPLOAD_CHECKS, ids=lambda check: check.__name__)
def test_unfinished_uploads_are_listed_and_aborted(server: S3Server, check) -> None:
    place = server.open(Schedule("first_save"))
    store = opened(server, place, "obstore")
    uploads = open_uploads_at(place.url, storage_options=server.options("P0"), retry=ONCE)
    assert uploads is not None
    check(store, uploads)
    uploads.close()
    store.close()


def put_under(server: S3Server, fault: Fault) -> tuple[int | None, Place]:
    """Put an object whose request meets a fault; return the status, None without an answer."""
    place = server.open(Schedule("first_save", faults=(fault,)))
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    try:
        headers = {"authorization": "Credential=A0/x"}
        connection.request("PUT", f"/campaign/{place.name}/.metadata", b"new", headers)
        return connection.getresponse().status, place
    except (ConnectionError, http.client.HTTPException):
        return None, place
    finally:
        connection.close()


@pytest.mark.parametrize("kind", [one for one in KINDS if one != "absent"])
def test_a_fault_acts_or_does_not_and_answers_as_its_name_says(server: S3Server, kind: str) -> None:
    status, place = put_under(server, Fault(kind, "A0", "seal", 0))
    acts_at_once = kind in (*ACTED, "twice", "cut-answer", "stall-did", "killed-did")
    assert (place.contents() == {".metadata": b"new"}) is acts_at_once
    assert list(place.script.fired) == [Fault(kind, "A0", "seal", 0)]
    said = kind.partition("-")[2]
    known = {"ExpiredToken": 400, "RequestTimeTooSkewed": 403, "twice": 200, "request": 400}
    if kind in LATE:
        said = said.partition("-")[2]
    is_answered = kind in (*REFUSED, *ACTED, *LATE) and said not in ("lost", "closed", "")
    if is_answered or kind in ("twice", "cut-request"):
        assert status == known.get(said or kind) or int(said) == status
    else:
        assert status is None
    server.call(lambda: place.do_late(all_of_them=True))
    assert bool(place.contents()) is (acts_at_once or kind in LATE)


def test_a_late_request_is_done_after_so_many_others(server: S3Server) -> None:
    _, place = put_under(server, Fault("late-3", "A0", "seal", 0))
    store = opened(server, place, "obstore")
    for number in range(3):
        assert place.contents().keys() == {str(n) for n in range(number)}
        store.put(str(number), b"x")
    assert ".metadata" in place.contents()
    store.close()


def test_what_reads_cannot_act(server: S3Server) -> None:
    place = server.open(Schedule("first_save", faults=(Fault("did-500", "A0", "look", 0),)))
    store = opened(server, place, "obstore")
    assert not list(place.script.fired)
    store.put(".metadata", b"x")
    assert bytes(store.get(".metadata").data) == b"x"
    assert not list(place.script.fired)
    store.close()


def test_a_killed_actor_gets_no_answer_any_more_and_others_do(server: S3Server) -> None:
    _, place = put_under(server, Fault("killed", "A0", "seal", 0))
    dead, alive = opened(server, place, "obstore"), opened(server, place, "obstore", "A1")
    with pytest.raises(Exception, match="failed"):
        dead.put("k", b"x")
    alive.put("k", b"x")
    assert place.contents() == {"k": b"x"}
    dead.close()
    alive.close()


def test_without_the_right_to_list_absence_is_a_refusal(server: S3Server) -> None:
    place = server.open(Schedule("first_save", flags=("nolist",)))
    hidden, pruner = opened(server, place, "obstore"), opened(server, place, "obstore", "P0")
    with pytest.raises(Exception, match="403"):
        hidden.get("absent")
    with pytest.raises(Exception, match="403"):
        list(hidden.list())
    assert list(pruner.list()) == []
    hidden.close()
    pruner.close()


def test_etags_can_be_compared_without_their_quotes_as_ceph_does(server: S3Server) -> None:
    place = server.open(Schedule("first_save", flags=("bare-etag",)))
    store = opened(server, place, "obstore")
    etag = store.put("k", b"x")
    assert etag is not None
    assert etag.startswith('"')
    store.put("k", b"y", mode=IfMatch(etag))  # the engine tries both forms
    assert place.contents() == {"k": b"y"}
    assert place.script.log.count("A0 put k") == 3
    store.close()
