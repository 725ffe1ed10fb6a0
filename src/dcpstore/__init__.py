"""DCP checkpoints straight to and from object stores.

```python
import torch.distributed.checkpoint as dcp
import dcpstore

dcp.save(state, storage_writer=dcpstore.ObjectStoreWriter("s3://bucket/run/step-100"))
dcp.load(state, storage_reader=dcpstore.ObjectStoreReader("s3://bucket/run/step-100"))
```

Torch is imported when a name that needs it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dcpstore.config import ReadConfig, WriteConfig
from dcpstore.errors import (
    AlreadyExistsError,
    CheckpointError,
    CommitUnknownError,
    ConfigError,
    ConflictError,
    CorruptError,
    IncompatibleError,
    NotFoundError,
    RankFailures,
    StoreError,
)

if TYPE_CHECKING:
    from dcpstore.loading import load
    from dcpstore.manager.events import TensorBoardEvents
    from dcpstore.manager.rng import rng_state, set_rng_state
    from dcpstore.optimizer import (
        load_sharded_optimizer_state_dict,
        optimizer_state,
        restore_optimizer,
    )
    from dcpstore.plan import LoadPlanner, SavePlanner
    from dcpstore.plan.load import DynamicMetaLoadPlanner
    from dcpstore.read.checkpoint import Checkpoint, open_checkpoint, read_tensor
    from dcpstore.read.reader import ObjectStoreReader
    from dcpstore.read.torch_save import BroadcastingTorchSaveReader
    from dcpstore.report import LoadResult, SaveResult
    from dcpstore.saving import save
    from dcpstore.write.writer import ObjectStoreWriter

__all__ = [
    "AlreadyExistsError",
    "BroadcastingTorchSaveReader",
    "Checkpoint",
    "CheckpointError",
    "CommitUnknownError",
    "ConfigError",
    "ConflictError",
    "CorruptError",
    "DynamicMetaLoadPlanner",
    "IncompatibleError",
    "LoadPlanner",
    "LoadResult",
    "NotFoundError",
    "ObjectStoreReader",
    "ObjectStoreWriter",
    "RankFailures",
    "ReadConfig",
    "SavePlanner",
    "SaveResult",
    "StoreError",
    "TensorBoardEvents",
    "WriteConfig",
    "load",
    "load_sharded_optimizer_state_dict",
    "optimizer_state",
    "open_checkpoint",
    "read_tensor",
    "restore_optimizer",
    "rng_state",
    "save",
    "set_rng_state",
]

__version__ = "0.1.0"

_LAZY = {
    "BroadcastingTorchSaveReader": "dcpstore.read.torch_save",
    "DynamicMetaLoadPlanner": "dcpstore.plan.load",
    "Checkpoint": "dcpstore.read.checkpoint",
    "LoadPlanner": "dcpstore.plan",
    "LoadResult": "dcpstore.report",
    "ObjectStoreReader": "dcpstore.read.reader",
    "ObjectStoreWriter": "dcpstore.write.writer",
    "SavePlanner": "dcpstore.plan",
    "SaveResult": "dcpstore.report",
    "TensorBoardEvents": "dcpstore.manager.events",
    "load": "dcpstore.loading",
    "load_sharded_optimizer_state_dict": "dcpstore.optimizer",
    "optimizer_state": "dcpstore.optimizer",
    "restore_optimizer": "dcpstore.optimizer",
    "open_checkpoint": "dcpstore.read.checkpoint",
    "read_tensor": "dcpstore.read.checkpoint",
    "rng_state": "dcpstore.manager.rng",
    "save": "dcpstore.saving",
    "set_rng_state": "dcpstore.manager.rng",
}


def __getattr__(name: str) -> Any:
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(module), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
