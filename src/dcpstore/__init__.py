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
    from dcpstore.reader import ObjectStoreReader
    from dcpstore.writer import ObjectStoreWriter

__all__ = [
    "AlreadyExistsError",
    "CheckpointError",
    "CommitUnknownError",
    "ConfigError",
    "ConflictError",
    "CorruptError",
    "IncompatibleError",
    "NotFoundError",
    "ObjectStoreReader",
    "ObjectStoreWriter",
    "RankFailures",
    "ReadConfig",
    "StoreError",
    "WriteConfig",
]

__version__ = "0.1.0"

_LAZY = {
    "ObjectStoreReader": "dcpstore.reader",
    "ObjectStoreWriter": "dcpstore.writer",
}


def __getattr__(name: str) -> Any:
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(module), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
