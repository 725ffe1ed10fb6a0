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
    AbandonedError,
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
    from dcpstore.manager.background import AsyncSave, async_save
    from dcpstore.manager.checkpoint_manager import CheckpointManager, Preempted
    from dcpstore.manager.events import TensorBoardEvents
    from dcpstore.manager.policies import (
        AtSteps,
        Best,
        EverySeconds,
        EverySteps,
        First,
        KeepPolicy,
        Latest,
        Moment,
        OnPreemption,
        SavePolicy,
        StepFacts,
    )
    from dcpstore.manager.rng import rng_state, set_rng_state
    from dcpstore.manager.staging import Stager
    from dcpstore.optimizer import (
        load_sharded_optimizer_state_dict,
        optimizer_state,
        restore_optimizer,
    )
    from dcpstore.plan import LoadPlanner, SavePlanner
    from dcpstore.plan.load import DynamicMetaLoadPlanner
    from dcpstore.read.attachments import read_attachment
    from dcpstore.read.checkpoint import Checkpoint, open_checkpoint, read_tensor
    from dcpstore.read.reader import ObjectStoreReader
    from dcpstore.read.torch_save import BroadcastingTorchSaveReader
    from dcpstore.report import LoadResult, SaveResult
    from dcpstore.saving import save
    from dcpstore.write.writer import ObjectStoreWriter

__all__ = [
    "AbandonedError",
    "AlreadyExistsError",
    "AsyncSave",
    "AtSteps",
    "Best",
    "BroadcastingTorchSaveReader",
    "Checkpoint",
    "CheckpointError",
    "CheckpointManager",
    "CommitUnknownError",
    "ConfigError",
    "ConflictError",
    "CorruptError",
    "DynamicMetaLoadPlanner",
    "EverySeconds",
    "EverySteps",
    "First",
    "IncompatibleError",
    "KeepPolicy",
    "Latest",
    "LoadPlanner",
    "LoadResult",
    "Moment",
    "NotFoundError",
    "ObjectStoreReader",
    "ObjectStoreWriter",
    "OnPreemption",
    "Preempted",
    "RankFailures",
    "ReadConfig",
    "SavePlanner",
    "SavePolicy",
    "SaveResult",
    "Stager",
    "StepFacts",
    "StoreError",
    "TensorBoardEvents",
    "WriteConfig",
    "async_save",
    "load",
    "load_sharded_optimizer_state_dict",
    "open_checkpoint",
    "optimizer_state",
    "read_attachment",
    "read_tensor",
    "restore_optimizer",
    "rng_state",
    "save",
    "set_rng_state",
]

__version__ = "0.1.0"

_LAZY = {
    "AsyncSave": "dcpstore.manager.background",
    "AtSteps": "dcpstore.manager.policies",
    "Best": "dcpstore.manager.policies",
    "BroadcastingTorchSaveReader": "dcpstore.read.torch_save",
    "Checkpoint": "dcpstore.read.checkpoint",
    "CheckpointManager": "dcpstore.manager.checkpoint_manager",
    "DynamicMetaLoadPlanner": "dcpstore.plan.load",
    "EverySeconds": "dcpstore.manager.policies",
    "EverySteps": "dcpstore.manager.policies",
    "First": "dcpstore.manager.policies",
    "KeepPolicy": "dcpstore.manager.policies",
    "Latest": "dcpstore.manager.policies",
    "LoadPlanner": "dcpstore.plan",
    "LoadResult": "dcpstore.report",
    "Moment": "dcpstore.manager.policies",
    "ObjectStoreReader": "dcpstore.read.reader",
    "ObjectStoreWriter": "dcpstore.write.writer",
    "OnPreemption": "dcpstore.manager.policies",
    "Preempted": "dcpstore.manager.checkpoint_manager",
    "SavePlanner": "dcpstore.plan",
    "SavePolicy": "dcpstore.manager.policies",
    "SaveResult": "dcpstore.report",
    "Stager": "dcpstore.manager.staging",
    "StepFacts": "dcpstore.manager.policies",
    "TensorBoardEvents": "dcpstore.manager.events",
    "async_save": "dcpstore.manager.background",
    "load": "dcpstore.loading",
    "load_sharded_optimizer_state_dict": "dcpstore.optimizer",
    "open_checkpoint": "dcpstore.read.checkpoint",
    "optimizer_state": "dcpstore.optimizer",
    "read_attachment": "dcpstore.read.attachments",
    "read_tensor": "dcpstore.read.checkpoint",
    "restore_optimizer": "dcpstore.optimizer",
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
