"""`diagnose`: what it says of stores that work, refuse, ignore conditions, or lie."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from dcpstore.audit.doctor import Diagnosis, diagnose
from dcpstore.audit.prune import Place, Rules, find_leftovers
from dcpstore.cli.main import main
from dcpstore.config import ReadConfig
from dcpstore.errors import AlreadyExistsError, ConfigError, ConflictError
from dcpstore.store import ObjectInfo, Store, open_store
from dcpstore.testing import Fault, FaultyStore, MotoServer, RecordingStore, StoreFault

SMALL = {"probe_bytes": 10 << 20, "config": ReadConfig(max_attempts=1)}


def memory() -> Store:
    return open_store("memory://doctor", engine="obstore")


def examine(store: Store, **more: Any) -> Diagnosis:
    return diagnose(
        "memory://doctor", store_opener=lambda *_args, **_options: store, **{**SMALL, **more}
    )


def outcomes(found: Diagnosis) -> dict[str, str]:
    return {check.name: check.outcome for check in found.checks}


def named(found: Diagnosis, name: str) -> Any:
    (check,) = [one for one in found.checks if one.name == name]
    return check


# --- healthy stores ------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["obstore", "fsspec"])
def test_an_s3_bucket_passes_every_check_and_keeps_no_probe(moto_server, bucket, engine):
    client = moto_server.client(bucket)
    client.put("healthy/.metadata", b"a checkpoint")
    found = diagnose(
        f"s3://{bucket}/healthy",
        storage_options=moto_server.storage_options(),
        probe_bytes=10 << 20,
        config=ReadConfig(engine=engine),
    )
    assert set(outcomes(found).values()) == {"ok"}, str(found)
    assert found.is_healthy
    assert not found.left_behind
    assert client.keys("healthy/") == ["healthy/.metadata"]
    assert client.get("healthy/.metadata") == b"a checkpoint"
    assert not [key for key in client.open_uploads() if key.startswith("healthy/")]
    measured = found.measured
    assert measured.upload_bytes_per_s
    assert measured.download_bytes_per_s
    assert measured.get_latency_s
    assert measured.put_latency_s
    assert measured.clock_skew_s == 0


def test_a_local_folder_is_fit_but_has_no_compare_and_swap(tmp_path):
    (tmp_path / "run").mkdir()
    found = diagnose(tmp_path / "run", **SMALL)
    assert found.is_healthy
    assert [name for name, outcome in outcomes(found).items() if outcome != "ok"] == [
        "swap (If-Match)"
    ]
    assert "Let only one job write" in named(found, "swap (If-Match)").advice
    assert not list((tmp_path / "run").iterdir())


def test_no_key_outside_the_folder_of_the_probes_is_written(moto_server):
    store = RecordingStore(memory())
    examine(store)
    writes = [r.key for r in store.requests if r.verb in ("put", "put_parts", "delete_many")]
    assert writes
    assert all(key.startswith(".dcpstore-doctor-") for key in writes)
    assert not list(store.list())


# --- servers that ignore conditions --------------------------------------------------


class Careless(RecordingStore):
    """A server that ignores some conditions of puts."""

    def __init__(self, inner: Store, ignored: str) -> None:
        super().__init__(inner)
        self._ignored = ignored

    def put(self, key: str, data: Any, *, mode: Any = "overwrite") -> str | None:
        kind = mode if isinstance(mode, str) else "match"
        return super().put(key, data, mode="overwrite" if kind == self._ignored else mode)


@pytest.mark.parametrize(
    ("ignored", "name"), [("create", "create (If-None-Match)"), ("match", "swap (If-Match)")]
)
def test_a_server_that_ignores_a_condition_is_not_fit(ignored, name):
    found = examine(Careless(memory(), ignored))
    assert [n for n, outcome in outcomes(found).items() if outcome == "failed"] == [name]
    check = named(found, name)
    assert "the condition is ignored" in check.detail
    assert "two jobs that save to one URL" in check.advice
    assert not found.is_healthy
    assert "NOT FIT FOR CHECKPOINTS (1 failed" in "".join(found.summary())


@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")
def test_the_google_emulator_is_caught_ignoring_conditions(gcs_server):
    options = gcs_server.storage_options()
    found = diagnose("gs://contract/doctor", storage_options=options, probe_bytes=10 << 20)
    failed = {name for name, outcome in outcomes(found).items() if outcome == "failed"}
    assert failed == {"create (If-None-Match)", "swap (If-Match)"}
    assert not found.left_behind
    assert named(found, "list open uploads").outcome == "skipped"


class LooksFirst(RecordingStore):
    """A server whose creates look first and put then, not in one step."""

    def put(self, key: str, data: Any, *, mode: Any = "overwrite") -> str | None:
        if mode != "create" or not key.endswith("/race"):
            return super().put(key, data, mode=mode)
        return super().put(key, data)


def test_creates_that_are_not_decided_in_one_step_are_caught():
    check = named(examine(LooksFirst(memory())), "create (If-None-Match)")
    assert (check.outcome, check.detail) == ("failed", "8 of 8 creates at once succeeded")


class Refusing(RecordingStore):
    """A server that refuses the right ETag, as Ceph 16 does."""

    def put(self, key: str, data: Any, *, mode: Any = "overwrite") -> str | None:
        if not isinstance(mode, str):
            raise ConflictError("412")
        return super().put(key, data, mode=mode)


def test_a_server_that_refuses_the_right_mark_is_told_what_to_do_about():
    check = named(examine(Refusing(memory())), "swap (If-Match)")
    assert check.outcome == "failed"
    assert "require_conditional_put=False" in check.advice


# --- refusals ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operation", "name", "outcome", "advice"),
    [
        ("PutObject", "put", "failed", "s3:PutObject"),
        ("GetObject", "get", "failed", "s3:GetObject"),
        ("CreateMultipartUpload", "multipart upload", "failed", "s3:PutObject"),
        ("ListObjects", "list", "warning", "s3:ListBucket"),
        ("DeleteObjects", "delete", "warning", "s3:DeleteObject"),
        ("ListMultipartUploads", "list open uploads", "warning", "s3:ListBucketMultipartUploads"),
        ("AbortMultipartUpload", "abort an upload", "warning", "s3:AbortMultipartUpload"),
    ],
)
def test_each_refusal_names_the_permission_to_grant(s3_server, operation, name, outcome, advice):
    client = s3_server.create_bucket(f"refuse-{operation.lower()}")
    s3_server.add_fault(Fault(operation, status=403, code="AccessDenied", times=-1))
    found = diagnose(
        f"s3://refuse-{operation.lower()}/run", storage_options=s3_server.storage_options(), **SMALL
    )
    check = named(found, name)
    assert (check.outcome, advice in check.advice) == (outcome, True), str(found)
    assert found.is_healthy == (outcome == "warning")
    s3_server.heal()
    left = [key.removeprefix("run/") for key in client.keys("run/")]
    assert sorted(found.left_behind) == sorted(left)


def test_probes_that_cannot_be_deleted_are_named_and_pruned_later(s3_server):
    s3_server.create_bucket("keeps-probes")
    url, options = "s3://keeps-probes/run", s3_server.storage_options()
    s3_server.add_fault(Fault("DeleteObjects", status=403, code="AccessDenied", times=-1))
    found = diagnose(url, storage_options=options, **SMALL)
    assert found.left_behind
    assert "left behind, because it could not be deleted" in "".join(found.summary())
    s3_server.heal()
    with Place(url, options) as at:
        leftovers = find_leftovers(at, Rules(older_than_s=0))
    assert {one.key for one in leftovers.removable} == set(found.left_behind)


def test_credentials_that_may_only_read_are_told_that_loads_work(s3_server):
    client = s3_server.create_bucket("read-only")
    client.put("run/.metadata", b"0123456789")
    s3_server.add_fault(Fault("PutObject", status=403, code="AccessDenied", times=-1))
    options = s3_server.storage_options()
    found = diagnose("s3://read-only/run", storage_options=options, **SMALL)
    assert not found.is_healthy
    assert named(found, "get .metadata").outcome == "ok"
    assert outcomes(found)["create (If-None-Match)"] == "skipped"
    loading = diagnose("s3://read-only/run", storage_options=options, read_only=True, **SMALL)
    assert loading.is_healthy
    assert set(outcomes(loading)) == {
        "reach the store",
        "get .metadata",
        "ranged get",
        "list",
        "latency",
    }
    nothing = diagnose("s3://read-only/x", storage_options=options, read_only=True, **SMALL)
    assert not nothing.is_healthy
    assert "there is none here" in named(nothing, "get .metadata").advice


def test_read_only_writes_nothing():
    store = RecordingStore(memory())
    store.put(".metadata", b"1234")
    store.clear()
    assert examine(store, read_only=True).is_healthy
    assert not {"put", "put_parts", "delete_many"} & set(store.counts)


# --- stores that are away or lie -----------------------------------------------------


def test_a_bucket_that_is_not_there_ends_the_checks(moto_server):
    options = moto_server.storage_options()
    found = diagnose("s3://no-such-bucket/run", storage_options=options, **SMALL)
    assert named(found, "reach the store").outcome == "failed"
    assert "create the bucket" in named(found, "reach the store").advice
    assert set(list(outcomes(found).values())[1:]) == {"skipped"}


def test_a_server_that_is_not_there_ends_the_checks():
    options = {"key": "k", "secret": "s", "endpoint_url": "http://127.0.0.1:9"}
    found = diagnose("s3://bucket/run", storage_options=options, **SMALL)
    assert named(found, "reach the store").outcome == "failed"
    assert "check the endpoint" in named(found, "reach the store").advice
    assert not found.left_behind


def test_a_store_that_fails_on_the_way_ends_the_checks_and_names_what_may_be_left():
    verbs = ("head", "delete_many")
    store = FaultyStore(memory(), [StoreFault("error", verb, times=None) for verb in verbs])
    found = examine(store)
    assert named(found, "head").outcome == "failed"
    assert named(found, "create (If-None-Match)").detail == "the store does not answer"
    assert [key.rpartition("/")[2] for key in found.left_behind] == ["small"]


def test_bytes_that_change_on_the_way_are_caught():
    for verb, name in (("get", "get"), ("get_range", "ranged get")):
        found = examine(FaultyStore(memory(), [StoreFault("flip", verb, key="small")]))
        assert named(found, name).outcome == "failed"
        assert "proxy" in named(found, name).advice
    found = examine(FaultyStore(memory(), [StoreFault("flip", "get_range", key="large")]))
    assert "1 of 4 ranges" in named(found, "ranged gets at once").detail


def test_listings_that_are_late_are_a_warning():
    class Late(RecordingStore):
        def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
            return iter(())

    found = examine(Late(memory()))
    assert named(found, "list").outcome == "warning"
    assert found.is_healthy


@pytest.mark.parametrize(("hours", "said"), [(1, "3600 s ahead of"), (-1, "behind")])
def test_clocks_that_differ_are_a_warning(hours, said):
    class Shifted(RecordingStore):
        def head(self, key: str) -> ObjectInfo:
            info = super().head(key)
            assert info.modified is not None
            later = info.modified + timedelta(hours=hours)
            return ObjectInfo(info.key, info.size_bytes, info.etag, later)

    found = examine(Shifted(memory()))
    check = named(found, "clocks")
    assert check.outcome == "warning"
    assert said in check.detail
    assert found.measured.clock_skew_s == pytest.approx(3600 * hours, abs=5)
    assert found.is_healthy


def test_a_probe_that_is_too_small_is_refused_before_anything_is_tried():
    with pytest.raises(ConfigError, match="two parts"):
        diagnose("memory://doctor", probe_bytes=1000)


def test_a_wrong_url_is_refused():
    with pytest.raises(ConfigError, match="write s3://bucket"):
        diagnose("s3:/bucket", **SMALL)


def test_every_check_is_told_as_it_ends():
    seen: list[Any] = []
    found = examine(memory(), on_check=seen.append)
    assert tuple(seen) == found.checks


def test_a_race_that_nobody_wins_is_caught():
    class Nobody(RecordingStore):
        def put(self, key: str, data: Any, *, mode: Any = "overwrite") -> str | None:
            if key.endswith("/race"):
                raise AlreadyExistsError("412")
            return super().put(key, data, mode=mode)

    assert "0 of 8" in named(examine(Nobody(memory())), "create (If-None-Match)").detail


# --- the command ---------------------------------------------------------------------


def run(*arguments: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    return main(arguments, stdout=out, stderr=err), out.getvalue(), err.getvalue()


def given(server: MotoServer) -> list[str]:
    texts = [
        f"{name}={value if isinstance(value, str) else json.dumps(value)}"
        for name, value in server.storage_options().items()
    ]
    return [word for text in texts for word in ("--storage-option", text)]


def test_the_command_prints_a_table_and_ends_with_a_code(s3_server):
    s3_server.create_bucket("commanded")
    words = ("doctor", "s3://commanded/run", "--probe-mib", "10", *given(s3_server))
    code, out, _ = run(*words)
    assert code == 0
    assert "ok       swap (If-Match)" in out
    assert "fit for checkpoints (0 failed, 0 warning(s))" in out
    code, out, _ = run(*words, "--json")
    document = json.loads(out)
    assert (code, document["healthy"], document["left_behind"]) == (0, True, [])
    assert document["upload_bytes_per_s"] > 0
    s3_server.add_fault(Fault("PutObject", status=403, code="AccessDenied", times=-1))
    code, out, _ = run(*words)
    assert code == 1
    assert "-> grant s3:PutObject" in out


def test_no_secret_is_printed(s3_server):
    options = ["--storage-option", "key=AKIAHIDDEN", "--storage-option", "secret=hush-hush-hush"]
    endpoint = ["--endpoint-url", s3_server.endpoint_url]
    s3_server.add_fault(Fault("*", status=403, code="InvalidAccessKeyId", times=-1))
    code, out, err = run("doctor", "s3://bucket/run", *options, *endpoint)
    assert code == 1
    assert "hush" not in out + err
    assert "check key, secret, profile and endpoint" in out
