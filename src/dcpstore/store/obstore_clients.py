"""obstore's store objects: made late, one per retry setting, never across a fork."""

from __future__ import annotations

import os
import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import obstore
from obstore.exceptions import BaseError
from obstore.store import AzureStore, GCSStore, LocalStore, MemoryStore, S3Store

from dcpstore.errors import ConfigError
from dcpstore.store.location import Location, redact
from dcpstore.store.retry import RetryPolicy

if TYPE_CHECKING:
    from dcpstore.store.options import ObstoreSettings

__all__ = ["ObstoreClients"]

Purpose = Literal["read", "put", "parts"]
# obstore's own 30 s for a whole request fails a large body on a slow link. A silent
# connection is told by its read timeout; but that one also runs while a body is being
# sent (measured: a 1 s read timeout breaks off an upload of 4 s that never pauses), so
# puts have a long overall timeout instead.
_TIMEOUTS: dict[Purpose, dict[str, str]] = {
    "read": {"connect_timeout": "10s", "timeout": "15min", "read_timeout": "60s"},
    "put": {"connect_timeout": "10s", "timeout": "5min"},
    "parts": {"connect_timeout": "10s", "timeout": "5min"},
}
# The processes that started obstore's Rust runtime. There is one per process, it does
# not survive a fork, and nothing but this module can know that it was started: the one
# piece of process-global state of the package.
_runtime_pids: set[int] = set()


class ObstoreClients:
    """Opens obstore's stores for one location on first use. Thread-safe.

    Args:
        location: The root.
        settings: Translated options.
        part_policy: For the requests that only obstore itself can repeat.
    """

    def __init__(
        self, location: Location, settings: ObstoreSettings, part_policy: RetryPolicy
    ) -> None:
        self._location = location
        self._settings = settings
        self._part_policy = part_policy
        self._lock = threading.Lock()
        self._open: dict[Purpose, Any] = {}
        self._memory: MemoryStore | None = None

    def get(self, purpose: Purpose = "read") -> Any:
        """Return the store for a purpose; the one for ``"parts"`` repeats its requests.

        Raises:
            ConfigError: In a forked child, before anything touches the Rust runtime.
        """
        self._refuse_after_fork()
        with self._lock:
            if purpose not in self._open:
                _runtime_pids.add(os.getpid())
                self._open[purpose] = self._make(purpose)
            return self._open[purpose]

    def close(self) -> None:
        """Drop the clients; a later `get` opens new ones. Memory is kept."""
        with self._lock:
            self._open.clear()

    def _refuse_after_fork(self) -> None:
        if not _runtime_pids - {os.getpid()}:
            return
        raise ConfigError(
            f"the obstore engine cannot be used in a forked process ({self._location.url}): "
            "its runtime does not survive a fork. Start the process with multiprocessing's "
            "'spawn' or 'forkserver', or open the store with engine='fsspec'"
        )

    def _make(self, purpose: Purpose) -> Any:
        scheme, settings = self._location.scheme, self._settings
        if scheme == "file":
            return LocalStore()
        if scheme == "memory":
            self._memory = self._memory or MemoryStore()
            return self._memory
        makers: dict[str, Any] = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}
        more: dict[str, Any] = {}
        if settings.credential_provider is not None:
            more["credential_provider"] = settings.credential_provider
        try:
            return makers[scheme](
                self._location.bucket,
                config=settings.config,
                client_options=_client_options(purpose, settings.client_options),
                retry_config=_retry_config(
                    self._part_policy if purpose == "parts" else RetryPolicy(1)
                ),
                **more,
            )
        except (BaseError, TypeError, ValueError) as error:
            raise ConfigError(
                f"cannot open {self._location.url}: {redact(str(error)).splitlines()[0]}"
            ) from None  # the original text may carry configuration values


def _client_options(purpose: Purpose, given: dict[str, Any]) -> dict[str, Any]:
    options = {**_TIMEOUTS[purpose], **given}
    if purpose != "read" or not _has_read_timeout():
        options.pop("read_timeout", None)
    return options


def _has_read_timeout() -> bool:
    """Tell whether this obstore knows the option: since 0.10."""
    major, minor = obstore.__version__.split(".")[:2]
    return (int(major), int(minor)) >= (0, 10)


def _retry_config(policy: RetryPolicy) -> dict[str, Any]:
    backoff = {
        "init_backoff": timedelta(seconds=policy.base_delay_s),
        "max_backoff": timedelta(seconds=max(policy.base_delay_s, policy.max_delay_s)),
        "base": 2,
    }
    return {
        "max_retries": policy.max_attempts - 1,
        "retry_timeout": timedelta(seconds=policy.total_deadline_s),
        "backoff": backoff,
    }
