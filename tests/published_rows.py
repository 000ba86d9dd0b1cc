"""A row of published measurements that no source has, which tests change."""

from planner.validate.rows import Row

OWN_ROW = Row(
    id="own-1", model="GPT tiny", layers=4, hidden=64, heads=4, vocab=256, seq_len=64, gpu="A100", gpu_mem_gb=80.0,
    n_gpus=4, gpus_per_node=8, interconnect="NVLink", dp=4, tp=1, pp=1, zero_stage=0, activation_recompute="none",
    precision="bf16", flash_attention=True, micro_batch=2, global_batch=32, iter_time_s=0.1,
)  # fmt: skip
