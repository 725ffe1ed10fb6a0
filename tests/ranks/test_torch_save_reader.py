"""Four processes load one ``torch.save`` file from a bucket, each its part."""

from __future__ import annotations

import io
import pickle

import pytest
import torch
import torch_save_ranks as ranks
from rank_layouts import CASES, TP

from dcpstore.testing import MotoServer

pytestmark = pytest.mark.xdist_group("ranks")


def saved(value: object, **more: object) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream, **more)
    return stream.getvalue()


class Code:
    def __reduce__(self) -> tuple:
        return print, ("this code must not run",)


@pytest.fixture(scope="module")
def place(moto_server: MotoServer) -> tuple[str, dict]:
    """A folder with a file per case, and files that are none; and the options that reach it."""
    client = moto_server.create_bucket("torch-save")
    for case in CASES:
        client.put(f"good/{case}.pt", saved(ranks.file_state(case)))
    sparse = torch.eye(3).to_sparse()
    whole = saved({**TP, "step": 5, "sparse": sparse})
    client.put("good/good.pt", whole)
    client.put("good/cut.pt", whole[: len(whole) // 2])
    client.put("good/text.pt", b"<html>not a checkpoint</html>")
    client.put("good/legacy.pt", saved(TP, _use_new_zipfile_serialization=False))
    client.put("good/code.pt", saved({"up": Code()}, pickle_module=pickle))
    client.put("good/list.pt", saved([1, torch.ones(2)]))
    return "s3://torch-save/good", moto_server.storage_options()


ALL = tuple(CASES)
TELLING = ("dtensor_2d", "replicated", "sharded_tensor")


@pytest.mark.parametrize(
    ("planner", "coordinator", "some"),
    [
        ("ours", 0, ALL),
        ("plain", 3, TELLING),
        ("torch's", 1, TELLING),
        ("torch's default", 2, TELLING),
        pytest.param("plain", 2, ALL, marks=pytest.mark.campaign),
        pytest.param("torch's", 3, ALL, marks=pytest.mark.campaign),
        pytest.param("torch's default", 1, ALL, marks=pytest.mark.campaign),
    ],
)
def test_dcp_load_sends_each_rank_only_the_part_that_it_holds(
    pool, place, planner: str, coordinator: int, some: tuple[str, ...]
) -> None:
    counted = pool.run(4, ranks.load_cases, *place, planner, coordinator, False, some)
    for case in some:
        rows = [counted[rank][case] for rank in range(4)]
        has_values = case == "replicated" and planner != "torch's"
        for rank, (received, held, fetched) in enumerate(rows):
            if rank == coordinator:
                assert received == 0
                assert fetched > 0
            else:
                extra = received - held
                assert 0 < extra < 4000 if has_values else extra == 0, (case, rank, received, held)
                assert fetched == 0, "only the coordinator reads"


def test_ranks_that_read_for_themselves_receive_no_tensor(pool, place) -> None:
    counted = pool.run(4, ranks.load_cases, *place, "ours", 0, True, TELLING)
    for case in TELLING:
        for rank in range(4):
            received, held, fetched = counted[rank][case]
            assert fetched > 0 if held else True
            assert received < 4000 if case == "replicated" else received == 0


def test_dcpstore_load_does_the_same_and_tells_what_it_did(pool, place) -> None:
    results = pool.run(4, ranks.load_cases_by_ours, *place, 2, ALL)
    for case in ALL:
        job = results[0][case].job
        assert job == results[3][case].job
        assert job.fetched_bytes == results[2][case].rank.fetched_bytes
        own = results[2][case].rank.needed_bytes
        assert job.received_bytes == job.needed_bytes - own
        assert not results[0][case].missing
        assert not results[0][case].unexpected


def test_every_byte_of_the_file_is_fetched_once_whoever_wants_it(
    pool, place, moto_server: MotoServer
) -> None:
    url, options = place
    moto_server.clear_requests()
    pool.run(4, ranks.load_cases_by_ours, url, options, 0, TELLING)
    requests = moto_server.requests()
    assert {request.operation for request in requests} <= {"GetObject", "HeadObject"}
    for case in TELLING:
        mine = [r for r in requests if r.key.endswith(f"/{case}.pt")]
        size = len(saved(ranks.file_state(case)))
        assert sum(r.num_bytes_out for r in mine) < 2.2 * size + 1000


def test_groups_of_ranks_load_side_by_side(pool, place) -> None:
    received = pool.run(4, ranks.load_in_groups, [[0, 2], [3, 1]], *place)
    whole = sum(full.numel() * 4 for full in TP.values())
    readers = {2, 3}  # groups sort their ranks
    for rank, (one,) in enumerate(received):
        assert one == (0 if rank in readers else whole)


def test_torchs_own_reader_serves_our_planner(pool, tmp_path) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(saved(ranks.file_state("tensor_parallel")))
    assert pool.run(4, ranks.load_by_torchs_reader, str(path)) == [[]] * 4


WORDS = {
    "missing key": "'nose'",
    "wrong shape": "(12, 7)",
    "wrong rank count": "(12, 7)",
    "one rank's shape": "(11, 7)",
    "one rank's key": "'nose'",
    "narrowing": "float16",
    "tensor as value": "saved as a tensor",
    "value as tensor": "saved as a value",
    "sparse": "sparse",
    "no file": "absent.pt",
    "text": "no torch.save file",
    "cut off": "cut off",
    "legacy": "torch before 1.6",
    "code": "not run",
    "list": "not a state dict",
}


@pytest.mark.parametrize("driver", ["dcp", "torch's", "dcpstore"])
def test_what_cannot_be_loaded_is_told_to_all_ranks_alike(pool, place, driver: str) -> None:
    told = pool.run(4, ranks.fail_everywhere, *place, driver)
    for name, word in WORDS.items():
        for rank in range(4):
            assert name in told[rank], f"{name}: rank {rank} was told nothing"
            if (driver, name) == ("torch's", "tensor as value"):
                word = "Non-tensor value"  # that planner says so before it asks the reader
            assert word in told[rank][name], told[rank][name]
