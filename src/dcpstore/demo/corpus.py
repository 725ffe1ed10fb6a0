"""Training text that is on every machine: the standard library's own sources."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch

__all__ = ["Corpus"]


class Corpus:
    """Bytes to learn from, cut into sequences the same way for any number of ranks.

    Args:
        max_bytes: How much text to read.

    Raises:
        RuntimeError: If this Python came without its sources.
    """

    def __init__(self, max_bytes: int = 1 << 21) -> None:
        text = bytearray()
        for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
            text += path.read_bytes()
            if len(text) >= max_bytes:
                break
        if not text:
            raise RuntimeError("found no standard library sources to train on")
        self._text = torch.frombuffer(text[:max_bytes], dtype=torch.uint8)

    def __len__(self) -> int:
        return self._text.numel()

    def micro_batch(
        self, *, seed: int, step: int, index: int, num_sequences: int, length: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the inputs and targets of one micro batch, each ``[num_sequences, length]``.

        A pure function of its arguments: neither the rank nor what was drawn before
        matters, so a resumed job sees the data that the interrupted one would have seen.
        """
        generator = torch.Generator().manual_seed((seed << 40) + (step << 16) + index)
        starts = torch.randint(len(self) - length, (num_sequences, 1), generator=generator)
        windows = self._text[starts + torch.arange(length + 1)].long()
        return windows[:, :-1], windows[:, 1:]
