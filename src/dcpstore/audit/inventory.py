"""What lies in a folder: by one listing, or object by object where listing is refused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from dcpstore.errors import CheckpointError, ConfigError, NotFoundError, StoreError
from dcpstore.store.base import ObjectInfo, Store

__all__ = ["Inventory", "take_inventory"]


@dataclass(frozen=True, slots=True)
class Inventory:
    """The objects of a folder.

    Attributes:
        objects: By key, at any depth; only those asked for if not `is_listed`.
        refused: Objects that the store refuses to tell of, with its reason.
        is_listed: Whether the store let us list.
    """

    objects: Mapping[str, ObjectInfo]
    refused: Mapping[str, CheckpointError]
    is_listed: bool


def take_inventory(store: Store, needed: Iterable[str], *, max_requests: int) -> Inventory:
    """Look up what is in a folder.

    A listing may be old where a store is lax, so a needed object that it lacks is looked up
    by itself.

    Args:
        store: Rooted at the folder.
        needed: Keys that must be looked up even where listing is refused.
        max_requests: Requests in flight.

    Raises:
        StoreError: If the store fails otherwise than by a refusal.
    """
    found: dict[str, ObjectInfo] = {}
    is_listed = True
    try:
        found.update((info.key, info) for info in store.list())
    except StoreError as error:
        if not error.denied:
            raise
        is_listed = False
    refused: dict[str, CheckpointError] = {}

    def look_up(key: str) -> None:
        try:
            found[key] = store.head(key)
        except NotFoundError:
            pass
        except (ConfigError, StoreError) as error:  # ConfigError: no store has such a key
            if isinstance(error, StoreError) and error.retryable:
                raise
            refused[key] = error

    with ThreadPoolExecutor(max_requests, "dcpstore-audit") as executor:
        list(executor.map(look_up, sorted(set(needed) - found.keys())))
    return Inventory(found, refused, is_listed)
