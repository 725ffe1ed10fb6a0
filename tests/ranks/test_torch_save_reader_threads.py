"""Ranks that are threads load a ``torch.save`` file: what may be in it, and what goes wrong."""

from __future__ import annotations

import io
import threading
import warnings
import zipfile
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, format_utils
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

import dcpstore
from dcpstore import (
    BroadcastingTorchSaveReader,
    ConfigError,
    ConflictError,
    CorruptError,
    DynamicMetaLoadPlanner,
    IncompatibleError,
    NotFoundError,
    RankFailures,
    ReadConfig,
)
from dcpstore.ranks import RankGroup
from dcpstore.store import open_store
from dcpstore.testing import FaultyStore, StoreFault
from dcpstore.testing.ranks import run_ranks

SMALL = ReadConfig(budget_bytes=4096, request_bytes=512, join_gap_bytes=64)
BASE = torch.arange(120.0)


def views() -> dict[str, torch.Tensor]:
    """Tensors whose elements lie in every possible way in their storages."""
    cube = torch.randn(5, 6, 7)
    return {
        "dense": torch.randn(33, 17),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        "transposed": torch.randn(12, 30).t(),
        "permuted": cube.permute(2, 0, 1),
        "slice": torch.randn(20, 30)[3:15, 5:25],
        "slice of permuted": cube.permute(1, 2, 0)[1:4, :, 2:],
        "every third": BASE[::3],
        "every other column": torch.randn(8, 8)[:, ::2],
        "expanded": torch.randn(6, 1).expand(6, 9),
        "one value": torch.tensor(7.0).expand(4, 4),
        "windows": BASE.unfold(0, 10, 5),
        "diagonal": torch.randn(9, 9).diagonal(),
        "tied": BASE[10:50],
        "tied again": BASE[10:50],
        "overlapping": BASE[40:60].view(4, 5),
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "conjugate": torch.randn(6, 5, dtype=torch.complex64).conj(),
        "negative": torch.randn(7, dtype=torch.complex128).conj().imag,
        "bfloat16": torch.randn(9, 5).bfloat16(),
        "float8": torch.randn(16).to(torch.float8_e4m3fn),
        "bool": torch.rand(11) > 0.5,
        "int8": torch.arange(-20, 20, dtype=torch.int8),
    }


def blank(state: dict[str, Any]) -> dict[str, Any]:
    return {
        key: torch.zeros(value.shape, dtype=value.dtype)
        if isinstance(value, torch.Tensor)
        else (blank(value) if isinstance(value, dict) else None)
        for key, value in state.items()
    }


def save(folder: Path, state: Any, name: str = "model.pt") -> str:
    torch.save(state, folder / name)
    return str(folder / name)


def load(group: RankGroup, url: str, state: dict[str, Any], **more: Any) -> dcpstore.LoadResult:
    """Load with the group's coordinator as the reading rank."""
    planner = more.pop("planner", None)
    reader = BroadcastingTorchSaveReader(url, group.coordinator, **{"config": SMALL, **more})
    return dcpstore.load(state, storage_reader=reader, planner=planner, process_group=group)


def assert_same(got: dict[str, Any], wanted: dict[str, Any]) -> None:
    for key, value in wanted.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(
                got[key].view(torch.uint8) if got[key].dim() else got[key],
                value.contiguous().resolve_conj().resolve_neg().view(torch.uint8)
                if value.dim()
                else value,
            ), key
        else:
            assert got[key] == value, key


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("size", [1, 3])
def test_tensors_load_whatever_way_their_elements_lie_in_the_file(
    tmp_path: Path, size: int, direct: bool
) -> None:
    state = views()
    url = save(tmp_path, state)

    def work(group: RankGroup) -> None:
        target = blank(state)
        load(group, url, target, direct=direct)
        assert_same(target, state)

    run_ranks(size, work, coordinator=size - 1).values()


def test_values_of_every_kind_load_on_all_ranks(tmp_path: Path) -> None:
    inside = (1, torch.arange(6.0).view(2, 3).t())
    state = {
        "step": 7,
        "name": "run",
        "none": None,
        "betas": (0.9, 0.99),
        "ordered": OrderedDict(a=1, b=[1, 2, {"c": 3.5}]),
        "counts": Counter("hello"),
        "tuple with a tensor": inside,
        "long": "x" * 10_000,
        "nested": {"list": [torch.ones(3), {"deep": torch.full((2, 2), 4)}]},
    }
    url = save(tmp_path, state)

    def work(group: RankGroup) -> dict[str, Any]:
        target = blank(state)
        target["nested"] = {"list": [torch.zeros(3), {"deep": torch.zeros(2, 2).long()}]}
        target["ordered"] = {"a": 0, "b": [0, 0, {"c": 0.0}]}
        load(group, url, target)
        return target

    for got in run_ranks(3, work).values():
        for key in ("step", "name", "none", "betas", "long"):
            assert got[key] == state[key]
        assert got["ordered"] == {"a": 1, "b": [1, 2, {"c": 3.5}]}
        assert torch.equal(got["tuple with a tensor"][1], inside[1])
        assert torch.equal(got["nested"]["list"][1]["deep"], torch.full((2, 2), 4))


def test_what_a_rank_does_not_want_is_not_sent_to_it(tmp_path: Path) -> None:
    state = {"a": torch.randn(1000), "b": torch.randn(500), "big": "v" * 5000}
    url = save(tmp_path, state)
    targets = [{"a": torch.zeros(1000)}, {"b": torch.zeros(500)}, {}, {"big": ""}]
    results = run_ranks(4, lambda group: load(group, url, targets[group.rank])).values()
    received = [result.rank.received_bytes for result in results]
    assert received[:3] == [0, 2000, 0]
    assert 5000 < received[3] < 8000


@pytest.mark.parametrize("budget_bytes", [2048, 1 << 14, 1 << 20])
def test_no_rank_holds_more_than_the_budget(tmp_path: Path, budget_bytes: int) -> None:
    state = {"big": torch.randn(200, 100), "other": torch.randn(64, 64)}
    url = save(tmp_path, state)
    config = ReadConfig(budget_bytes=budget_bytes, request_bytes=min(budget_bytes, 1 << 16))

    def work(group: RankGroup) -> tuple[int, int]:
        target = blank(state)
        rank = load(group, url, target, config=config).rank
        assert_same(target, state)
        return rank.peak_bytes, rank.num_requests

    header_bytes = 128
    (most, requests), *others = run_ranks(3, work).values()
    assert most <= budget_bytes + header_bytes
    assert max(peak for peak, _ in others) <= budget_bytes // 4
    assert requests >= 80_000 // budget_bytes


def test_dtypes_are_cast_as_the_config_allows(tmp_path: Path) -> None:
    url = save(tmp_path, {"w": torch.arange(5.0)})

    def into(dtype: torch.dtype, casts: str) -> torch.Tensor:
        target = {"w": torch.zeros(5, dtype=dtype)}
        config = ReadConfig(casts=casts)
        dcpstore.load(target, storage_reader=BroadcastingTorchSaveReader(url, config=config))
        return target["w"]

    assert into(torch.float64, "widening").tolist() == [0, 1, 2, 3, 4]
    assert into(torch.float16, "any").tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(IncompatibleError, match="float16"):
        into(torch.float16, "widening")
    with pytest.raises(IncompatibleError, match="allows no cast"):
        into(torch.float64, "exact")


def test_a_load_takes_parts_of_the_file_under_other_names(tmp_path: Path) -> None:
    url = save(tmp_path, {"module": {"a": torch.ones(3), "b": torch.ones(2)}, "step": 4})
    planner = DynamicMetaLoadPlanner(rename={"model.": "module."}, exclude=["step"], strict=False)
    target = {"model": {"a": torch.zeros(3), "new": torch.zeros(1)}, "step": 0}
    result = dcpstore.load(target, storage_reader=BroadcastingTorchSaveReader(url), planner=planner)
    assert target["model"]["a"].tolist() == [1, 1, 1]
    assert target["model"]["new"].tolist() == [0]
    assert target["step"] == 0
    assert result.missing == ("module.new",)
    assert result.unexpected == ("module.b", "step")


class Halving(DynamicMetaLoadPlanner):
    """A user's planner: loads into memory of its own and hands over half of it."""

    def __init__(self) -> None:
        super().__init__()
        self.values: list[str] = []

    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        return torch.empty_like(super().resolve_tensor(read_item))

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        super().resolve_tensor(read_item).copy_(tensor / 2)

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        self.values.append(read_item.dest_index.fqn)
        super().load_bytes(read_item, value)


def test_a_planner_that_users_extended_is_asked_for_everything(tmp_path: Path) -> None:
    url = save(tmp_path, {"w": torch.arange(600.0), "step": 3})

    def work(group: RankGroup) -> list[str]:
        planner, target = Halving(), {"w": torch.zeros(600), "step": 0}
        load(group, url, target, planner=planner)
        assert torch.equal(target["w"], torch.arange(600.0) / 2)
        assert target["step"] == 3
        return planner.values

    assert run_ranks(2, work).values() == [["step"], ["step"]]


class FailsOnRank1(DynamicMetaLoadPlanner):
    """Raises on rank 1, in one of its methods."""

    def __init__(self, method: str, rank: int) -> None:
        super().__init__()
        self.method, self.rank = method, rank

    def _maybe(self, method: str) -> None:
        if self.rank == 1 and method == self.method:
            raise ZeroDivisionError(f"in {method}")

    def create_local_plan(self) -> Any:
        self._maybe("create_local_plan")
        return super().create_local_plan()

    def finish_plan(self, plan: Any) -> Any:
        self._maybe("finish_plan")
        return super().finish_plan(plan)

    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        self._maybe("resolve_tensor")
        return super().resolve_tensor(read_item)

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        self._maybe("commit_tensor")

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        self._maybe("load_bytes")


@pytest.mark.parametrize(
    "method", ["create_local_plan", "finish_plan", "resolve_tensor", "commit_tensor", "load_bytes"]
)
@pytest.mark.parametrize("coordinator", [0, 1])
def test_a_planner_that_fails_on_one_rank_fails_the_load_on_all(
    tmp_path: Path, method: str, coordinator: int
) -> None:
    url = save(tmp_path, {"w": torch.randn(3000), "step": 3})

    def work(group: RankGroup) -> None:
        target = {"w": torch.zeros(3000), "step": 0}
        load(group, url, target, planner=FailsOnRank1(method, group.rank))

    run = run_ranks(3, work, coordinator=coordinator, wait_s=30)
    assert not run.running
    for error in run.errors.values():
        assert isinstance(error, RankFailures)
        assert "ZeroDivisionError" in error.causes[1]
        assert method in error.causes[1]
    assert len(run.errors) == 3


def faulty(*script: StoreFault) -> Any:
    return lambda *args, **kwargs: FaultyStore(open_store(*args, **kwargs), script)


@pytest.mark.parametrize("at", [0, 1, 4, 9])
@pytest.mark.parametrize("direct", [False, True])
def test_a_read_that_the_store_refuses_is_told_to_all_ranks(
    tmp_path: Path, at: int, direct: bool
) -> None:
    state = {"a": torch.randn(2000), "b": torch.randn(2000)}
    url = save(tmp_path, state)
    fault = StoreFault("denied", verb="get_range", at=at, times=None)

    def work(group: RankGroup) -> None:
        opener = faulty(fault) if group.rank == 2 else open_store
        load(group, url, blank(state), store_opener=opener, direct=direct)

    run = run_ranks(3, work, coordinator=2, wait_s=30)
    assert not run.running
    for error in run.errors.values():
        assert isinstance(error, RankFailures)
        assert list(error.causes) == [2]
        assert "StoreError" in error.causes[2]
    assert len(run.errors) == 3
    assert not [t.name for t in threading.enumerate() if t.name.startswith("dcpstore-")]


def test_a_file_that_is_replaced_during_the_load_fails_it(tmp_path: Path) -> None:
    url = save(tmp_path, {"w": torch.zeros(4000)})
    other = save(tmp_path, {"w": torch.ones(4000)}, "other.pt")

    class Replaces(DynamicMetaLoadPlanner):
        def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
            Path(other).replace(url)

    def work(group: RankGroup) -> None:
        planner = Replaces() if group.rank == 0 else DynamicMetaLoadPlanner()
        load(group, url, {"w": torch.full((4000,), 5.0)}, planner=planner)

    run = run_ranks(2, work)
    for error in run.errors.values():
        assert isinstance(error, RankFailures)
        assert isinstance(error.exceptions[0], ConflictError)
    assert len(run.errors) == 2


def repack(source: str, target: Path, *, gap_bytes: int, method: int = zipfile.ZIP_STORED) -> str:
    """Write the members again as another tool might: other places, bytes between them."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", method) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
            assert new.fp is not None
            new.fp.write(b"\xff" * gap_bytes)
            new.start_dir = new.fp.tell()
    return str(target)


@pytest.mark.parametrize("gap_bytes", [0, 40, 100_000])
def test_files_that_another_tool_packed_load_too(tmp_path: Path, gap_bytes: int) -> None:
    state = views()
    url = repack(save(tmp_path, state), tmp_path / "again.pt", gap_bytes=gap_bytes)

    def work(group: RankGroup) -> None:
        target = blank(state)
        load(group, url, target)
        assert_same(target, state)

    run_ranks(2, work).values()


def test_a_directory_that_lies_about_a_storage_is_found_out(tmp_path: Path) -> None:
    url = save(tmp_path, {"w": torch.randn(1000)})
    data = bytearray(Path(url).read_bytes())
    at = data.find(b"/data/0")
    data[at + 1 : at + 5] = b"DATA"  # in its own header, not in the directory
    Path(url).write_bytes(data)
    with pytest.raises(CorruptError, match="damaged"):
        dcpstore.load({"w": torch.zeros(1000)}, storage_reader=BroadcastingTorchSaveReader(url))


def test_code_in_a_file_runs_only_if_the_config_allows_it(tmp_path: Path) -> None:
    state = {"w": torch.ones(2), "path": Path("a")}
    url = save(tmp_path, state)
    with pytest.raises(CorruptError, match="not run"):
        dcpstore.load({"w": torch.zeros(2)}, storage_reader=BroadcastingTorchSaveReader(url))
    target: dict[str, Any] = {"w": torch.zeros(2), "path": None}
    reader = BroadcastingTorchSaveReader(url, config=ReadConfig(allow_pickle=True))
    planner = DynamicMetaLoadPlanner(allow_pickle=True)
    dcpstore.load(target, storage_reader=reader, planner=planner)
    assert target["path"] == Path("a")
    assert target["w"].tolist() == [1, 1]


def plain_load(state: dict[str, Any], reader: Any, **more: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, storage_reader=reader, **more)


def test_a_process_alone_loads_without_a_process_group(tmp_path: Path) -> None:
    state = {"model": {"w": torch.randn(9, 4)}, "step": 3}
    url = save(tmp_path, state)
    for planner in (DynamicMetaLoadPlanner(), dcpstore.LoadPlanner(), None):
        target = {"model": {"w": torch.zeros(9, 4)}, "step": 0}
        plain_load(target, BroadcastingTorchSaveReader(url), planner=planner)
        assert torch.equal(target["model"]["w"], state["model"]["w"])
        assert target["step"] == 3
    target = {"model": {"w": torch.zeros(9, 4)}}
    plain_load(
        target, BroadcastingTorchSaveReader(url), planner=format_utils.DynamicMetaLoadPlanner()
    )
    assert torch.equal(target["model"]["w"], state["model"]["w"])


def test_torchs_own_tools_read_the_file_through_the_reader(tmp_path: Path) -> None:
    """What needs the map from flattened keys to the nested state dict finds it."""
    state = {"model": {"w": torch.randn(9, 4)}, "list": [{"lr": 0.5}], "step": 3}
    url = save(tmp_path, state)
    target: dict[str, Any] = {}
    reader = BroadcastingTorchSaveReader(url)
    _load_state_dict(target, reader, no_dist=True, planner=_EmptyStateDictLoadPlanner())
    assert torch.equal(target["model"]["w"], state["model"]["w"])
    assert target["list"] == [{"lr": 0.5}]


def test_one_reader_serves_many_loads_also_after_one_that_failed(tmp_path: Path) -> None:
    first = save(tmp_path, {"w": torch.ones(3)})
    second = save(tmp_path, {"w": torch.full((3,), 2.0)}, "second.pt")
    reader = BroadcastingTorchSaveReader()
    with pytest.raises(ConfigError, match="no file was named"):
        dcpstore.load({"w": torch.zeros(3)}, storage_reader=reader)
    for url, value in ((first, 1.0), (second, 2.0), (first, 1.0)):
        with pytest.raises(IncompatibleError):
            dcpstore.load({"w": torch.zeros(4)}, url, storage_reader=reader)
        with pytest.raises(NotFoundError):
            dcpstore.load({"w": torch.zeros(3)}, f"{url}x", storage_reader=reader)
        target = {"w": torch.zeros(3)}
        dcpstore.load(target, url, storage_reader=reader)
        assert target["w"].tolist() == [value] * 3
        assert reader.checkpoint_id == url


def test_progress_counts_what_each_rank_is_given(tmp_path: Path) -> None:
    url = save(tmp_path, {"a": torch.randn(3000), "b": torch.randn(20)})

    def work(group: RankGroup) -> list[Any]:
        told: list[Any] = []
        target = {"a": torch.zeros(3000)} if group.rank else {"b": torch.zeros(20)}
        reader = BroadcastingTorchSaveReader(url, config=SMALL)
        dcpstore.load(target, storage_reader=reader, process_group=group, progress=told.append)
        return told

    for told, num_bytes in zip(run_ranks(2, work).values(), (80, 12_000), strict=True):
        assert told[-1].done_bytes == told[-1].total_bytes == num_bytes
        assert [one.done_bytes for one in told] == sorted(one.done_bytes for one in told)


def test_wrong_calls_are_told_so(tmp_path: Path) -> None:
    url = save(tmp_path, {"w": torch.ones(3)})
    reader = BroadcastingTorchSaveReader(url)
    with pytest.raises(ConfigError, match="read_metadata comes before"):
        reader.read_data(None, None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="names no file"):
        BroadcastingTorchSaveReader("s3://bucket")
    assert not BroadcastingTorchSaveReader.validate_checkpoint_id("s3://bucket")
    assert BroadcastingTorchSaveReader.validate_checkpoint_id("s3://bucket/model.pt")
    with pytest.raises(ConfigError, match="pass one of the two"):
        DynamicMetaLoadPlanner(allow_partial_load=True, strict={"a": True})

    def work(group: RankGroup) -> None:
        dcpstore.load({}, storage_reader=BroadcastingTorchSaveReader(url, 1), process_group=group)

    errors = run_ranks(2, work, coordinator=0).errors
    assert all(isinstance(error, ConfigError) for error in errors.values())
    assert len(errors) == 2


def test_whoever_takes_a_file_for_a_checkpoint_is_told_how_to_load_it() -> None:
    stream = io.BytesIO()
    torch.save({"w": torch.ones(2)}, stream)
    open_store("memory://taken-for-a-folder").put("model.pt", stream.getvalue())
    url, target = "memory://taken-for-a-folder/model.pt", {"w": torch.zeros(2)}
    with pytest.raises(NotFoundError, match="BroadcastingTorchSaveReader"):
        dcpstore.load(target, url)
    dcpstore.load(target, url, storage_reader=BroadcastingTorchSaveReader())
    assert target["w"].tolist() == [1, 1]


def test_a_folder_of_dcp_is_told_from_a_file(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"w": torch.ones(2)}, storage_writer=FileSystemWriter(tmp_path / "dcp"))
    with pytest.raises(IncompatibleError, match="folder"):
        dcpstore.load({}, storage_reader=BroadcastingTorchSaveReader(tmp_path / "dcp"))


def test_the_planner_makes_metadata_up_only_where_the_reader_has_none(tmp_path: Path) -> None:
    metadata = BroadcastingTorchSaveReader(save(tmp_path, {"w": torch.ones(5)})).read_metadata()
    planner = DynamicMetaLoadPlanner()
    planner.set_up_planner({"w": torch.zeros(4)}, metadata)
    with pytest.raises(IncompatibleError, match=r"\(5,\)"):
        planner.create_local_plan()
    for nothing in (None, format_utils.BroadcastingTorchSaveReader("x").read_metadata()):
        planner.set_up_planner({"a": {"w": torch.zeros(4)}, "v": 1}, nothing)
        kinds = [item.type.name for item in planner.create_local_plan().items]
        assert kinds == ["TENSOR", "BYTE_IO"]
        planner.set_up_planner({"w": torch.zeros(4)}, nothing)
        assert planner.metadata is not None
        assert planner.metadata.state_dict_metadata["w"].size == (4,)


def test_keys_are_not_flattened_if_told_so(tmp_path: Path) -> None:
    url = save(tmp_path, {"a.b": torch.ones(2), "c": {"d": torch.ones(3)}})
    planner = DynamicMetaLoadPlanner(flatten_state_dict=False)
    target: dict[str, Any] = {"a.b": torch.zeros(2)}
    dcpstore.load(target, storage_reader=BroadcastingTorchSaveReader(url), planner=planner)
    assert target["a.b"].tolist() == [1, 1]
    with pytest.raises(IncompatibleError, match="'c'"):
        dcpstore.load(
            {"c": {"d": torch.zeros(3)}},
            storage_reader=BroadcastingTorchSaveReader(url),
            planner=DynamicMetaLoadPlanner(flatten_state_dict=False),
        )


def test_the_planner_loads_stock_checkpoints_of_dcp_too(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"m": {"w": torch.ones(4)}}, storage_writer=FileSystemWriter(tmp_path))
    target = {"m": {"w": torch.zeros(4)}}
    plain_load(target, FileSystemReader(tmp_path), planner=DynamicMetaLoadPlanner())
    assert target["m"]["w"].tolist() == [1, 1, 1, 1]
