"""From the sizes of a row to the graph of one rank: a zoo model, traced shallow, split over `tp` as the engine does it.

Rows carry names and sizes, no code. `profiles/published/models.toml` says which of four architectures a name means and
what else is known of it; sizes that a row states always win. A graph of three layers is traced once for each distinct
set of sizes and kept on disk, keyed by everything that it is made of; `planner.repeat` makes it as deep as the model.
"""

import hashlib
import inspect
import os
import pickle
import re
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

import planner
from planner.cluster import Cluster
from planner.errors import PlannerError
from planner.graph import Batch, Graph
from planner.repeat import Repeated, repeated, runs
from planner.search.sharded import prices
from planner.shard.localize import localize
from planner.shard.placement import Placement, R, Sharding, split
from planner.shard.program import resharded
from planner.trace import priced, trace
from planner.validate.data import table
from planner.validate.rows import RefusedError, Row
from planner.zoo.bert import BERT, BERTConfig
from planner.zoo.gpt import GPT, GPTConfig
from planner.zoo.llama import Llama, LlamaConfig
from planner.zoo.t5 import T5, T5Config

Architecture = Literal["gpt", "llama", "bert", "t5"]

# The second of three equal layers has a neighbour of its own kind on either side. The first layer of a T5 is unlike the
# others: it makes the position bias.
TRACED_LAYERS = {"gpt": 3, "llama": 3, "bert": 3, "t5": 4}
PARAMETER_TOLERANCE = 0.10  # of the stated number of parameters; names round it to two digits
CACHE_VERSION = 1
WHOLE_LAYERS = 48  # of a model whose layers are not one block each, which is traced at full depth
KEPT = 64  # graphs in memory
KEPT_SECONDS = 7 * 86400.0  # traces of other versions on disk
# Matrices that a Megatron-like engine splits by outputs (columns) and by inputs (rows): Shoeybi et al. 2019
# (arXiv 1909.08053), section 3. What is not named is left to the sharding program.
COLUMN_PARALLEL = ("query", "key", "value", "up", "gate", "tokens", "head")
ROW_PARALLEL = ("out", "down")
# What sequence parallelism splits by tokens: Korthikanti et al. 2022 (arXiv 2205.05198), section 4.2.2.
TOKEN_WISE = ("aten.add.Tensor", "aten.layer_norm.default", "aten.rms_norm.default")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """An architecture and its sizes. Equal specs with another depth share one trace."""

    architecture: Architecture
    layers: int  # of each stack
    hidden: int
    heads: int
    key_value_heads: int
    ffn_hidden: int
    vocabulary: int
    sequence: int  # tokens of a sample
    target_sequence: int = 0  # tokens of a T5's output
    experts: int = 0
    experts_per_token: int = 2
    dropout: float = 0.0
    attention_lengths: float = 1.0  # keys that a query sees, in units of the sequence

    @property
    def head(self) -> int:
        """Width of an attention head; those of a T5 need not make up the hidden size (64 in most of its sizes)."""
        return self.hidden // self.heads if self.hidden % self.heads == 0 else 64

    @property
    def num_layers(self) -> int:
        """Layers of all stacks."""
        return self.layers * (2 if self.architecture == "t5" else 1)

    @property
    def is_causal(self) -> bool:
        """Whether self-attention sees earlier tokens only."""
        return self.architecture in ("gpt", "llama")


@dataclass(frozen=True, kw_only=True, eq=False)
class RankGraph:
    """The graph of one rank at full depth, with the sharding of each block where tensors are split."""

    graph: Graph
    shardings: tuple[Sharding, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceKey:
    """What a traced graph depends on."""

    spec: ModelSpec  # with `TRACED_LAYERS`
    tp: int
    sequence_parallel: bool
    precision: Literal["bf16", "fp32"]


def model_of(
    row: Row, *, tp: int = 1, cp: int = 1, dropout: float = 0.0, sequence: int | None = None, pads: bool = False
) -> ModelSpec:
    """The model of a row, with the tokens that one of `cp` ranks has.

    A vocabulary that is split over `tp` ranks is padded as Megatron-LM does (`--make-vocab-size-divisible-by` 128).

    Raises:
        RefusedError: sizes are missing that nothing known of the model gives, or they contradict each other.
    """
    known = _known(row)
    if "refuse" in known:
        raise RefusedError(str(known["refuse"]))

    def size(cell: int | None, key: str, what: str) -> int:
        value = cell if cell else known.get(key)
        if not value:
            raise RefusedError(f"{what} not stated")
        return int(value)

    layers = size(row.layers, "layers", "layers")
    hidden = size(row.hidden, "hidden", "hidden size")
    heads = size(row.heads, "heads", "attention heads")
    tokens = row.seq_len or known.get("seq_len") or sequence
    if not tokens:
        raise RefusedError("sequence length not stated")
    vocabulary = row.vocab or int(known.get("vocab", 0)) or 50257
    if tp > 1 or pads:
        vocabulary = -(-vocabulary // (128 * tp)) * 128 * tp
    architecture: Architecture = known.get("architecture", "gpt")
    flags = row.note(r"flags?:(.*)$")
    flag_text = flags[1] if flags else ""
    if "swiglu" in flag_text and architecture == "gpt":
        architecture = "llama"
    experts, taken = int(known.get("experts", 0)), int(known.get("experts_per_token", 2))
    if stated := re.search(r"MoE: (\d+) experts(?: top-(\d+))?", row.notes):
        experts, taken = int(stated[1]), int(stated[2] or 1)
    elif (row.ep or 1) > 1 and not experts:
        named = re.search(r"(\d+)experts", row.model)
        experts, taken = int(named[1]) if named else 8, 1
    ffn = row.ffn_hidden or int(known.get("ffn_hidden", 0)) or 4 * hidden
    gated = architecture == "llama"
    if architecture == "gpt" and (ffn != 4 * hidden or experts or (row.kv_heads or heads) != heads):
        architecture = "llama"
    if (architecture == "llama" and not gated) or (experts and not row.ffn_hidden):
        ffn = max(1, round(2 * ffn / 3 / 128)) * 128  # three matrices of two thirds are two matrices
    if not row.ffn_hidden and not known.get("ffn_hidden") and gated and not experts:
        ffn = -(-round(8 * hidden / 3) // 128) * 128
    if architecture == "bert" and ffn != 4 * hidden:
        raise RefusedError("BERT with a feed-forward width other than 4 times the hidden size")
    if hidden % heads and architecture != "t5":
        raise RefusedError(f"{heads} heads do not divide a hidden size of {hidden}")
    if tokens % cp:
        raise RefusedError(f"cp={cp} does not divide {tokens} tokens")
    target = 0
    if architecture == "t5":
        target = max(1, round(tokens * float(known.get("target_share", 1.0))))
        if known.get("halve_layers") == "both" and not re.search(rf"{layers // 2}\+{layers // 2}", row.model):
            pass  # the row counts one stack
        elif known.get("halve_layers"):
            layers //= 2
    return ModelSpec(
        architecture=architecture,
        layers=layers,
        hidden=hidden,
        heads=heads,
        key_value_heads=row.kv_heads or int(known.get("kv_heads", 0)) or heads,
        ffn_hidden=ffn,
        vocabulary=vocabulary,
        sequence=int(tokens) // cp,
        target_sequence=target,
        experts=experts,
        experts_per_token=min(taken, experts) if experts else 2,
        dropout=dropout if architecture in ("gpt", "bert", "t5") else 0.0,
        attention_lengths=float(known.get("attention_lengths", 1.0)),
    )


def num_parameters(spec: ModelSpec) -> float:
    """Elements of all matrices and embeddings; biases and norms are left out."""
    width, words = spec.hidden, spec.vocabulary * spec.hidden
    keys = 2 * width * spec.key_value_heads * spec.head
    inner = 2 * width * spec.ffn_hidden
    match spec.architecture:
        case "llama":
            return 2 * words + spec.layers * (2 * width**2 + keys + 1.5 * inner * max(1, spec.experts))
        case "t5":
            return words + spec.layers * (12 * width**2 + 2 * inner)
        case _:
            return words + spec.sequence * width + spec.layers * (4 * width**2 + inner)


def odd_parameters(row: Row, spec: ModelSpec) -> str:
    """What is odd about the number of parameters that the model has ("" = nothing): told with the prediction."""
    if not row.params_b:
        return ""
    built = num_parameters(spec) / 1e9
    off = built / row.params_b - 1
    if abs(off) <= PARAMETER_TOLERANCE:
        return ""
    return f"the model as built has {built:.3g} B parameters, {off:+.0%} against the {row.params_b:g} B stated"


def trace_key(spec: ModelSpec, tp: int, *, sequence_parallel: bool, single_precision: bool) -> TraceKey:
    """The trace that a model shares with all that differ in nothing but depth.

    Raises:
        RefusedError: the heads cannot be split over the ranks.
    """
    if spec.heads % tp:
        raise RefusedError(f"tp={tp} does not divide {spec.heads} heads")
    if sequence_parallel and (spec.sequence % tp or (spec.target_sequence or tp) % tp):
        sequence_parallel = False
    return TraceKey(
        spec=replace(spec, layers=TRACED_LAYERS[spec.architecture], attention_lengths=1.0),
        tp=tp,
        sequence_parallel=sequence_parallel and tp > 1,
        precision="fp32" if single_precision else "bf16",
    )


def rank_graph(key: TraceKey, layers: int) -> RankGraph:
    """A traced graph at a depth.

    Raises:
        RefusedError: it is no deeper than what was traced, or its blocks are not alike.
    """
    return _deep(key, layers)


@lru_cache(maxsize=KEPT)
def _deep(key: TraceKey, layers: int) -> RankGraph:
    least = TRACED_LAYERS[key.spec.architecture]
    if layers < least:
        short, shardings = traced(replace(key, spec=replace(key.spec, layers=max(1, layers))))
        return RankGraph(graph=short, shardings=shardings)
    short, shardings = traced(key)
    wanted = [len(run) + layers - least for run in runs(short)]
    if len(wanted) != (2 if key.spec.architecture == "t5" else 1):  # a narrow model's layers are cut within
        if layers > WHOLE_LAYERS:
            raise RefusedError(f"the layers are cut within, and {layers} are too many to trace")
        short, shardings = traced(replace(key, spec=replace(key.spec, layers=layers)))
        return RankGraph(graph=short, shardings=shardings)
    try:
        deep: Repeated = repeated(short, wanted)
    except PlannerError as error:
        raise RefusedError(f"layers are not alike: {error}") from None
    return RankGraph(graph=deep.graph, shardings=tuple(shardings[o] for o in deep.origins) if shardings else ())


@lru_cache(maxsize=KEPT)
def traced(key: TraceKey) -> tuple[Graph, tuple[Sharding, ...]]:
    """The shallow graph of one rank, from the cache or made.

    Raises:
        RefusedError: the model cannot be built, traced or split.
    """
    path = _cache_path(key)
    try:
        with path.open("rb") as file:
            loaded: tuple[Graph, tuple[Sharding, ...]] | str = pickle.load(file)
    except (OSError, pickle.UnpicklingError, EOFError, AttributeError, ImportError, IndexError, TypeError):
        loaded = _made(key)
        _keep(path, loaded)
    if isinstance(loaded, str):
        raise RefusedError(loaded)
    return loaded


def make(key: TraceKey) -> None:
    """Fill the cache with one trace: the job of a worker process, which returns nothing large."""
    torch.set_num_threads(1)
    if not _cache_path(key).exists():
        _keep(_cache_path(key), _made(key))


def is_made(key: TraceKey) -> bool:
    """Whether the cache holds a trace."""
    return _cache_path(key).exists()


def _made(key: TraceKey) -> tuple[Graph, tuple[Sharding, ...]] | str:
    """The graph with its shardings, or the sentence why there is none."""
    try:
        graph = trace(*_module(key.spec), precision=key.precision, device_kind="cuda")
        if graph.fallbacks:
            return f"no graph: {graph.fallbacks[0]}"
        if key.tp == 1:
            return graph, ()
        return _split(graph, key)
    except (PlannerError, RuntimeError, ValueError) as error:
        return f"cannot be traced: {' '.join(str(error).split())[:200]}"


def _split(graph: Graph, key: TraceKey) -> tuple[Graph, tuple[Sharding, ...]]:
    """What one of `tp` ranks runs, split as Megatron-LM splits it."""
    parameters: dict[str, Placement] = {}
    for tensor in graph.tensors:
        if tensor.kind != "parameter":
            continue
        sizes = [size for size in tensor.shape if isinstance(size, int)]
        leaf = tensor.name.split(".")[-2] if "." in tensor.name else tensor.name
        if leaf == "qkv":
            parameters[tensor.name] = split(0, [sizes[0] // 3] * 3)
        elif leaf in COLUMN_PARALLEL and sizes[0] % key.tp == 0 and _divides_heads(leaf, key):
            parameters[tensor.name] = split(0, [sizes[0]])
        elif leaf in ROW_PARALLEL and len(sizes) > 1:
            parameters[tensor.name] = split(1, [sizes[1]])
    carried: dict[int, Placement] = {}
    between = {t for cut in graph.carried for t in cut}
    inside = {
        t
        for node in graph.nodes
        if key.sequence_parallel and node.op in TOKEN_WISE
        for t in node.outputs
        if t is not None
    }
    for index in between | inside:
        shape = graph.tensors[index].shape
        if len(shape) == 3 and isinstance(shape[0], Batch) and isinstance(shape[1], int):
            carried[index] = split(1, [shape[1]]) if key.sequence_parallel else R
    wide = prices(graph, Cluster.load("8xA100-80GB"), {"tp": key.tp}, "tp", global_batch=8) if key.tp <= 8 else None
    chosen = wide or prices(graph, Cluster.load(f"{key.tp}x8xA100-80GB"), {"tp": key.tp}, "tp", global_batch=8 * key.tp)
    shardings = resharded(graph, key.tp, chosen, parameters, carried, keeps_parts=True)
    return priced(localize(graph, shardings, key.tp).graph, graph, key.tp, "cuda"), tuple(shardings)


def _divides_heads(leaf: str, key: TraceKey) -> bool:
    return leaf not in ("key", "value") or key.spec.key_value_heads % key.tp == 0


def _module(spec: ModelSpec) -> tuple[nn.Module, Mapping[str, Any]]:
    with torch.device("meta"):
        tokens = torch.zeros(2, spec.sequence, dtype=torch.int64)
        batch = {"input_ids": tokens, "labels": tokens}
        match spec.architecture:
            case "gpt":
                return GPT(
                    GPTConfig(
                        layers=spec.layers, width=spec.hidden, heads=spec.heads, context=spec.sequence,
                        vocabulary=spec.vocabulary, dropout=spec.dropout,
                    )
                ), batch  # fmt: skip
            case "bert":
                return BERT(
                    BERTConfig(
                        layers=spec.layers, width=spec.hidden, heads=spec.heads, context=spec.sequence,
                        vocabulary=spec.vocabulary, dropout=spec.dropout,
                    )
                ), batch  # fmt: skip
            case "t5":
                targets = torch.zeros(2, spec.target_sequence, dtype=torch.int64)
                return T5(
                    T5Config(
                        layers=spec.layers, width=spec.hidden, heads=spec.heads, head=spec.head,
                        hidden=spec.ffn_hidden, vocabulary=spec.vocabulary, dropout=spec.dropout,
                    )
                ), {"input_ids": tokens, "labels": targets}  # fmt: skip
            case "llama":
                return Llama(
                    LlamaConfig(
                        layers=spec.layers, width=spec.hidden, heads=spec.heads,
                        key_value_heads=spec.key_value_heads, hidden=spec.ffn_hidden, vocabulary=spec.vocabulary,
                        context=spec.sequence, experts=spec.experts, experts_per_token=spec.experts_per_token,
                    )
                ), batch  # fmt: skip


def is_frozen(row: Row) -> bool:
    """Whether only adapters are trained."""
    return bool(_known(row).get("frozen", False))


def _known(row: Row) -> Mapping[str, Any]:
    """What the data file knows of a model of this name."""
    for entry in table("models")["model"]:
        if re.search(entry["pattern"], row.model, re.IGNORECASE):
            return dict(entry)
    return {}


@cache
def _sources() -> str:
    """A digest of all that a trace is made by: the code, and torch."""
    digest = hashlib.sha256(f"{CACHE_VERSION} {torch.__version__}".encode())
    root = Path(planner.__file__).parent
    files = [root / "graph.py", *(f for part in ("trace", "shard", "zoo") for f in sorted((root / part).rglob("*.py")))]
    for file in files:
        digest.update(file.read_bytes())
    own = "".join(inspect.getsource(function) for function in (_made, _split, _divides_heads, _module))
    digest.update(f"{own} {COLUMN_PARALLEL} {ROW_PARALLEL} {TOKEN_WISE}".encode())
    return digest.hexdigest()


def _cache_path(key: TraceKey) -> Path:
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torch-autoplan" / "traces"
    return root / _sources()[:16] / f"{hashlib.sha256(f'{_sources()} {key!r}'.encode()).hexdigest()[:40]}.pickle"


def _keep(path: Path, content: object) -> None:
    """Write it whole or not at all; a cache that cannot be written is no error."""
    try:
        if not path.parent.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            _forget_old(path.parent)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_bytes(pickle.dumps(content, protocol=pickle.HIGHEST_PROTOCOL))
        part.replace(path)
    except OSError:
        return


def _forget_old(own: Path) -> None:
    """Remove what earlier versions of the code traced and nobody has added to for a while."""
    for other in own.parent.iterdir():
        if other != own and other.is_dir() and time.time() - other.stat().st_mtime > KEPT_SECONDS:
            shutil.rmtree(other, ignore_errors=True)
