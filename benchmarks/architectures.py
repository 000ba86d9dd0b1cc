"""Hugging Face architectures that no test names: planned from a config.json, and trained small on two ranks.

    python -m benchmarks.architectures [MODEL_TYPE ...] [--small] [--timeout SECONDS]

For each model type the library's default config is written to a config.json and planned as
`autoplan plan config.json --cluster 4xA100-80GB --global-batch 64` does. Then a small config of it, without dropout,
is trained for two steps in float64 on two gloo ranks, by ZeRO-3 with recomputation and as two pipeline stages (only
the first where it has no graph), against the eager module in one process with the same micro-batches. The figure is
the worst relative error of losses, gradient norms, first gradients and last parameters. `--small` plans the small
config. Run it from the root of the repository; it needs transformers.
"""

import argparse
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.float64 import explicit_float32_as_float64
from tests.models import sgd
from tests.ranks import RankPool

MODEL_TYPES = (
    "albert", "electra", "deberta-v2", "xlnet", "gpt_neo", "gptj", "gpt_neox", "falcon", "qwen2", "qwen3", "mistral",
    "olmo2", "cohere", "stablelm", "starcoder2", "deit", "swin", "convnext", "segformer", "dinov2", "pegasus", "marian",
    "led", "m2m_100", "hubert", "funnel", "roformer", "olmoe", "gemma2", "granite",
)  # fmt: skip
SMALL: Mapping[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embedding_size", "num_hidden_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers"), 3),
    **dict.fromkeys(("num_attention_heads", "n_head", "encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("intermediate_size", "d_inner", "encoder_ffn_dim", "decoder_ffn_dim", "ffn_dim"), 64),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 16),
    "num_key_value_heads": 2, "vocab_size": 97, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 2, "n_inner": 64, "num_experts": 4, "num_experts_per_tok": 2, "decoder_vocab_size": 97,
    "rotary_dim": 8, "image_size": 32, "patch_size": 8,
    "head_dim": 8, "d_head": 8, "n_ctx": 16, "moe_intermediate_size": 32, "query_pre_attn_scalar": 8,
    "attention_types": [[["global", "local", "global"], 1]], "attention_layers": ["global", "local", "global"],
    "window_size": 4, "layer_types": None, "sliding_window": 6, "attention_window": [8, 8, 8],
}  # fmt: skip
SMALL_OF: Mapping[str, Mapping[str, Any]] = {
    "swin": {"embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "num_layers": 2, "patch_size": 4},
    "convnext": {"hidden_sizes": [8, 16], "depths": [2, 2], "num_stages": 2, "patch_size": 4, "drop_path_rate": 0.0},
    "segformer": {"image_size": 64, "patch_sizes": [7, 3, 3, 3]},
    "hubert": {
        "conv_dim": [8, 8, 8, 8, 8, 8, 8], "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2,
        "vocab_size": 32,
    },
    "funnel": {"block_sizes": [1, 1, 1], "block_repeats": [1, 1, 1], "d_inner": 64, "num_decoder_layers": 1},
    "gpt_neo": {"num_layers": 3, "window_size": 4},
}  # fmt: skip
SAMPLES, STEPS, MICRO_BATCHES = 4, 2, 2


@dataclass(frozen=True, slots=True)
class Row:
    """What was found of one architecture."""

    planned: str = ""
    trained: str = ""
    is_graph: bool = False
    is_wrong: bool = False


def write_config(model_type: str, folder: Path, *, small: bool) -> Path:
    """The config.json of a model type: the library's default, or a small one that drops nothing."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    values = {**CONFIG_MAPPING[model_type]().to_dict(), "model_type": model_type}
    if small:
        same_kind = {
            k: v for k, v in SMALL.items() if k in values and (v is None or isinstance(values[k], type(v) | None))
        }
        values |= same_kind
        for derived in ("out_features", "out_indices", "stage_names"):
            values.pop(derived, None)
        values |= SMALL_OF.get(model_type, {})
        dropping = [k for k, v in values.items() if "drop" in k and isinstance(v, float)]
        values |= dict.fromkeys([*dropping, *(k for k in values if k.startswith("mask_") and k.endswith("_prob"))], 0.0)
        values |= {key: False for key in ("apply_spec_augment",) if key in values}
    folder.mkdir(exist_ok=True)
    path = folder / "config.json"
    path.write_text(json.dumps(values, default=str), encoding="utf-8")
    return path


def plan(path: Path) -> tuple[str, bool]:
    """The plan of a config in words, and whether it is by the graph path."""
    from planner.errors import InfeasibleError
    from planner.search import search_model
    from planner.trace import trace
    from planner.zoo import load_model

    start = time.perf_counter()
    loaded = load_model(str(path), device="meta")
    try:
        best = search_model(
            loaded.module, "4xA100-80GB", batch=loaded.batch, loss_fn=loaded.loss_fn, global_batch=64, name=loaded.name
        ).plans[0]
    except InfeasibleError as error:
        graph = trace(loaded.module, loaded.batch, precision="bf16", loss_fn=loaded.loss_fn)
        return f"{len(graph.blocks)} blocks, too large: {error}", not graph.fallbacks
    seconds = time.perf_counter() - start
    missing = [note for note in best.notes if note.startswith("no graph")]
    blocks = sum(len(stage.blocks) for stage in best.stages)
    size = sum(p.numel() for p in loaded.module.parameters()) / 1e6
    mesh = best.mesh
    text = (
        f"{type(loaded.module).__name__}, {size:,.0f} M parameters, {blocks} blocks, "
        f"pp{mesh.pp} dp{mesh.dp} micro-batch {best.micro_batch}, {seconds:.0f} s"
    )
    return (f"{text}; {missing[0]}" if missing else text), not missing


def example(path: Path) -> tuple[nn.Module, list[dict[str, Tensor]]]:
    """The small model in float64, and the global batch of each step; the same in every process."""
    from planner.zoo import load_model

    warnings.simplefilter("ignore")
    with explicit_float32_as_float64():
        loaded = load_model(str(path), device="cpu")
        module = loaded.module.double().train()
    assert isinstance(loaded.batch, dict)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64), alpha=0.02)

    def samples(value: Tensor, step: int) -> Tensor:
        value = value.double() if value.is_floating_point() else value
        return torch.cat([value.roll(step + i, -1) if value.ndim > 1 else value for i in range(SAMPLES // 2)])

    return module, [{key: samples(value, step) for key, value in loaded.batch.items()} for step in range(STEPS)]


def parts(batch: Mapping[str, Tensor], count: int) -> list[dict[str, Tensor]]:
    return [{key: value.chunk(count)[i] for key, value in batch.items()} for i in range(count)]


def eager(path: Path, chunks: int) -> dict[str, Tensor]:
    """Losses, norms, first gradients and last parameters of the eager module."""
    with explicit_float32_as_float64():
        module, batches = example(path)
        optimizer = sgd(module.named_parameters())
        found: dict[str, Tensor] = {}
        for step, batch in enumerate(batches):
            losses = [module(**part).loss / chunks for part in parts(batch, chunks)]
            for loss in losses:
                loss.backward()
            named = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
            if step == 0:
                found |= {f"gradient of {n}": g.clone() for n, g in named.items()}
            found[f"loss {step}"] = torch.stack(losses).sum().detach()
            found[f"norm {step}"] = nn.utils.get_total_norm(list(named.values()))
            optimizer.step()
            optimizer.zero_grad()
    return found | {f"parameter {n}": p.detach() for n, p in module.named_parameters()}


@cache
def graph_of(path: Path) -> Any:
    """The trace of the small model, once in each process."""
    from planner.trace import trace

    module, batches = example(path)
    with explicit_float32_as_float64():
        return trace(module, batches[0], precision="fp64", device_kind="cpu")


def planned(path: Path, kind_name: str) -> dict[str, Any]:
    """The same by a plan, on this rank; `path` says whether there was a graph."""
    from planner.runtime import apply_plan
    from tests.distributed_cases import Kind, make_plan

    module, batches = example(path)
    graph = graph_of(path)
    dp, pp = (2, 1) if kind_name == "dp2" else (1, 2)
    kind = Kind(name="", dp=dp, pp=pp, zero=(3 if dp > 1 else 0,), recompute=("none" if graph.fallbacks else "full",))
    found: dict[str, Any] = {"fallback": str(graph.fallbacks[0]) if graph.fallbacks else ""}
    if graph.couples_samples or (graph.fallbacks and kind.pp > 1):
        return found | {"refused": graph.couples_samples or found["fallback"]}
    hand_made = make_plan(graph, kind, global_batch=SAMPLES, num_microbatches=MICRO_BATCHES)
    with explicit_float32_as_float64():
        trainer = apply_plan(hand_made, module, graph=graph, optimizer=sgd)
        for step, batch in enumerate(batches):
            found[f"loss {step}"] = torch.tensor(trainer.step(parts(batch, trainer.data_world)[trainer.data_rank]))
            found[f"norm {step}"] = torch.tensor(trainer.grad_norm)
            if step == 0:
                found |= {f"gradient of {n}": g for n, g in trainer.gradients().items()}
    return found | {f"parameter {n}": p for n, p in trainer.state_dict().items()}


def worst(expected: Mapping[str, Tensor], found: Mapping[str, Any]) -> tuple[float, str]:
    """The worst relative error; a gradient that is rounding noise must be noise."""
    errors = []
    noise = 1e-12 * float(expected["norm 0"])
    for name, wanted in expected.items():
        if name in found:
            scale = max(float(wanted.double().norm()), noise)
            errors.append((float((found[name].double() - wanted.double()).norm()) / scale, name))
            if float(wanted.double().norm()) <= noise:
                errors[-1] = (0.0 if float(found[name].norm()) <= 1e3 * noise else 1.0, name)
    return max(errors)


class Pools:
    """Processes that stay: one that plans, one that trains the eager module and never imports planner, two ranks."""

    def __init__(self, folder: Path, timeout_seconds: float) -> None:
        self.planner = RankPool(1, folder, groups=False, timeout_seconds=timeout_seconds)
        self.eager = RankPool(1, folder, groups=False, timeout_seconds=timeout_seconds)
        self.ranks = RankPool(2, folder, timeout_seconds=timeout_seconds)

    def close(self) -> None:
        for pool in (self.planner, self.eager, self.ranks):
            pool.close()


def train(path: Path, pools: Pools) -> tuple[str, bool]:
    """How two ranks train the model, and whether it is wrong."""
    words, is_wrong = [], False
    for kind, chunks in (("dp2", 2 * MICRO_BATCHES), ("pp2", MICRO_BATCHES)):
        results = pools.ranks.run(planned, path, kind)
        if "refused" in results[0]:
            continue
        (expected,) = pools.eager.run(eager, path, chunks)
        error, where = max(worst(expected, result) for result in results)
        is_wrong |= not error < 1e-9
        by = "modules" if results[0]["fallback"] else "graph"
        words.append(f"{kind} by {by} {error:.0e}{f' WRONG: {where}' if not error < 1e-9 else ''}")
    return ", ".join(words), is_wrong


def row(model_type: str, folder: Path, pools: Pools, *, small: bool) -> Row:
    """One architecture, planned and trained; what fails is in the table."""
    try:
        ((text, is_graph),) = pools.planner.run(plan, write_config(model_type, folder / model_type, small=small))
    except (AssertionError, TimeoutError) as error:
        text, is_graph = last_line(error), False
    print(f"{model_type:12} planned: {text}", flush=True)
    try:
        trained, is_wrong = train(write_config(model_type, folder / f"{model_type}-small", small=True), pools)
    except (AssertionError, TimeoutError) as error:
        trained, is_wrong = last_line(error), True
    print(f"{'':12} trained: {trained}", flush=True)
    return Row(text, trained, is_graph, is_wrong)


def last_line(error: Exception) -> str:
    return str(error).strip().splitlines()[-1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("model_types", nargs="*", default=list(MODEL_TYPES), metavar="MODEL_TYPE")
    parser.add_argument("--small", action="store_true", help="plan the small config, too")
    parser.add_argument(
        "--timeout", type=float, default=600.0, metavar="SECONDS", help="of each plan and each training"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        pools = Pools(Path(name), arguments.timeout)
        rows = [row(m, Path(name), pools, small=arguments.small) for m in arguments.model_types]
        pools.close()
    graphs, wrong = sum(r.is_graph for r in rows), sum(r.is_wrong for r in rows)
    print(f"\n{len(rows)} architectures: {graphs} planned by the graph path, {wrong} wrong or not trained")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
