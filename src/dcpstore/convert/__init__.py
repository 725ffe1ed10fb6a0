"""Converters: from the checkpoint that is there to the file that the next tool wants, and back.

Every converter takes these arguments, all but the first two by keyword; its own documentation
says what it adds to them:

``source``, ``target``
    What is read, and what is written: URLs, or local paths.
``keys``, ``exclude``
    Patterns (``fnmatch``) of the source's flattened keys to convert, such as ``["model.*"]``, all
    if empty; and of those to leave out, which is stronger.
``rename``
    From the source's key to the target's: a map of keys and of prefixes that end with ``.``, or a
    function. Nested keys are joined by dots, as in DCP.
``dtype``
    Converts the tensors of its kind (floating point, complex, integer): one dtype for all, or one
    per pattern of source keys, of which the first that matches counts.
``source_options``, ``target_options``
    fsspec's options for the protocol of either URL.
``budget_bytes``
    Memory for bytes on their way, per rank.
``overwrite``
    Replace what exists at the target.
``process_group``
    The ranks that work together, each on a share; None for all, or for this process alone. An
    open `RankGroup` will do.
``deadline_s``
    Most seconds that one step may take before ranks that wait for it give up.
``progress``
    A callback on every rank; True for a bar on the coordinator; None for one if standard error is
    a terminal.

All ranks of the group call a converter together. If any fails, every rank raises.
"""

from __future__ import annotations

from dcpstore.convert.dcp.copy import dcp_to_dcp
from dcpstore.convert.safetensors import dcp_to_safetensors, safetensors_to_dcp
from dcpstore.convert.selection import ConvertResult
from dcpstore.convert.torch.from_dcp import dcp_to_torch_save
from dcpstore.convert.torch.to_dcp import torch_save_to_dcp

__all__ = [
    "ConvertResult",
    "dcp_to_dcp",
    "dcp_to_safetensors",
    "dcp_to_torch_save",
    "safetensors_to_dcp",
    "torch_save_to_dcp",
]
