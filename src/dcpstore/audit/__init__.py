"""Looking into stored checkpoints without loading them: the library behind the command line.

Torch is imported when something that needs it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dcpstore.audit.compare import Comparison, compare_checkpoints
    from dcpstore.audit.diagnosis import Diagnosis, diagnose
    from dcpstore.audit.leftovers import Leftovers, Rules, find_leftovers
    from dcpstore.audit.removal import Pruned, prune
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
    "Comparison": "dcpstore.audit.compare",
    "Diagnosis": "dcpstore.audit.diagnosis",
    "Leftovers": "dcpstore.audit.leftovers",
    "Pruned": "dcpstore.audit.removal",
    "Rules": "dcpstore.audit.leftovers",
    "Verification": "dcpstore.audit.verify",
    "compare_checkpoints": "dcpstore.audit.compare",
    "diagnose": "dcpstore.audit.diagnosis",
    "find_leftovers": "dcpstore.audit.leftovers",
    "prune": "dcpstore.audit.removal",
    "verify_checkpoint": "dcpstore.audit.verify",
}


def __getattr__(name: str) -> Any:
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(module), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
