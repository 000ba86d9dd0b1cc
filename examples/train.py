"""Plan for this machine and train: `python train.py`, or `torchrun --nproc-per-node 2 train.py` on two devices."""

import os

import torch

from planner import autoplan
from planner.zoo import build, text_batch

torch.manual_seed(0)  # the same weights on every rank
model, _ = build("gpt-tiny")
plan = autoplan(model, "local", global_batch=16, fix={"devices": int(os.environ.get("WORLD_SIZE", "1"))})
trainer = plan.apply(model, optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-3))
samples = plan.global_batch // trainer.data_world  # of each data rank
mine = slice(trainer.data_rank * samples, (trainer.data_rank + 1) * samples)
for step in range(50):
    batch = text_batch(step, plan.global_batch, sequence_length=128, seed=0)
    loss = trainer.step({name: tensor[mine] for name, tensor in batch.items()})
    if step % 10 == 9 and os.environ.get("RANK", "0") == "0":
        print(f"step {step + 1}  loss {loss:.3f}")
