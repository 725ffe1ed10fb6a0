"""Planners of our own on DCP's abstract ones, and the lookups they share."""

from __future__ import annotations

from dcpstore.plan.load import LoadPlanner
from dcpstore.plan.rules import find_object
from dcpstore.plan.save import SavePlanner

__all__ = [
    "LoadPlanner",
    "SavePlanner",
    "find_object",
]
