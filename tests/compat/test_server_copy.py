"""Copies that the provider makes by itself: which bytes pass here, and what proves the rest."""

from __future__ import annotations

import logging
import threading
from collections import Counter

import pytest
import torch
import torch.distributed.checkpoint as dcp
from compat_states import QUIET, assert_same, blank, pattern

import dcpstore
from dcpstore import AlreadyExistsError, CorruptError, RankFailures, StoreError
from dcpstore.convert import dcp_to_dcp
from dcpstore.convert.dcp.copy import (
    CopyTask,
    MirrorOfOurs,
    MirrorOfStock,
    Transfer,
    copy_objects,
    mirror,
)
from dcpstore.convert.output import share_budget
from dcpstore.format.seal import METADATA_KEY
from dcpstore.ranks import SingleGroup
from dcpstore.report import Meter
from dcpstore.store import RetryPolicy, open_store
from dcpstore.store.base import ByteRange, server_copier
from dcpstore.store.folder import parse_location
from dcpstore.store.retry import copy_with_retries
from dcpstore.store.s3fs_engine import S3fsStore
from dcpstore.testing import Fault, FaultyStore, RecordingStore, StoreFault
from dcpstore.testing.ranks import run_ranks

pytestmark = [*QUIET, pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")]

MIB = 1 << 20
WRITERS = ("ours", "stock")


def model() -> dict[str, object]:
    layers = {f"w{n}": pattern(torch.float32, (300, 1000), seed=n) for n in range(4)}
    return {"model": layers, "bias": pattern(torch.bfloat16, (7,), seed=9), "step": 3}


@pytest.fixture(scope="session")
def buckets(moto_server, tmp_path_factory):
    """Two buckets of one server, each with a checkpoint of ours and a stock one."""
    state = model()
    clients = [moto_server.create_bucket(name) for name in ("server-one", "server-two")]
    options = moto_server.storage_options()
    dcpstore.save(
        state,
        "s3://server-one/ours",
        storage_options=options,
        config=dcpstore.WriteConfig(object_bytes=2 * MIB),
        progress=False,
        attachments={"vocab.txt": bytes(range(100)) * 100},
        metrics={"loss": 0.5},
    )
    folder = tmp_path_factory.mktemp("stock")
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    for path in folder.iterdir():
        clients[0].put(f"stock/{path.name}", path.read_bytes())
    return state, *clients


@pytest.fixture
def options(s3_server):
    """The options that let each engine serve an S3 URL."""
    given = s3_server.storage_options()
    foreign = {"config_kwargs": {"user_agent_extra": "copy"}}  # obstore cannot honour it
    return {"obstore": given, "fsspec": {**given, **foreign}}


def copy(source, target, options, **more):
    return dcp_to_dcp(source, target, source_options=options, target_options=options, **more)


def load(state, url, options):
    target = blank(state)
    dcpstore.load(target, url, storage_options=options, progress=False)
    return target


def of_data(server) -> Counter[str]:
    """Operations on data objects since the log was cleared."""
    return Counter(one.operation for one in server.requests() if one.key.endswith(".distcp"))


def data_of(client, prefix) -> list[str]:
    return [key for key in client.keys(prefix) if key.endswith(".distcp")]


@pytest.mark.parametrize(
    ("engine", "writer", "bucket"),
    [
        ("obstore", "ours", "server-one"),
        ("obstore", "stock", "server-two"),
        ("fsspec", "ours", "server-two"),
    ],
)
def test_no_data_passes_through_a_copy_that_s3_makes(
    s3_server, buckets, options, engine, writer, bucket
) -> None:
    state, *_ = buckets
    target = f"s3://{bucket}/unread/{engine}-{writer}"
    s3_server.clear_requests()
    result = copy(f"s3://server-one/{writer}", target, options[engine], verify=False)
    asked = of_data(s3_server)
    assert asked.keys() <= {"CopyObject", "HeadObject"}
    assert asked["CopyObject"] == len(result.objects) == result.num_server_copies
    assert result.server_copied_bytes == result.stored_bytes
    assert result.fetched_bytes == 0
    assert f"by server  {result.server_copied_bytes / MIB:.1f} MiB in" in str(result)
    assert_same(load(state, target, options[engine]), state)
    if writer == "ours":
        found = dcpstore.read_attachment(target, "vocab.txt", storage_options=options[engine])
        assert found == bytes(range(100)) * 100


def test_blocks_are_proven_by_checksums_and_the_source_is_read_where_there_are_none(
    s3_server, buckets, options
) -> None:
    state, *_ = buckets
    fetched = {}
    for writer in WRITERS:
        s3_server.clear_requests()
        target = f"s3://server-two/read/{writer}"
        result = copy(f"s3://server-one/{writer}", target, options["obstore"])
        assert of_data(s3_server)["PutObject"] == of_data(s3_server)["UploadPart"] == 0
        read = [one for one in s3_server.requests() if one.operation == "GetObject"]
        back = [one for one in read if one.bucket == "server-two" and one.range]
        assert sum(one.num_bytes_out for one in back) == result.stored_bytes
        fetched[writer] = result.fetched_bytes
        assert_same(load(state, target, options["obstore"]), state)
    assert fetched["stock"] == result.stored_bytes
    assert 0 < fetched["ours"] < result.stored_bytes // 10


def test_a_task_says_which_bytes_no_checksum_proves() -> None:
    class Item:
        def __init__(self, start: int, end: int) -> None:
            self.payload = ByteRange(start, end)

    def unproven(*payloads: tuple[int, int]) -> list[tuple[int, int]]:
        items = tuple(Item(*one) for one in payloads)
        return CopyTask("a", "b", 10 * MIB, items).unproven()

    whole = (0, 10 * MIB)
    assert unproven() == [whole]
    assert unproven(whole) == unproven((0, 6 * MIB), (4 * MIB, 10 * MIB)) == []
    assert unproven((100, 4 * MIB), (4 * MIB + 7, 10 * MIB - 1)) == [
        (0, 100),
        (4 * MIB, 4 * MIB + 7),
        (10 * MIB - 1, 10 * MIB),
    ]
    assert unproven((100, 200), (300, 10 * MIB)) == [(0, 300)]


class Damaging(RecordingStore):
    """A store whose provider changes one byte of what it copies."""

    def __init__(self, inner, client, prefix, share) -> None:
        super().__init__(inner)
        self._damage = lambda key, size: client.flip_bit(f"{prefix}/{key}", int(share * size))
        self._once = threading.Lock()

    def copy_from(self, source, key, mode="overwrite") -> None:
        super().copy_from(source, key, mode)
        if self._once.acquire(blocking=False):
            self._damage(key, source.size_bytes)


def mirror_into(target, source_url, options, *, verify=True, source=None):
    """Copy a checkpoint into an open store."""
    with dcpstore.open_checkpoint(source_url, storage_options=options) as checkpoint:
        how = MirrorOfStock(checkpoint, target)
        if source_url.endswith("ours"):
            writer = dcpstore.ObjectStoreWriter(target.url, storage_options=options)
            how = MirrorOfOurs(checkpoint, writer)
        return mirror(
            SingleGroup(10),
            how,
            Transfer(
                source or checkpoint.store,
                target,
                share_budget(32 * MIB),
                Meter("copy"),
                False,
                verify,
            ),
        )


@pytest.mark.parametrize(
    ("writer", "share", "said"),
    [("ours", 0, "not what was sent"), ("ours", 0.4, "CRC32C"), ("stock", 0.9, "not what")],
)
def test_a_copy_that_the_server_damages_is_not_sealed(
    buckets, options, writer, share, said
) -> None:
    _, _, client = buckets
    prefix = f"damaged/{writer}-{share}"
    inner = open_store(f"s3://server-two/{prefix}", storage_options=options["obstore"])
    target = Damaging(inner, client, prefix, share)
    with pytest.raises(RankFailures, match=f"distcp.*{said}") as caught:
        mirror_into(target, f"s3://server-one/{writer}", options["obstore"])
    assert isinstance(caught.value.exceptions[0], CorruptError)
    assert client.keys(prefix) == []
    assert target.counts["copy_from"] >= 1


def test_damage_of_the_source_is_told_from_damage_of_the_copy(buckets, options) -> None:
    state, client, _ = buckets
    dcpstore.save(state, "s3://server-one/bad", storage_options=options["obstore"], progress=False)
    (key,) = data_of(client, "bad/")
    client.flip_bit(key, len(client.get(key)) // 2)
    with pytest.raises(CorruptError, match=r"server-one/bad.*were copied so"):
        copy("s3://server-one/bad", "s3://server-two/bad", options["obstore"])
    assert buckets[2].keys("bad/") == []


@pytest.mark.parametrize(
    ("num_copied", "status", "code"), [(0, 403, "AccessDenied"), (1, 501, "NotImplemented")]
)
def test_what_the_server_refuses_passes_through_this_process(
    s3_server, buckets, options, caplog, num_copied, status, code
) -> None:
    state, *_ = buckets
    s3_server.add_fault(Fault("CopyObject", skip=num_copied, times=-1, status=status, code=code))
    target = f"s3://server-two/refused/{code}"
    with caplog.at_level(logging.WARNING, "dcpstore.convert"):
        result = copy("s3://server-one/ours", target, options["obstore"])
    assert result.num_server_copies == num_copied < len(result.objects)
    assert result.fetched_bytes >= result.stored_bytes - result.server_copied_bytes
    assert code in caplog.text
    assert caplog.text.count("pass through this process") == 1
    assert_same(load(state, target, options["obstore"]), state)


def test_a_throttled_copy_is_asked_for_again_and_counted_once(s3_server, buckets, options) -> None:
    s3_server.add_fault(Fault("CopyObject", times=2))
    seen = []
    result = copy(
        "s3://server-one/ours",
        "s3://server-two/slow",
        options["obstore"],
        progress=lambda state: seen.append((state.done_bytes, state.total_bytes)),
    )
    assert result.num_server_copies == len(result.objects)
    assert seen[-1] == (result.stored_bytes, result.stored_bytes)


def test_a_server_that_fails_for_long_ends_the_copy_and_leaves_nothing(buckets, options) -> None:
    _, _, client = buckets
    once = RetryPolicy(max_attempts=1)
    inner = open_store("s3://server-two/failed", storage_options=options["obstore"], retry=once)
    target = FaultyStore(inner, [StoreFault("error", "copy_from", at=1, times=None)])
    with pytest.raises(RankFailures, match="scripted"):
        mirror_into(target, "s3://server-one/ours", options["obstore"])
    assert client.keys("failed/") == []


def test_a_stock_copy_never_replaces_an_object(s3_server, buckets, options) -> None:
    _, client, other = buckets
    (key,) = data_of(client, "stock/")
    name = key.rpartition("/")[2]
    other.put(f"taken/{name}", b"somebody's")
    with pytest.raises(AlreadyExistsError, match="overwrite=True"):
        copy("s3://server-one/stock", "s3://server-two/taken", options["obstore"])
    assert other.keys("taken/") == [f"taken/{name}"]
    assert other.get(f"taken/{name}") == b"somebody's"
    s3_server.clear_requests()
    copy("s3://server-one/stock", "s3://server-two/free", options["obstore"])
    copies = [one for one in s3_server.requests() if one.operation == "CopyObject"]
    assert [one.is_conditional for one in copies] == [True]


def test_what_another_copy_sealed_meanwhile_is_kept(buckets, options) -> None:
    _, client, other = buckets

    class SealedByAnother(RecordingStore):
        """Somebody seals a copy with the same names just before this one does."""

        def put(self, key, data, **more):
            other.put(f"race/{METADATA_KEY}", b"theirs")
            return super().put(key, data, **more)

    inner = open_store("s3://server-two/race", storage_options=options["obstore"])
    target = SealedByAnother(inner)
    with pytest.raises(RankFailures, match="already holds"):
        mirror_into(target, "s3://server-one/stock", options["obstore"], verify=False)
    assert len(data_of(other, "race/")) == len(data_of(client, "stock/"))


def test_ranks_share_what_the_server_copies(buckets, options) -> None:
    state, *_ = buckets

    def convert(group):
        target = "s3://server-two/ranks"
        return copy("s3://server-one/ours", target, options["obstore"], process_group=group)

    one, other = run_ranks(2, convert, wait_s=60).values()
    assert one.objects == other.objects
    assert one.num_server_copies == other.num_server_copies
    assert one.num_server_copies == len(one.objects) > 2
    assert_same(load(state, "s3://server-two/ranks", options["obstore"]), state)


def test_google_rewrites_objects(gcs_server, tmp_path) -> None:
    state, options = model(), gcs_server.storage_options()
    folder = f"gs://contract/{tmp_path.name}"
    dcpstore.save(state, f"{folder}/a", storage_options=options, progress=False)
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    dcp_to_dcp(tmp_path, f"{folder}/b", target_options=options)
    for name in ("a", "b"):
        result = copy(f"{folder}/{name}", f"{folder}/{name}{name}", options)
        assert result.num_server_copies == len(result.objects) > 0
        assert_same(load(state, f"{folder}/{name}{name}", options), state)


# --- parts -------------------------------------------------------------------------------


@pytest.fixture
def large(s3_server):
    """A large object, and a store that copies it in parts of 5 MiB."""
    client = s3_server.create_bucket("server-parts")
    source = open_store("s3://server-parts/a", storage_options=s3_server.storage_options())
    content = torch.arange(11 * MIB // 8).numpy().tobytes() + b"end"
    source.put("large", content)
    target = S3fsStore(
        parse_location("s3://server-parts/b"),
        s3_server.storage_options(),
        part_policy=RetryPolicy(base_delay_s=0.01),
    )
    target.copy_part_bytes = 5 * MIB
    s3_server.clear_requests()
    return client, server_copier(source, target), content


def test_a_large_object_is_copied_in_parts(s3_server, large) -> None:
    client, copy_object, content = large
    s3_server.add_fault(Fault("UploadPartCopy", times=2))
    copy_object("large", "it", size_bytes=len(content))
    assert client.get("b/it") == content
    assert s3_server.counts()["UploadPartCopy"] == 3 + 2
    with pytest.raises(AlreadyExistsError):
        copy_object("large", "it", size_bytes=len(content), mode="create")


def test_a_refused_part_leaves_no_upload(s3_server, large) -> None:
    client, copy_object, content = large
    s3_server.add_fault(Fault("UploadPartCopy", skip=1, times=-1, status=403, code="AccessDenied"))
    with pytest.raises(StoreError, match="AccessDenied"):
        copy_object("large", "refused", size_bytes=len(content))
    assert client.open_uploads() == []
    assert client.keys("b/refused") == []


@pytest.mark.parametrize("throttled", [False, True])
def test_a_copy_whose_answer_was_lost_is_its_own_success(throttled) -> None:
    answers = [
        StoreError("what became of it?", retryable=True, throttled=throttled),
        AlreadyExistsError("it is there"),
    ]

    def request(_left_s: float) -> None:
        raise answers.pop(0)

    policy = RetryPolicy(base_delay_s=0)
    if throttled:  # then nothing was done: it is somebody else's
        with pytest.raises(AlreadyExistsError):
            copy_with_retries(request, policy)
    else:
        copy_with_retries(request, policy)
    assert answers == []


def test_a_refusal_is_asked_for_once_per_thread_at_most(s3_server, buckets, options) -> None:
    _, client, other = buckets
    for number in range(24):
        client.put(f"many/{number}.distcp", b"x" * number)
    source, target = (
        open_store(f"s3://{one}/many", storage_options=options["obstore"])
        for one in ("server-one", "server-two")
    )
    tasks = [CopyTask(f"{n}.distcp", f"{n}.distcp", n) for n in range(24)]
    s3_server.clear_requests()
    s3_server.add_fault(Fault("CopyObject", times=-1, status=403, code="AccessDenied"))
    transfer = Transfer(
        source, target, share_budget(32 * MIB), Meter("copy"), overwrite=True, verify=True
    )
    copied = copy_objects(transfer, tasks)
    assert s3_server.counts()["CopyObject"] <= 8
    assert {key: one.size_bytes for key, one in copied.stored.items()} == {
        task.key: task.size_bytes for task in tasks
    }
    assert len(data_of(other, "many/")) == 24


def test_what_cannot_copy_by_itself_is_never_asked_to(tmp_path, s3_server) -> None:
    options = s3_server.storage_options()
    s3 = open_store("s3://server-one/x", storage_options=options)
    local, memory = open_store(tmp_path), open_store("memory://x")
    azure = open_store("az://box/x", storage_options={"account_name": "me", "account_key": "a2V5"})
    for source, target in [
        (s3, local),
        (local, s3),
        (local, local),
        (memory, memory),
        (azure,) * 2,
    ]:
        assert server_copier(source, target) is None
    other = open_store("s3://server-two", storage_options={**options, "key": "somebody's"})
    assert server_copier(s3, other) is server_copier(other, s3) is None
    assert server_copier(FaultyStore(s3), RecordingStore(s3)) is not None
