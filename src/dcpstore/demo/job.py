"""A training job under FSDP2 that can save half way and can start from a checkpoint.

It trains a small decoder-only transformer over bytes, on sequences that count up in steps of
their own, modulo 256.

Every rank of a job calls `train` with the same spec. What a job reports (losses,
and a hash per tensor of its state) is written by rank 0 for the parent to read.

The arithmetic does not depend on the number of ranks. The global batch is cut into
micro batches of fixed size, so every matrix product has the same shape and input
wherever it runs. Only the order in which their gradients are added up differs, and
FSDP2 is told to add in float64, where a dozen float32 numbers of similar magnitude
add without rounding. So a job resumed on another number of ranks is expected to
repeat the losses to the last bit, like one resumed on the same number.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp  # re-exports its functions in a way mypy ignores
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional

import dcpstore
from dcpstore.torch_private import flatten_state_dict

NUM_BYTE_VALUES = 256


def micro_batch(
    *, seed: int, step: int, index: int, num_sequences: int, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the inputs and targets of one micro batch, each ``[num_sequences, length]``.

    A pure function of its arguments: neither the rank nor what was drawn before
    matters, so a resumed job sees the data that the interrupted one would have seen.
    """
    generator = torch.Generator().manual_seed((seed << 40) + (step << 16) + index)
    first, stride = torch.randint(NUM_BYTE_VALUES, (2, num_sequences, 1), generator=generator)
    sequences = (first + stride * torch.arange(length + 1)) % NUM_BYTE_VALUES
    return sequences[:, :-1], sequences[:, 1:]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes of the model.

    Attributes:
        width: Length of the vector at each position; a multiple of ``num_heads``.
        num_layers: Number of decoder blocks.
        num_heads: Attention heads per block.
        context: Longest sequence, in bytes.
    """

    width: int = 128
    num_layers: int = 4
    num_heads: int = 4
    context: int = 64


class Decoder(nn.Module):
    """Predict the next byte at every position.

    Args:
        config: Sizes. Weights come from torch's global random state.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(NUM_BYTE_VALUES, config.width)
        self.position_embedding = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                config.width,
                config.num_heads,
                4 * config.width,
                dropout=0.0,
                activation="gelu",
                batch_first=True,
                norm_first=True,
            )
            for _ in range(config.num_layers)
        )
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, NUM_BYTE_VALUES, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map tokens ``[sequences, length]`` to logits ``[sequences, length, 256]``."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


NUM_MICRO_BATCHES = 12
"""Micro batches in the global batch of one step; each rank takes an equal share of them."""

SEQUENCES_PER_MICRO_BATCH = 2
LEARNING_RATE = 2e-3


@dataclass(frozen=True, slots=True)
class JobSpec:
    """One job. Steps are numbered from 0; a job runs ``[first_step, end_step)``.

    Attributes:
        num_ranks: Processes of the job; divides `NUM_MICRO_BATCHES`.
        first_step: First step to run.
        end_step: Step to stop before.
        url: The checkpoint, saved or loaded.
        storage_options: How to reach it.
        save_before_step: Save when this step comes up; None to load before the first one.
        seed: Decides the data.
        weights_seed: Decides the weights a job starts with.
        folder: Where the ranks meet and where rank 0 leaves the report.
        model: Sizes of the model.
    """

    num_ranks: int
    first_step: int
    end_step: int
    url: str
    storage_options: Mapping[str, Any]
    save_before_step: int | None
    seed: int
    weights_seed: int
    folder: Path
    model: ModelConfig = field(default_factory=ModelConfig)

    @property
    def report_path(self) -> Path:
        """Where rank 0 writes the job's report."""
        return self.folder / "report.json"


@dataclass(frozen=True, slots=True)
class JobReport:
    """What a job did.

    Attributes:
        losses: Mean loss of the global batch, per step from ``first_step``.
        checkpoint_digest: Hash per leaf of the state, as saved or as it was after loading.
        final_digest: Hash per leaf of the state after the last step.
        state_bytes: Payload of all tensors in the state.
        checkpoint_s: Seconds that the save or the load took.
    """

    losses: list[float]
    checkpoint_digest: dict[str, str]
    final_digest: dict[str, str]
    state_bytes: int
    checkpoint_s: float

    @classmethod
    def read(cls, path: Path) -> JobReport:
        """Read what rank 0 wrote. JSON keeps every bit of a float."""
        return cls(**json.loads(path.read_text()))


def train(spec: JobSpec, rank: int) -> None:
    """Run one rank of the job (collective over all its ranks)."""
    torch.set_num_threads(1)  # the order of sums must not depend on the number of cores
    torch.use_deterministic_algorithms(mode=True)
    # Without a name, gloo takes the address of this machine's host name, whatever that is.
    interfaces = {name for _, name in socket.if_nameindex()}
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if "lo0" in interfaces else "lo")
    rendezvous = f"file://{spec.folder / 'rendezvous'}"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=spec.num_ranks)
    report = _Trainer(spec, rank).run()
    if rank == 0:
        spec.report_path.write_text(json.dumps(asdict(report)))
    # FSDP2's reference cycles keep the process group, and so gloo's threads, alive beyond its
    # destruction. A thread that then meets the finalizing interpreter aborts the process.
    gc.collect()
    dist.destroy_process_group()


class _Trainer:
    """Model, optimizer and data of one rank."""

    def __init__(self, spec: JobSpec, rank: int) -> None:
        self.spec = spec
        share = NUM_MICRO_BATCHES // spec.num_ranks
        self.micro_batches = range(rank * share, (rank + 1) * share)
        torch.manual_seed(spec.weights_seed)
        self.model = Decoder(spec.model)
        _shard(self.model, spec.num_ranks)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=LEARNING_RATE)
        self.step = spec.first_step

    def run(self) -> JobReport:
        checkpoint_digest: dict[str, str] = {}
        checkpoint_s = 0.0
        losses: list[float] = []
        if self.spec.save_before_step is None:
            checkpoint_s = self.load()
            checkpoint_digest = _digest(self.state())
        while self.step < self.spec.end_step:
            if self.step == self.spec.save_before_step:
                checkpoint_digest = _digest(self.state())
                checkpoint_s = self.save()
            losses.append(self.train_step())
            self.step += 1
        state = self.state()
        leaves, _ = flatten_state_dict(state)
        return JobReport(
            losses=losses,
            checkpoint_digest=checkpoint_digest,
            final_digest=_digest(state),
            state_bytes=sum(t.nbytes for t in leaves.values() if isinstance(t, torch.Tensor)),
            checkpoint_s=checkpoint_s,
        )

    def state(self) -> dict[str, Any]:
        """All there is to save. For a new optimizer, zeros of the right shapes."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": self.step}

    def save(self) -> float:
        """Save to the bucket; return the seconds it took."""
        state = self.state()
        start_s = time.perf_counter()
        writer = dcpstore.ObjectStoreWriter(
            self.spec.url, storage_options=dict(self.spec.storage_options)
        )
        dcp.save(state, storage_writer=writer)  # type: ignore[attr-defined]
        return time.perf_counter() - start_s

    def load(self) -> float:
        """Load from the bucket into model and optimizer; return the seconds it took."""
        state = self.state()
        start_s = time.perf_counter()
        reader = dcpstore.ObjectStoreReader(
            self.spec.url, storage_options=dict(self.spec.storage_options)
        )
        dcp.load(state, storage_reader=reader)  # type: ignore[attr-defined]
        seconds = time.perf_counter() - start_s
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.step = state["step"]
        return seconds

    def train_step(self) -> float:
        """Take one optimizer step on the global batch; return its mean loss on every rank."""
        assert isinstance(self.model, FSDPModule)  # fully_shard changed its class
        losses = []
        for index in self.micro_batches:
            self.model.set_requires_gradient_sync(index == self.micro_batches[-1])
            inputs, targets = micro_batch(
                seed=self.spec.seed,
                step=self.step,
                index=index,
                num_sequences=SEQUENCES_PER_MICRO_BATCH,
                length=self.spec.model.context,
            )
            logits = self.model(inputs)
            loss = functional.cross_entropy(logits.view(-1, NUM_BYTE_VALUES), targets.reshape(-1))
            torch.autograd.backward(loss / NUM_MICRO_BATCHES)
            losses.append(loss.detach())
        self.optimizer.step()
        self.optimizer.zero_grad()
        return _mean_in_order(torch.stack(losses), self.spec.num_ranks)


def _shard(model: Decoder, num_ranks: int) -> None:
    mesh = init_device_mesh("cpu", (num_ranks,))
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float64)
    for module in [*model.blocks, model]:
        fully_shard(module, mesh=mesh, mp_policy=policy)
        # Add gradients without dividing by the number of ranks: the loss is divided instead.
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)


def _mean_in_order(losses: torch.Tensor, num_ranks: int) -> float:
    """Average the losses of all ranks in the order of the micro batches."""
    gathered = [torch.empty_like(losses) for _ in range(num_ranks)]
    dist.all_gather(gathered, losses)
    total = 0.0
    for loss in torch.cat(gathered).tolist():
        total += loss
    return total / NUM_MICRO_BATCHES


def _digest(state: Mapping[str, Any]) -> dict[str, str]:
    """Hash every leaf (collective: sharded tensors are gathered, one at a time)."""
    leaves, _ = flatten_state_dict(dict(state))
    return {path: _leaf_digest(leaf) for path, leaf in leaves.items()}


def _leaf_digest(leaf: object) -> str:
    if not isinstance(leaf, torch.Tensor):
        return repr(leaf)
    full = leaf.full_tensor() if isinstance(leaf, DTensor) else leaf
    content = full.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
    return f"{full.dtype} {tuple(full.shape)} {hashlib.sha256(content).hexdigest()}"
