"""A run in a bucket: what it costs to find its newest step among thousands, and who may save."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcpstore import ObjectStoreWriter, open_checkpoint
from dcpstore.audit.verify import verify_checkpoint
from dcpstore.config import ReadConfig
from dcpstore.errors import ConflictError
from dcpstore.manager.policies import Best, Latest
from dcpstore.manager.retention import plan, retire
from dcpstore.manager.run import Run
from dcpstore.testing import Fault, MotoServer

ENGINES = ("obstore", "fsspec")
_numbers = itertools.count()

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


@pytest.fixture
def server(bucket: str, s3_server: MotoServer) -> MotoServer:
    return s3_server


class Place:
    """The folder of a run in the bucket."""

    def __init__(self, server: MotoServer, bucket: str, engine: Any) -> None:
        self.server, self.engine = server, engine
        self.name = f"run-{next(_numbers)}"
        self.url = f"s3://{bucket}/{self.name}"
        self.options = server.storage_options()
        self.client = server.client(bucket)

    def run(self) -> Run:
        return Run(self.url, self.options, ReadConfig(engine=self.engine))

    def save(self, step: int, run: str | None, **metrics: float) -> None:
        writer = ObjectStoreWriter(f"{self.url}/step-{step}", storage_options=self.options)
        writer.attach(step=step, run=run, metrics=metrics)
        dcp.save({"weight": torch.full((9,), float(step))}, storage_writer=writer, no_dist=True)

    def names(self) -> list[str]:
        return [key.removeprefix(f"{self.name}/") for key in self.client.keys(f"{self.name}/")]


@pytest.fixture(params=ENGINES)
def place(request: pytest.FixtureRequest, server: MotoServer, bucket: str) -> Iterator[Place]:
    yield Place(server, bucket, request.param)


def test_retention_works_on_buckets_as_megatron_bridge_5559_did_not(place: Place) -> None:
    with place.run() as run, place.run() as other:
        run_id = run.claim()
        for step in range(1, 7):
            run.renew(step)
            place.save(step, run_id, loss=abs(step - 2) / 8)
        other.pin(3)
        run.report(4, {"loss": -1.0})
        keep = [Latest(1), Best(2, "loss", "min")]
        place.server.clear_requests()
        results = retire(run, plan(run, keep))
        assert [(one.step, one.num_objects, one.why_not) for one in results] == [
            (5, 2, ""),
            (1, 2, ""),
        ]
        # The metadata first, then what they named in one request.
        assert place.server.counts()["DeleteObjects"] + place.server.counts()["DeleteObject"] >= 6
        folders = {name.partition("/")[0] for name in place.names()}
        assert folders == {".dcpstore-run", "step-2", "step-3", "step-4", "step-6"}
        assert not [name for name in place.names() if "deleting" in name]
        assert [one.step for one in run.all()] == [6, 4, 3, 2]
        for one in run.all():
            with open_checkpoint(one.url, storage_options=place.options) as checkpoint:
                assert checkpoint.read_tensor("weight").eq(one.step).all()
            assert not verify_checkpoint(one.url, storage_options=place.options).findings

        assert retire(run, plan(run, keep)) == []


def test_the_store_decides_who_has_the_run(place: Place) -> None:
    with place.run() as first, place.run() as second:
        run_id = first.claim()
        first.renew(1)
        with pytest.raises(ConflictError, match="is claimed by"):
            second.claim(takeover=False)
        assert second.claim() == run_id
        with pytest.raises(ConflictError, match="was taken over by"):
            first.renew(2)
        second.renew(2)


def test_many_jobs_that_claim_at_once_agree_on_the_run(place: Place) -> None:
    runs = [place.run() for _ in range(6)]

    def claim(run: Run) -> str | None:
        try:
            return run.claim()
        except ConflictError:
            return None

    with ThreadPoolExecutor(len(runs)) as executor:
        outcomes = list(executor.map(claim, runs))
    found = runs[0].claimed()
    assert found is not None
    assert {one for one in outcomes if one} == {found.run}
    holders = []
    for run, outcome in zip(runs, outcomes, strict=True):
        if outcome is not None:
            try:
                run.renew(1)
            except ConflictError:
                continue
            holders.append(run)
        run.close()
    assert len(holders) == 1


def test_a_lost_answer_to_the_removal_of_metadata_is_settled(place: Place) -> None:
    for step in (1, 2):
        place.save(step, None)
    with place.run() as run:
        verdicts = plan(run, Latest(1))
        for operation in ("DeleteObjects", "DeleteObject"):
            place.server.add_fault(Fault(operation, kind="lost_ack", status=500))
        retire(run, verdicts)
        assert [one.step for one in run.all()] == [2]
        retire(run, plan(run, Latest(1)))
    assert {name.partition("/")[0] for name in place.names()} == {"step-2"}


@pytest.mark.campaign  # the fewest folders that take three pages
def test_the_newest_of_2_001_steps_takes_three_listings_and_one_small_request(
    server: MotoServer, bucket: str
) -> None:
    place = Place(server, bucket, "obstore")
    place.save(2001, None)
    with ThreadPoolExecutor(16) as executor:
        keys = (f"{place.name}/step-{step}/__0_0.distcp" for step in range(1, 2001))
        list(executor.map(lambda key: place.client.put(key, b""), keys))
    server.clear_requests()
    with place.run() as run:
        newest = run.newest()
    assert newest is not None
    assert newest.step == 2001
    counts = server.counts()
    assert counts["GetObject"] == 1
    assert sum(counts.values()) == 4, counts
    (got,) = [one for one in server.requests() if one.operation == "GetObject"]
    assert got.num_bytes_out <= 64 << 10
