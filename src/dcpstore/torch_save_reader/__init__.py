"""``torch.save`` files as the source of distributed loads.

::

    store --ranged GETs--> reading rank --waves of messages--> each rank: its part of each tensor

Modules in the order of the work: `catalogue` (what the file holds), `targets` (what this rank
wants), `waves` (what travels together), `fill` (reads it), `trade` (carries it), `deliver`.
"""

from __future__ import annotations

from dcpstore.torch_save_reader.reader import BroadcastingTorchSaveReader

__all__ = ["BroadcastingTorchSaveReader"]
