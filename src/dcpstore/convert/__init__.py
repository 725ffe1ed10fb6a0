"""Converters: from the checkpoint that is there to the file that the next tool wants, and back."""

from __future__ import annotations

from dcpstore.convert.result import ConvertResult

__all__ = ["ConvertResult"]
