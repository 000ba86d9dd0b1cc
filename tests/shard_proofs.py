"""Proof of a sharding rule: run a node's option on the parts of random tensors, put together, compare with the whole.

An example is a call of an operator, spelled with `tensor(...)` for its operands; what it makes is found by running it.
"""

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from planner.graph import Arg, Batch, Node, Ref, Size, Tensor
from planner.shard.placement import Option, Placement, local_shape, operands_of
from planner.shard.rules import options
from planner.shard.rules.special import inner_collectives
from planner.trace.aten import call_node, materialize, torch_operator
from planner.trace.parallel import Communicator, Threads, bound, piece_of
from planner.trace.pricing import price_nodes
from tests.sharded import apart, together

MICRO_BATCH = 2
AXIS = "tp"
CPU = torch.device("cpu")

Values = Callable[[torch.Generator, list[int]], torch.Tensor]


def _uniform(generator: torch.Generator, shape: list[int]) -> torch.Tensor:
    return torch.rand(shape, generator=generator, dtype=torch.float64) * 0.8 + 0.1  # in the domain of every function


def normal(generator: torch.Generator, shape: list[int]) -> torch.Tensor:
    """Values of both signs."""
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def integers(high: int) -> Values:
    """Integers in [0, high)."""
    return lambda generator, shape: torch.randint(high, shape, generator=generator)


def booleans(generator: torch.Generator, shape: list[int]) -> torch.Tensor:
    """True and false, the first of each row true."""
    found = torch.rand(shape, generator=generator) > 0.4
    found[..., 0] = True
    return found


@dataclass(frozen=True, eq=False)
class Operand:
    """A tensor of an example; `kind` is that of `planner.graph.Tensor`."""

    shape: tuple[Size, ...]
    values: Values = _uniform
    has_gradient: bool = True
    kind: Any = "activation"
    seeds: tuple[str, ...] = ()


def tensor(*shape: Size, values: Values = _uniform, has_gradient: bool = True, seeds: Iterable[str] = ()) -> Operand:
    """An operand; `seeds` are splits that it may have."""
    return Operand(shape, values, has_gradient, seeds=tuple(seeds))


def buffer(*shape: Size) -> Operand:
    """What an operator writes in place."""
    return Operand(shape, _uniform, False, "buffer")


@dataclass(frozen=True)
class Example:
    """A call. `made_seeds` are splits that its outputs may have; `mutates` are positions of arguments it writes.

    `expected` are options (as text) that must be among those found.
    """

    op: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    made_seeds: Mapping[int, Sequence[str]] = field(default_factory=dict)
    mutates: tuple[int, ...] = ()
    expected: tuple[str, ...] = ()
    never: tuple[str, ...] = ()
    degrees: tuple[int, ...] = (2,)

    def __str__(self) -> str:
        shapes = [list(a.shape) for a in self.args if isinstance(a, Operand)]
        return f"{self.op}{shapes}".replace("Batch(per_sample=1)", "B").replace("Batch(per_sample=", "B(")


def example(op: str, *args: Any, **rest: Any) -> Example:
    """An example; keywords of `Example`, others are the call's own."""
    own = {k: rest.pop(k) for k in ("made_seeds", "mutates", "expected", "never", "degrees") if k in rest}
    return Example(op, args, rest, **own)


@dataclass(frozen=True)
class Made:
    """An example as a node of a graph, with values for its operands."""

    node: Node
    tensors: tuple[Tensor, ...]
    values: Mapping[int, torch.Tensor]
    seeds: Mapping[int, tuple[Placement, ...]]
    gradients: frozenset[int]

    def options(self, degree: int) -> tuple[Option, ...]:
        """What the rule allows."""
        return options(self.node, self.tensors, degree, self.seeds, self.gradients)


def make(given: Example) -> Made:
    """The node of an example; sizes of what it makes are found by running it for two micro-batches."""
    operands: list[Operand] = []

    def frozen(arg: Any) -> Arg:
        if isinstance(arg, Operand):
            if arg not in operands:
                operands.append(arg)
            return Ref(operands.index(arg))
        if isinstance(arg, list | tuple):
            return tuple(frozen(item) for item in arg)
        plain: Arg = arg
        return plain

    args = tuple(frozen(arg) for arg in given.args)
    kwargs = tuple((key, frozen(arg)) for key, arg in given.kwargs.items())
    runs = []
    for micro_batch in (MICRO_BATCH, MICRO_BATCH + 1):
        generator = torch.Generator().manual_seed(zlib.crc32(str(given).encode()))
        values = {i: o.values(generator, _concrete(o.shape, micro_batch)) for i, o in enumerate(operands)}
        node = Node(name="n", op=given.op, args=args, kwargs=kwargs, outputs=())
        runs.append((values, _results(_called(node, {i: v.clone() for i, v in values.items()}, micro_batch, {}))))
    values, results = runs[0]
    shapes = [
        tuple(a if a == b else Batch(b - a) for a, b in zip(one.shape, two.shape, strict=True))
        for one, two in zip(results, runs[1][1], strict=True)
    ]
    count = len(operands)
    tensors = [
        Tensor(name=f"t{i}", shape=o.shape, dtype=_dtype(values[i]), kind=o.kind) for i, o in enumerate(operands)
    ] + [
        Tensor(name=f"o{i}", shape=s, dtype=_dtype(r), kind="activation")
        for i, (s, r) in enumerate(zip(shapes, results, strict=True))
    ]
    with_gradient = {i for i, o in enumerate(operands) if o.has_gradient and values[i].is_floating_point()}
    gradients = with_gradient | {count + i for i, r in enumerate(results) if with_gradient and r.is_floating_point()}
    if "detach" in given.op:
        gradients = with_gradient
    seeds: dict[int, tuple[Placement, ...]] = {
        i: tuple(map(Placement.parse, o.seeds)) for i, o in enumerate(operands) if o.seeds
    }
    seeds |= {count + i: tuple(map(Placement.parse, texts)) for i, texts in given.made_seeds.items()}
    node = Node(
        name="n", op=given.op, args=args, kwargs=kwargs, outputs=tuple(range(count, count + len(results))),
        returns_list=_is_list(given.op),
        mutates=tuple(a.tensor for p in given.mutates if isinstance(a := args[p], Ref)),
    )  # fmt: skip
    return Made(node, tuple(tensors), values, seeds, frozenset(gradients))


def _is_list(op: str) -> bool:
    schema = getattr(torch_operator(op), "_schema", None)
    return schema is not None and (len(schema.returns) != 1 or "List" in str(schema.returns[0].type))


def _results(result: Any) -> list[torch.Tensor]:
    return list(result) if isinstance(result, list | tuple) else [result]


def _concrete(shape: Sequence[Size], micro_batch: int) -> list[int]:
    return [s.per_sample * micro_batch if isinstance(s, Batch) else s for s in shape]


def _dtype(value: torch.Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")


def _called(node: Node, env: Mapping[int, torch.Tensor], micro_batch: int, replace: Mapping[str, Any]) -> Any:
    function = replace.get(node.op) or torch_operator(node.op)
    args = [materialize(arg, env, micro_batch, CPU) for arg in node.args]
    return function(*args, **{k: materialize(a, env, micro_batch, CPU) for k, a in node.kwargs})


def check(given: Example) -> None:
    """Every option of an example is proven, there is a split, and what was expected is found."""
    made = make(given)
    for degree in given.degrees:
        found = made.options(degree)
        texts = [str(option) for option in found]
        assert len(set(texts)) == len(texts), f"{given}: {texts}"
        for option in found:
            prove(made, option, degree)
        is_split = [any(p is not None and p.is_split for p in (*o.operands, *o.outputs)) for o in found]
        assert any(is_split), f"{given} has no split over {degree} ranks"
        for text in given.never:
            assert not any(text in one for one in texts), f"{given} over {degree} ranks: {text} is in {texts}"
    missing = set(given.expected) - {str(option) for degree in given.degrees for option in made.options(degree)}
    assert not missing, f"{given} has no {missing}"


def prove(made: Made, option: Option, degree: int) -> None:
    """Values and gradients of `option` on `degree` ranks, put together, are those of the whole."""
    rng = torch.Generator().manual_seed(5)
    whole = _run(made.node, made, {i: v.clone() for i, v in made.values.items()}, {}, {})
    incoming = {
        t: torch.randn(whole.values[t].shape, generator=rng, dtype=whole.values[t].dtype)
        for t in made.node.outputs
        if t is not None and t in made.gradients
    }
    whole = _run(made.node, made, {i: v.clone() for i, v in made.values.items()}, incoming, {})
    placed = dict(zip(operands_of(made.node), option.operands, strict=True))
    out = {t: p for t, p in zip(made.node.outputs, option.outputs, strict=True) if t is not None and p is not None}
    parts = {t: apart(v, placed[t], degree, micro_batch=MICRO_BATCH) for t, v in made.values.items()}
    given = {t: apart(g, out[t], degree, micro_batch=MICRO_BATCH, is_gradient=True) for t, g in incoming.items()}
    node = _of_rank(made.node, option)

    made_inside: list[tuple[str, str, float]] = []

    def on_rank(c: Communicator) -> "_Ran":
        c = Counted(c, made_inside if c.rank == 0 else [])
        operators = {**bound({AXIS: c}), "planner.dropout.default": _dropped(c)}
        env = {t: p[c.rank].clone() for t, p in parts.items()}
        return _run(node, made, env, {t: g[c.rank] for t, g in given.items()}, operators)

    ranks = Threads(degree).run(on_rank)
    declared = [
        (phase, collective, num_bytes.at(MICRO_BATCH))
        for phase, collective, num_bytes in inner_collectives(option.op, option.args, made.tensors, degree)
        if phase == "forward" or given
    ]
    assert made_inside == declared, f"{option}: {made_inside} are made inside, {declared} are declared"
    for t, placement in (*out.items(), *((t, placed[t]) for t in made.node.mutates if t not in out)):
        expected_shape = _concrete(local_shape(made.tensors[t].shape, placement, degree), MICRO_BATCH)
        for ran in ranks:
            assert list(ran.values[t].shape) == expected_shape, f"{option}: tensor {t} is {list(ran.values[t].shape)}"
            assert ran.values[t].dtype == whole.values[t].dtype, f"{option}: tensor {t} is {ran.values[t].dtype}"
        _assert_equal([r.values[t] for r in ranks], whole.values[t], placement, f"{option}: value {t}")
    for t, gradient in whole.gradients.items():
        found = [r.gradients[t] for r in ranks]
        _assert_equal(found, gradient, placed[t], f"{option}: gradient {t}", is_gradient=True)


def _assert_equal(
    ranks: list[torch.Tensor], whole: torch.Tensor, placement: Placement, what: str, *, is_gradient: bool = False
) -> None:
    found = together(ranks, placement, micro_batch=MICRO_BATCH, is_gradient=is_gradient)
    torch.testing.assert_close(
        found, whole, rtol=1e-9, atol=1e-10, equal_nan=True, msg=lambda text: f"{what} {placement}: {text}"
    )


class Counted:
    """A communicator that writes down what it is asked for: pass, collective, bytes as `planner.collectives` does."""

    def __init__(self, inner: Communicator, made: list[tuple[str, str, float]]) -> None:
        self._inner = inner
        self._made = made
        self.rank = inner.rank
        self.size = inner.size

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._inner, name)
        if not callable(function):
            return function

        def counted(x: torch.Tensor, *args: Any) -> Any:
            factor = self.size if name == "all_gather" else 1
            is_backward = torch._C._current_autograd_node() is not None  # private: nothing public tells
            phase, kind = "backward" if is_backward else "forward", name.removesuffix("_rows")
            self._made.append((phase, kind, factor * x.numel() * x.itemsize))
            return function(x, *args)

        return counted


@dataclass(frozen=True)
class _Ran:
    values: Mapping[int, torch.Tensor]
    gradients: Mapping[int, torch.Tensor]


def _run(
    node: Node,
    made: Made,
    operands: Mapping[int, torch.Tensor],
    incoming: Mapping[int, torch.Tensor],
    operators: Mapping[str, Any],
) -> _Ran:
    leaves = {t: v.requires_grad_() if t in made.gradients else v for t, v in operands.items() if t < len(made.values)}
    env = {t: v.clone() if t in made.gradients else v for t, v in leaves.items()}
    if node.op == "aten.dropout.default":
        operators = {**operators, node.op: _dropped(None)}
    env.update(call_node(node, env, micro_batch=MICRO_BATCH, device=CPU, replace=operators))
    if incoming:
        made_here = [env[t] for t in incoming if env[t].requires_grad]
        given = [g for t, g in incoming.items() if env[t].requires_grad]
        if made_here:
            torch.autograd.backward(made_here, given)
    gradients = {t: torch.zeros_like(v) if v.grad is None else v.grad for t, v in leaves.items() if t in made.gradients}
    return _Ran({t: v.detach() for t, v in env.items()}, gradients if incoming else {})


def _dropped(c: Communicator | None) -> Callable[..., torch.Tensor]:
    """Dropout that is decided for the whole, of which a rank has a part."""

    def run(
        x: torch.Tensor, p: float, train: bool, dim: int = 0, parts: Sequence[int] = (), repeats: int = 1,
        axis: str = AXIS,
    ) -> torch.Tensor:  # fmt: skip
        if not train:
            return x
        shape = list(x.shape)
        if c is not None:
            shape[dim] *= c.size
        kept = torch.rand(shape, generator=torch.Generator().manual_seed(1)) >= p
        if c is not None:
            kept = piece_of(kept, dim, parts, repeats, c.rank, c.size)
        return x * kept / (1 - p)

    return run


def assert_prices(made: Made, option: Option, degree: int) -> None:
    """A rank's operator is priced on shapes alone, in half precision on a GPU, and makes the declared collectives."""
    half = [replace(t, dtype="bfloat16" if t.dtype == "float64" else t.dtype) for t in made.tensors]
    placed = dict(zip(operands_of(made.node), option.operands, strict=True))
    placed |= {t: p for t, p in zip(made.node.outputs, option.outputs, strict=True) if t is not None and p is not None}
    local = [replace(t, shape=local_shape(t.shape, placed[i], degree)) for i, t in enumerate(half)]
    inputs = [t for t in operands_of(made.node) if t in made.gradients]
    shared = [t for t in operands_of(made.node) if t not in made.gradients]
    outputs = [t for t in made.node.outputs if t is not None]
    priced = price_nodes(local, [_of_rank(made.node, option)], inputs, shared, outputs, axes={AXIS: degree})
    found = [(c.phase, c.collective, c.num_bytes) for c in priced.collectives]
    assert found == list(inner_collectives(option.op, option.args, half, degree)), str(option)


def _of_rank(node: Node, option: Option) -> Node:
    """The node of a rank."""
    kwargs = option.kwargs + ((("axis", AXIS),) if option.op.startswith("planner.") else ())
    return replace(node, op=option.op, args=option.args, kwargs=kwargs)
