"""DCP's ways to save and load on several ranks, each with a load that compares every bit."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import pairwise

import pytest
import rank_modes as modes
import torch
from rank_pool import RankPool

from dcpstore import ObjectStoreReader, ObjectStoreWriter, ReadConfig, WriteConfig
from dcpstore.format.seal import save_id_of
from dcpstore.testing import MotoServer


@pytest.fixture
def place(bucket: str, moto_server: MotoServer, request) -> tuple[str, dict]:
    """A folder of the test's own, and the options that reach it."""
    return f"{bucket}/{request.node.name}", moto_server.storage_options()


def keys_below(moto_server: MotoServer, url: str) -> list[str]:
    prefix = url.removeprefix("s3://ranks/") + "/"
    return [key.removeprefix(prefix) for key in moto_server.client("ranks").keys(prefix)]


@pytest.mark.parametrize("rank", [1, 2])
def test_any_rank_may_coordinate(pool, place, rank: int) -> None:
    pool.run(3, modes.save_coordinated_by, rank, *place)


def test_a_group_without_rank_0_saves_and_loads(pool, place) -> None:
    pool.run(4, modes.save_in_groups, [[1, 3]], *place)


def test_two_groups_save_at_the_same_time(pool, place) -> None:
    pool.run(4, modes.save_in_groups, [[0, 2], [3, 1]], *place)


def test_ranks_that_do_not_talk_keep_their_own_values(pool, place, moto_server: MotoServer) -> None:
    paths = pool.run(3, modes.save_without_collectives, *place)
    found = keys_below(moto_server, place[0])
    assert {f"__{rank}.metadata" for rank in range(3)} < set(found)
    assert ".metadata" not in found
    for rank, names in enumerate(paths):
        assert all(name.startswith(f"__{rank}_") for name in names), names
    pool.run(3, modes.save_again_without_collectives, *place)
    left = keys_below(moto_server, place[0])
    assert len(left) <= len(found), "an overwritten save left objects behind"
    assert {save_id_of(key) for key in left}.isdisjoint(filter(None, map(save_id_of, found)))


@pytest.mark.parametrize("has_one_writer", [True, False], ids=["one-writer", "new-writers"])
def test_cached_plans_do_not_mix_saves(
    pool, place, moto_server: MotoServer, has_one_writer: bool
) -> None:
    pool.run(2, modes.save_with_cached_plans, *place, has_one_writer)
    saved = [set(keys_below(moto_server, f"{place[0]}/{name}")) for name in "abc"]
    for one, other in pairwise(saved):
        assert one & other <= {".metadata"}
    assert len({len(names) for names in saved}) == 1, "the overwritten save was not swept"


def test_async_save_in_a_thread_keeps_the_values_of_the_call(pool, place) -> None:
    pool.run(2, modes.save_async, "thread", *place)


def test_async_save_in_a_process_keeps_the_values_of_the_call(pool, place) -> None:
    pool.run(1, modes.save_async, "process", *place)


@pytest.mark.campaign
def test_async_save_in_a_process_per_rank_keeps_the_values_of_the_call(place, tmp_path) -> None:
    # Torch keeps the process that it starts for good, with the group it was started in.
    with RankPool(2, tmp_path) as pool:
        pool.run(2, modes.save_async, "process", *place)


def test_plain_dcp_save_carries_what_any_rank_attaches_or_leaves_nothing(
    pool, place, moto_server: MotoServer
) -> None:
    pool.run(3, modes.save_with_attachments, *place)
    assert ".metadata" in keys_below(moto_server, f"{place[0]}/good")
    assert not keys_below(moto_server, f"{place[0]}/bad")


def test_a_tensor_that_a_collective_still_computes_is_waited_for(pool, place) -> None:
    pool.run(2, modes.save_unfinished_collective, *place)


def test_a_planner_may_deal_items_to_ranks(pool, place) -> None:
    assert pool.run(2, modes.save_balanced, *place)[0] == [0, 1]


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_adam_of_two_ranks_goes_on_with_others(pool, place, num_ranks: int) -> None:
    saved = pool.run(2, modes.save_adam, *place)[0]
    loaded = pool.run(num_ranks, modes.load_adam, *place)[0]
    assert_same(loaded, saved)
    assert saved["optim"]["state"]["0.weight"]["step"] == 3
    assert len(saved["optim"]["state"]) == 4


def assert_same(got, expected, path: str = "") -> None:
    if isinstance(expected, dict):
        assert got.keys() == expected.keys(), path
        for key, value in expected.items():
            assert_same(got[key], value, f"{path}.{key}")
    elif isinstance(expected, list):
        assert len(got) == len(expected), path
        for number, value in enumerate(expected):
            assert_same(got[number], value, f"{path}[{number}]")
    elif isinstance(expected, torch.Tensor):
        assert got.dtype == expected.dtype, path
        assert torch.equal(got, expected), path
    else:
        assert got == expected, path


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("engine", ["auto", "fsspec"])
def test_a_used_writer_and_reader_go_to_another_process(pool, place, engine: str) -> None:
    url, options = place
    values = modes.plain(4)
    blank = {key: torch.zeros_like(value) for key, value in values.items()}
    writer = ObjectStoreWriter(
        f"{url}/here", storage_options=options, config=WriteConfig(engine=engine)
    )
    modes.save_with(writer, values)
    writer.reset(f"{url}/there")
    pool.run(1, modes.save_with, writer, values)
    reader = ObjectStoreReader(
        f"{url}/there", storage_options=options, config=ReadConfig(engine=engine)
    )
    assert_same(modes.load_with(reader, dict(blank)), values)
    blank = {key: torch.zeros_like(value) for key, value in values.items()}
    assert_same(pool.run(1, modes.load_with, reader, blank)[0], values)


FORK = """
import os, signal, sys, warnings
warnings.simplefilter("ignore")
import torch
import torch.distributed.checkpoint as dcp
from dcpstore import ConfigError, ObjectStoreReader, ObjectStoreWriter, ReadConfig, WriteConfig
url, endpoint = sys.argv[1:]
options = {"key": "test", "secret": "test", "endpoint_url": endpoint,
           "client_kwargs": {"region_name": "us-east-1"}}
state = {"w": torch.arange(10000.0)}

def used(engine):
    here = f"{url}/{engine}"
    writer = ObjectStoreWriter(here, storage_options=options, config=WriteConfig(engine=engine))
    reader = ObjectStoreReader(here, storage_options=options, config=ReadConfig(engine=engine))
    dcp.save(state, storage_writer=writer, no_dist=True)
    dcp.load(state, storage_reader=reader, no_dist=True)
    return writer, reader

def use_in_a_child(engine, writer, reader):
    signal.alarm(90)
    there = f"{url}/{engine}-2"
    target = {"w": torch.zeros(10000)}
    try:
        reader.read_metadata()
        writer.reset(there)
        dcp.save(state, storage_writer=writer, no_dist=True)
        dcp.load(target, checkpoint_id=there, storage_reader=reader, no_dist=True)
    except ConfigError as error:
        os._exit(3 if "fork" in str(error) else 4)
    os._exit(0 if torch.equal(target["w"], state["w"]) else 5)

for engine in ("obstore", "fsspec"):
    both = used(engine)
    if not os.fork():
        use_in_a_child(engine, *both)
    print(engine, os.waitstatus_to_exitcode(os.wait()[1]))
"""


def test_a_fork_works_or_is_refused_but_never_hangs(place) -> None:
    url, options = place
    ended = subprocess.run(
        [sys.executable, "-c", FORK, url, options["endpoint_url"]],
        capture_output=True,
        text=True,
        timeout=110,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    said = ended.stdout.split()
    assert said == ["obstore", "3", "fsspec", "0"], ended.stdout + ended.stderr
