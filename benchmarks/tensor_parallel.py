"""What the layers of Llama and BERT communicate over the tensor-parallel axis: Megatron's formulas, planned, counted.

    python -m benchmarks.tensor_parallel [--json]

Two ways of Megatron-LM, whose matrices are given here as it holds them; everything else is chosen by the program:

    column/row         activations whole between layers (Shoeybi et al. 2019, arXiv 1909.08053, section 3): per layer
                       two all-reduces of [tokens, width] forward, two backward; one for the embedding of a split
                       vocabulary forward, one for its logits backward
    sequence parallel  activations split by tokens between layers (Korthikanti et al. 2022, arXiv 2205.05198, section
                       4.2.2): per layer two all-gathers and two reduce-scatters each way. Megatron keeps the part of
                       what it gathers and gathers it again in backward (two more all-gathers); this planner keeps it

The loss over a split vocabulary gathers four numbers of every rank for each token, once; Megatron sums three numbers
for each token, one after the other. `found` is the fastest way that the program finds when nothing is given.

Planned figures are of the real widths in bfloat16, with two layers (layers are alike, one is in the table), a
micro-batch of one sample and at most 4,096 tokens: with more, gathering the weights of attention would be cheaper than
gathering activations. Prices are given here, so that no profile of a machine decides. The counts are
of small models of the same kind, whose lowered blocks run on threads, forward and backward: `counted` is what was seen
there, `as planned` whether that was planned for them; what is `found` for them may be another way. Bytes are those of
one sample, as `planner.collectives` counts them.
"""

import argparse
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, cast

import torch
from torch import nn

from planner.graph import Block, Graph, Node
from planner.runtime.blocks import constant, lower_block, lower_prelude
from planner.runtime.parts import piece
from planner.runtime.peers import Peers
from planner.shard.localize import localize
from planner.shard.placement import Placement, R, Sharding, split
from planner.shard.program import Prices, resharded, variants
from planner.shard.rules.special import inner_collectives
from planner.trace import priced, trace
from planner.trace.parallel import Communicator, Threads
from planner.zoo.bert import BERT, BERTConfig
from planner.zoo.llama import Llama, LlamaConfig
from planner.zoo.registry import CONFIGS

Form = Literal["column/row", "sequence parallel", "found"]
Phase = Literal["forward", "backward"]
Seen = Counter[tuple[str, float]]  # (collective, bytes of one for one sample)
Where = tuple[str, Phase]  # part of the model, pass

FORMS: tuple[Form, ...] = ("column/row", "sequence parallel", "found")
PARTS = ("embedding", "layer", "head", "loss")
PHASES: tuple[Phase, ...] = ("forward", "backward")
COLUMN = ("query", "key", "value", "gate", "up", "tokens", "head")  # split by what they make; vocabularies too
ROW = ("out", "down")  # split by what they take
SAMPLES = 2

# Of rings, for sequence parallel and what is found: bytes alone decide. Latencies would have BERT mix both ways, whose
# layers are small.
_RINGS = Prices(
    flop_per_second=6e14, bytes_per_second=2.5e12, kernel_seconds=0.0,
    collective_seconds=lambda kind, num_bytes: num_bytes / 2e11 * (2 if kind == "all_reduce" else 1),
    micro_batch=1, num_microbatches=8,
)  # fmt: skip
# For column/row: where a switch sums, an all-reduce is no slower than the all-gather of as many bytes.
_IN_SWITCH = replace(_RINGS, collective_seconds=lambda _, num_bytes: num_bytes / 2e11)
# Of a machine so slow that small models are worth splitting.
_SLOW = Prices(
    flop_per_second=1e11, bytes_per_second=1e12, kernel_seconds=0.0,
    collective_seconds=lambda kind, num_bytes: 1e-5 + num_bytes / 2e9 * (2 if kind == "all_reduce" else 1),
    micro_batch=SAMPLES, num_microbatches=8,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model at real width and a small one of its kind, on so many ranks."""

    model: str
    degree: int
    small: LlamaConfig | BERTConfig
    small_degree: int

    @property
    def config(self) -> LlamaConfig | BERTConfig:
        """With two layers, and no more tokens than make weights cheaper to gather than activations."""
        config = cast("LlamaConfig | BERTConfig", CONFIGS[self.model])
        return replace(config, layers=2, context=min(config.context, 4096))


CASES = (
    Case(
        model="llama3-8b", degree=8, small_degree=2,
        small=LlamaConfig(
            layers=2, width=64, heads=4, key_value_heads=2, hidden=176, vocabulary=1024, context=32
        ),
    ),
    Case(  # 30,522 tokens are two parts, not four or eight
        model="bert-large", degree=2, small_degree=2,
        small=BERTConfig(layers=2, width=64, heads=4, context=32, vocabulary=1026),
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The collectives of one part of a model in one pass: `number` of each kind and bytes of all of them for a sample.

    `megatron` is empty where Megatron has none of this form. The small model's are `counted` and planned.
    """

    model: str
    degree: int
    form: Form
    part: str
    phase: Phase
    megatron: tuple[tuple[str, int, float], ...]
    planned: tuple[tuple[str, int, float], ...]
    small_planned: tuple[tuple[str, int, float], ...]
    counted: tuple[tuple[str, int, float], ...]

    @property
    def is_as_planned(self) -> bool:
        """Whether the small model communicates what was planned."""
        return self.counted == self.small_planned


def megatron(form: Form, config: LlamaConfig | BERTConfig, *, element_bytes: int = 2) -> dict[Where, Seen]:
    """Megatron's collectives by part and pass."""
    tokens = element_bytes * config.context * config.width
    if form == "found":
        return {}
    if form == "column/row":
        layer = {p: Counter({("all_reduce", tokens): 2}) for p in PHASES}
        embedding = {"forward": Counter({("all_reduce", tokens): 1}), "backward": Counter()}
        head = {"forward": Counter(), "backward": Counter({("all_reduce", tokens): 1})}
    else:
        layer = {p: Counter({("all_gather", tokens): 2, ("reduce_scatter", tokens): 2}) for p in PHASES}
        embedding = {
            p: Counter({(k, tokens): 1}) for p, k in zip(PHASES, ("reduce_scatter", "all_gather"), strict=True)
        }
        head = {p: Counter({(k, tokens): 1}) for p, k in zip(PHASES, ("all_gather", "reduce_scatter"), strict=True)}
    loss = {"forward": Counter({("all_reduce", 4 * config.context): 3}), "backward": Counter()}
    found: dict[str, Any] = {"embedding": embedding, "layer": layer, "head": head, "loss": loss}
    return {(part, phase): found[part][phase] for part in PARTS for phase in PHASES}


def graph_of(config: LlamaConfig | BERTConfig, *, precision: str, device: str) -> tuple[Graph, nn.Module]:
    """The trace of a model of the zoo."""
    torch.manual_seed(0)
    with torch.device(device):
        model = Llama(config) if isinstance(config, LlamaConfig) else BERT(config)
        ids = torch.zeros(SAMPLES, config.context, dtype=torch.long)
    kind: Literal["cpu", "cuda"] = "cpu" if device == "cpu" else "cuda"
    return trace(model, {"input_ids": ids, "labels": ids}, precision=precision, device_kind=kind), model


def shardings_of(graph: Graph, degree: int, form: Form, priced_as: Prices) -> tuple[Sharding, ...]:
    """How the blocks are split: with Megatron's matrices and layouts, or as the program finds it.

    Sequence parallel is of rings always.
    """
    if form == "found":
        return variants(graph, degree, priced_as)[0].shardings
    held: dict[str, Placement] = {}
    for tensor in graph.tensors:
        if tensor.kind == "parameter" and len(tensor.shape) == 2:
            leaf = tensor.name.split(".")[-2]
            if leaf in (*COLUMN, *ROW):
                dim = int(leaf in ROW)
                held[tensor.name] = split(dim, [tensor.shape[dim]])
    between = {t for block in graph.blocks for t in block.outputs} - {graph.loss}
    carried = {t: R if form == "column/row" else split(1, [graph.tensors[t].shape[1]]) for t in between}
    return resharded(graph, degree, priced_as if form == "column/row" else _RINGS, held, carried)


def part_of(graph: Graph, block: Block) -> str:
    """Which part of the model a block is."""
    if graph.loss in {t for i in block.nodes for t in graph.nodes[i].outputs}:
        return "head"
    return "layer" if block.inputs else "embedding"


def planned(
    whole: Graph, shardings: Sequence[Sharding], degree: int, device: Literal["cpu", "cuda"]
) -> dict[Where, Seen]:
    """What the blocks of a rank communicate by their prices; of equal layers one. The loss is a part of its own."""
    local = localize(whole, shardings, degree).graph
    graph = priced(local, whole, degree, device)
    found: dict[Where, Seen] = {}
    for block in graph.blocks:
        part = part_of(graph, block)
        for phase in PHASES:
            found[part, phase] = Counter(
                (made.collective, made.num_bytes.per_sample + made.num_bytes.fixed / SAMPLES)
                for made in graph.classes[block.class_index].collectives
                if made.phase == phase
            )
    return _with_loss(found, whole, local, degree)


def _with_loss(found: dict[Where, Seen], whole: Graph, local: Graph, degree: int) -> dict[Where, Seen]:
    """The collectives of the head without those inside of its loss, and those."""
    inside: dict[Phase, Seen] = {phase: Counter() for phase in PHASES}
    for node in _loss_operators(local):
        for phase, collective, num_bytes in inner_collectives(node.op, node.args, whole.tensors, degree):
            inside[phase][collective, num_bytes.per_sample + num_bytes.fixed / SAMPLES] += 1
    for phase in PHASES:
        assert inside[phase] <= found["head", phase], (inside, found)
        found["head", phase] -= inside[phase]
        found["loss", phase] = inside[phase]
    return found


def _loss_operators(local: Graph) -> Iterator[Node]:
    return (local.nodes[i] for i in local.blocks[-1].nodes if "cross_entropy" in local.nodes[i].op)


class Counting:
    """A communicator of one rank that notes what its collectives move."""

    def __init__(self, inner: Communicator) -> None:
        self._inner = inner
        self.rank, self.size = inner.rank, inner.size
        self.seen: Seen = Counter()

    def _noted(self, collective: str, x: torch.Tensor) -> None:
        self.seen[collective, x.numel() * x.element_size() / SAMPLES] += 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Noted with what each rank gives."""
        self._noted("all_reduce", x)
        return self._inner.all_reduce(x)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Noted with the whole."""
        result = self._inner.all_gather(x)
        self._noted("all_gather", result)
        return result

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """Noted with the whole."""
        self._noted("reduce_scatter", x)
        return self._inner.reduce_scatter(x)

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        """Noted with the part of a rank."""
        self._noted("all_to_all", x)
        return self._inner.all_to_all(x)

    def all_to_all_rows(self, x: torch.Tensor, sends: Sequence[int], receives: Sequence[int]) -> torch.Tensor:
        """As many rows are sent as received: noted as the all-to-all that it is."""
        self._noted("all_to_all", x)
        return self._inner.all_to_all_rows(x, sends, receives)


def counted(
    graph: Graph, model: nn.Module, shardings: Sequence[Sharding], degree: int
) -> tuple[dict[Where, Seen], float]:
    """What the lowered blocks of a rank communicate, block after block and back; and the loss.

    All ranks must communicate alike, and layers as well.
    """
    local = localize(graph, shardings, degree)
    values = {t.name: model.get_parameter(t.name) for t in graph.tensors if t.kind == "parameter"}
    draws = torch.Generator().manual_seed(0)

    def tensor(index: int, rank: int) -> torch.Tensor:
        described = local.graph.tensors[index]
        if described.kind == "constant":
            return constant(local.graph, index, torch.device("cpu"))
        part = piece(values[described.name].detach(), local.placements.get(index, R), rank, degree)
        return nn.Parameter(part.clone(), described.requires_grad)

    vocabulary = next(t.shape[0] for t in graph.tensors if t.name.endswith("tokens.weight"))
    context = graph.tensors[graph.inputs[0]].shape[1]
    ids = torch.randint(cast("int", vocabulary), (SAMPLES, cast("int", context)), generator=draws)
    inputs = dict.fromkeys(graph.inputs, ids)

    def work(communicator: Communicator) -> tuple[dict[Where, Seen], float]:
        return _run(local.graph, Counting(communicator), lambda index: tensor(index, communicator.rank), inputs)

    (first, loss), *others = Threads(degree).run(work)
    assert all((seen, value) == (first, loss) for seen, value in others), "ranks communicate otherwise"
    return _with_loss(first, graph, local.graph, degree), loss


class _Made(dict[int, torch.Tensor]):
    """Parameters and constants by index, made when they are asked for."""

    def __init__(self, make: Callable[[int], torch.Tensor]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, index: int) -> torch.Tensor:
        self[index] = self._make(index)
        return self[index]


def _run(
    graph: Graph, communicator: Counting, make: Callable[[int], torch.Tensor], inputs: Mapping[int, torch.Tensor]
) -> tuple[dict[Where, Seen], float]:
    """One rank: each block alone, its inputs cut off from the block before, so that passes can be told apart."""
    cpu, peers = torch.device("cpu"), Peers.of({"tp": communicator})
    attributes = _Made(make)
    env = dict(inputs)
    needed = [t for block in graph.blocks for t in block.shared]
    prelude = lower_prelude(graph, needed, attributes=attributes, micro_batch=SAMPLES, device=cpu)
    if prelude is not None:
        env.update(zip(prelude.outputs, prelude(*(env[t] for t in prelude.inputs)), strict=True))
    found: dict[Where, Seen] = {}
    runs: list[tuple[Block, dict[int, Any]]] = []
    for block in graph.blocks:
        lowered = lower_block(
            graph, block, tied=(), attributes=attributes, micro_batch=SAMPLES, device=cpu, peers=peers
        )  # fmt: skip
        communicator.seen = Counter()
        made = dict(zip(lowered.outputs, lowered(*(env[t] for t in lowered.inputs)), strict=True))
        _note(found, (part_of(graph, block), "forward"), communicator.seen)
        env.update({t: value.detach().requires_grad_(value.requires_grad) for t, value in made.items()})
        runs.append((block, made))
    env[graph.loss].grad = torch.ones(())
    for block, made in reversed(runs):
        communicator.seen = Counter()
        moving = [t for t in made if env[t].grad is not None]
        torch.autograd.backward([made[t] for t in moving], [env[t].grad for t in moving])
        _note(found, (part_of(graph, block), "backward"), communicator.seen)
    return found, env[graph.loss].item()


def _note(found: dict[Where, Seen], where: Where, seen: Seen) -> None:
    assert found.setdefault(where, seen) == seen, f"layers communicate otherwise: {found[where]} and {seen}"


def rows(case: Case, forms: Collection[Form] = FORMS) -> Iterator[Row]:
    """The parts of a model, forward and backward, split in each of the forms."""
    real, _ = graph_of(case.config, precision="bf16", device="meta")
    small, model = graph_of(case.small, precision="fp32", device="cpu")
    for form in forms:
        formula = megatron(form, case.config)
        priced_as = _IN_SWITCH if form == "column/row" else _RINGS
        figures = planned(real, shardings_of(real, case.degree, form, priced_as), case.degree, "cuda")
        shardings = shardings_of(small, case.small_degree, form, _SLOW)
        small_figures = planned(small, shardings, case.small_degree, "cpu")
        seen, _ = counted(small, model, shardings, case.small_degree)
        for part in PARTS:
            for phase in PHASES:
                where = part, phase
                yield Row(
                    model=case.model, degree=case.degree, form=form, part=part, phase=phase,
                    megatron=_listed(formula.get(where, Counter())), planned=_listed(figures[where]),
                    small_planned=_listed(small_figures[where]), counted=_listed(seen[where]),
                )  # fmt: skip


def _listed(seen: Seen) -> tuple[tuple[str, int, float], ...]:
    """(collective, number, bytes of one for one sample), in order."""
    return tuple((collective, number, num_bytes) for (collective, num_bytes), number in sorted(seen.items()))


def _text(entries: Sequence[tuple[str, int, float]]) -> str:
    return ", ".join(f"{number} {collective} {num_bytes / 2**20:.3g}" for collective, number, num_bytes in entries)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    is_json = parser.parse_args().json
    found = [row for case in CASES for row in rows(case)]
    if is_json:
        print(json.dumps([asdict(row) for row in found], indent=1))
        return
    for model, degree, form in dict.fromkeys((row.model, row.degree, row.form) for row in found):
        print(f"{model}, {degree} ranks, {form}: collectives, MiB of each for a sample")
        print(f"  {'part':10}{'pass':10}{'Megatron':42}{'planned':42}{'small: counted':50}as planned")
        for row in found:
            if (row.model, row.degree, row.form) == (model, degree, form) and (row.megatron or row.planned):
                print(
                    f"  {row.part:10}{row.phase:10}{_text(row.megatron):42}{_text(row.planned):42}"
                    f"{_text(row.counted):50}{'yes' if row.is_as_planned else 'NO'}"
                )
        print()


if __name__ == "__main__":
    main()
