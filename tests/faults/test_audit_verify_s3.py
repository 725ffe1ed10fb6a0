"""`verify` and `diff` on S3, by each engine: refusals, damage, and the answers of a bad day."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

from dcpstore import NotFoundError, ReadConfig, StoreError
from dcpstore.audit.diff import compare_checkpoints
from dcpstore.audit.verify import Verification, verify_checkpoint
from dcpstore.cli.main import main
from dcpstore.testing import Fault
from faults.places import Place
from faults.states import save, state_at

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*fsync:UserWarning"),
]


def verify(place: Place, attempts: int = 1, **config: Any) -> Verification:
    return verify_checkpoint(
        place.url,
        storage_options=place.server.storage_options(),
        config=ReadConfig(engine=place.engine, max_attempts=attempts, **config),
    )


def filled(place: Place) -> Place:
    save(state_at(1), place.writer())
    place.server.clear_requests()
    return place


def largest(place: Place) -> str:
    return max(place.data_keys(), key=lambda key: len(place.get(key)))


def test_a_checkpoint_in_a_bucket_is_read_once(any_place: Place):
    found = verify(filled(any_place))
    counts = any_place.server.counts()
    assert found.is_sound, str(found)
    assert not [note for note in found.notes if "ETag" in note]
    stored = sum(len(any_place.get(key)) for key in any_place.data_keys())
    assert found.fetched_bytes == found.checked_bytes == stored
    assert counts["ListObjects"] == 1
    assert not {"PutObject", "DeleteObjects", "HeadObject"} & set(counts)


def test_flipped_truncated_and_missing_objects_are_found_together(any_place: Place):
    filled(any_place)
    flipped, cut, gone = sorted(any_place.data_keys())[:3]
    any_place.client.flip_bit(f"{any_place.name}/{flipped}", 2000)
    any_place.client.truncate(f"{any_place.name}/{cut}", 1000)
    any_place.client.delete(f"{any_place.name}/{gone}")
    found = verify(any_place)
    kinds = {(one.kind, one.key) for one in found.findings}
    assert kinds == {("checksum", flipped), ("truncated", cut), ("missing", gone)}
    (bad,) = [one for one in found.findings if one.kind == "checksum"]
    assert bad.span is not None
    assert bad.span.start <= 2000 < bad.span.end
    assert any("2 objects with another ETag" in note for note in found.notes)


def test_without_permission_to_list_a_checkpoint_can_be_verified(any_place: Place):
    filled(any_place)
    any_place.server.add_fault(Fault("ListObjects", status=403, code="AccessDenied", times=-1))
    found = verify(any_place)
    assert found.is_sound
    assert "does not let these credentials list" in found.notes[0]


def test_an_object_that_is_refused_is_named(any_place: Place):
    filled(any_place)
    key = largest(any_place)
    fault = Fault("GetObject", key=f"{any_place.name}/{key}", status=403, code="InvalidObjectState")
    fault.times = -1
    any_place.server.add_fault(fault)
    found = verify(any_place)
    assert {(one.kind, one.key) for one in found.findings} == {("unreadable", key)}


def test_throttling_is_ridden_out(place: Place):
    filled(place)
    place.server.add_fault(Fault("GetObject", skip=2, times=4))
    assert verify(place, attempts=8).is_sound


def test_a_server_that_stays_down_is_an_error_and_no_finding(place: Place):
    filled(place)
    place.server.add_fault(Fault("GetObject", skip=2, times=-1))
    with pytest.raises(StoreError, match="503: slow down"):
        verify(place)


def test_an_empty_prefix_of_a_bucket_has_no_checkpoint(any_place: Place):
    with pytest.raises(NotFoundError, match="no checkpoint"):
        verify(any_place)


def test_a_stock_checkpoint_in_a_bucket_is_verified_and_compared(place: Place):
    options = place.server.storage_options()
    stock = f"{place.url}/stock"
    dcp.save(state_at(1), storage_writer=FsspecWriter(stock, **options), no_dist=True)
    save(state_at(1), place.writer(url=f"{place.url}/ours"))
    assert verify_checkpoint(stock, storage_options=options).is_sound
    found = compare_checkpoints(
        stock, f"{place.url}/ours", left_options=options, right_options=options
    )
    assert found.is_equal, str(found)
    metadata = FsspecReader(stock, **options).read_metadata()
    records = metadata.storage_data.items()
    index, record = max(records, key=lambda item: item[1].length)  # a tensor, elements amid
    place.client.flip_bit(
        f"{place.name}/stock/{record.relative_path}", record.offset + record.length // 2
    )
    (finding,) = verify_checkpoint(stock, storage_options=options).findings
    assert (finding.kind, finding.key) == ("checksum", record.relative_path)
    assert finding.fqn == index.fqn


def test_the_command_prints_findings_and_ends_with_a_code(place: Place):
    filled(place)
    texts = [
        f"{name}={value if isinstance(value, str) else json.dumps(value)}"
        for name, value in place.server.storage_options().items()
    ]
    words = [word for text in texts for word in ("--storage-option", text)]

    def run(*arguments: str) -> tuple[int, str]:
        out = io.StringIO()
        return main(
            ["verify", *arguments, *words], stdout=out, stderr=io.StringIO()
        ), out.getvalue()

    code, out = run(place.url)
    assert code == 0
    assert ": sound" in out
    key = largest(place)
    place.client.flip_bit(f"{place.name}/{key}", 3000)
    code, out = run(place.url)
    assert code == 1
    assert "DAMAGED, 1 finding" in out
    assert f"checksum: {key}, bytes [" in out
    code, out = run(place.url, "--json")
    (finding,) = json.loads(out)["findings"]
    assert (code, finding["key"], finding["kind"]) == (1, key, "checksum")
    assert finding["start"] <= 3000 < finding["end"]
    assert run(f"{place.url}/nothing")[0] == 3
