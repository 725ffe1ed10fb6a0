"""Load checkpoints with stock torch alone; run by a test in an interpreter of its own.

``python -I load_without_dcpstore.py REQUEST`` where REQUEST is a JSON file::

    {"template": "t.pt", "folder": "...", "url": "s3://...", "options": {...}, "out": "..."}

Writes ``file_system.pt``, ``fsspec.pt`` and ``converted.pt`` to ``out``.
"""

from __future__ import annotations

import importlib.abc
import json
import sys
import warnings
from pathlib import Path


class _Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("dcpstore", "obstore", "crc32c"):
            raise ModuleNotFoundError(f"{name} is blocked")
        return


def prove_absent() -> None:
    sys.meta_path.insert(0, _Blocker())
    try:
        import dcpstore  # noqa: F401
    except ModuleNotFoundError:
        return
    raise SystemExit("dcpstore can be imported here: this test proves nothing")


def main(request: dict) -> None:
    prove_absent()
    warnings.simplefilter("ignore")
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    out = Path(request["out"])
    readers = {
        "file_system": dcp.FileSystemReader(request["folder"]),
        "fsspec": FsspecReader(request["url"], **request["options"]),
    }
    for name, reader in readers.items():
        state = torch.load(request["template"], weights_only=True)
        dcp.load(state, storage_reader=reader, no_dist=True)
        torch.save(state, out / f"{name}.pt")
    dcp_to_torch_save(request["folder"], out / "converted.pt")
    assert not [name for name in sys.modules if name.startswith("dcpstore")]


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
