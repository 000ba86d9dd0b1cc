"""One rank of `autoplan run`: build the model from the seed, apply the plan, train, report.

Started by torchrun with the path of a job file. Rank 0 appends one JSON line per step to
`events.jsonl` in the job's folder; a rank that fails leaves `error-RANK.json`.
"""

import json
import os
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from planner.errors import ModelError, PlanError, PlannerError, RunError
from planner.graph import Graph, Ref
from planner.plan import Plan
from planner.profile import Machine
from planner.runtime.allocated import with_peak
from planner.runtime.optimizers import Optimizer
from planner.runtime.parent import die_with_parent
from planner.runtime.phases import last_steps
from planner.runtime.trainer import apply_plan
from planner.shard.loads import expert_layers
from planner.trace import leaves, map_leaves, trace
from planner.zoo.load import LoadedModel, load_function, load_model
from planner.zoo.text import TEXT_VOCABULARY, continued_text_batch, masked_text_batch, random_batch, text_batch

_MOST_CPU_RANKS = 64
_LARGE_MODEL_PARAMETERS = 10**9  # from here on no rank holds the whole model
RANDOM_DATA = "random"  # where batches come from, if nothing better is known
_MEMORY_STEP = 1  # the second, of warm-up: optimizer states are there


@dataclass(frozen=True, kw_only=True)
class Job:
    """What the launcher tells every rank."""

    model: str
    steps: int
    seed: int
    learning_rate: float
    sequence_length: int | None = None
    data: str | None = None
    check: bool | Literal["replicate"] = True
    weights: str | None = None  # a directory or file
    needs_experts: bool = False  # to count their tokens
    machine: Mapping[str, Any] | None = None  # a `Machine`, for the record
    folder: str = ""  # the launcher's: the plan is there, events and errors go there

    def dumps(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))


def device_kind() -> Literal["cuda", "cpu"]:
    """What this machine trains on: `cuda` or `cpu`."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def memory_kind() -> str:
    """What the peak bytes of a rank are."""
    return "allocated" if device_kind() == "cuda" else "allocated by torch"


def num_local_devices() -> int:
    """How many ranks this machine can hold: its CUDA devices; on CPUs there is no limit worth naming."""
    return torch.cuda.device_count() if device_kind() == "cuda" else _MOST_CPU_RANKS


def main() -> None:
    """Entry of a rank."""
    die_with_parent()
    rank = int(os.environ["RANK"])
    job = Job(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    folder = Path(job.folder)
    try:
        _train(job, folder, rank)
    except Exception as error:
        report = {
            "rank": rank,
            "type": type(error).__name__,
            "message": str(error).strip().split("\n")[0],
            "notes": list(getattr(error, "__notes__", ())),
            "place": "" if isinstance(error, PlannerError) else _place(error),
            "expected": isinstance(error, PlannerError),
            "traceback": traceback.format_exc(),
            "time": time.time(),
        }
        draft = folder / f".error-{rank}"
        draft.write_text(json.dumps(report), encoding="utf-8")
        draft.replace(folder / f"error-{rank}.json")
        os._exit(1)  # an orderly exit would wait for ranks that wait for this one
    sys.stdout.flush()
    sys.stderr.flush()
    # All is written and all ranks are done; torch 2.13's gloo threads abort about one orderly exit in twenty
    # ("terminate called without an active exception").
    os._exit(0)


def _place(error: BaseException) -> str:
    """The innermost line of the user's own code in a traceback, as file:line; empty if there is none."""
    installed = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    others = (str(Path(__file__).resolve().parents[1]), *installed, "<")
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(others)]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def load_to_train(job: Job) -> LoadedModel:
    """The model with a batch of real values: with its weights, or on meta where a rank should not hold all of them.

    A factory's model is built as its code says. Others are on meta if weights are given or they are large; the limit
    is a constant, so that the values that a seed draws depend on nothing else.
    """
    loaded = load_model(job.model, sequence_length=job.sequence_length, device="meta", batch_device="cpu")
    elements = sum(parameter.numel() for parameter in loaded.module.parameters())
    if loaded.kind != "factory" and (job.weights is not None or elements > _LARGE_MODEL_PARAMETERS):
        return loaded
    return load_model(job.model, sequence_length=job.sequence_length, device="cpu", seed=job.seed)


def _train(job: Job, folder: Path, rank: int) -> None:
    torch.set_num_threads(1 if device_kind() == "cpu" else torch.get_num_threads())
    if device_kind() == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    plan = Plan.load(folder / "plan.json")
    loaded = load_to_train(job)
    graph = trace(
        loaded.module,
        loaded.batch,
        precision=plan.precision,
        loss_fn=loaded.loss_fn,
        name=plan.model,
        device_kind=device_kind(),
    )
    if job.needs_experts and not expert_layers(graph):
        raise PlanError(f"{plan.model} has no grouped products of experts to count; leave out --count-experts")
    dist.init_process_group("nccl" if device_kind() == "cuda" else "gloo")
    data = job.data or ("text" if _text_vocabulary(loaded, graph) else RANDOM_DATA)
    batches = _batches(job, loaded, graph, plan)
    first = next(batches)
    trainer = apply_plan(
        plan,
        loaded.module,
        graph=graph,
        loss_fn=loaded.loss_fn,
        optimizer=_optimizer(plan.optimizer, job.learning_rate),
        weights=job.weights,
        seed=job.seed,
        check=job.check,
        batch=first,
    )
    del loaded
    if device_kind() == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    peak: int | None = None
    sampled = last_steps(job.steps)
    trainer.phases.sample(sampled)
    with (folder / "events.jsonl").open("a", encoding="utf-8") if rank == 0 else _nowhere() as events:
        for step in range(job.steps):
            batch = _part_of(next(batches) if step else first, trainer.data_rank, trainer.data_world, plan.global_batch)
            start = time.perf_counter()
            if device_kind() == "cpu" and step == min(_MEMORY_STEP, job.steps - 1):
                trainer.zero_grad()
                loss, peak = with_peak(partial(trainer.step, batch))
            else:
                loss = trainer.step(batch)
            seconds.append(time.perf_counter() - start)
            events.write(json.dumps({"step": step, "loss": loss, "seconds": seconds[-1]}) + "\n")
            events.flush()
    if device_kind() == "cuda":
        peak = torch.cuda.max_memory_allocated()
    record = None
    if trainer.phases.num_steps:
        machine = None if job.machine is None else Machine(**job.machine)
        record = trainer.record(peak_bytes=peak, memory_kind=memory_kind(), machine=machine)
    peaks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(peaks, peak)
    expert_loads = trainer.expert_loads() if expert_layers(graph) else {}
    if rank == 0:
        result = {
            # Without a step beyond warm-up the quickest says most: in one of them memory is counted.
            "measured_step_seconds": min(seconds) if record is None else record.step,
            "record": None if record is None else record.to_dict(),
            "peak_bytes": peaks,
            "check": str(trainer.check or "self-check: off"),
            "expert_loads": expert_loads,
            "data": data,
        }
        (folder / "result.json").write_text(json.dumps(result), encoding="utf-8")
    dist.barrier()


_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
    "momentum": lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9),
}


def _optimizer(name: str, learning_rate: float) -> Optimizer:
    return lambda named: _OPTIMIZERS[name]([p for _, p in named], lr=learning_rate)


def _nowhere() -> Any:
    return open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123 a context manager like the other branch


def _batches(job: Job, loaded: LoadedModel, graph: Graph, plan: Plan) -> Iterator[Any]:
    """Global batches, the same on every rank: the user's, real text, or random values."""
    if job.data is not None:
        yield from _user_batches(job.data, plan.global_batch, job.seed)
        raise RunError(f"{job.data} gave too few batches for {job.steps} steps; give more, or lower --steps")
    for step in range(job.steps):
        vocabulary = _text_vocabulary(loaded, graph)
        if vocabulary:
            length = leaves(loaded.batch)[0].tensor.shape[1]
            where = (step, plan.global_batch, length, job.seed)
            if loaded.kind == "masked-lm":
                batch = masked_text_batch(*where, mask_token=vocabulary - 1)
            elif loaded.kind == "seq2seq":
                batch = continued_text_batch(*where)
            else:
                batch = text_batch(*where)
            if not loaded.is_zoo:  # Hugging Face models shift the labels themselves
                batch["labels"] = batch["input_ids"].clone()
            yield batch
        else:
            yield _random_batch(loaded.batch, plan.global_batch, job.seed, step)


def _random_batch(example: Any, global_batch: int, seed: int, step: int) -> Any:
    """Random values of the same structure; nested ones too."""
    flat = {leaf.name: leaf.tensor for leaf in leaves(example)}
    drawn = random_batch(flat, global_batch=global_batch, seed=seed, step=step)
    return map_leaves(example, lambda leaf: drawn[leaf.name])  # type: ignore[call-overload]


def _text_vocabulary(loaded: LoadedModel, graph: Graph) -> int:
    """The tokens that a language model knows, if bytes are among them, and one more where some are masked; else 0."""
    tables = [n.args[0].tensor for n in graph.nodes if n.op == "aten.embedding.default" and isinstance(n.args[0], Ref)]
    largest = max((s for t in tables if isinstance(s := graph.tensors[t].shape[0], int)), default=0)
    is_known = loaded.kind == "causal-lm" or (loaded.is_zoo and loaded.kind in ("masked-lm", "seq2seq"))
    names = {leaf.name for leaf in leaves(loaded.batch)}
    reads_bytes = largest >= TEXT_VOCABULARY + (loaded.kind == "masked-lm")
    return largest if is_known and reads_bytes and names == {"input_ids", "labels"} else 0


def _user_batches(spec: str, global_batch: int, seed: int) -> Iterator[Any]:
    """What `file.py:loader` gives: `loader(global_batch, seed)` yields global batches."""
    loader = load_function(spec)
    try:
        made = loader(global_batch, seed)
        yield from made
    except PlannerError:
        raise
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise ModelError(
            f"{spec} raised {type(error).__name__}: {error} ({frame.filename}:{frame.lineno}); "
            "it is called as loader(global_batch, seed) and yields global batches"
        ) from error


def _part_of(batch: Any, rank: int, world: int, global_batch: int) -> Any:
    """The samples of one data rank."""
    size = global_batch // world
    for leaf in leaves(batch):
        if leaf.is_batched and leaf.tensor.shape[0] != global_batch:
            raise RunError(
                f"the data has {leaf.tensor.shape[0]} samples in {leaf.name}, the plan's global batch is {global_batch}"
            )
    return map_leaves(
        batch, lambda leaf: leaf.tensor[rank * size : (rank + 1) * size] if leaf.is_batched else leaf.tensor
    )


if __name__ == "__main__":
    main()
