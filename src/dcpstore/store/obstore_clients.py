"""obstore's store objects: made late, one per purpose and time-out, never across a fork."""

from __future__ import annotations

import math
import os
import threading
from collections import OrderedDict
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

__all__ = ["ObstoreClients", "Purpose"]

Purpose = Literal["read", "put", "parts"]
_CONNECT_S = 10.0
_MOST_CLIENTS = 16  # one takes 5 ms to make, and keeps connections of its own
_BACKOFF_SHARE = 0.1  # of the deadline: the longest delay before a part is sent again
# The processes that started obstore's Rust runtime. There is one per process, it does
# not survive a fork, and nothing but this module can know that it was started: the one
# piece of process-global state of the package.
_runtime_pids: set[int] = set()


class ObstoreClients:
    """Opens obstore's stores for one location on first use. Thread-safe.

    Args:
        location: The root.
        settings: Translated options.
        part_policy: For the requests that only obstore itself can repeat, and for how long an
            answer may pause.
    """

    def __init__(
        self, location: Location, settings: ObstoreSettings, part_policy: RetryPolicy
    ) -> None:
        self._location = location
        self._settings = settings
        self._part_policy = part_policy
        self._lock = threading.Lock()
        self._open: OrderedDict[tuple[Purpose, float], Any] = OrderedDict()
        self._memory: MemoryStore | None = None

    def get(self, purpose: Purpose, timeout_s: float) -> Any:
        """Return the store for a purpose; the one for ``"parts"`` repeats its requests.

        obstore takes time-outs for all requests of a client only. So there is one for each
        time-out, to two digits; the few that are usual are kept, with their connections.

        Args:
            purpose: What for.
            timeout_s: Of one request, from its beginning to the end of its answer.

        Raises:
            ConfigError: In a forked child, before anything touches the Rust runtime.
        """
        self._refuse_after_fork()
        kind = purpose, _two_digits(timeout_s)
        with self._lock:
            if kind not in self._open:
                _runtime_pids.add(os.getpid())
                self._open[kind] = self._make(*kind)
                if len(self._open) > _MOST_CLIENTS:
                    self._open.popitem(last=False)
            self._open.move_to_end(kind)
            return self._open[kind]

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

    def _make(self, purpose: Purpose, timeout_s: float) -> Any:
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
                client_options=self._client_options(purpose, timeout_s),
                retry_config=_retry_config(
                    self._part_policy if purpose == "parts" else RetryPolicy(1), timeout_s
                ),
                **more,
            )
        except (BaseError, TypeError, ValueError) as error:
            raise ConfigError(
                f"cannot open {self._location.url}: {redact(str(error)).splitlines()[0]}"
            ) from None  # the original text may carry configuration values

    def _client_options(self, purpose: Purpose, timeout_s: float) -> dict[str, Any]:
        """Return what bounds one request.

        The read timeout notices an answer that pauses. Puts have none, as it also runs while a
        body is being sent (measured: one of 1 s breaks off an upload of 4 s that never pauses).
        """
        pause_s = min(self._part_policy.timeout_floor_s, timeout_s)
        options = {
            "connect_timeout": _duration(min(_CONNECT_S, timeout_s)),
            "timeout": _duration(timeout_s),
            "read_timeout": _duration(pause_s),
            **self._settings.client_options,
        }
        if purpose != "read" or not _has_read_timeout():
            del options["read_timeout"]
        return options


def _has_read_timeout() -> bool:
    """Tell whether this obstore knows the option: since 0.10."""
    major, minor = obstore.__version__.split(".")[:2]
    return (int(major), int(minor)) >= (0, 10)


def _two_digits(seconds: float) -> float:
    """Round down, so that what is cut to the time that is left shares clients too."""
    unit = 10.0 ** (math.floor(math.log10(seconds)) - 1)
    return float(f"{math.floor(seconds / unit + 1e-6) * unit:.6g}")


def _duration(seconds: float) -> str:
    return f"{max(1, round(seconds * 1000))}ms"


def _retry_config(policy: RetryPolicy, timeout_s: float) -> dict[str, Any]:
    """Return how obstore repeats, so that the last try ends before the deadline.

    obstore compares its ``retry_timeout`` when a try has failed. Then it waits, and then the
    next try takes no longer than its time-out.
    """
    longest_s = min(policy.max_delay_s, _BACKOFF_SHARE * policy.total_deadline_s)
    backoff = {
        "init_backoff": timedelta(seconds=min(policy.base_delay_s, longest_s)),
        "max_backoff": timedelta(seconds=longest_s),
        "base": 2,
    }
    begins_s = max(0.0, policy.total_deadline_s - timeout_s - longest_s)
    return {
        "max_retries": policy.max_attempts - 1,
        "retry_timeout": timedelta(seconds=begins_s),
        "backoff": backoff,
    }
