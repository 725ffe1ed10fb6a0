"""Two processes share a conversion."""

from __future__ import annotations

import convert_ranks as ranks
import pytest
import torch
from safetensors.torch import load_file

import dcpstore

pytestmark = pytest.mark.xdist_group("ranks")


def test_two_processes_share_the_files_and_the_objects(pool, tmp_path) -> None:
    dcpstore.save(ranks.model(), tmp_path / "dcp", progress=False)
    one, other = pool.run(2, ranks.convert_there_and_back, tmp_path)
    assert one == other
    files, back, copies = one
    assert len(files) == ranks.MODEL_KEYS + 1
    assert {key.split("_")[2] for key in back} == {"0", "1"}
    assert sorted(copies.values()) == sorted(back.values())
    found = {}
    for path in (tmp_path / "hf").glob("*.safetensors"):
        found.update(load_file(path))
    for name, tensor in ranks.model().items():
        assert torch.equal(found[name], tensor)
        assert torch.equal(dcpstore.read_tensor(tmp_path / "copy", name), tensor)


def test_what_one_process_cannot_read_leaves_no_file_of_the_other(pool, tmp_path) -> None:
    dcpstore.save(ranks.model(), tmp_path / "dcp", progress=False)
    (data,) = (tmp_path / "dcp").glob("*.distcp")
    content = bytearray(data.read_bytes())
    content[-5000] ^= 1
    data.write_bytes(content)
    said = pool.run(2, ranks.fail_on_one, tmp_path)
    assert said[0] == said[1]
    assert f"layer{ranks.MODEL_KEYS - 1}" in said[0]
    assert [*(tmp_path / "hf").iterdir()] == []
