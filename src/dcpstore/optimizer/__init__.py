"""Optimizer state in the model's layout, whatever layout wrote it."""

from __future__ import annotations

from dcpstore.optimizer.restoring import optimizer_state, restore_optimizer
from dcpstore.optimizer.sharded import LoadedOptimizerState, load_sharded_optimizer_state_dict

__all__ = [
    "LoadedOptimizerState",
    "load_sharded_optimizer_state_dict",
    "optimizer_state",
    "restore_optimizer",
]
