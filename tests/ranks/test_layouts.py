"""Save on N ranks, load on M, in every layout: each rank gets the plain values to the last bit."""

from __future__ import annotations

from itertools import product

import pytest
from rank_layouts import (
    CASES,
    load_and_check_all,
    load_case_from_folder,
    load_cases_with_stock,
    save_case_as_safetensors,
    save_cases,
    save_cases_with_stock,
)

from dcpstore.testing import MotoServer


@pytest.fixture(scope="session")
def saved(pool, bucket: str, moto_server: MotoServer):
    """Gives the URL of what N ranks saved, for N from 1 to 4."""
    urls: dict[int, str] = {}

    def saved(num_ranks: int) -> str:
        if num_ranks not in urls:
            url = f"{bucket}/layouts/{num_ranks}"
            pool.run(num_ranks, save_cases, url, moto_server.storage_options())
            urls[num_ranks] = url
        return urls[num_ranks]

    return saved


QUICK = {(1, 4), (2, 3), (3, 2), (4, 1), (4, 4)}
"""Numbers of ranks in every run; the campaign tries all."""
PAIRS = [
    pytest.param(saved, loaded, marks=[] if (saved, loaded) in QUICK else [pytest.mark.campaign])
    # The number of loading ranks changes slowest: a change costs a new process group.
    for loaded, saved in product(range(1, 5), range(1, 5))
]


@pytest.mark.parametrize(("num_saved", "num_loaded"), PAIRS)
def test_what_n_ranks_saved_m_ranks_load_in_every_layout(
    pool, saved, moto_server: MotoServer, num_saved: int, num_loaded: int
) -> None:
    options, url = moto_server.storage_options(), saved(num_saved)
    variant = int(num_saved != num_loaded or num_saved % 2)
    fetched = pool.run(num_loaded, load_and_check_all, url, options, variant)
    for case in CASES:
        assert sum(by_case[case] for by_case in fetched) > 0, case


@pytest.fixture(scope="session")
def saved_by_stock(pool, bucket: str, moto_server: MotoServer) -> str:
    url = f"{bucket}/stock-layouts"
    pool.run(2, save_cases_with_stock, url, moto_server.storage_options())
    return url


def test_what_stock_saved_on_two_ranks_ours_loads_on_three(
    pool, saved_by_stock: str, moto_server: MotoServer
) -> None:
    pool.run(3, load_and_check_all, saved_by_stock, moto_server.storage_options(), 1)


def test_what_ours_saved_on_two_ranks_stock_loads_on_three(
    pool, saved, moto_server: MotoServer
) -> None:
    pool.run(3, load_cases_with_stock, saved(2), moto_server.storage_options())


@pytest.mark.parametrize("case", ["fsdp2", "dtensor_1d"])
def test_shards_that_ranks_saved_as_safetensors_load_on_others(pool, tmp_path, case: str) -> None:
    pool.run(2, save_case_as_safetensors, case, str(tmp_path))
    pool.run(3, load_case_from_folder, case, str(tmp_path))
