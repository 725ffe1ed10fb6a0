"""The checks of open uploads that `dcpstore.testing.conformance` ships, over every engine."""

from __future__ import annotations

import os
import xml.etree.ElementTree as ET
from datetime import datetime, timedelta, timezone

import pytest

from dcpstore.errors import ConfigError, NotFoundError, StoreError
from dcpstore.store import RetryPolicy
from dcpstore.store.folder import parse_location
from dcpstore.store.uploads import S3Uploads, open_uploads_at
from dcpstore.testing import Fault, MotoServer, conformance

from .conftest import ONCE

ENGINES = ("obstore-s3", "s3fs", "obstore-local", "fsspec-local")


def options_for(engine: str, server: MotoServer) -> dict:
    return {} if engine.endswith("local") else server.storage_options()


def uploads_query(client, key: str) -> str:
    """The query that sends the first part of the newest upload of a key."""
    tree = ET.fromstring(client.request("GET", query="uploads"))
    (upload,) = [one for one in tree.iterfind(".//{*}Upload") if one.findtext("{*}Key") == key]
    return f"partNumber=1&uploadId={upload.findtext('{*}UploadId')}"


@pytest.mark.parametrize("check", conformance.UPLOAD_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("engine", ENGINES)
def test_open_uploads_of(engine, check, open_engine, moto_server):
    store = open_engine(engine, retry=ONCE)
    options = options_for(engine, moto_server)
    uploads = open_uploads_at(store.url, storage_options=options, retry=ONCE)
    assert uploads is not None
    check(store, uploads)
    uploads.close()


@pytest.mark.parametrize("url", ["gs://bucket/run", "az://bucket/run", "memory://run"])
def test_a_store_without_such_a_list_says_so(url):
    assert open_uploads_at(url) is None


def test_uploads_to_s3_are_listed_below_the_root_only(moto_server, bucket):
    client = moto_server.client(bucket)
    for number in range(5):
        client.request("POST", f"paged/run/{number}", "uploads")
    client.request("POST", "paged/run2", "uploads")
    uploads = open_uploads_at(
        f"s3://{bucket}/paged/run", storage_options=moto_server.storage_options()
    )
    client.request("PUT", "paged/run/0", uploads_query(client, "paged/run/0"), b"x" * 123)
    found = {one.key: one for one in uploads.list()}
    assert sorted(found) == list("01234")
    assert (found["0"].size_bytes, found["1"].size_bytes) == (123, 0)
    assert found["0"].modified > found["1"].modified
    for one in uploads.list():
        uploads.abort(one)
    assert client.open_uploads() == ["paged/run2"]
    uploads.close()


def test_a_long_list_is_followed_page_by_page():
    asked = []
    times = [datetime(2026, 1, day, tzinfo=timezone.utc) for day in (1, 3, 2)]

    def parts(more):
        if more["UploadId"] == "1":
            raise StoreError("refused", denied=True)
        if "PartNumberMarker" in more:
            return {"Parts": [{"Size": 5, "LastModified": times[2]}]}
        more = {"IsTruncated": True, "NextPartNumberMarker": 1}
        return {"Parts": [{"Size": 10, "LastModified": times[1]}], **more}

    class Paged:
        url = "s3://bucket/run"

        def send(self, _asked, operation, **more):
            if operation == "list_parts":
                return parts(more)
            asked.append((operation, more))
            if "KeyMarker" in more:
                return {"Uploads": [{"Key": "run/b", "UploadId": "2"}], "IsTruncated": False}
            return {
                "Uploads": [{"Key": "run/a", "UploadId": "1", "Initiated": times[0]}],
                "IsTruncated": True,
                "NextKeyMarker": "run/a",
                "NextUploadIdMarker": "1",
            }

    uploads = S3Uploads(Paged(), parse_location("s3://bucket/run"), ONCE)
    refused, told = uploads.list()
    assert (refused.key, refused.modified, refused.size_bytes) == ("a", times[0], None)
    assert (told.key, told.modified, told.size_bytes) == ("b", times[1], 15)
    assert [more["Prefix"] for _, more in asked] == ["run/", "run/"]
    assert (asked[1][1]["KeyMarker"], asked[1][1]["UploadIdMarker"]) == ("run/a", "1")


def test_a_refusal_to_list_uploads_is_an_error(s3_server, bucket):
    s3_server.add_fault(Fault("*", status=403, code="AccessDenied", times=-1))
    uploads = open_uploads_at(
        f"s3://{bucket}/refused", storage_options=s3_server.storage_options(), retry=ONCE
    )
    with pytest.raises(StoreError, match="access is denied"):
        list(uploads.list())


def test_a_bucket_that_is_not_there_is_not_found(moto_server):
    uploads = open_uploads_at(
        "s3://no-such-bucket/x",
        storage_options=moto_server.storage_options(),
        retry=RetryPolicy(max_attempts=1),
    )
    with pytest.raises(NotFoundError):
        list(uploads.list())


def test_an_unknown_option_is_refused(moto_server):
    with pytest.raises(ConfigError, match="nonsense"):
        open_uploads_at("s3://bucket/x", storage_options={"nonsense": 1})


def test_local_files_of_other_names_are_no_uploads(tmp_path):
    for name in ("object", "a#b", "#1"):
        (tmp_path / name).write_bytes(b"1")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "object#3").write_bytes(b"1")
    os.utime(tmp_path / "sub" / "object#3", (1000, 1000))
    uploads = open_uploads_at(tmp_path)
    (only,) = uploads.list()
    assert (only.key, only.upload_id) == ("sub/object", "sub/object#3")
    assert only.modified == datetime.fromtimestamp(0, timezone.utc) + timedelta(seconds=1000)
    uploads.abort(only)
    assert not list(uploads.list())
