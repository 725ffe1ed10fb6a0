"""obstore's store objects: made late, one per retry setting, never across a fork."""

from __future__ import annotations

import os
import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from obstore.exceptions import BaseError
from obstore.store import AzureStore, GCSStore, LocalStore, MemoryStore, S3Store

from dcpstore.errors import ConfigError
from dcpstore.store.location import Location, redact
from dcpstore.store.retry import RetryPolicy

if TYPE_CHECKING:
    from dcpstore.store.options import ObstoreSettings

__all__ = ["ObstoreClients"]

# obstore's own 30 s for a whole request fails a large part on a slow link; what must
# not hang is a silent connection, and that is the read timeout.
_TIMEOUTS = {"timeout": "15min", "connect_timeout": "10s", "read_timeout": "60s"}
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
        self._open: dict[bool, Any] = {}
        self._memory: MemoryStore | None = None

    def get(self, *, is_retrying: bool = False) -> Any:
        """Return the store that sends each request once, or the one that repeats them.

        Raises:
            ConfigError: In a forked child, before anything touches the Rust runtime.
        """
        self._refuse_after_fork()
        with self._lock:
            if is_retrying not in self._open:
                _runtime_pids.add(os.getpid())
                self._open[is_retrying] = self._make(is_retrying)
            return self._open[is_retrying]

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

    def _make(self, is_retrying: bool) -> Any:
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
                client_options={**_TIMEOUTS, **settings.client_options},
                retry_config=_retry_config(self._part_policy if is_retrying else RetryPolicy(1)),
                **more,
            )
        except (BaseError, TypeError, ValueError) as error:
            raise ConfigError(
                f"cannot open {self._location.url}: {redact(str(error)).splitlines()[0]}"
            ) from None  # the original text may carry configuration values


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
