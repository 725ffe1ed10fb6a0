"""S3 credentials from botocore's chain, for the engine that has no such chain itself."""

from __future__ import annotations

import importlib.util
import os
import threading
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any

__all__ = ["BotocoreCredentials", "default_region", "has_botocore"]

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
