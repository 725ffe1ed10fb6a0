"""What is sealed beside the tensors, by one rank and by several that are threads."""

from __future__ import annotations

import io
import math
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

import dcpstore
from dcpstore import (
    ConfigError,
    ConflictError,
    IncompatibleError,
    ObjectStoreReader,
    ObjectStoreWriter,
    RankFailures,
    SavePlanner,
    WriteConfig,
)
from dcpstore.format.seal import Facts, read_tail
from dcpstore.read.discovery import discover
from dcpstore.store import open_store
from dcpstore.testing import RecordingStore
from dcpstore.testing.ranks import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

STATE = {"model": {"w": torch.arange(6.0)}, "step": 7}


def facts_at(url: str) -> Facts | None:
    """Read step, run and metrics as whoever looks at many checkpoints does."""
    data = open_store(url).get(".metadata").data
    seal = read_tail(data[-(64 << 10) :], len(data))
    assert seal is not None
    return seal.facts


def info_at(url: str) -> Any:
    return discover(open_store(url), dcpstore.ReadConfig()).decode_manifest().info


def save_on(size: int, url: str, given: Any, coordinator: int = 0) -> list[Any]:
    """Save on so many ranks, each with the keywords that ``given(rank)`` returns."""

    def work(group: Any) -> Any:
        return dcpstore.save(STATE, url, process_group=group, **given(group.rank))

    return run_ranks(size, work, coordinator=coordinator, deadline_s=60).values()


def test_metrics_a_step_and_users_metadata_come_back() -> None:
    url = "memory://attached/one"
    dcpstore.save(
        STATE,
        url,
        metrics={"loss": torch.tensor(0.5), "num": 3, "worst": math.inf},
        user_metadata={"tokens": 10**12, "note": ["a", {"b": None}]},
        facts=Facts(100, "a" * 16, {"lr": 0.1}),
    )
    metrics = {"lr": 0.1, "loss": 0.5, "num": 3.0, "worst": math.inf}
    assert facts_at(url) == Facts(100, "a" * 16, metrics)
    assert info_at(url)["user_metadata"] == {"tokens": 10**12, "note": ["a", {"b": None}]}


def test_a_plain_dcp_save_seals_what_was_attached_to_its_writer_once(tmp_path: Any) -> None:
    writer = ObjectStoreWriter(tmp_path / "0")
    writer.attach(metrics={"loss": 1.0}, step=1, user_metadata={"a": 1})
    for number in (1, 2):
        url = str(tmp_path / str(number))
        dcp.save(dict(STATE), checkpoint_id=url, storage_writer=writer, no_dist=True)
    assert facts_at(str(tmp_path / "1")) == Facts(1, None, {"loss": 1.0})
    assert info_at(str(tmp_path / "1"))["user_metadata"] == {"a": 1}
    assert facts_at(str(tmp_path / "2")) is None
    assert "user_metadata" not in info_at(str(tmp_path / "2"))


def test_the_coordinators_value_counts_and_then_the_lowest_ranks() -> None:
    url = "memory://attached/ranks"
    save_on(
        4,
        url,
        lambda rank: {
            "metrics": {
                "loss": float(rank),
                f"of {rank}": 1.0,
                **({"late": 3.0} if rank == 3 else {}),
            },
            "user_metadata": {"rank": rank} if rank != 2 else {},
            "facts": Facts(step=10 + rank) if rank in (1, 3) else None,
        },
        coordinator=2,
    )
    facts = facts_at(url)
    assert facts == Facts(
        11, None, {"loss": 2.0, "late": 3.0, **{f"of {rank}": 1.0 for rank in range(4)}}
    )
    assert info_at(url)["user_metadata"] == {"rank": 0}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"metrics": {"loss": "0.1"}}, "not a number"),
        ({"metrics": {"loss": torch.zeros(2)}}, "no single number"),
        ({"metrics": {"loss": 10**400}}, "no single number"),
        ({"metrics": {1: 0.1}}, "not a float"),
        ({"metrics": {str(n): 0.1 for n in range(4096)}}, "is the most"),
        ({"user_metadata": {"a": math.nan}}, "JSON"),
        ({"user_metadata": {"a": torch.zeros(1)}}, "JSON"),
        ({"user_metadata": {"a": {1: 2}}}, "the key 1 is a int"),
        ({"user_metadata": {"a": 10**500}}, "digits"),
        ({"user_metadata": {"a": "x" * (256 << 10)}}, "make it an attachment"),
        ({"user_metadata": {"a": eval("[" * 80 + "]" * 80)}}, "64 levels"),
    ],
)
def test_what_cannot_be_sealed_is_refused_on_all_ranks_before_anything_is_written(
    given: dict[str, Any], message: str
) -> None:
    url = "memory://attached/refused"
    with pytest.raises(ConfigError, match=message):
        dcpstore.save(STATE, url, **given)
    for failure in save_on_and_fail(url, given):
        assert isinstance(failure.exceptions[1], ConfigError)
        assert failure.step == "plan"
    assert not list(open_store(url).list())


def save_on_and_fail(url: str, given: dict[str, Any]) -> list[RankFailures]:
    def work(group: Any) -> Any:
        with pytest.raises(RankFailures) as caught:
            dcpstore.save(STATE, url, process_group=group, **(given if group.rank == 1 else {}))
        return caught.value

    return run_ranks(2, work, deadline_s=60).values()


def test_metrics_of_ranks_that_are_too_many_together_seal_nothing() -> None:
    url = "memory://attached/together"

    def work(group: Any) -> Any:
        metrics = {f"a metric of rank {group.rank}: {n}": 0.1 for n in range(300)}
        with pytest.raises(RankFailures) as caught:
            dcpstore.save(STATE, url, process_group=group, metrics=metrics)
        return caught.value

    for failure in run_ranks(2, work, deadline_s=60).values():
        assert "all ranks together" in str(failure)
    assert not list(open_store(url).list())


def test_what_is_given_twice_or_to_a_foreign_writer_is_refused(tmp_path: Any) -> None:
    writer = ObjectStoreWriter(tmp_path / "a")
    writer.attach(step=1)
    with pytest.raises(ConfigError, match="attached to your storage_writer already"):
        dcpstore.save(STATE, storage_writer=writer, metrics={"loss": 1.0})
    foreign = dcp.FileSystemWriter(tmp_path / "b")
    with pytest.raises(ConfigError, match="FileSystemWriter"):
        dcpstore.save(STATE, storage_writer=foreign, metrics={"loss": 1.0})


class FailsOnce:
    """A part of a state that cannot be saved the first time."""

    def __init__(self) -> None:
        self.calls = 0

    def state_dict(self) -> dict[str, Any]:
        self.calls += 1
        if self.calls == 1:
            raise RuntimeError("not yet")
        return {"w": torch.ones(2)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


def test_a_save_that_failed_leaves_nothing_attached_to_a_writer_of_the_callers(
    tmp_path: Path,
) -> None:
    writer, state = ObjectStoreWriter(tmp_path), {"model": FailsOnce()}
    with pytest.raises(RuntimeError, match="not yet"):
        dcpstore.save(state, storage_writer=writer, metrics={"loss": 1.0})
    assert not writer.has_attached
    dcpstore.save(state, storage_writer=writer, metrics={"loss": 2.0})
    assert facts_at(str(tmp_path)) == Facts(metrics={"loss": 2.0})


def test_stock_dcp_loads_a_checkpoint_with_facts(tmp_path: Any) -> None:
    dcpstore.save(STATE, tmp_path, metrics={"loss": 1.0}, user_metadata={"a": 1})
    state = {"model": {"w": torch.zeros(6)}, "step": 0}
    dcp.load(state, checkpoint_id=str(tmp_path), no_dist=True)
    assert torch.equal(state["model"]["w"], STATE["model"]["w"])
    assert state["step"] == 7


# --- attachments ----------------------------------------------------------------------------

MIB = 1 << 20
CONFIG = WriteConfig(
    checksum_block_bytes=4096, part_bytes=5 * MIB, budget_bytes=15 * MIB, object_bytes=8 * MIB
)
SIZES = {
    "nothing": 0,
    "inline": 5,
    "the most inline": CONFIG.inline_bytes,
    "one more": CONFIG.inline_bytes + 1,
    "one block": 4096,
    "several blocks": 3 * 4096 + 1,
    "several parts": 11 * MIB + 3,
}


def content(seed: int, num_bytes: int) -> bytes:
    return bytes(range(seed, seed + 97)) * (num_bytes // 97) + bytes(num_bytes % 97)


def read_all(url: str) -> dict[str, bytes]:
    with dcpstore.open_checkpoint(url) as checkpoint:
        assert set(checkpoint.attachments) == set(checkpoint.attached_items)
        return {name: checkpoint.read_attachment(name) for name in checkpoint.attachments}


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("form", ["bytes", "path"])
def test_attachments_of_every_size_come_back_from_any_number_of_ranks(
    size: int, form: str, tmp_path: Path
) -> None:
    url = str(tmp_path / "run")
    expected: dict[str, bytes] = {}
    given: list[dict[str, Any]] = [{} for _ in range(size)]
    for number, (name, num_bytes) in enumerate(SIZES.items()):
        for rank in range(size):
            if num_bytes > MIB and rank:
                continue
            data = expected[f"{name}/of {rank}"] = content(number + rank, num_bytes)
            file = tmp_path / f"{number}-{rank}"
            if form == "path":
                file.write_bytes(data)
            given[rank][name + "/of {rank}"] = file if form == "path" else data
    results = save_on(
        size,
        url,
        lambda rank: {"attachments": given[rank], "config": CONFIG},
        coordinator=size - 1,
    )
    assert read_all(url) == expected
    assert results[0].peak_bytes <= CONFIG.budget_bytes
    assert results[0].stored_bytes > sum(map(len, expected.values()))
    for name in ("several parts/of 0", f"inline/of {size - 1}"):
        assert dcpstore.read_attachment(url, name) == expected[name]
    state = {"model": {"w": torch.zeros(6)}, "step": 0}
    dcpstore.load(state, url)
    assert torch.equal(state["model"]["w"], STATE["model"]["w"])


def test_a_rank_without_tensors_attaches_too() -> None:
    url = "memory://attached/no-tensors"

    def work(group: Any) -> Any:
        state = STATE if group.rank == 0 else {}
        given = {"rng-{rank}": b"%d" % group.rank}
        return dcpstore.save(state, url, process_group=group, attachments=given)

    run_ranks(3, work, deadline_s=60).values()
    assert read_all(url) == {f"rng-{rank}": b"%d" % rank for rank in range(3)}
    assert len([one for one in open_store(url).list() if one.key.startswith("__")]) == 3


def test_small_attachments_cost_a_save_and_a_read_no_request() -> None:
    counts = []
    for number, given in enumerate(({}, {"a": b"x", "b": b"y" * 3000})):
        store = RecordingStore(open_store(f"memory://attached/requests-{number}"))
        writer = ObjectStoreWriter("memory://ignored", store_opener=lambda *_, s=store, **__: s)
        dcpstore.save(STATE, storage_writer=writer, attachments=given)
        counts.append(store.counts)
        if given:
            before = sum(store.counts.values())
            opener = {"store_opener": lambda *_, s=store, **__: s}
            assert dcpstore.read_attachment("memory://ignored", "a", **opener) == b"x"
            assert sum(store.counts.values()) == before + 1
            assert dcpstore.read_attachment("memory://ignored", "b", **opener) == b"y" * 3000
            assert sum(store.counts.values()) == before + 3
    assert counts == [{"get": 1, "put": 2}] * 2


@pytest.mark.parametrize("reader", ["stock", "ours"])
def test_a_load_ignores_attachments(reader: str, tmp_path: Path) -> None:
    writer = ObjectStoreWriter(tmp_path)
    writer.attach(attachments={"a": b"1", "large": b"2" * 5000}, metrics={"loss": 1.0})
    dcp.save(dict(STATE), storage_writer=writer, no_dist=True)
    make = dcp.FileSystemReader if reader == "stock" else ObjectStoreReader
    state = {"model": {"w": torch.zeros(6)}, "step": 0}
    dcp.load(state, storage_reader=make(tmp_path), no_dist=True)
    assert torch.equal(state["model"]["w"], STATE["model"]["w"])
    assert state["step"] == 7
    assert read_all(str(tmp_path)) == {"a": b"1", "large": b"2" * 5000}


def test_one_name_of_two_ranks_is_one_attachment_if_the_bytes_are_the_same() -> None:
    url = "memory://attached/same"
    state = STATE
    save_on(3, url, lambda rank: {"attachments": {"config.json": b"{}" * 2000}})
    assert read_all(url) == {"config.json": b"{}" * 2000}
    manifest = discover(open_store(url), dcpstore.ReadConfig()).decode_manifest()
    data = {one.key for one in open_store(url).list()} - {".metadata"}
    assert {one.key for one in manifest.objects} == data  # so that none of them is left for ever
    dcpstore.save(state, url, overwrite=True)
    assert not data & {one.key for one in open_store(url).list()}


def test_one_name_with_other_bytes_fails_before_the_seal_and_leaves_nothing() -> None:
    url = "memory://attached/other"

    def work(group: Any) -> Any:
        with pytest.raises(RankFailures) as caught:
            given = {"rng.json": b"%d" % group.rank}
            dcpstore.save(STATE, url, process_group=group, attachments=given)
        return caught.value

    for failure in run_ranks(3, work, deadline_s=60).values():
        (error,) = failure.exceptions.values()
        assert isinstance(error, IncompatibleError)
        assert "rng-{rank}.json" in str(error)
    assert not list(open_store(url).list())


def protocol_of_two(url: str, given: list[dict[str, Any]]) -> None:
    """Go through what plain ``dcp.save`` calls on two ranks."""
    writers = [ObjectStoreWriter(url) for _ in range(2)]
    results = []
    for rank, (writer, attachments) in enumerate(zip(writers, given, strict=True)):
        writer.attach(attachments=attachments)
        writer.storage_meta()
        writer.set_up_storage_writer(rank == 0, rank=rank, use_collectives=True)
    plans = writers[0].prepare_global_plan([SavePlan([]), SavePlan([])])
    for writer, plan in zip(writers, plans, strict=True):
        results.append(writer.write_data(plan, SavePlanner()).wait())
    writers[0].finish(dcp.Metadata({}), results)


def test_plain_dcp_save_carries_attachments_of_all_ranks_or_leaves_nothing(tmp_path: Path) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    protocol_of_two(str(good), [{"a": b"1", "c-{rank}": b"3"}, {"b": b"2", "c-{rank}": b"4"}])
    assert read_all(str(good)) == {"a": b"1", "b": b"2", "c-0": b"3", "c-1": b"4"}
    with pytest.raises(IncompatibleError, match="two ranks attached different bytes"):
        protocol_of_two(str(bad), [{"a": b"1"}, {"a": b"2"}])
    assert not [path for path in bad.rglob("*") if path.is_file()]


class Meanwhile(SavePlanner):
    """Does something when the first item is written, which comes before any attachment."""

    def __init__(self, action: Any) -> None:
        super().__init__()
        self._action = action

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        self._action()
        return super().resolve_data(write_item)


def test_bytes_are_those_of_the_moment_of_the_call() -> None:
    url, data = "memory://attached/moment", bytearray(b"before")
    planner = Meanwhile(lambda: data.__setitem__(slice(0, 6), b"after!"))
    given = {"a": data, "b": memoryview(data)}
    dcpstore.save(STATE, url, planner=planner, attachments=given)
    assert data == b"after!"
    assert read_all(url) == {"a": b"before", "b": b"before"}


@pytest.mark.parametrize("num_bytes", [0, 4, 6, 3 * MIB])
def test_a_file_that_changes_its_size_meanwhile_fails_the_save(
    num_bytes: int, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"12345")
    planner = Meanwhile(lambda: file.write_bytes(bytes(num_bytes)))
    with pytest.raises(ConflictError, match="had 5 bytes when it began to be saved"):
        dcpstore.save(STATE, tmp_path / "run", planner=planner, attachments={"a": file})
    assert not [path for path in (tmp_path / "run").rglob("*") if path.is_file()]


def test_a_file_that_vanishes_meanwhile_fails_the_save(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"12345")
    planner = Meanwhile(lambda: file.unlink(missing_ok=True))
    with pytest.raises(ConfigError, match="cannot be read"):
        dcpstore.save(STATE, tmp_path / "run", planner=planner, attachments={"a": file})
    assert not [path for path in (tmp_path / "run").rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"a": "text"}, "a str is taken for neither"),
        ({"a": 7}, "is a int"),
        ({"a": None}, "is a NoneType"),
        ({"a": Path("nowhere")}, "cannot be read"),
        ({"a": Path(__file__).parent}, "no regular file"),
        ({7: b""}, "name is a str"),
        ({"": b""}, "relative path"),
        ({"/etc/a": b""}, "relative path"),
        ({"../a": b""}, "relative path"),
        ({"a/../../b": b""}, "relative path"),
        ({"s3://a": b""}, "relative path"),
        ({"a\x1b[2J": b""}, "relative path"),
        ({"a" * 1025: b""}, "relative path"),
        ({"a" * 1000 + "{rank}": b"", "b": b""}, None),
        ({"a" * 1015 + "{rank}": b""}, "relative path"),
        ({"a-0": b"", "a-{rank}": b""}, "same name on rank 0"),
    ],
)
def test_what_cannot_be_attached_is_refused(given: Any, message: str | None) -> None:
    url = "memory://attached/not"
    if message is None:
        dcpstore.save(STATE, url + "/but", attachments=given)
        return
    with pytest.raises(ConfigError, match=message):
        dcpstore.save(STATE, url, attachments=given)
    assert not [one for one in open_store(url).list() if "but" not in one.key]


def test_a_writer_that_is_pickled_keeps_what_was_attached(tmp_path: Path) -> None:
    writer = ObjectStoreWriter(tmp_path)
    writer.attach(attachments={"a": b"1"}, step=3)
    copied = pickle.loads(pickle.dumps(writer))
    dcp.save(dict(STATE), storage_writer=copied, no_dist=True)
    assert read_all(str(tmp_path)) == {"a": b"1"}
    assert facts_at(str(tmp_path)) == Facts(3)


def test_a_later_attach_replaces_an_earlier_one(tmp_path: Path) -> None:
    writer = ObjectStoreWriter(tmp_path)
    writer.attach(attachments={"a": b"1"}, step=3)
    writer.attach(attachments={"b": b"2"})
    dcp.save(dict(STATE), storage_writer=writer, no_dist=True)
    assert read_all(str(tmp_path)) == {"b": b"2"}
    assert facts_at(str(tmp_path)) is None


def test_attachments_are_stored_as_they_are_beside_transformed_tensors(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("torch.distributed.checkpoint._extension").ZStandard
    writer = ObjectStoreWriter(tmp_path, extensions=[zstandard()])
    writer.attach(attachments={"a": b"plain " * 1000})
    dcp.save(dict(STATE), storage_writer=writer, no_dist=True)
    assert read_all(str(tmp_path)) == {"a": b"plain " * 1000}
    assert any(b"plain plain " in path.read_bytes() for path in tmp_path.glob("__0_*"))


def test_a_path_is_read_from_where_it_was_when_it_was_attached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"here")
    monkeypatch.chdir(tmp_path)
    writer = ObjectStoreWriter(tmp_path / "run")
    writer.attach(attachments={"a": Path("file")})
    monkeypatch.chdir(os.sep)
    dcp.save(dict(STATE), storage_writer=writer, no_dist=True)
    assert read_all(str(tmp_path / "run")) == {"a": b"here"}
