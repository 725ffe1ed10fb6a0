"""`dcpstore.async_save` on gloo processes: layouts, the trainer's collectives, death and exit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import async_save_ranks as ranks
import pytest
import torch

import dcpstore

pytestmark = pytest.mark.xdist_group("ranks")


def test_every_layout_is_stored_as_a_save_that_is_waited_for_stores_it(pool, tmp_path: Path):
    pool.run(4, ranks.save_all_layouts, str(tmp_path))


def test_an_unfinished_collective_is_waited_for_and_stored_alike(pool, tmp_path: Path):
    pool.run(2, ranks.save_an_unfinished_collective, str(tmp_path))


def test_a_partial_sum_is_staged_and_refused_as_always(pool, tmp_path: Path):
    pool.run(2, ranks.save_a_partial_sum, str(tmp_path))


def test_the_trainers_collectives_go_on_beside_a_save_that_hangs_on_one_rank(pool, tmp_path: Path):
    for num_collectives, slowest_s in pool.run(4, ranks.train_beside, str(tmp_path)):
        assert num_collectives == 100, "the save used none of the trainer's"
        assert slowest_s < 2


def test_saves_in_the_background_and_others_do_not_mix(pool, tmp_path: Path):
    pool.run(3, ranks.save_in_order, str(tmp_path))


ENDING = """
import sys, torch, dcpstore
from dcpstore.store import open_store
from dcpstore.testing import FaultyStore, LatencyStore, StoreFault

def slowly(*args, **options):
    return LatencyStore(open_store(*args, **options), latency_s=0.3)

def failing(*args, **options):
    return FaultyStore(slowly(*args, **options), [StoreFault("denied", "put", times=None)])

for name, opener in (("good", slowly), ("bad", failing)):
    writer = dcpstore.ObjectStoreWriter(f"{sys.argv[1]}/{name}", store_opener=opener)
    save = dcpstore.async_save({"w": torch.ones(1000)}, storage_writer=writer)
    assert not save.done()
"""


def test_an_interpreter_that_ends_waits_for_its_saves_and_tells_of_those_that_fail(tmp_path: Path):
    script = [sys.executable, "-W", "ignore", "-c", ENDING, str(tmp_path)]
    ended = subprocess.run(script, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    found = {"w": torch.zeros(1000)}
    dcpstore.load(found, tmp_path / "good")
    assert found["w"].sum() == 1000
    assert f"{tmp_path}/bad failed: StoreError: put" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert f"{tmp_path}/good" not in ended.stderr


def test_shards_in_shards_are_stored_alike(pool, tmp_path: Path):
    pool.run(4, ranks.save_nested_shards, str(tmp_path))
