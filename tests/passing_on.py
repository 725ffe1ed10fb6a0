"""Stands in for something, and passes on whatever a subclass does not change."""

from __future__ import annotations

from typing import Any


class PassesOn:
    """A store, a group or a board around another one.

    Args:
        inner: What is passed on to.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
