from __future__ import annotations

from pathlib import Path

import pytest

from dcpstore.errors import ConfigError
from dcpstore.store.folder import parse_location
from dcpstore.text import redact


@pytest.mark.parametrize(
    ("url", "scheme", "bucket", "prefix", "shown"),
    [
        ("s3://bucket", "s3", "bucket", "", "s3://bucket"),
        ("s3://bucket/", "s3", "bucket", "", "s3://bucket"),
        ("s3a://bucket/a/b/", "s3", "bucket", "a/b", "s3://bucket/a/b"),
        ("S3://bucket/a", "s3", "bucket", "a", "s3://bucket/a"),
        ("gs://bucket/a", "gs", "bucket", "a", "gs://bucket/a"),
        ("gcs://bucket/a", "gs", "bucket", "a", "gs://bucket/a"),
        ("az://box/a", "az", "box", "a", "az://box/a"),
        ("abfss://box@acc.dfs.core.windows.net/a", "az", "box", "a", "az://box/a"),
        ("memory://x/y", "memory", "", "x/y", "memory://x/y"),
        ("memory://", "memory", "", "", "memory://"),
        ("file:///tmp/a b", "file", "", "/tmp/a b", "file:///tmp/a b"),
        ("/tmp/a/../b", "file", "", "/tmp/b", "file:///tmp/b"),
        (Path("/tmp/a"), "file", "", "/tmp/a", "file:///tmp/a"),
        ("sftp://host/path", "sftp", "", "host/path", "sftp://host/path"),
        ("s3://b/with space/%41#x?y=1", "s3", "b", "with space/%41#x?y=1", None),
    ],
)
def test_urls_are_taken_apart(url, scheme, bucket, prefix, shown):
    location = parse_location(url)
    assert (location.scheme, location.bucket, location.prefix) == (scheme, bucket, prefix)
    assert shown is None or location.url == shown


def test_an_azure_url_may_name_the_account():
    assert parse_location("abfs://box@acc.dfs.core.windows.net/a").account == "acc"


def test_a_relative_path_is_made_absolute(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert parse_location("runs/one").prefix == str(tmp_path / "runs/one")
    assert parse_location("file://runs/one").prefix == str(tmp_path / "runs/one")


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("s3:/bucket/a", "write s3://bucket/a"),
        (Path("s3://bucket/a"), "write s3://bucket/a"),
        ("gs:bucket", "write gs://bucket"),
        ("s3://", "names no bucket"),
        ("s3:///a", "names no bucket"),
        ("nosuch://a", "nothing serves nosuch://"),
        ("simplecache::s3://b/a", "chained"),
        ("s3://id:hush@bucket/a", "storage_options"),
        ("s3://host:9000/bucket", "port"),
        ("", "empty"),
    ],
)
def test_a_wrong_url_is_refused_with_what_to_write(url, says):
    with pytest.raises(ConfigError, match=says) as caught:
        parse_location(url)
    assert "hush" not in str(caught.value)


def test_bytes_are_no_url():
    with pytest.raises(ConfigError, match="text"):
        parse_location(b"/tmp")  # type: ignore[arg-type]


def test_a_text_is_cleared_of_credentials_and_queries():
    text = "GET https://u:hush@host/b?X-Amz-Signature=hush&a=1 failed (see http://h/p?sig=hush)"
    cleared = redact(text)
    assert "hush" not in cleared
    assert "host/b" in cleared
    assert cleared.endswith(")")
