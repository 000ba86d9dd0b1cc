"""Rules of the axis `ep`, whose ranks have samples of their own: only the matrices of experts are split.

Every operator runs as it is, on a rank's own samples, but for three kinds.

    grouped products     rows are sent to the ranks that have their experts (E), and come back
    rows alone           what is done to each row between two of them, on the rows that came
    of parameters alone  what makes a rank's matrices of its part of a parameter

A rank has as much to do as alone, if experts are balanced. No conversion is made on this axis. A parameter that is
whole and used among a rank's experts gets its gradient from the rows of all ranks there, and their sum over ranks,
which data parallelism takes, is that of all rows: as it should be.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from planner.graph import Arg, Node, Ref, Tensor
from planner.shard.placement import E, Option, Placement, R, split
from planner.shard.rules import experts
from planner.shard.rules.call import Call, Rewritten, options_of
from planner.shard.rules.special import DISPATCHED, ROWS_OF_EXPERTS

_LOOKS_UP = ("index", "index_select", "embedding")


def options(
    node: Node,
    tensors: Sequence[Tensor],
    degree: int,
    seeds: Mapping[int, Collection[Placement]] = {},
    whole: Sequence[Option] = (),
) -> tuple[Option, ...]:
    """Every way to run a node on the `degree` ranks of `ep`, that on a rank's own samples first.

    `whole` are the options that the node has on other axes, where ranks have parts of one batch; of what is made of
    parameters alone they hold here as well.
    """
    call = Call(node, tensors, degree, seeds, frozenset())

    def allowed(call: Call) -> Iterator[Option]:
        touched = [*call.operands, *(t for t in node.outputs if t is not None)]
        if call.name == "_grouped_mm":
            yield from _product(call)
        elif not any(tensors[t].is_batched or tensors[t].order is not None for t in touched):
            for option in (option for option in whole if _is_of_parameters(option)):
                yield from (_in_order(option, order) for order in _orders(seeds, touched))
        elif touched and all(experts.form_of(call, t) == "rows" for t in node.outputs if t is not None):
            yield from _of_rows(call)

    return options_of(call, allowed)


def spread(num_experts: int, order: tuple[int, ...] = ()) -> Placement:
    """How what has a row for each expert is split; `order` is that in which ranks have them."""
    return replace(split(0, [num_experts]), order=order)


def _orders(seeds: Mapping[int, Collection[Placement]], touched: Iterable[int | None]) -> tuple[tuple[int, ...], ...]:
    """The orders of experts that neighbours may have, that of the model first."""
    found = (seed.order for t in touched if t is not None for seed in seeds.get(t, ()))
    return tuple(dict.fromkeys([(), *found]))


def _in_order(option: Option, order: tuple[int, ...]) -> Option:
    """What is made of parameters, of which ranks have their rows in an order."""

    def ordered(placement: Placement | None) -> Placement | None:
        is_first = placement is not None and placement.is_split and placement.dim == 0
        return replace(placement, order=order) if placement is not None and is_first else placement

    operands = tuple(p for p in map(ordered, option.operands) if p is not None)
    return replace(option, operands=operands, outputs=tuple(map(ordered, option.outputs)))


def _is_of_parameters(option: Option) -> bool:
    placed = [p for p in (*option.operands, *option.outputs) if p is not None]
    return all(p.kind in ("R", "S") for p in placed) and not option.op.startswith("planner.")


def _product(call: Call) -> Iterator[Option]:
    """Rows of own samples or of own experts, both before and after."""
    rows, matrices, ends, made = call.operand(0), call.operand(1, "mat2"), call.operand(2, "offs"), call.output
    if rows is None or matrices is None or ends is None or made is None:
        return
    is_plain = all(call.arg(position, name) is None for position, name in ((3, "bias"), (4, "out_dtype")))
    is_ordered = all(experts.form_of(call, t) == form for t, form in ((rows, "rows"), (made, "rows"), (ends, "ends")))
    num_experts = call.shape(matrices)[0]
    if not is_plain or not is_ordered or not isinstance(num_experts, int) or num_experts % call.degree:
        return
    for source in (R, E):
        for target in (E, R):
            for order in _orders(call.seeds, [matrices]):
                flags: tuple[Arg, ...] = (source == R, target == R, call.shape(rows)[0], *([order] if order else []))
                own = Rewritten(op=DISPATCHED, args=(Ref(rows), Ref(matrices), Ref(ends), *flags), kwargs=())
                placed = {rows: source, matrices: spread(num_experts, order), ends: R}
                yield call.option(placed, [target], own, share=1.0)


def _of_rows(call: Call) -> Iterator[Option]:
    """What is done to each row alone, and what each expert adds to its rows."""
    ordered = [t for t in call.operands if experts.form_of(call, t) is not None]
    table, others = call.operand(0), [t for t in call.operands if t != call.operand(0)]
    is_look_up = call.name.rstrip("_") in _LOOKS_UP
    if is_look_up and table is not None and len(others) == 1 and experts.form_of(call, others[0]) == "keys":
        num_experts = call.shape(table)[0]
        if not call.tensors[table].is_batched and isinstance(num_experts, int) and num_experts % call.degree == 0:
            for order in _orders(call.seeds, [table]):
                args: tuple[Arg, ...] = (Ref(table), Ref(others[0]), True, False, *([order] if order else []))
                own = Rewritten(op=ROWS_OF_EXPERTS, args=args, kwargs=())
                yield call.option({table: spread(num_experts, order), others[0]: R}, [E], own, share=1.0)
    elif ordered and all(experts.form_of(call, t) == "rows" for t in ordered):
        is_mixed = any(call.tensors[t].is_batched for t in call.operands if t not in ordered)
        if not is_mixed and (rewritten := experts.resized(call, E)) is not None:
            operands = {t: E if t in ordered else R for t in call.operands}
            yield call.option(operands, [E] * len(call.node.outputs), rewritten, share=1.0)
