"""Planners of our own on DCP's abstract ones, and the lookups they share."""

from __future__ import annotations

from dcpstore.planners.load import LoadPlanner
from dcpstore.planners.lookup import find_object, find_tensor
from dcpstore.planners.save import SavePlanner

__all__ = ["LoadPlanner", "SavePlanner", "find_object", "find_tensor"]
