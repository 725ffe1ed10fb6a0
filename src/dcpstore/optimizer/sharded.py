"""`load_sharded_optimizer_state_dict`: a saved optimizer in the layout that the model has now.

1. (coordinator) the metadata is read; every rank is sent it
2. (all ranks) it says what is saved of the optimizer. Shapes and kind are compared with what is
   there now, then memory is made for what this rank holds of the model, and for nothing else
3. (all ranks) `dcpstore.load` fills it: the planner plans, shared bytes are fetched once
4. (all ranks) the nested state dict is put together again, as it was saved
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlanner as DcpLoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.optim import Optimizer

from dcpstore.config import ReadConfig
from dcpstore.loading import load
from dcpstore.optimizer.assembly import Assembly
from dcpstore.optimizer.entries import find_entries
from dcpstore.optimizer.fit import check_shapes
from dcpstore.optimizer.names import Parameters
from dcpstore.optimizer.restore_groups import check_options
from dcpstore.progress import ProgressCallback
from dcpstore.protocol import Ranks
from dcpstore.report import LoadResult
from dcpstore.share import SharePolicy

__all__ = ["LoadedOptimizerState", "load_sharded_optimizer_state_dict"]


class LoadedOptimizerState(dict[str, Any]):
    """A nested optimizer state dict as it was saved, and what its load did.

    Attributes:
        result: Of the load. ``unexpected`` has the saved entries of this optimizer that no
            parameter of the model has use for, or that the planner left out; ``missing`` has, as
            ``<optimizer_key>.state.<name>``, the tensors of the model that got no state.
    """

    def __init__(self, state: Mapping[str, Any], result: LoadResult) -> None:
        super().__init__(state)
        self.result = result


def load_sharded_optimizer_state_dict(
    model_state_dict: Mapping[str, Any],
    optimizer_key: str,
    source: str | os.PathLike[str] | StorageReader,
    *,
    planner: DcpLoadPlanner | None = None,
    process_group: Ranks = None,
    optimizer: Optimizer | None = None,
    parameter_names: Sequence[str] | None = None,
    storage_options: Mapping[str, Any] | None = None,
    config: ReadConfig | None = None,
    share: SharePolicy = "auto",
    coordinator_rank: int = 0,
    deadline_s: float = 1800.0,
    progress: ProgressCallback | bool | None = None,
) -> LoadedOptimizerState:
    """Load a saved optimizer, each tensor sharded the way the model is now. Collective.

    The optimizer's own state may still be empty, and its former layout does not matter. The
    saved dtypes are kept. A rank allocates what it holds of each tensor; scalars lie on the
    host. With the result, go on as with torch's function of this name::

        state = dcpstore.load_sharded_optimizer_state_dict(model.state_dict(), "optimizer", url)
        # FSDP1
        optimizer.load_state_dict(
            FSDP.optim_state_dict_to_load(model, optimizer, state["optimizer"])
        )
        # FSDP2, tensor parallelism, DDP
        set_optimizer_state_dict(model, optimizer, state["optimizer"])

    Args:
        model_state_dict: The model's, flat, with the layout wanted; such as FSDP1's of type
            ``SHARDED_STATE_DICT``. Not changed.
        optimizer_key: Where the optimizer is in the saved state dict: ``"optimizer"``, or
            dotted if it is nested, ``"app.optim"``.
        source: Folder of the checkpoint, or any DCP storage reader.
        planner: Any DCP load planner; None for `dcpstore.LoadPlanner`. It is given flattened
            keys, and values of the kinds that a model's state dict has. What it leaves out is
            not in the state returned.
        process_group: The ranks that load together; None for all, or for this process alone.
        optimizer: Refuse a checkpoint of an optimizer of another kind than this one.
        parameter_names: Names of the optimizer's parameters in its order. For a checkpoint of
            a plain ``optimizer.state_dict()``, which numbers them, where the model is sharded.
        storage_options: As for `dcpstore.load`; so are all arguments below.
        config: Sizes, bounds, retries, casts and trust.
        share: Whether ranks share what they fetch.
        coordinator_rank: Rank of the group that reads the metadata.
        deadline_s: Most seconds that one step may take.
        progress: A callback, True for a bar, None for one on a terminal.

    Returns:
        ``{optimizer_key: {"state": ..., "param_groups": ...}}``, nested as it was saved. Where
        FSDP1 nests ShardedTensors, the inner one. Its ``result`` is the `LoadResult`.

    Raises:
        RankFailures: On every rank of several, if any failed.
        NotFoundError: If the checkpoint has no such optimizer; names those it has.
        IncompatibleError: If the optimizer is of another kind, or the model of other shapes.
        CheckpointError: As `dcpstore.load` does.
    """
    parameters = Parameters(model_state_dict, parameter_names)
    made: list[Assembly] = []

    def make_state(metadata: Metadata) -> dict[str, Any]:
        entries = find_entries(metadata, optimizer_key, parameters.tensors)
        if optimizer is not None:
            check_options(optimizer, {entry.name for entry in entries if entry.is_in_group})
        owners = parameters.match(entries)
        check_shapes(metadata, entries, owners)
        made.append(Assembly(entries, owners, parameters.common_device))
        return made[0].wanted

    url, reader = (None, source) if isinstance(source, StorageReader) else (source, None)
    result = load(
        make_state,
        url,
        storage_reader=reader,
        planner=planner,
        process_group=process_group,
        storage_options=storage_options,
        config=config,
        share=share,
        coordinator_rank=coordinator_rank,
        deadline_s=deadline_s,
        progress=progress,
    )
    assembly = made[0]
    assembly.settle(result.loaded)
    without = parameters.without_state(assembly.owners.values())
    return LoadedOptimizerState(
        assembly.nested(optimizer_key), assembly.result(result, optimizer_key, without)
    )
