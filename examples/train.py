"""Plan for this machine and train: `torchrun --nproc-per-node 2 train.py`, or `python train.py` on one device."""

import os

import torch

from planner import autoplan
from planner.zoo import build, text_batch

torch.manual_seed(0)  # the same weights on every rank
model, _ = build("gpt-tiny")
world = int(os.environ.get("WORLD_SIZE", "1"))
plan = autoplan(model, "local", global_batch=16, fix={"devices": world})
trainer = plan.apply(model, optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-3))
for step in range(50):
    batch = text_batch(step, plan.global_batch, sequence_length=128, seed=0)
    loss = trainer.step({name: t.chunk(trainer.data_world)[trainer.data_rank] for name, t in batch.items()})
    if step % 10 == 9 and os.environ.get("RANK", "0") == "0":
        print(f"step {step + 1}  loss {loss:.3f}")
