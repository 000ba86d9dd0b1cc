"""What the ranks of the tests of split parameters run: values come in, are trained element by element, and leave."""

import gc
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from planner.errors import PlannerError
from planner.graph import Graph
from planner.runtime.execute import Owned
from planner.runtime.initialise import materialise
from planner.runtime.parts import TensorParallel
from planner.runtime.weights import StateTemplate, Values, fill, take
from planner.runtime.zero import Sharder, local
from planner.shard.placement import Placement
from planner.trace import trace
from tests.distributed_cases import Kind, build, graph_of, make_plan
from tests.weight_cases import SEED, Live, different, on_meta, state_of

CPU = torch.device("cpu")
STEPS = 3
KERNELS: Mapping[str, dict[str, Any]] = {"own": {"foreach": True}, "file": {"fused": True}, "drawn": {}}  # by source


class Mixed(nn.Module):
    """A parameter of every form that a plan may split, and of some that it may not."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(12, 8)
        self.norm = nn.BatchNorm1d(8)
        self.qkv = nn.Linear(8, 16)  # of 8 queries, 4 keys, 4 values
        self.transposed = nn.Linear(24, 8)  # its second dim is of three parts
        self.thin = nn.Linear(8, 2)  # fewer rows than ranks
        self.odd = nn.Linear(8, 3)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.tokens.weight
        self.gain = nn.Parameter(torch.empty(()))
        self.spare = nn.Parameter(torch.empty(3))  # nothing reads it
        self.frozen = nn.Parameter(torch.empty(8), requires_grad=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for parameter in (self.gain, self.spare, self.frozen):
            nn.init.normal_(parameter)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.norm(self.tokens(x).sum(1) + self.frozen)
        q = self.qkv(h)[:, :8] * self.gain
        h = self.transposed(torch.cat([q, h, q], 1))
        rest: Tensor = self.thin(h).square().mean() + self.odd(h).square().mean()
        return nn.functional.cross_entropy(self.head(h), y) + rest


MIXED = {
    "tokens.weight": "S0[12]", "norm.weight": "S0[8]", "norm.bias": "S0[8]", "norm.running_mean": "S0[8]",
    "norm.running_var": "S0*2[4]", "qkv.weight": "S0[8,4,4]", "qkv.bias": "S0[8,4,4]", "transposed.weight": "S1*3[8]",
    "transposed.bias": "R", "thin.weight": "S0[2]", "thin.bias": "S0[2]", "odd.weight": "Q", "odd.bias": "Q",
}  # fmt: skip
GPT2 = {
    "transformer.wpe.weight": "Q",
    "attn.c_attn.weight": "S1*3[16]", "attn.c_attn.bias": "S0*3[16]", "attn.c_proj.weight": "S0[16]",
    "mlp.c_fc.weight": "S1[64]", "mlp.c_fc.bias": "S0[64]", "mlp.c_proj.weight": "S0[64]",
}  # fmt: skip
GPT = {
    "attention.qkv.weight": "S0*3[16]", "attention.qkv.bias": "S0*3[16]", "attention.out.weight": "S1[16]",
    "mlp.up.weight": "S0[64]", "mlp.up.bias": "S0[64]", "mlp.down.weight": "S1[64]",
    "tokens.weight": "S1[16]", "head.weight": "S1[16]", "positions.weight": "S1[16]",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, where its values come from, and the ranks that hold it."""

    model: str
    tp: int
    dp: int = 1
    shards: int = 0  # of `dp`; 0: all
    zero: int = 1

    @property
    def name(self) -> str:
        return f"{self.model} tp{self.tp}xdp{self.dp}" + (f" of {self.shards}" if self.shards else f" ZeRO-{self.zero}")


def made(model: str, *, device: str = "cpu") -> nn.Module:
    if model != "mixed":
        return build(model) if device == "cpu" else on_meta(model)
    torch.manual_seed(SEED)
    with torch.device(device):
        return Mixed().double()


@cache
def graph(model: str) -> Graph:
    if model != "mixed":
        return graph_of(model)
    batch = {"x": torch.arange(30).reshape(6, 5) % 12, "y": torch.arange(6)}
    traced = trace(made(model), batch, precision="fp64", name=model, device_kind="cpu")
    assert not traced.fallbacks, traced.fallbacks
    return traced


def placements(model: str, tp: int) -> dict[str, Placement]:
    """By the full names of the model; the suffixes of `GPT` are those of every block."""
    patterns = {"mixed": MIXED, "hf-gpt2": GPT2}.get(model, GPT)
    module = made(model, device="meta")
    names = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]
    found = {name: text for name in names for end, text in patterns.items() if name == end or name.endswith(f".{end}")}
    if model == "mixed" and tp == 4:
        found |= {"thin.weight": "S1*2[4]", "thin.bias": "R", "norm.running_var": "S0[4,4]"}
    return {name: Placement.parse(text) for name, text in found.items()}


class Held:
    """The parameters and buffers of one case on this rank, registered and wrapped as a stage has them."""

    def __init__(
        self, case: Case, module: nn.Module, weights: Any = None, mapping: Mapping[str, Placement] | None = None
    ) -> None:
        shards = case.shards or (case.dp if case.zero else 1)
        self.mesh = init_device_mesh(
            "cpu", (1, case.dp // shards, shards, case.tp), mesh_dim_names=("pp", "dp_replicate", "dp_shard", "tp")
        )
        self.graph = graph(case.model)
        plan = make_plan(self.graph, Kind(name="", dp=case.dp, shards=shards, zero=(case.zero,)))
        self.parallel = TensorParallel(self.mesh["tp"], placements(case.model, case.tp) if mapping is None else mapping)
        self.values = Values(module, weights=weights, seed=SEED, device=CPU)
        self.template = StateTemplate(module, plan, self.graph, self.values, self.parallel)
        sharder = Sharder(self._data_mesh(case, shards), "fp64")
        taken = take(
            module, plan, self.graph, 0, CPU, values=self.values, wrapped=sharder.mesh is not None,
            parallel=self.parallel,
        )  # fmt: skip
        self.root = nn.Module()
        self.owned: list[Owned] = []
        tied = {tensor for tensor, _ in self.graph.tie_groups}
        for position, block in enumerate(self.graph.blocks):
            child = nn.Module()
            self.root.add_module(str(position), child)
            self._register(child, [t for t in block.parameters if t not in tied], taken)
            sharder.wrap(child, case.zero)
        self._register(self.root, sorted(tied), taken)
        sharder.wrap(self.root, case.zero)
        fill(self.root, self.owned, self.values, CPU, self.parallel)
        written = {t for n in self.graph.nodes for t in n.mutates if self.graph.tensors[t].kind == "buffer"}
        self.current = {self.graph.tensors[t].name: taken[t] for t in sorted(written)}
        self.engine = cast("Any", SimpleNamespace(owned=self.owned, buffers=lambda: self.current))

    def _data_mesh(self, case: Case, shards: int) -> DeviceMesh | None:
        if case.dp == 1:
            return None
        if shards not in (1, case.dp):
            return self.mesh["dp_replicate", "dp_shard"]
        return self.mesh["dp_shard" if case.zero else "dp_replicate"]

    def _register(self, module: nn.Module, tensors: list[int], taken: Mapping[int, Tensor]) -> None:
        for tensor in tensors:
            module.register_parameter(f"p{tensor}", cast("nn.Parameter", taken[tensor]))
            self.owned.append(Owned(name=self.graph.tensors[tensor].name, module=module, leaf=f"p{tensor}"))

    def state(self) -> dict[str, Any]:
        return self.template.fill(self.mesh["pp"].get_group(), self.engine, CPU, rank0_only=False)

    def own_bytes(self) -> int:
        return sum(local(owned.parameter).nbytes for owned in self.owned)


def _step(optimizer: torch.optim.Optimizer) -> None:
    """With gradients that depend on the values alone, element by element."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = parameter.detach().sin()
    optimizer.step()


def held(case: Case, source: str, folder: Path) -> dict[str, Any]:
    """Values from the model itself, from `folder`, or drawn on meta; then some steps of AdamW; then on disk.

    `folder` gets a directory `saved`.
    """
    given = made(case.model, device="meta" if source == "drawn" else "cpu")
    one = materialise(given, seed=SEED) if source == "drawn" else given
    expected = state_of(one)
    module = made(case.model, device="cpu" if source == "own" else "meta")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns of tensors that two axes shard along one dim
        mine = Held(case, module, str(folder / "given") if source == "file" else None)
        result: dict[str, Any] = {"start": different(mine.state(), expected)}
    result |= {"read": mine.values.bytes_read, "own": mine.own_bytes(), "kinds": _kinds(mine)}
    trained = {owned.name: owned.parameter for owned in mine.owned if owned.parameter.requires_grad}
    optimizer = torch.optim.AdamW(list(trained.values()), lr=0.1, **KERNELS[source])
    wanted = {name: parameter for name, parameter in one.named_parameters() if name in trained}
    reference = torch.optim.AdamW(list(wanted.values()), lr=0.1, **KERNELS[source])
    for _ in range(STEPS):
        _step(optimizer)
        _step(reference)
    gradients = {o.name: mine.template.whole(o, o.parameter.grad) for o in mine.owned if o.name in trained}
    result["gradients"] = [
        name for name, value in gradients.items() if not torch.equal(value, cast("Tensor", wanted[name].grad))
    ]
    with torch.no_grad():  # what a block does to its part of the running statistics
        for name, buffer in mine.current.items():
            buffer += 1 if not buffer.is_floating_point() else buffer.sin()
            full = dict(one.named_buffers())[name]
            full += 1 if not full.is_floating_point() else full.sin()
    result["end"] = different(mine.state(), state_of(one))
    gc.collect()
    with Live() as live:
        files = mine.template.save(
            folder / "saved", mine.engine, stage=0, is_writer=dist.get_rank() == 0, max_shard_bytes=10_000, dtype=None
        )
    return result | {"saved": files, "state": state_of(one), "held": live.most}


def _kinds(mine: Held) -> dict[str, str]:
    """Name -> torch's placements."""
    return {
        o.name: "".join(str(p) for p in o.parameter.placements) if isinstance(o.parameter, DTensor) else "plain"
        for o in mine.owned
    }


def refused(mapping: dict[str, str]) -> str:
    """What is said to placements that do not fit `Mixed`."""
    case = Case(model="mixed", tp=dist.get_world_size())
    try:
        Held(case, made("mixed"), mapping={name: Placement.parse(text) for name, text in mapping.items()})
    except PlannerError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def held_while_starting(case: Case, weights: str | None) -> dict[str, int]:
    """The most bytes alive on this rank while a model on meta gets its values, beside what it keeps."""
    Held(case, made(case.model, device="meta"), weights)  # what torch makes once
    gc.collect()
    with Live() as live:
        mine = Held(case, made(case.model, device="meta"), weights)
    model = made(case.model)
    return {
        "most": live.most,
        "own": mine.own_bytes(),
        "read": mine.values.bytes_read,
        "largest tensor": max(p.nbytes for p in model.parameters()),
        "largest module": max(sum(p.nbytes for p in m.parameters(recurse=False)) for m in model.modules()),
        "model": sum(p.nbytes for p in model.parameters()),
    }
