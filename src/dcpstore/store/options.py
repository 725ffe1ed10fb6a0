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
import ssl
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from dcpstore.errors import ConfigError
from dcpstore.text import redact

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

    Thread-safe. Holds no secret of its own.

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


class GoogleCredentials:
    """A callable that obstore asks for tokens: application default credentials. Thread-safe.

    Args:
        file: Of credentials; None to look where Google's tools look.
    """

    def __init__(self, file: str | None = None) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._found: Any = None

    def __call__(self) -> dict[str, Any]:
        """Return a token in obstore's form.

        Raises:
            google.auth.exceptions.GoogleAuthError: If there are no credentials, or they are
                refused.
        """
        import google.auth
        from google.auth.transport.requests import Request

        with self._lock:
            if self._found is None and self._file is not None:
                load: Any = google.auth.load_credentials_from_file
                self._found, _ = load(self._file, [_GOOGLE_SCOPE])
            elif self._found is None:
                self._found, _ = google.auth.default([_GOOGLE_SCOPE])
            if not self._found.valid:  # or so soon that obstore would ask again
                self._found.refresh(Request())
            expires = self._found.expiry
            at = None if expires is None else expires.replace(tzinfo=timezone.utc)
            return {"token": self._found.token, "expires_at": at}


_GOOGLE_SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"


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
        settings = _translate_s3(location, given)
    elif location.scheme == "gs":
        settings = _translate_gs(given)
    elif location.scheme == "az":
        settings = _translate_az(location, given)
    else:
        given.pop("auto_mkdir", None)
        for name in given:
            raise NotHonoured(name)
        return ObstoreSettings()
    _add_trust(settings, _BUNDLES if location.scheme == "s3" else _BUNDLES[1:])
    return settings


def check_connection(location: Location, options: Mapping[str, Any]) -> None:
    """Refuse what no engine could connect with, before one tries to.

    Raises:
        ConfigError: If the address of the server is no URL, or there are no certificates where an
            option says.
    """
    inner = options.get("client_kwargs")
    nested = inner if isinstance(inner, Mapping) else {}
    verify = nested.get("verify")
    if isinstance(verify, str | os.PathLike) and not Path(verify).is_dir():
        _certificates(verify, "client_kwargs.verify")
    given = {
        "endpoint_url": options.get("endpoint_url"),
        "client_kwargs.endpoint_url": nested.get("endpoint_url"),
    }
    if location.scheme == "s3":
        for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"):
            given[name] = os.environ.get(name)
    for name, value in given.items():
        if value is None or value == "":
            continue
        text = str(value)
        try:
            url = urlsplit(text)
            is_url = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
        except ValueError:  # brackets that do not match, a port that is no number
            is_url = False
        if is_url and not any(char.isspace() for char in text):
            continue
        rest = text.rpartition("://")[2].strip("/ ")
        like = f"https://{rest}" if rest else "https://minio.example:9000"
        raise ConfigError(
            f"{name}={redact(text)!r} is not the URL of a server: write {redact(like)!r}, or"
            " http:// for one without TLS"
        )


# Whom to trust -------------------------------------------------------------------------

_BUNDLES = ("AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE")  # the first that is set counts, as in botocore


def _add_trust(settings: ObstoreSettings, variables: Sequence[str]) -> None:
    """Trust whom the environment names, as the fsspec engines do, unless an option says it."""
    options = settings.client_options
    if "root_certificate" in options or options.get("allow_invalid_certificates"):
        return
    for name in variables:
        if path := os.environ.get(name):
            options["root_certificate"] = _certificates(path, name)
            return


def _certificates(path: str | os.PathLike[str], name: str) -> bytes:
    """Read the certificates of authorities.

    Raises:
        ConfigError: If there are none.
        NotHonoured: If it is a folder.
    """
    if Path(path).is_dir():
        raise NotHonoured(name, "obstore takes a file of certificates, not a folder of them")
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{name}={os.fspath(path)!r} cannot be read ({error.strerror}): give the path of a"
            " file with the certificates of the authorities to trust, in PEM"
        ) from None
    if b"-----BEGIN CERTIFICATE-----" not in content:
        raise ConfigError(
            f"{name}={os.fspath(path)!r} has no certificate in it: give a file in PEM, with"
            " '-----BEGIN CERTIFICATE-----'"
        )
    return content


def _refuse_self_signed(settings: ObstoreSettings, name: str) -> None:
    """Leave it to the fsspec engine to trust a server's own certificate: obstore does not.

    That is what `openssl req -x509` makes: an authority by its flag, with the server's name.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    certificates = settings.client_options["root_certificate"].decode("ascii", "ignore")
    with suppress(ssl.SSLError):
        context.load_verify_locations(cadata=certificates)
    host = urlsplit(str(settings.config.get("endpoint") or "")).hostname
    for found in context.get_ca_certs():
        named: Any = found.get("subjectAltName", ())
        if found["subject"] == found["issuer"] and host in {said for _, said in named}:
            raise NotHonoured(name, "obstore does not take a server's self-signed certificate")


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
_S3_CONFIG = {
    **_S3_NAMES,
    **{f"client_kwargs.{name}": ours for name, ours in _S3_NAMES.items()},
    "config_kwargs.region_name": "region",
    "s3_additional_kwargs.ServerSideEncryption": "server_side_encryption",
    "s3_additional_kwargs.SSEKMSKeyId": "sse_kms_key_id",
    "s3_additional_kwargs.BucketKeyEnabled": "sse_bucket_key_enabled",
}
_S3_FLAGS = {"anon": "skip_signature", "requester_pays": "request_payer"}
_S3_TIMEOUTS = {
    "config_kwargs.connect_timeout": "connect_timeout",
    "config_kwargs.read_timeout": "read_timeout",
}
_S3_MOOT = frozenset({"config_kwargs.max_pool_connections", "config_kwargs.tcp_keepalive"})
# What obstore does anyway.
_S3_USUAL: dict[str, tuple[object, ...]] = {
    "use_ssl": (True,),
    "version_aware": (False,),
    "asynchronous": (False,),
    "client_kwargs.use_ssl": (True,),
    "client_kwargs.verify": (True,),
    "config_kwargs.signature_version": ("s3v4",),
    "config_kwargs.request_checksum_calculation": ("when_required",),
    "config_kwargs.response_checksum_validation": ("when_required",),
    "config_kwargs.s3.addressing_style": ("path", "auto"),
}
# The later of these come first in what is made of them, and what is not nested comes last.
_S3_NESTED = ("s3_additional_kwargs", "config_kwargs", "config_kwargs.s3", "client_kwargs")


def _translate_s3(location: Location, given: dict[str, Any]) -> ObstoreSettings:
    # UNSIGNED-PAYLOAD: hashing every body costs 0.9 CPU s/GiB, and our CRC32C covers it.
    settings = ObstoreSettings(config={"unsigned_payload": True})
    profile = given.pop("profile", None)
    for nested in _S3_NESTED:
        inner = given.pop(nested, {})
        if not isinstance(inner, Mapping):
            raise NotHonoured(nested, f"it is a {type(inner).__name__}, not a dictionary")
        given = {f"{nested}.{k}": v for k, v in inner.items() if v is not None} | given
    for name, value in given.items():
        _s3_option(settings, name, value)
    _s3_endpoint_and_region(settings, profile, location.bucket)
    _s3_credentials(settings, profile)
    if "root_certificate" in settings.client_options:
        _refuse_self_signed(settings, "client_kwargs.verify")
    return settings


def _s3_option(settings: ObstoreSettings, name: str, value: Any) -> None:
    config, client_options = settings.config, settings.client_options
    if name in _S3_CONFIG:
        config[_S3_CONFIG[name]] = value
    elif name in _S3_FLAGS:
        config[_S3_FLAGS[name]] = bool(value)
    elif name in _S3_TIMEOUTS:
        client_options[_S3_TIMEOUTS[name]] = f"{round(float(value) * 1000)}ms"
    elif name == "config_kwargs.s3.payload_signing_enabled":
        config["unsigned_payload"] = not value
    elif name == "client_kwargs.verify" and value is False:
        client_options["allow_invalid_certificates"] = True
    elif name == "client_kwargs.verify" and isinstance(value, str | os.PathLike):
        client_options["root_certificate"] = _certificates(value, name)
    elif name == "config_kwargs.s3.addressing_style" and value == "virtual":
        config["virtual_hosted_style_request"] = True
    elif name == "use_ssl" and "endpoint" in config:
        pass  # the endpoint's own scheme decides
    elif name not in _S3_MOOT and value not in _S3_USUAL.get(name, ()):
        raise NotHonoured(name)


def _s3_endpoint_and_region(settings: ObstoreSettings, profile: str | None, bucket: str) -> None:
    config = settings.config
    from_env = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    endpoint = config.get("endpoint") or from_env
    if endpoint:
        endpoint = str(endpoint).rstrip("/")
        if config.get("virtual_hosted_style_request"):  # obstore wants the bucket in the name
            endpoint = endpoint.replace("://", f"://{bucket}.", 1)
        config["endpoint"] = endpoint
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
    if not _GS_CREDENTIALS & settings.config.keys() and not _gs_service_account_in_env():
        settings.credential_provider = settings.credential_provider or GoogleCredentials()
    return settings


_GS_CREDENTIALS = frozenset(
    {"skip_signature", "bearer_token", "service_account", "service_account_key"}
)


def _gs_service_account_in_env() -> bool:
    """Whether obstore finds a service account by a variable that only it knows."""
    return any(name.startswith("GOOGLE_SERVICE_ACCOUNT") for name in os.environ)


def _gs_token(settings: ObstoreSettings, token: Any) -> None:
    if token == "anon":  # noqa: S105 - gcsfs's word for no credentials
        settings.config["skip_signature"] = True
    elif token in ("google_default", "cloud"):
        pass  # the chain that is taken anyway
    elif isinstance(token, Mapping) and token.get("type") == "service_account":
        settings.config["service_account_key"] = json.dumps(dict(token))
    elif isinstance(token, str | os.PathLike) and Path(token).is_file():
        if json.loads(Path(token).read_text(encoding="utf-8")).get("type") == "service_account":
            settings.config["service_account"] = os.fspath(token)
        else:
            settings.credential_provider = GoogleCredentials(os.fspath(token))
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
