"""The round trip of torch's own FSDP optimizer test, on a bucket; and the same of FSDP2."""

from __future__ import annotations

import optimizer_round_trip as trips
import pytest

from dcpstore.testing import MotoServer

pytestmark = pytest.mark.xdist_group("ranks")


@pytest.mark.parametrize("planner", ["none", "own", "ours"])
@pytest.mark.parametrize("layout", ["fsdp1", "fsdp2"])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_a_fresh_optimizer_gets_every_entry_and_trains_on_alike(
    pool, bucket: str, moto_server: MotoServer, num_ranks: int, layout: str, planner: str
) -> None:
    url = f"{bucket}/optimizer/{layout}-{num_ranks}-{planner}"
    options = moto_server.storage_options()
    for calls in pool.run(num_ranks, getattr(trips, layout), planner, url, options):
        wanted = {"create_local_plan", "resolve_tensor"} if planner == "own" else set()
        assert set(calls) == wanted, "the planner was not asked"
