"""Open a pickled ``.metadata`` without running what lies in the bucket.

Torch pickles its checkpoint metadata. Unpickling may call any function that the bytes
name; here only the classes that such metadata is made of may be named. Torch-free as
long as no pickle is opened.
"""

from __future__ import annotations

import io
import pickle
from pathlib import PurePosixPath
from typing import Any

from dcpstore.errors import CorruptError

__all__ = ["load_metadata_pickle"]

_METADATA = "torch.distributed.checkpoint.metadata"
# Everything that torch 2.0 to 2.14 puts into a checkpoint's metadata, and nothing that
# does more than hold data when it is called.
_ALLOWED: frozenset[tuple[str, str]] = frozenset(
    {
        *(
            (_METADATA, name)
            for name in (
                "BytesStorageMetadata",
                "ChunkStorageMetadata",
                "Metadata",
                "MetadataIndex",
                "StorageMeta",
                "TensorProperties",
                "TensorStorageMetadata",
                "_MEM_FORMAT_ENCODING",
            )
        ),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.distributed.checkpoint.filesystem", "_StoragePrefix"),
        ("torch.distributed.checkpoint._hf_utils", "_HFStorageInfo"),
        ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties"),
        ("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"),
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("collections", "OrderedDict"),
        ("builtins", "set"),
        ("builtins", "frozenset"),
        ("pathlib", "Path"),
        ("pathlib", "PosixPath"),
        ("pathlib", "PurePosixPath"),
        ("pathlib", "WindowsPath"),
        ("pathlib", "PureWindowsPath"),
        ("pathlib._local", "PosixPath"),
        ("pathlib._local", "WindowsPath"),
    }
)


class _Unpickler(pickle.Unpickler):
    """An unpickler that knows only the names above and torch's dtypes."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            if module.startswith("pathlib"):
                # A foreign system's path class cannot be made here, and none is needed.
                return _as_text
            return super().find_class(module, name)
        if module == "torch" and "." not in name:
            import torch

            value = getattr(torch, name, None)
            if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
                return value
        raise _Refused(module, name)


class _Refused(pickle.UnpicklingError):
    def __init__(self, module: str, name: str) -> None:
        super().__init__(f"{module}.{name}")


def _as_text(*parts: str) -> str:
    return str(PurePosixPath(*parts))


def load_metadata_pickle(data: bytes | memoryview, *, key: str, allow_pickle: bool = False) -> Any:
    """Unpickle a ``.metadata`` object.

    Args:
        data: The object's bytes; anything after the pickle is ignored.
        key: Its name, for messages.
        allow_pickle: Use plain pickle, which runs whatever the bytes name.

    Raises:
        CorruptError: If the bytes name a global that metadata has no use for, or are no
            pickle. Nothing that they name was called.
    """
    try:
        if allow_pickle:
            return pickle.loads(data)  # noqa: S301 - the caller asked for it by name
        return _Unpickler(io.BytesIO(data)).load()
    except _Refused as error:
        raise CorruptError(
            f"{key} names {error}, which checkpoint metadata has no use for; it was not run."
            " If you wrote this checkpoint yourself with a planner that keeps objects of its"
            " own there, load it with ReadConfig(allow_pickle=True)",
            key=key,
        ) from error
    except Exception as error:
        raise CorruptError(f"{key} is no checkpoint metadata: {error!r}", key=key) from error
