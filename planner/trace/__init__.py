"""From a module and a batch to a `Graph`: export, fold masks, cut, price once per block class."""

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from planner.errors import ModelError
from planner.graph import (
    Affine,
    Batch,
    Block,
    BlockClass,
    Graph,
    LossTerms,
    Node,
    Prelude,
    Ref,
    Tensor,
    reads,
    total,
)
from planner.trace import pricing
from planner.trace.batch import LossFunction, call, leaves, map_leaves, num_samples, scalar_loss, settings
from planner.trace.cut import Cut, cut, signature, storages
from planner.trace.export import FlatGraph, NoGraphError, checkpoint_inlined, export
from planner.trace.masks import fold_masks
from planner.trace.separable import separability

__all__ = ["call", "leaves", "map_leaves", "num_samples", "scalar_loss", "trace"]

logger = logging.getLogger(__name__)
Progress = Callable[[str], None]
PRECISIONS = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}

# Losses that are a mean over valid targets: positions of target, class weights, reduction and
# ignored index (ATen signatures).
MEAN_LOSSES = {
    "aten.cross_entropy_loss.default": (1, 2, 3, 4),
    "aten.nll_loss_nd.default": (1, 2, 3, 4),
    "aten.nll_loss.default": (1, 2, 3, 4),
    "aten.nll_loss2d.default": (1, 2, 3, 4),
}
MEAN = 1
IGNORE_INDEX = -100


def trace(
    model: nn.Module,
    batch: object,
    *,
    precision: str = "fp32",
    loss_fn: LossFunction | None = None,
    name: str = "",
    device_kind: Literal["cuda", "cpu"] = "cuda",
    progress: Progress | None = None,
) -> Graph:
    """The model with its loss as a graph of blocks, in the compute dtype of `precision`.

    No weight is allocated or read. `batch` gives names, shapes and dtypes; its dim 0 is the batch.
    A model that has no graph comes back with `fallbacks` and one block per module to wrap.
    `device_kind` tells whose kernels the prices are of; it does not change what is executed.

    Raises:
        ModelError: the batch does not fit the model, or there is no scalar loss.
    """
    say = progress or (lambda _: None)
    if precision not in PRECISIONS:
        raise ModelError(f"precision {precision!r} is none of {', '.join(PRECISIONS)}")
    if not any(p.requires_grad for p in model.parameters()):
        raise ModelError("the model has no parameter that requires a gradient; nothing to train")
    name = name or type(model).__name__
    dtype: torch.dtype = getattr(torch, PRECISIONS[precision])
    try:
        say("exporting the model")
        flat = fold_masks(export(model, batch, dtype, loss_fn))
        say("cutting into blocks")
        found = cut(flat)
    except NoGraphError as error:
        for fallback in error.fallbacks:
            logger.warning("no graph: %s", fallback)
        say("pricing modules")
        return _without_graph(model, batch, loss_fn, dtype, name, device_kind, error)
    say("pricing block classes")
    graph = _assemble(flat, found, name, PRECISIONS[precision], device_kind, num_samples(batch))
    return replace(graph, settings=settings(batch))


def _assemble(
    flat: FlatGraph, found: Cut, name: str, dtype: str, device_kind: Literal["cuda", "cpu"], samples: int
) -> Graph:
    """Wire the segments, price each class once, and put the graph together.

    A block that compares the samples of a batch is priced for a batch of `samples`.
    """
    tensors = list(flat.tensors)
    maker = {t: i for i, n in enumerate(flat.nodes) for t in n.outputs if t is not None}
    segment_of = {
        node: position
        for position, segment in enumerate(found.segments)
        for node in found.main[segment.start : segment.end]
    }
    last_read: dict[int, int] = {flat.loss: len(found.segments)}
    for node, position in segment_of.items():
        for tensor in reads(flat.nodes[node]):
            last_read[tensor] = max(position, last_read.get(tensor, -1))

    prelude = _prelude_nodes(flat, found, maker)
    blocks: list[Block] = []
    classes: list[BlockClass] = []
    class_of: dict[str, int] = {}
    names = _names(flat, found)
    coupling, is_quadratic = _coupling(flat, found)
    live = [flat.nodes[i] for i in sorted({*found.main, *found.free})]
    split = separability(flat.tensors, live, flat.loss)
    coupling = coupling or split.sums
    sizes = (2, max(4, samples)) if is_quadratic else (2, 4)
    moving = _moving(flat)
    for position, segment in enumerate(found.segments):
        nodes = found.main[segment.start : segment.end]
        read = list(dict.fromkeys(t for i in nodes for t in reads(flat.nodes[i])))
        made = [t for i in nodes for t in flat.nodes[i].outputs if t is not None]
        inside = set(made)
        outside = [t for t in read if t not in inside]
        inputs = tuple(t for t in outside if segment_of.get(maker.get(t, -1), position) != position)
        shared = tuple(t for t in outside if tensors[t].kind == "input" or maker.get(t, -1) in prelude)
        outputs = tuple(t for t in made if last_read.get(t, -1) > position)
        detached = [t for t in inputs if t not in moving]
        key = signature(tensors, [flat.nodes[i] for i in nodes], outputs, {*detached, *shared})
        if key not in class_of:
            class_of[key] = len(classes)
            classes.append(
                pricing.price_nodes(
                    tensors, [flat.nodes[i] for i in nodes], inputs, shared, outputs,
                    device_kind=device_kind, detached=detached, micro_batches=sizes, linearised=is_quadratic,
                )
            )  # fmt: skip
        blocks.append(
            Block(
                name=names[position],
                kind="block" if segment.kind == "block" else "glue",
                class_index=class_of[key],
                nodes=nodes,
                inputs=inputs,
                shared=shared,
                outputs=outputs,
                parameters=tuple(t for t in outside if tensors[t].kind == "parameter"),
                buffers=tuple(t for t in outside if tensors[t].kind == "buffer"),
            )
        )
    kernels, prelude_bytes = pricing.price_forward(
        tensors, [flat.nodes[i] for i in sorted(prelude)],
        tuple(dict.fromkeys(t for b in blocks for t in b.shared if tensors[t].kind != "input")),
        device_kind=device_kind,
    )  # fmt: skip
    return Graph(
        name=name,
        dtype=dtype,
        tensors=tuple(tensors),
        nodes=flat.nodes,
        inputs=flat.inputs,
        loss=flat.loss,
        blocks=tuple(_with_saved_bytes(blocks, classes, tensors)),
        classes=tuple(classes),
        prelude=Prelude(nodes=tuple(sorted(prelude)), kernels=kernels, num_bytes=prelude_bytes),
        aliases=flat.aliases,
        unused_parameters=flat.unused_parameters,
        dropout_nodes=tuple(i for i in found.main if _drops(flat.nodes[i])),
        loss_terms=(
            *_loss_terms(flat, found, prelude, maker),
            *(LossTerms(target=t, ignore_index=None) for t in split.divisors if maker.get(t) in prelude),
        ),
        not_separable=split.mixes,
        couples_samples=f"{coupling} (priced as for {sizes[1]} samples)" if is_quadratic else coupling,
        updates_statistics=any(tensors[t].kind == "buffer" for i in found.main for t in flat.nodes[i].mutates),
    )


def _moving(flat: FlatGraph) -> set[int]:
    """Tensors through which a gradient flows: trainable parameters and what is made of them."""
    moving = {i for i, t in enumerate(flat.tensors) if t.kind == "parameter" and t.requires_grad}
    for node in flat.nodes:
        if node.op != "aten.detach.default" and any(t in moving for t in reads(node)):
            made = (t for t in (*node.outputs, *node.mutates) if t is not None)
            moving.update(t for t in made if flat.tensors[t].dtype.startswith(("float", "bfloat", "complex")))
    return moving


def _prelude_nodes(flat: FlatGraph, found: Cut, maker: Mapping[int, int]) -> set[int]:
    """Free nodes that main nodes need, directly or not, with all that write into what they read."""
    free = set(found.free)
    storage = storages(flat.nodes)
    todo = [maker[t] for i in found.main for t in reads(flat.nodes[i]) if t in maker]
    writers: dict[int, list[int]] = {}
    for index in free:
        for tensor in flat.nodes[index].mutates:
            writers.setdefault(storage[tensor], []).append(index)
    needed: set[int] = set()
    while todo:
        index = todo.pop()
        if index in free and index not in needed:
            needed.add(index)
            made = (t for t in flat.nodes[index].outputs if t is not None)
            for touched in (*reads(flat.nodes[index]), *made):
                if touched in maker:
                    todo.append(maker[touched])
                todo += writers.get(storage.get(touched, -1), ())
    return needed


def _with_saved_bytes(blocks: list[Block], classes: list[BlockClass], tensors: list[Tensor]) -> list[Block]:
    """Bytes each block keeps: its own, its outputs, and inputs that nobody counted before it."""
    counted: set[int] = set()
    result = []
    for block in blocks:
        kind = classes[block.class_index]
        kept = [kind.saved]
        flagged = [
            *zip(block.inputs, kind.saves_input, strict=True),
            *zip(block.outputs, kind.saves_output, strict=True),
        ]
        for tensor, is_saved in flagged:
            if is_saved and tensor not in counted:
                counted.add(tensor)
                kept.append(tensors[tensor].num_bytes)
        result.append(
            replace(
                block,
                saved=total(kept),
                input_bytes=total(tensors[t].num_bytes for t in block.inputs),
            )
        )
    return result


def _names(flat: FlatGraph, found: Cut) -> list[str]:
    """A block is called by its module; glue by the modules whose parameters it reads."""
    names: list[str] = []
    for segment in found.segments:
        if segment.path:
            name = segment.path[-1]
        else:
            nodes = [flat.nodes[i] for i in found.main[segment.start : segment.end]]
            owners = dict.fromkeys(
                flat.tensors[t].name.rpartition(".")[0] or flat.tensors[t].name
                for n in nodes
                for t in reads(n)
                if flat.tensors[t].kind == "parameter"
            )
            name = "+".join([*owners][:3]) or "glue"
        names.append(name if name not in names else f"{name}#{len(names)}")
    return names


def _drops(node: Node) -> bool:
    """Whether a node drops elements at random."""
    if "dropout" in node.op:
        return len(node.args) > 1 and node.args[1] not in (0, 0.0)
    if "scaled_dot_product" in node.op:
        rate = dict(node.kwargs).get("dropout_p", node.args[4] if len(node.args) > 4 else 0.0)
        return rate not in (0, 0.0)
    return node.is_random


def _loss_terms(flat: FlatGraph, found: Cut, prelude: set[int], maker: Mapping[int, int]) -> tuple[LossTerms, ...]:
    """Targets of mean losses that inputs alone determine."""
    result = []
    for index in found.main:
        node = flat.nodes[index]
        if node.op in MEAN_LOSSES:
            target, _, reduction, ignored = (_argument(node, p) for p in MEAN_LOSSES[node.op])
            if reduction not in (None, MEAN) or not isinstance(target, Ref):
                continue
            tensor = flat.tensors[target.tensor]
            given = tensor.kind == "input" or maker.get(target.tensor) in prelude
            if given and tensor.dtype.startswith(("int", "uint")):
                ignore = ignored if isinstance(ignored, int) else IGNORE_INDEX
                result.append(LossTerms(target=target.tensor, ignore_index=ignore))
    return tuple(result)


def _argument(node: Node, position: int) -> object:
    """A positional argument of a mean loss, or its keyword, or None for its default."""
    names = ("self", "target", "weight", "reduction", "ignore_index")
    if position < len(node.args):
        return node.args[position]
    return dict(node.kwargs).get(names[position])


def _coupling(flat: FlatGraph, found: Cut) -> tuple[str, bool]:
    """Why the loss is no mean over samples ("" = it is), and whether costs grow with the square of the batch.

    Two batch dims in one tensor compare samples with each other; class weights make the mean a
    weighted one, so that the mean of micro-batch means is another number.
    """
    weighted = ""
    for index in found.main:
        node = flat.nodes[index]
        for tensor in node.outputs:
            if tensor is not None and sum(isinstance(s, Batch) for s in flat.tensors[tensor].shape) > 1:
                return f"{node.source}: {node.op} compares samples of one batch with each other", True
        if node.op in MEAN_LOSSES:
            _, weight, reduction, _ = (_argument(node, p) for p in MEAN_LOSSES[node.op])
            if isinstance(weight, Ref) and reduction in (None, MEAN):
                weighted = weighted or f"{node.source}: the mean loss is weighted by class"
    return weighted, False


def _without_graph(
    model: nn.Module,
    batch: object,
    loss_fn: LossFunction | None,
    dtype: torch.dtype,
    name: str,
    device_kind: Literal["cuda", "cpu"],
    reason: NoGraphError,
) -> Graph:
    """One block per child of a repeated module list, then the root: what ZeRO can wrap."""
    wrapped = _repeated_children(model)
    with checkpoint_inlined(), _AssumedValues():
        priced = pricing.price_module(
            _with_plain_tensors_on(model, "meta" if device_kind == "cuda" else "cpu"), batch, loss_fn,
            wrapped=wrapped, dtype=dtype, device_kind=device_kind,
        )  # fmt: skip
    tensors: list[Tensor] = []
    index_of: dict[str, int] = {}
    short = str(dtype).removeprefix("torch.")
    groups: dict[int, list[str]] = {}
    for full, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(full)
    for full, parameter in model.named_parameters():
        index_of[full] = len(tensors)
        tensors.append(
            Tensor(
                name=full, shape=tuple(parameter.shape), kind="parameter",
                dtype=short if parameter.is_floating_point() else str(parameter.dtype)[6:],
                requires_grad=parameter.requires_grad,
            )
        )  # fmt: skip
    owner = {full: next((w for w in wrapped if full.startswith(f"{w}.")), "") for full in index_of}
    inputs = []
    for leaf in leaves(batch):
        inputs.append(len(tensors))
        shape = tuple(leaf.tensor.shape)
        kind = short if leaf.tensor.is_floating_point() else str(leaf.tensor.dtype)[6:]
        tensors.append(
            Tensor(
                name=leaf.name, kind="input", dtype=kind,
                shape=((Batch(1), *shape[1:]) if leaf.is_batched else shape),
            )
        )  # fmt: skip
    blocks = [
        Block(
            name=module,
            kind="block" if module else "glue",
            class_index=position,
            nodes=(), inputs=(), shared=(), outputs=(),
            parameters=tuple(i for full, i in index_of.items() if owner[full] == module),
            buffers=(),
            saved=priced[module].saved,
            input_bytes=Affine(),
        )
        for position, module in enumerate([*wrapped, ""])
    ]  # fmt: skip
    return Graph(
        name=name, dtype=short, tensors=tuple(tensors), nodes=(), inputs=tuple(inputs), loss=-1,
        blocks=tuple(blocks), classes=tuple(priced[m] for m in [*wrapped, ""]),
        aliases=tuple(tuple(names) for names in groups.values() if len(names) > 1),
        updates_statistics=any(isinstance(m, nn.modules.batchnorm._NormBase) for m in model.modules()),
        couples_samples=reason.couples_samples,
        fallbacks=reason.fallbacks,
    )  # fmt: skip


def _with_plain_tensors_on(model: nn.Module, device: str) -> nn.Module:
    """The model with tensors that are plain attributes moved to `device`; parameters and buffers are the same."""
    memo: dict[int, Any] = {id(t): t for t in (*model.parameters(), *model.buffers())}
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, torch.Tensor) and id(value) not in memo:
                memo[id(value)] = value.detach().to(device)
    return copy.deepcopy(model, memo)


class _AssumedValues(TorchFunctionMode):
    """Prices a forward that looks at values, which fake tensors lack: every value is one, every mask selects all."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _VALUE_OF:
            kind = _VALUE_OF[func]
            if kind is not None:
                return kind(1)
            return 1.0 if args[0].is_floating_point() else args[0].dtype == torch.bool or 1
        if func is torch.Tensor.__getitem__ and isinstance(args[1], torch.Tensor) and args[1].dtype == torch.bool:
            return args[0].flatten(0, args[1].ndim - 1)
        return func(*args, **(kwargs or {}))


_VALUE_OF: Mapping[Any, type | None] = {
    torch.Tensor.item: None,
    torch.Tensor.__bool__: bool,
    torch.Tensor.__int__: int,
    torch.Tensor.__float__: float,
    torch.Tensor.__index__: int,
}


def _repeated_children(model: nn.Module) -> list[str]:
    """Children of module lists, outermost lists only, that share no parameter with others."""
    uses: dict[int, set[str]] = {}
    result: list[str] = []
    for name, module in model.named_modules():
        is_list = isinstance(module, nn.ModuleList | nn.Sequential) and len(module) > 1
        if is_list and not any(name.startswith(f"{w}.") or name == w for w in result):
            result += [f"{name}.{child}" if name else child for child, _ in module.named_children()]
    for name, parameter in model.named_parameters(remove_duplicate=False):
        uses.setdefault(id(parameter), set()).add(next((w for w in result if name.startswith(f"{w}.")), ""))
    shared = {w for owners in uses.values() if len(owners) > 1 for w in owners}
    modules = dict(model.named_modules())
    return [
        w for w in result
        if w not in shared and any(True for _ in modules[w].parameters())
        and sum(m is modules[w] for m in modules.values()) == 1
    ]  # fmt: skip
