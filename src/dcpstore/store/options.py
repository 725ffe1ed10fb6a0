"""fsspec-style storage options, translated for obstore.

An option is *honoured* (it becomes obstore configuration), *moot* (it tunes file
handles, caches or listings that dcpstore never uses), or not honourable: then
`NotHonoured` names it, and ``engine="auto"`` takes the fsspec engine instead.
S3 credentials come from botocore's chain, as obstore has no such chain itself.
"""

from __future__ import annotations

import importlib.util
import json
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dcpstore.store.base import Location


# obstore asks again, ten times a second if need be, once less than 5 minutes of an
# answer are left: 10 minutes make that one question in 5. botocore renews expiring
# credentials at least 10 minutes ahead, so none is used stale, and files that
# somebody rewrites (~/.aws/credentials) are read again just as often.
_TTL = timedelta(minutes=10)


def _utcnow() -> datetime:
    return datetime.now(timezone.utc)


def has_botocore() -> bool:
    """Whether botocore is installed (it comes with s3fs)."""
    return importlib.util.find_spec("botocore") is not None


def _session(profile: str | None) -> Any:
    from botocore.session import Session

    return Session(profile=profile)


def default_region(profile: str | None = None) -> str | None:
    """Find the region as the AWS tools do: environment first, then the profile."""
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if region or not has_botocore():
        return region or None
    found = _session(profile).get_config_variable("region")
    return str(found) if found else None


class BotocoreCredentials:
    """A callable that obstore asks for credentials: profiles, SSO, environment, IMDS.

    Picklable: a copy in another process opens its own session. Thread-safe. Holds no
    secret of its own and its repr shows none.

    Args:
        profile: Name of the profile; None for the chain's own choice.
        now: Clock, for tests.
        session_factory: Makes a botocore session for a profile, for tests.
    """

    def __init__(
        self,
        profile: str | None = None,
        *,
        now: Callable[[], datetime] = _utcnow,
        session_factory: Callable[[str | None], Any] = _session,
    ) -> None:
        self._profile = profile
        self._now = now
        self._session_factory = session_factory
        self._lock = threading.Lock()
        self._found: Any = None

    def __call__(self) -> dict[str, Any]:
        """Return credentials in obstore's form.

        Raises:
            botocore.exceptions.NoCredentialsError: If the chain finds none.
        """
        with self._lock:
            frozen = self._resolve().get_frozen_credentials()
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": self._now() + _TTL,
        }

    def _resolve(self) -> Any:
        from botocore.credentials import RefreshableCredentials
        from botocore.exceptions import NoCredentialsError

        if not isinstance(self._found, RefreshableCredentials):
            self._found = self._session_factory(self._profile).get_credentials()
        if self._found is None:
            raise NoCredentialsError
        return self._found

    def __repr__(self) -> str:
        return f"{type(self).__name__}(profile={self._profile!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BotocoreCredentials) and other._profile == self._profile

    def __hash__(self) -> int:
        return hash((type(self), self._profile))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._profile,)


# They steer fsspec's instances, listings and file objects; no verb of ours uses those.
_MOOT_FSSPEC = frozenset(
    {"use_listings_cache", "listings_expiry_time", "max_paths", "skip_instance_cache"}
    | {"batch_size", "default_block_size", "default_fill_cache", "default_cache_type"}
    | {"block_size", "cache_type", "fill_cache", "max_concurrency", "fixed_upload_size"}
    | {"cache_regions", "local_expiry_check"}
)
_MOOT_GS = frozenset({"project", "consistency", "cache_timeout", "check_connection"})


class NotHonoured(Exception):
    """obstore cannot do what this option asks for.

    Args:
        option: The option's name, dotted where nested.
        why: What stands in the way.
    """

    def __init__(self, option: str, why: str = "obstore has no such setting") -> None:
        super().__init__(f"storage option {option!r}: {why}")
        self.option = option


@dataclass(slots=True)
class ObstoreSettings:
    """What an obstore store is made from. Its repr shows no value."""

    config: dict[str, Any] = field(default_factory=dict, repr=False)
    client_options: dict[str, Any] = field(default_factory=dict, repr=False)
    credential_provider: Callable[[], dict[str, Any]] | None = None


def translate(location: Location, options: Mapping[str, Any]) -> ObstoreSettings:
    """Translate options for the location's scheme.

    Raises:
        NotHonoured: Naming the first option that obstore cannot honour.
    """
    given = {k: v for k, v in options.items() if v is not None and k not in _MOOT_FSSPEC}
    if location.scheme == "s3":
        return _translate_s3(given)
    if location.scheme == "gs":
        return _translate_gs(given)
    if location.scheme == "az":
        return _translate_az(location, given)
    given.pop("auto_mkdir", None)
    for name in given:
        raise NotHonoured(name)
    return ObstoreSettings()


# S3 ------------------------------------------------------------------------------------

_S3_NAMES = {
    "key": "access_key_id",
    "username": "access_key_id",
    "aws_access_key_id": "access_key_id",
    "secret": "secret_access_key",
    "password": "secret_access_key",
    "aws_secret_access_key": "secret_access_key",
    "token": "session_token",
    "aws_session_token": "session_token",
    "endpoint_url": "endpoint",
    "region_name": "region",
}
_S3_ADDED = {
    "ServerSideEncryption": "server_side_encryption",
    "SSEKMSKeyId": "sse_kms_key_id",
    "BucketKeyEnabled": "sse_bucket_key_enabled",
}


def _translate_s3(given: dict[str, Any]) -> ObstoreSettings:
    # UNSIGNED-PAYLOAD: hashing every body costs 0.9 CPU s/GiB, and our CRC32C covers it.
    settings = ObstoreSettings(config={"unsigned_payload": True})
    for name, value in _nested(given, "client_kwargs"):
        _s3_client_option(settings, name, value)
    for name, value in _nested(given, "config_kwargs"):
        _s3_config_option(settings, name, value)
    for name, value in _nested(given, "s3_additional_kwargs"):
        if name not in _S3_ADDED:
            raise NotHonoured(f"s3_additional_kwargs.{name}")
        settings.config[_S3_ADDED[name]] = value
    profile = given.pop("profile", None)
    for name, value in given.items():
        _s3_option(settings, name, value)
    _s3_endpoint_and_region(settings, profile)
    _s3_credentials(settings, profile)
    return settings


def _s3_option(settings: ObstoreSettings, name: str, value: Any) -> None:
    if name in _S3_NAMES:
        settings.config[_S3_NAMES[name]] = value
    elif name == "anon":
        settings.config["skip_signature"] = bool(value)
    elif name == "requester_pays":
        settings.config["request_payer"] = bool(value)
    elif name == "use_ssl" and (value or "endpoint" in settings.config):
        pass  # the endpoint's own scheme decides
    elif name in ("version_aware", "asynchronous") and not value:
        pass
    else:
        raise NotHonoured(name)


def _s3_client_option(settings: ObstoreSettings, name: str, value: Any) -> None:
    if name in _S3_NAMES:
        settings.config[_S3_NAMES[name]] = value
    elif name == "verify" and value is False:
        settings.client_options["allow_invalid_certificates"] = True
    elif name == "verify" and isinstance(value, str | os.PathLike):
        settings.client_options["root_certificate"] = Path(value).read_bytes()
    elif (name == "verify" and value is True) or (name == "use_ssl" and value):
        pass
    else:
        raise NotHonoured(f"client_kwargs.{name}")


def _s3_config_option(settings: ObstoreSettings, name: str, value: Any) -> None:
    if name == "region_name":
        settings.config["region"] = value
    elif name == "connect_timeout":
        settings.client_options["connect_timeout"] = f"{round(float(value) * 1000)}ms"
    elif name == "read_timeout":
        settings.client_options["read_timeout"] = f"{round(float(value) * 1000)}ms"
    elif name == "signature_version" and value == "s3v4":
        pass
    elif name.endswith(("checksum_calculation", "checksum_validation")):
        if value != "when_required":
            raise NotHonoured(f"config_kwargs.{name}")
    elif name == "s3" and isinstance(value, Mapping):
        for inner, setting in value.items():
            _s3_addressing(settings, inner, setting)
    elif name not in ("max_pool_connections", "tcp_keepalive"):
        raise NotHonoured(f"config_kwargs.{name}")


def _s3_addressing(settings: ObstoreSettings, name: str, value: Any) -> None:
    if name == "addressing_style" and value in ("path", "auto"):
        pass  # path style is obstore's own, and works on AWS too
    elif name == "payload_signing_enabled":
        settings.config["unsigned_payload"] = not value
    else:
        raise NotHonoured(f"config_kwargs.s3.{name}")


def _s3_endpoint_and_region(settings: ObstoreSettings, profile: str | None) -> None:
    config = settings.config
    from_env = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    endpoint = config.get("endpoint") or from_env
    if endpoint:
        config["endpoint"] = endpoint = str(endpoint).rstrip("/")
        if "AWS_ENDPOINT_URL_S3" in os.environ:
            # obstore reads it too, where it is recent, and prefers it to `endpoint`.
            config["aws_endpoint_url_s3"] = endpoint
        if endpoint.startswith("http://"):
            settings.client_options["allow_http"] = True
    config["region"] = config.get("region") or default_region(profile) or "us-east-1"


def _s3_credentials(settings: ObstoreSettings, profile: str | None) -> None:
    config = settings.config
    has_key, has_secret = "access_key_id" in config, "secret_access_key" in config
    if has_key != has_secret:
        raise NotHonoured("key" if has_key else "secret", "give key and secret together")
    if not has_key and not config.get("skip_signature") and has_botocore():
        settings.credential_provider = BotocoreCredentials(profile)
    elif profile is not None and not has_key:
        raise NotHonoured("profile", "profiles need botocore: pip install s3fs")


# Google --------------------------------------------------------------------------------


def _translate_gs(given: dict[str, Any]) -> ObstoreSettings:
    settings = ObstoreSettings()
    for name, value in given.items():
        if name == "token":
            _gs_token(settings, value)
        elif name == "endpoint_url":
            settings.config["base_url"] = endpoint = str(value).rstrip("/")
            settings.client_options["allow_http"] = endpoint.startswith("http://")
        elif name == "bearer_token":
            settings.config["bearer_token"] = value
        elif (
            (name == "access" and value in ("full_control", "read_write"))
            or (name == "requester_pays" and not value)
            or name in _MOOT_GS
        ):
            pass
        else:
            raise NotHonoured(name)
    return settings


def _gs_token(settings: ObstoreSettings, token: Any) -> None:
    if token == "anon":  # noqa: S105 - gcsfs's word for no credentials
        settings.config["skip_signature"] = True
    elif token in ("google_default", "cloud"):
        pass  # obstore's own chain: application default credentials, then the metadata server
    elif isinstance(token, Mapping) and token.get("type") == "service_account":
        settings.config["service_account_key"] = json.dumps(dict(token))
    elif isinstance(token, str | os.PathLike) and Path(token).is_file():
        kind = json.loads(Path(token).read_text(encoding="utf-8")).get("type")
        name = "service_account" if kind == "service_account" else "application_credentials"
        settings.config[name] = os.fspath(token)
    else:
        raise NotHonoured("token", "obstore takes a service account, a key file or 'anon'")


# Azure ---------------------------------------------------------------------------------

_AZ_NAMES = {
    "account_name": "account_name",
    "account_key": "account_key",
    "sas_token": "sas_key",
    "tenant_id": "tenant_id",
    "client_id": "client_id",
    "client_secret": "client_secret",
}
_AZ_CONNECTION = {
    "accountname": "account_name",
    "accountkey": "account_key",
    "sharedaccesssignature": "sas_key",
    "blobendpoint": "endpoint",
}


def _translate_az(location: Location, given: dict[str, Any]) -> ObstoreSettings:
    settings = ObstoreSettings()
    if location.account is not None:
        settings.config["account_name"] = location.account
    for name, value in given.items():
        if name in _AZ_NAMES:
            settings.config[_AZ_NAMES[name]] = value
        elif name == "connection_string":
            _az_connection(settings, str(value))
        elif name == "credential" and isinstance(value, str):
            settings.config["sas_key" if "sig=" in value else "account_key"] = value
        elif name == "anon":
            settings.config["skip_signature"] = bool(value)
        elif name == "endpoint_url":
            settings.config["endpoint"] = str(value).rstrip("/")
        else:
            raise NotHonoured(name)
    sas = settings.config.get("sas_key")
    if isinstance(sas, str):
        settings.config["sas_key"] = sas.lstrip("?")
    endpoint = str(settings.config.get("endpoint", ""))
    if endpoint.startswith("http://"):
        settings.client_options["allow_http"] = True
    return settings


def _az_connection(settings: ObstoreSettings, text: str) -> None:
    for part in filter(None, text.split(";")):
        name, _, value = part.partition("=")
        lowered = name.strip().lower()
        if lowered in _AZ_CONNECTION:
            settings.config[_AZ_CONNECTION[lowered]] = value
        elif lowered == "usedevelopmentstorage":
            settings.config["use_emulator"] = value.lower() == "true"
        elif lowered not in ("defaultendpointsprotocol", "endpointsuffix"):
            raise NotHonoured(f"connection_string.{name}")


def _nested(given: dict[str, Any], name: str) -> list[tuple[str, Any]]:
    inner = given.pop(name, {})
    if not isinstance(inner, Mapping):
        raise NotHonoured(name, f"it is a {type(inner).__name__}, not a dictionary")
    return [(k, v) for k, v in inner.items() if v is not None]
