"""The folder of a checkpoint: its URL, its options, and the open store."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from dcpstore.config import ReadConfig, WriteConfig
from dcpstore.errors import ConfigError
from dcpstore.store.base import Store
from dcpstore.store.location import parse_location
from dcpstore.store.opening import open_store
from dcpstore.store.retry import RetryPolicy


class Folder:
    """A checkpoint's URL and how to reach it. Opens the store on first use.

    Pickles by its settings, so that a spawned process opens its own clients.

    Args:
        url: Folder of the checkpoint.
        storage_options: fsspec's options for its protocol.
        config: Names the engine and bounds the retries.
        opener: Opens a store.

    Raises:
        ConfigError: If the URL or an option cannot be honoured.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        storage_options: Mapping[str, Any] | None,
        config: WriteConfig | ReadConfig,
        opener: Callable[..., Store] = open_store,
    ) -> None:
        self.url = parse_location(url).url
        self._options = dict(storage_options or {})
        self._config = config
        self._opener = opener
        self._store: Store | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_store": None}

    @staticmethod
    def is_valid(url: str | os.PathLike[str]) -> bool:
        """Tell whether a URL can be served."""
        try:
            parse_location(url)
        except ConfigError:
            return False
        return True

    @property
    def policy(self) -> RetryPolicy:
        """How long to keep trying."""
        config = self._config
        policy = RetryPolicy(
            max_attempts=config.max_attempts,
            total_deadline_s=config.retry_deadline_s,
            timeout_floor_s=config.timeout_s,
        )
        if isinstance(config, WriteConfig):
            return replace(policy, min_bytes_per_s=config.min_bytes_per_s)
        return policy

    def open(self) -> Store:
        """Return the open store."""
        if self._store is None:
            self._store = self._opener(
                self.url,
                storage_options=self._options,
                engine=self._config.engine,
                retry=self.policy,
            )
        return self._store

    def move(self, url: str | os.PathLike[str]) -> None:
        """Go to another URL with the same options.

        Raises:
            ConfigError: If this folder is a remote one and ``url`` names a local path.
        """
        new, text = parse_location(url).url, os.fspath(url)
        if not self.url.startswith("file://") and "://" not in text:
            raise ConfigError(
                f"checkpoint_id {text!r} is a local path, while the storage was made for"
                f" {self.url}. Write the whole URL, such as {self.url.rstrip('/')}/{text}"
            )
        if new != self.url:
            self.close()
            self.url = new

    def close(self) -> None:
        """Close the store. Idempotent; the next `open` opens it again."""
        store, self._store = self._store, None
        if store is not None:
            store.close()
