"""The round trip of torch's own FSDP optimizer test, on a bucket; and the same of FSDP2."""

from __future__ import annotations

import optimizer_round_trip as trips
import pytest

from dcpstore.testing import MotoServer

pytestmark = pytest.mark.xdist_group("ranks")


PLANNERS = ["none", "own", "ours"]


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("layout", ["fsdp1", "fsdp2"])
def test_a_fresh_optimizer_gets_every_entry_and_trains_on_alike_with_any_planner(
    pool, bucket: str, moto_server: MotoServer, num_ranks: int, layout: str
) -> None:
    url = f"{bucket}/optimizer/{layout}-{num_ranks}"
    options = moto_server.storage_options()
    for calls in pool.run(num_ranks, getattr(trips, layout), PLANNERS, url, options):
        assert list(calls) == PLANNERS
        assert set(calls["own"]) == {"create_local_plan", "resolve_tensor"}, "it was not asked"
