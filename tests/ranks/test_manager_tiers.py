"""A manager whose steps come to the disks of the nodes first: each rank is a node of its own."""

from __future__ import annotations

import shutil
from pathlib import Path

from manager_ranks import train_on_disks
from rank_pool import RankPool


def test_a_run_goes_on_from_its_disks_from_the_bucket_and_on_other_ranks(
    pool: RankPool, tmp_path: Path
) -> None:
    bucket, local = str(tmp_path / "bucket"), str(tmp_path / "node{rank}")

    def train(ranks: int, steps: int) -> tuple[int | None, str | None]:
        answers = pool.run(ranks, train_on_disks, bucket, local, steps, 2)
        (start, source, told, in_bucket) = answers[0]
        assert {one[0] for one in answers} == {start}
        assert {"save_started", "staged", "sealed"} <= set(told)
        assert [one[3] for one in answers] == [in_bucket] * ranks
        return start, source

    assert train(2, 5) == (None, None)
    assert sorted(path.name for path in (tmp_path / "node1").iterdir()) == ["step-4", "step-5"]
    assert not (tmp_path / "bucket/step-5").exists()

    start, source = train(2, 3)  # the disks hold a step that the bucket does not
    assert start == 5
    assert source == f"file://{tmp_path}/node0/step-5"

    shutil.rmtree(tmp_path / "node1")  # step 8 is lost with it, and the bucket has step 7
    start, source = train(2, 1)
    assert start == 7
    assert source == f"file://{tmp_path}/node0/step-7"  # and what is lost of it from its copy

    for disk in tmp_path.glob("node*"):
        shutil.rmtree(disk)
    start, _ = train(4, 2)
    assert start == 7
    start, source = train(4, 1)
    assert start == 9
    assert source is not None
    assert "node0" in source
