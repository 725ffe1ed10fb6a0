"""Train with FSDP2; save to a bucket in the background; resume on any number of ranks.

torchrun --nproc-per-node 2 examples/train_fsdp2.py s3://bucket/run --steps 1000
"""

import argparse
import json

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from dcpstore import (
    Best,
    CheckpointManager,
    EverySeconds,
    EverySteps,
    Latest,
    OnPreemption,
    rng_state,
    set_rng_state,
)


class App:
    """Model and optimizer under names that fit any number of ranks."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state):
        parts = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(self.model, self.optimizer, **parts)


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:  # the same on all ranks
    inputs = torch.randn(32, 16, generator=torch.Generator().manual_seed(number))
    return inputs, inputs.sin().sum(1, keepdim=True)


def main(run: str, num_steps: int, options: dict[str, str]) -> None:
    dist.init_process_group()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 1))
    fully_shard(model)
    app = App(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    position = {"batch": 0}
    with CheckpointManager(
        run,
        save=[EverySteps(10), EverySeconds(1800), OnPreemption(deadline_s=25)],
        keep=[Latest(3), EverySteps(100), Best(1, "loss", "min")],
        storage_options=options,
    ) as manager:
        start = manager.restore({"app": app})
        if start is not None:
            position = json.loads(manager.read_attachment("data.json"))
            set_rng_state(manager.read_attachment("rng"))
        for step in range(start or 0, num_steps):
            inputs, wanted = batch(position["batch"])
            position["batch"] += 1
            loss = nn.functional.mse_loss(model(inputs), wanted)
            loss.backward()
            app.optimizer.step()
            app.optimizer.zero_grad()
            beside = {}
            if dist.get_rank() == 0:  # all ranks draw the same numbers; else "rng-{rank}"
                beside = {"data.json": json.dumps(position).encode(), "rng": rng_state()}
            metrics = {"loss": loss.item()}
            manager.step(step + 1, {"app": app}, metrics=metrics, attachments=beside)
    print(f"rank {dist.get_rank()}: trained to step {num_steps}, the loss is {loss.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", help="URL or local folder of the run")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--options", type=json.loads, default={}, help="storage options, in JSON")
    given = parser.parse_args()
    main(given.run, given.steps, given.options)
