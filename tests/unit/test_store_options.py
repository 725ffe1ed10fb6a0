from __future__ import annotations

import json
import pickle
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from dcpstore.errors import ConfigError, StoreError
from dcpstore.store import RetryPolicy, open_store
from dcpstore.store.folder import parse_location
from dcpstore.store.options import (
    BotocoreCredentials,
    GoogleCredentials,
    NotHonoured,
    translate,
)

KEYS = {"key": "id", "secret": "hush"}


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch, tmp_path):
    names = ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "AWS_PROFILE")
    for name in (*names, "AWS_ENDPOINT_URL_S3", "AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


def s3(**options):
    return translate(parse_location("s3://b/p"), {**KEYS, **options})


def engine_of(url, **options):
    return type(open_store(url, storage_options=options).inner).__name__


@pytest.mark.parametrize(
    ("options", "name", "value"),
    [
        ({}, "access_key_id", "id"),
        ({}, "secret_access_key", "hush"),
        ({}, "unsigned_payload", True),
        ({}, "region", "us-east-1"),
        ({"token": "t"}, "session_token", "t"),
        ({"endpoint_url": "http://h:1/"}, "endpoint", "http://h:1"),
        ({"client_kwargs": {"endpoint_url": "http://h:1"}}, "endpoint", "http://h:1"),
        ({"client_kwargs": {"region_name": "eu-west-1"}}, "region", "eu-west-1"),
        ({"config_kwargs": {"region_name": "eu-west-1"}}, "region", "eu-west-1"),
        ({"requester_pays": True}, "request_payer", True),
        ({"anon": True}, "skip_signature", True),
        (
            {"s3_additional_kwargs": {"ServerSideEncryption": "AES256"}},
            "server_side_encryption",
            "AES256",
        ),
        ({"s3_additional_kwargs": {"SSEKMSKeyId": "k"}}, "sse_kms_key_id", "k"),
        ({"config_kwargs": {"s3": {"payload_signing_enabled": True}}}, "unsigned_payload", False),
    ],
)
def test_s3_options_become_configuration(options, name, value):
    assert s3(**options).config[name] == value


@pytest.mark.parametrize(
    ("options", "name", "value"),
    [
        ({"endpoint_url": "http://h:1"}, "allow_http", True),
        ({"client_kwargs": {"verify": False}}, "allow_invalid_certificates", True),
        ({"config_kwargs": {"connect_timeout": 2.5}}, "connect_timeout", "2500ms"),
        ({"config_kwargs": {"read_timeout": 30}}, "read_timeout", "30000ms"),
    ],
)
def test_s3_options_become_client_options(options, name, value):
    assert s3(**options).client_options[name] == value


def test_certificates_are_read_from_an_option_or_else_from_the_environment(
    authority, tmp_path, monkeypatch
):
    known = Path(authority.file).read_bytes()
    other = tmp_path / "other.pem"
    other.write_bytes(b"# another\n" + known)
    assert s3(client_kwargs={"verify": authority.file}).client_options["root_certificate"] == known
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(other))
    assert s3().client_options["root_certificate"] == other.read_bytes()
    google = translate(parse_location("gs://b"), {"token": "anon"})
    assert google.client_options["root_certificate"] == other.read_bytes()
    monkeypatch.setenv("AWS_CA_BUNDLE", authority.file)
    assert s3().client_options["root_certificate"] == known
    assert s3(client_kwargs={"verify": str(other)}).client_options["root_certificate"] != known
    assert "root_certificate" not in s3(client_kwargs={"verify": False}).client_options


@pytest.mark.parametrize(
    ("content", "said"), [(None, "No such file"), (b"PEM", "no certificate in it")]
)
def test_a_bundle_without_certificates_is_refused(tmp_path, monkeypatch, content, said):
    bundle = tmp_path / "ca.pem"
    if content is not None:
        bundle.write_bytes(content)
    with pytest.raises(ConfigError, match=f"client_kwargs.verify=.*{said}"):
        s3(client_kwargs={"verify": str(bundle)})
    monkeypatch.setenv("AWS_CA_BUNDLE", str(bundle))
    with pytest.raises(ConfigError, match=f"AWS_CA_BUNDLE=.*{said}"):
        s3()


def test_a_folder_of_certificates_is_left_to_the_fsspec_engine(tmp_path):
    assert engine_of("s3://b", **KEYS, client_kwargs={"verify": str(tmp_path)}) == "S3fsStore"


@pytest.mark.parametrize(
    "endpoint",
    [
        *("127.0.0.1:9000", "minio", "minio:9000", "htp://minio", "http//minio", "https://"),
        *("http://[::1", "http://a b", "http://minio:port", "//minio"),
    ],
)
@pytest.mark.parametrize("engine", ["auto", "obstore", "fsspec"])
def test_an_endpoint_that_is_no_url_is_refused_before_anything_else(endpoint, engine, monkeypatch):
    for given in ({"endpoint_url": endpoint}, {"client_kwargs": {"endpoint_url": endpoint}}):
        with pytest.raises(ConfigError, match=r"is not the URL of a server: write 'https?://"):
            open_store("s3://b/c", storage_options={**KEYS, **given}, engine=engine)
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    with pytest.raises(ConfigError, match=r"AWS_ENDPOINT_URL=.* is not the URL of a server"):
        open_store("s3://b/c", storage_options=KEYS, engine=engine)


def test_buckets_may_be_in_the_name_of_the_server():
    virtual = {"config_kwargs": {"s3": {"addressing_style": "virtual"}}}
    assert s3(**virtual).config["virtual_hosted_style_request"] is True
    config = s3(endpoint_url="https://minio.example:9000", **virtual).config
    assert config["endpoint"] == "https://b.minio.example:9000"


def test_the_endpoint_and_region_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://h:1")
    monkeypatch.setenv("AWS_REGION", "eu-north-1")
    settings = s3()
    assert settings.config["endpoint"] == "http://h:1"
    assert settings.config["region"] == "eu-north-1"
    assert settings.client_options["allow_http"] is True


def test_the_region_comes_from_the_profile(tmp_path):
    (tmp_path / "config").write_text("[profile mine]\nregion = eu-south-1\n")
    settings = translate(parse_location("s3://b"), {"profile": "mine"})
    assert settings.config["region"] == "eu-south-1"


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"session": object()}, "session"),
        ({"client_kwargs": {"api_version": "1"}}, "client_kwargs.api_version"),
        ({"config_kwargs": {"retries": {}}}, "config_kwargs.retries"),
        (
            {"config_kwargs": {"s3": {"use_accelerate_endpoint": True}}},
            "config_kwargs.s3.use_accelerate_endpoint",
        ),
        ({"s3_additional_kwargs": {"ACL": "private"}}, "s3_additional_kwargs.ACL"),
        ({"version_aware": True}, "version_aware"),
        ({"use_ssl": False}, "use_ssl"),
        ({"client_kwargs": 3}, "client_kwargs"),
        ({"secret": None}, "key"),
    ],
)
def test_what_obstore_cannot_honour_is_named(options, name):
    with pytest.raises(NotHonoured) as caught:
        s3(**options)
    assert caught.value.option == name
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"default_block_size": 5, "default_fill_cache": False, "default_cache_type": "none"},
        {"use_listings_cache": True, "listings_expiry_time": 3, "skip_instance_cache": True},
        {
            "max_concurrency": 4,
            "config_kwargs": {"max_pool_connections": 9, "signature_version": "s3v4"},
        },
        {"anon": False, "requester_pays": False, "version_aware": False, "use_ssl": True},
        {"endpoint_url": None, "token": None, "client_kwargs": {"verify": None}},
    ],
)
def test_what_only_tunes_file_handles_is_no_hindrance(options):
    assert engine_of("s3://b/p", **KEYS, **options) == "ObstoreStore"


def test_auto_takes_fsspec_where_obstore_cannot_honour_an_option():
    assert engine_of("s3://b", **KEYS, s3_additional_kwargs={"ACL": "private"}) == "S3fsStore"
    assert engine_of("s3://b", **KEYS) == "ObstoreStore"
    assert engine_of("gs://b", token="anon", endpoint_url="http://h:1") == "FsspecStore"
    assert engine_of("gs://b", token="anon") == "ObstoreStore"
    assert engine_of("gs://b", token="anon", requester_pays=True) == "FsspecStore"
    assert engine_of("memory://b") == "FsspecStore"
    assert engine_of("/tmp/b") == "ObstoreStore"
    assert engine_of("/tmp/b", auto_mkdir=True) == "ObstoreStore"


def test_a_json_emulator_in_the_environment_is_for_gcsfs(monkeypatch):
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://h:1")
    assert engine_of("gs://b", token="anon") == "FsspecStore"


@pytest.mark.parametrize("engine", ["auto", "fsspec"])
@pytest.mark.parametrize(
    ("url", "option", "near"),
    [
        ("s3://b", "endpoint", "endpoint_url"),
        ("s3://b", "secrets", "secret"),
        ("gs://b", "tokens", "token"),
        ("/tmp/b", "auto_mkdirs", "auto_mkdir"),
        ("memory://b", "frobnicate", None),
    ],
)
def test_an_option_that_nobody_knows_is_refused_by_name(engine, url, option, near):
    with pytest.raises(ConfigError, match=repr(option)) as caught:
        open_store(url, storage_options={option: "hush"}, engine=engine)
    assert near is None or repr(near) in str(caught.value)
    assert "hush" not in str(caught.value)


def test_obstore_alone_refuses_what_it_cannot_honour():
    with pytest.raises(ConfigError, match=r"ACL.*engine='obstore'"):
        open_store(
            "s3://b",
            storage_options={**KEYS, "s3_additional_kwargs": {"ACL": "x"}},
            engine="obstore",
        )
    with pytest.raises(ConfigError, match="sftp"):
        open_store("sftp://h/p", engine="obstore")


def test_an_engine_that_does_not_exist_is_refused():
    with pytest.raises(ConfigError, match="'auto', 'obstore' or 'fsspec'"):
        open_store("/tmp/a", engine="boto3")  # type: ignore[arg-type]


@pytest.mark.parametrize("engine", ["obstore", "fsspec"])
def test_no_secret_shows(engine):
    store = open_store("s3://b/p", storage_options={**KEYS, "token": "hush"}, engine=engine)
    settings = translate(parse_location("s3://b"), KEYS)
    assert "hush" not in f"{store!r} {store} {store.url} {settings!r}"
    copy = pickle.loads(pickle.dumps(store))
    assert repr(copy) == repr(store)


# Google and Azure


@pytest.mark.parametrize(
    ("options", "config"),
    [
        ({"token": "anon"}, {"skip_signature": True}),
        ({"token": "google_default", "project": "p", "access": "full_control"}, {}),
        (
            {"endpoint_url": "http://h:1/", "bearer_token": "b"},
            {"base_url": "http://h:1", "bearer_token": "b"},
        ),
        (
            {"token": {"type": "service_account", "k": 1}},
            {"service_account_key": json.dumps({"type": "service_account", "k": 1})},
        ),
    ],
)
def test_google_options_become_configuration(options, config):
    assert translate(parse_location("gs://b"), options).config == config


def test_a_google_key_file_is_told_by_its_type(tmp_path):
    path = tmp_path / "key.json"
    path.write_text(json.dumps({"type": "service_account"}))
    settings = translate(parse_location("gs://b"), {"token": str(path)})
    assert (settings.config, settings.credential_provider) == ({"service_account": str(path)}, None)
    path.write_text(json.dumps({"type": "authorized_user"}))
    settings = translate(parse_location("gs://b"), {"token": str(path)})
    assert settings.config == {}
    assert isinstance(settings.credential_provider, GoogleCredentials)


class Issued:
    """Credentials as google-auth has them."""

    def __init__(self) -> None:
        self.token, self.expiry, self.valid, self.num_refreshed = None, None, False, 0

    def refresh(self, request):
        self.num_refreshed += 1
        self.token, self.valid = f"t{self.num_refreshed}", True
        self.expiry = datetime(2026, 11, 22, 12)


def test_googles_tokens_are_fetched_when_they_are_needed_and_renewed(monkeypatch):
    issued = Issued()
    monkeypatch.setattr("google.auth.default", lambda scopes: (issued, "project"))
    provide = translate(parse_location("gs://b"), {}).credential_provider
    assert issued.num_refreshed == 0
    assert provide() == provide()
    assert provide()["token"] == "t1"
    assert provide()["expires_at"] == datetime(2026, 11, 22, 12, tzinfo=timezone.utc)
    issued.valid = False
    assert provide()["token"] == "t2"


@pytest.mark.parametrize(
    "options", [{"token": "browser"}, {"requester_pays": True}, {"access": "read_only"}]
)
def test_google_options_that_need_gcsfs(options):
    with pytest.raises(NotHonoured):
        translate(parse_location("gs://b"), options)


@pytest.mark.parametrize(
    ("options", "config"),
    [
        ({"account_name": "a", "account_key": "k"}, {"account_name": "a", "account_key": "k"}),
        (
            {"account_name": "a", "sas_token": "?sv=1&sig=x"},
            {"account_name": "a", "sas_key": "sv=1&sig=x"},
        ),
        ({"account_name": "a", "credential": "k"}, {"account_name": "a", "account_key": "k"}),
        (
            {
                "connection_string": "DefaultEndpointsProtocol=http;AccountName=a;AccountKey=k==;BlobEndpoint=http://h:1/a"
            },
            {"account_name": "a", "account_key": "k==", "endpoint": "http://h:1/a"},
        ),
        ({"connection_string": "UseDevelopmentStorage=true"}, {"use_emulator": True}),
        ({"account_name": "a", "anon": True}, {"account_name": "a", "skip_signature": True}),
    ],
)
def test_azure_options_become_configuration(options, config):
    assert translate(parse_location("az://c/p"), options).config == config


def test_an_azure_account_may_stand_in_the_url():
    location = parse_location("abfs://c@acc.dfs.core.windows.net/p")
    assert translate(location, {"account_key": "k"}).config["account_name"] == "acc"


def test_azure_objects_need_adlfs():
    with pytest.raises(NotHonoured, match="credential"):
        translate(parse_location("az://c"), {"account_name": "a", "credential": object()})


# Credentials


def test_a_profile_signs_requests(s3_server, tmp_path):
    (tmp_path / "credentials").write_text(
        "[mine]\naws_access_key_id=FROMFILE\naws_secret_access_key=hush\n"
    )
    s3_server.create_bucket("profiled")
    options = {"profile": "mine", "endpoint_url": s3_server.endpoint_url}
    store = open_store("s3://profiled/run", storage_options=options)
    store.put("a", b"1")
    assert bytes(store.get("a").data) == b"1"
    copy = pickle.loads(pickle.dumps(store))
    assert bytes(copy.get("a").data) == b"1"


@pytest.mark.parametrize("engine", ["obstore", "fsspec"])
def test_absent_credentials_are_denied_with_advice(engine, s3_server, monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    options = {"endpoint_url": s3_server.endpoint_url}
    store = open_store(
        "s3://b/run", storage_options=options, engine=engine, retry=RetryPolicy(max_attempts=1)
    )
    with pytest.raises(StoreError, match=r"no credentials.*profile") as caught:
        store.get("a")
    assert caught.value.denied


def test_files_are_read_again_and_answers_expire():
    from botocore.credentials import Credentials

    now = datetime(2026, 1, 1, tzinfo=timezone.utc)
    made = []

    class Session:
        def __init__(self, profile):
            made.append(profile)

        def get_credentials(self):
            return Credentials(f"id{len(made)}", "hush", "t")

    ask = BotocoreCredentials("mine", now=lambda: now, session_factory=Session)
    first, second = ask(), ask()
    assert (first["access_key_id"], second["access_key_id"]) == ("id1", "id2")
    assert first["token"] == "t"
    assert first["expires_at"] == now + timedelta(minutes=10)
    assert made == ["mine", "mine"]
    assert "hush" not in repr(ask)


def test_credentials_that_renew_themselves_keep_their_session():
    from botocore.credentials import RefreshableCredentials

    made = []

    class Session:
        def __init__(self, profile):
            made.append(profile)

        def get_credentials(self):
            later = datetime.now(timezone.utc) + timedelta(hours=1)
            return RefreshableCredentials("id", "hush", "t", later, dict, "test")

    ask = BotocoreCredentials(session_factory=Session)
    assert ask()["access_key_id"] == ask()["access_key_id"] == "id"
    assert made == [None]


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("az://c/p", {"account_name": "a", "account_key": "aGVsbG8="}),
        ("az://c/p", {"connection_string": "UseDevelopmentStorage=true"}),
        ("gs://b/p", {"token": "anon"}),
        ("s3://b/p", {**KEYS, "requester_pays": True, "client_kwargs": {"verify": False}}),
        ("s3://b/p", {"anon": True, "config_kwargs": {"read_timeout": 3, "connect_timeout": 1}}),
    ],
)
def test_obstore_accepts_what_is_translated(url, options):
    store = open_store(url, storage_options=options, engine="obstore").inner
    for purpose in ("read", "put", "parts"):
        assert store._clients.get(purpose, 20.0) is not None


def test_a_configuration_that_obstore_refuses_is_ours_and_without_secrets():
    store = open_store("az://c/p", storage_options={"account_name": "a", "account_key": "hush!"})
    with pytest.raises(ConfigError) as caught:
        store.get("a")
    assert "az://c/p" in caught.value.message
    assert "hush" not in caught.value.message
