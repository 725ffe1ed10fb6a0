"""Copies that the provider makes by itself: no byte passes through this process.

S3 and Google copy between buckets that the same credentials reach at the same endpoint. Both
engines of a URL do it through s3fs or gcsfs, since obstore copies within one bucket only, takes
no condition on S3, and stops at S3's limit of 5 GiB. Azure's copies may go on after the answer,
and nobody here waits for them: they pass through the process, as folders and memory do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

from dcpstore.errors import AlreadyExistsError, StoreError
from dcpstore.store.base import Store
from dcpstore.store.limits import check_key
from dcpstore.store.location import Location
from dcpstore.store.retry import Deadline, RetryPolicy, call_with_retries

_SCHEMES = frozenset({"s3", "gs"})

CopyMode: TypeAlias = Literal["overwrite", "create"]


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a store's objects lie, and what reaches them.

    Attributes:
        location: The root.
        options: fsspec's options, as given by the user.
    """

    location: Location
    options: Mapping[str, Any] = field(repr=False)

    def path(self, key: str) -> str:
        """Return the object's key in its bucket."""
        prefix = self.location.prefix
        return f"{prefix}/{check_key(key)}" if prefix else check_key(key)


@runtime_checkable
class ServerCopies(Protocol):
    """A `Store` whose provider may copy objects; see `server_copier`."""

    def copy_from(
        self,
        origin: Origin,
        source_key: str,
        key: str,
        *,
        size_bytes: int,
        mode: CopyMode = "overwrite",
    ) -> None:
        """Copy one object of another store of the provider; whole under its key, or not at all.

        Failures that may pass are repeated by the engine, parts of a large object singly.

        Raises:
            AlreadyExistsError: If ``mode="create"`` and the object exists.
            StoreError: If the provider refused or failed; ``retryable`` tells which.
            ConfigError: If the engine that copies does not take the options.
        """


class ServerCopy(Protocol):
    """Copies one object between two stores; arguments and errors of `ServerCopies.copy_from`."""

    def __call__(
        self, source_key: str, key: str, *, size_bytes: int, mode: CopyMode = "overwrite"
    ) -> None:
        """Copy."""


def server_copier(source: Store, target: Store) -> ServerCopy | None:
    """Return what copies from one store to another by the provider alone, if it can.

    Whether it may, the provider tells when asked: a refusal is a `StoreError`.

    Args:
        source: Rooted at the bucket and prefix to copy from.
        target: To copy to. Retries and wrappers of its own apply.
    """
    here, there = _origin_of(source), _origin_of(target)
    if here is None or there is None or not isinstance(target, ServerCopies):
        return None
    if here.location.scheme not in _SCHEMES or here.location.scheme != there.location.scheme:
        return None
    if dict(here.options) != dict(there.options):
        return None
    copy_from = target.copy_from

    def copy(source_key: str, key: str, *, size_bytes: int, mode: CopyMode = "overwrite") -> None:
        copy_from(here, source_key, key, size_bytes=size_bytes, mode=mode)

    return copy


def copy_with_retries(
    request: Callable[[], None], policy: RetryPolicy, deadline: Deadline | None = None
) -> None:
    """Repeat a copy on any retryable error: the same bytes land twice.

    A copy that must create finds its own object where an answer was lost: that is a success.

    Args:
        request: Copies, and asks the deadline, if there is one, for its time-out.
        policy: How long to keep trying.
        deadline: By which the last try must have ended; None for the policy's, from now on.

    Raises:
        AlreadyExistsError: If the object was there at the first try.
    """
    maybe_done = False

    def once() -> None:
        nonlocal maybe_done
        try:
            request()
        except AlreadyExistsError:
            if not maybe_done:
                raise
        except StoreError as error:
            maybe_done = maybe_done or (error.retryable and not error.throttled)
            raise

    call_with_retries(once, policy, deadline=deadline)


def _origin_of(store: Store) -> Origin | None:
    """Return where the engine under all wrappers keeps its objects."""
    while (inner := getattr(store, "inner", None)) is not None:
        store = inner
    found = getattr(store, "origin", None)
    return found if isinstance(found, Origin) else None
