"""Looking into stored checkpoints without loading them: the library behind the command line.

Torch is imported when something that needs it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dcpstore.audit.diff import Comparison, compare_checkpoints
    from dcpstore.audit.doctor import Diagnosis, diagnose
    from dcpstore.audit.prune import Leftovers, Pruned, Rules, find_leftovers, prune
    from dcpstore.audit.verify import Verification, verify_checkpoint

__all__ = [
    "Comparison",
    "Diagnosis",
    "Leftovers",
    "Pruned",
    "Rules",
    "Verification",
    "compare_checkpoints",
    "diagnose",
    "find_leftovers",
    "prune",
    "verify_checkpoint",
]

_LAZY = {
    "Comparison": "dcpstore.audit.diff",
    "Diagnosis": "dcpstore.audit.doctor",
    "Leftovers": "dcpstore.audit.prune",
    "Pruned": "dcpstore.audit.prune",
    "Rules": "dcpstore.audit.prune",
    "Verification": "dcpstore.audit.verify",
    "compare_checkpoints": "dcpstore.audit.diff",
    "diagnose": "dcpstore.audit.doctor",
    "find_leftovers": "dcpstore.audit.prune",
    "prune": "dcpstore.audit.prune",
    "verify_checkpoint": "dcpstore.audit.verify",
}


def __getattr__(name: str) -> Any:
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(module), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
