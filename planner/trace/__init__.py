"""From a module and a batch to a `Graph`: export, fold masks, cut, price once per block class."""

import copy
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn

from planner.errors import ModelError, TraceError
from planner.graph import (
    HOOKED,
    OPAQUE,
    Affine,
    Batch,
    Block,
    BlockClass,
    Divisor,
    Graph,
    LossTerm,
    Node,
    Prelude,
    Ref,
    Tensor,
    reads,
    total,
)
from planner.shard.placement import differentiable
from planner.trace import (
    parallel_attention,  # noqa: F401 registers operators
    parallel_experts,  # noqa: F401 registers operators
    parallel_operators,  # noqa: F401 registers operators
    pricing,
)
from planner.trace.assumed import AssumedValues
from planner.trace.batch import (
    LossFunction,
    call,
    describe,
    leaves,
    map_leaves,
    not_taken,
    num_samples,
    scalar_loss,
    settings,
)
from planner.trace.canonical import in_canonical_order
from planner.trace.convert import FlatGraph
from planner.trace.cut import Cut, cut, cut_like, signature, storages
from planner.trace.dispatch import orders_of_rows
from planner.trace.export import export
from planner.trace.masks import fold_masks
from planner.trace.refusal import NoGraphError
from planner.trace.separable import Separability, separability
from planner.trace.shared_memory import check_shared_buffers, check_shared_parameters
from planner.trace.state import Evaluation
from planner.trace.updates import updates
from planner.trace.watch import checkpoint_inlined

__all__ = ["Evaluation", "call", "leaves", "map_leaves", "num_samples", "priced", "scalar_loss", "trace"]

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
    "planner.cross_entropy.default": (1, 2, 3, 4),
    "planner.cross_entropy_of_part.default": (1, 2, 3, 4),
}
# Whose operators are known to treat samples one by one, or to what extent not.
KNOWN_NAMESPACES = ("aten", "prims", "planner", "operator", "math", "transformers", "torchvision")
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
    evaluation: Evaluation | None = None,
    like: Graph | None = None,
) -> Graph:
    """The model with its loss as a graph of blocks, in the compute dtype of `precision`.

    With `evaluation` it is in eval mode and the graph has outputs as well; where that has a loss function, it is the
    one that counts. A graph `like` another one of the same model has the same blocks, and is not priced: it has no
    classes.
    No weight is allocated or read. `batch` gives names, shapes and dtypes; its dim 0 is the batch.
    A model that has no graph comes back with `fallbacks` and one block per module to wrap.
    `device_kind` tells whose kernels the prices are of; of what is executed it changes only what autocast casts.

    Raises:
        ModelError: the batch does not fit the model, or there is no scalar loss.
    """
    say = progress or (lambda _: None)
    if precision not in PRECISIONS:
        raise ModelError(f"precision {precision!r} is none of {', '.join(PRECISIONS)}")
    if not any(p.requires_grad for p in model.parameters()):
        raise ModelError("the model has no parameter that requires a gradient; nothing to train")
    for path, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            raise ModelError(
                f"module {path} is a SyncBatchNorm, which reaches over all ranks behind a plan's back; use BatchNorm, "
                "whose running statistics are merged over the data ranks of any plan"
            )
    check_shared_parameters(model)
    name = name or type(model).__name__
    dtype: torch.dtype = getattr(torch, PRECISIONS[precision])
    try:
        say("exporting the model")
        flat = export(model, batch, dtype, evaluation or loss_fn, trains_on_cpu=device_kind == "cpu")
        if evaluation is None:  # which may be without a loss
            _check_all_is_read(model, batch, loss_fn, flat)
        check_shared_buffers(model, {flat.tensors[t].name for node in flat.nodes for t in node.mutates})
        flat = fold_masks(in_canonical_order(flat))
        say("cutting into blocks")
        found = cut(flat) if like is None else cut_like(flat, like)
    except NoGraphError as error:
        for fallback in error.fallbacks:
            logger.warning("no graph: %s", fallback)
        if like is not None:
            raise ModelError(str(error)) from error
        say("pricing modules")
        return _without_graph(model, batch, loss_fn, dtype, name, device_kind, error)
    say("pricing block classes")
    kind = device_kind if like is None else None
    graph = _assemble(flat, found, name, PRECISIONS[precision], kind, num_samples(batch))
    if evaluation is not None:
        graph = replace(graph, outputs=_outputs(flat, evaluation.names))
        if not evaluation.with_loss:  # the first output stands for it
            graph = replace(graph, loss_terms=(), divisors=(), couples_samples="", not_separable="")
    return replace(graph, settings=settings(batch))


def _check_all_is_read(model: nn.Module, batch: object, loss_fn: LossFunction | None, flat: FlatGraph) -> None:
    """Refuse an entry of the batch that reaches nobody: a name is misspelled.

    Raises:
        ModelError: forward has no parameter for it, and the loss function does not read it.
    """
    if loss_fn is None:
        return
    read = {flat.tensors[t].name for node in flat.nodes for t in reads(node)}
    for key in not_taken(model, batch):
        tensors = {leaf.name for leaf in leaves(batch) if leaf.name == key or leaf.name.startswith(f"{key}.")}
        if tensors and not tensors & read:
            raise ModelError(
                f"neither forward{inspect.signature(model.forward)} nor loss_fn computes with {key!r} of the batch "
                f"{describe(batch)}; leave it out, or give it the name that it is read by"
            )


def _assemble(
    flat: FlatGraph, found: Cut, name: str, dtype: str, device_kind: Literal["cuda", "cpu"] | None, samples: int
) -> Graph:
    """Wire the segments, price each class once, and put the graph together.

    A block that compares the samples of a batch is priced for a batch of `samples`. Without a kind of device there
    are no prices.
    """
    tensors = list(flat.tensors)
    maker = {t: i for i, n in enumerate(flat.nodes) for t in n.outputs if t is not None}
    segment_of = {
        node: position
        for position, segment in enumerate(found.segments)
        for node in found.main[segment.start : segment.end]
    }
    last_read = dict.fromkeys((t for t in (flat.loss, *flat.outputs) if t is not None), len(found.segments))
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
    for tensor, order in orders_of_rows(tensors, live)[1].items():
        tensors[tensor] = replace(tensors[tensor], order=order)
    recursions, one_data_rank = updates(flat.tensors, live, flat.loss)
    coupling = coupling or split.sums
    terms, unweighed = _loss_terms(flat, split, found, prelude, maker)
    divisors = tuple(Divisor(tensor=d.tensor, degree=d.degree, sums=d.sums) for d in split.divisors)
    made_late = [d.tensor for d in divisors if any(maker.get(t) not in prelude for t in (d.tensor, *dict(d.sums)))]
    lost = ""
    if made_late:  # written in place, for example: a micro-batch keeps its own
        source = flat.nodes[maker[made_late[0]]].source
        divisors, lost = (), f"{source}: what the loss is divided by is not made of inputs alone"
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
            class_of[key] = len(class_of)
            if device_kind is not None:
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
    prepared = Prelude(nodes=tuple(sorted(prelude)))
    if device_kind is not None:
        kernels, prelude_bytes = pricing.price_forward(
            tensors, [flat.nodes[i] for i in sorted(prelude)],
            tuple(dict.fromkeys(t for b in blocks for t in b.shared if tensors[t].kind != "input")),
            device_kind=device_kind,
        )  # fmt: skip
        prepared = replace(prepared, kernels=kernels, num_bytes=prelude_bytes)
        blocks = _with_saved_bytes(blocks, classes, tensors)
    return Graph(
        name=name,
        dtype=dtype,
        tensors=tuple(tensors),
        nodes=flat.nodes,
        inputs=flat.inputs,
        loss=flat.loss,
        blocks=tuple(blocks),
        classes=tuple(classes),
        prelude=prepared,
        aliases=flat.aliases,
        unused_parameters=flat.unused_parameters,
        dropout_nodes=tuple(i for i in found.main if flat.nodes[i].is_random),
        loss_terms=terms,
        divisors=divisors,
        unweighed=unweighed,
        not_separable=split.mixes or lost or _unknown_backward(live),
        checkpoints=flat.checkpoints,
        couples_samples=f"{coupling} (priced as for {sizes[1]} samples)" if is_quadratic else coupling,
        priced_samples=sizes[1] if is_quadratic else 0,
        updates_statistics=any(tensors[t].kind == "buffer" for i in found.main for t in flat.nodes[i].mutates),
        buffer_updates=recursions,
        one_data_rank=one_data_rank,
    )


def priced(
    local: Graph,
    whole: Graph,
    degree: int,
    device_kind: Literal["cuda", "cpu"] = "cuda",
    *,
    axis: str = "tp",
    outer: Mapping[str, int] = {},
    expert_imbalance: float = 1.0,
) -> Graph:
    """A graph of one of `degree` ranks with the prices of its classes, collectives included; each is priced once.

    `whole` is the graph that it was made of: blocks that are as they were keep their prices. `outer` are the axes,
    with their sizes, over which that one communicates already. A rank's experts get `expert_imbalance` times a fair
    share of the tokens.

    Raises:
        TraceError: a block of the rank does not run on fake tensors.
    """
    moving = differentiable(local)
    classes: dict[int, BlockClass] = {}
    for block, before in zip(local.blocks, whole.blocks, strict=True):
        if block.class_index in classes:
            continue
        nodes = [local.nodes[i] for i in block.nodes]
        touched = {t for node in nodes for t in (*reads(node), *node.outputs) if t is not None}
        if (
            whole.classes
            and nodes == [whole.nodes[i] for i in before.nodes]
            and all(local.tensors[t] == whole.tensors[t] for t in touched)
        ):
            classes[block.class_index] = whole.classes[before.class_index]
            continue
        classes[block.class_index] = pricing.price_nodes(
            local.tensors, nodes, block.inputs, block.shared, block.outputs,
            device_kind=device_kind, detached=[t for t in block.inputs if t not in moving],
            micro_batches=(2, local.priced_samples or 4), linearised=local.priced_samples > 0,
            axes={**outer, axis: degree}, expert_imbalance=expert_imbalance,
        )  # fmt: skip
    kinds = [classes[index] for index in range(len(classes))]
    return replace(local, classes=tuple(kinds), blocks=tuple(_with_saved_bytes(local.blocks, kinds, local.tensors)))


def _outputs(flat: FlatGraph, names: Sequence[str]) -> tuple[tuple[str, int], ...]:
    """The outputs of an evaluation by name.

    Raises:
        ModelError: one is not computed for each sample.
    """
    result = []
    for name, tensor in zip(names, flat.outputs, strict=True):
        if tensor is None or flat.tensors[tensor].kind != "activation":
            raise ModelError(f"the output {name} is not computed by the model; it is what the batch or the model holds")
        shape = flat.tensors[tensor].shape
        if sum(isinstance(size, Batch) for size in shape) != 1:
            sizes = ["batch" if isinstance(size, Batch) else size for size in shape]
            raise ModelError(f"the output {name} has the shape {sizes}; only outputs with one batch dim can be had")
        result.append((name, tensor))
    return tuple(result)


_OF_A_RANK = " (on N data-parallel ranks they are N times those of one device, and averaged later)"


def _unknown_backward(nodes: Sequence[Node]) -> str:
    """Where user code has a backward of its own, of which it is not known that it treats samples one by one."""
    for node in nodes:
        if node.op == OPAQUE:
            name = str(node.args[0]).partition("#")[0].rpartition(".")[2]
            return (
                f"{node.source}: autograd.Function {name} may mix samples, or look at the size of gradients{_OF_A_RANK}"
            )
        if node.op == HOOKED:
            return f"{node.source}: a tensor hook may mix samples, or look at the size of gradients{_OF_A_RANK}"
        if node.op.partition(".")[0] not in KNOWN_NAMESPACES:
            return f"{node.source}: operator {node.op} may mix samples"
    return ""


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
    todo += [maker[t] for t in flat.outputs if t is not None and t in maker]
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


def _with_saved_bytes(blocks: Sequence[Block], classes: Sequence[BlockClass], tensors: Sequence[Tensor]) -> list[Block]:
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


def _loss_terms(
    flat: FlatGraph, split: Separability, found: Cut, prelude: set[int], maker: Mapping[int, int]
) -> tuple[tuple[LossTerm, ...], str]:
    """The parts of the loss with the class indices that their means count, and why such a mean is no part."""
    parts = dict(split.parts)
    counted: dict[int, LossTerm] = {}
    unweighed = ""
    for index in found.main:
        node = flat.nodes[index]
        if node.op not in MEAN_LOSSES:
            continue
        target, _, reduction, ignored = (_argument(node, p) for p in MEAN_LOSSES[node.op])
        if reduction not in (None, MEAN) or not isinstance(target, Ref):
            continue
        tensor, made = flat.tensors[target.tensor], node.outputs[0]
        given = tensor.kind == "input" or maker.get(target.tensor) in prelude
        if given and tensor.dtype.startswith(("int", "uint")) and made is not None:
            if parts.get(made) != 1:
                unweighed = unweighed or f"{node.source}: the loss is not linear in this mean over valid targets"
            ignore = ignored if isinstance(ignored, int) else IGNORE_INDEX
            counted[made] = LossTerm(tensor=made, target=target.tensor, ignore_index=ignore)
    terms = (counted.get(made) or LossTerm(tensor=made, power=power) for made, power in split.parts)
    # A mean that is no part keeps its count, so that the runtime can refuse unequal ones.
    return (*terms, *(term for made, term in counted.items() if made not in parts)), unweighed


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
    """One block per child of a repeated module list, then the root: what ZeRO can wrap.

    Only the root where one rank's forward may leave out a module that another rank's calls: the ranks would gather
    different parameters at the same time; and where forward runs a backward, which would free what it gathered.
    """
    wrapped = [] if reason.may_branch else _repeated_children(model)
    plain = _with_plain_tensors_on(model, "meta" if device_kind == "cuda" else "cpu")

    def price(*, holds: bool) -> dict[str, BlockClass]:
        with checkpoint_inlined(), AssumedValues(holds=holds):
            return pricing.price_module(plain, batch, loss_fn, wrapped=wrapped, dtype=dtype, device_kind=device_kind)

    try:
        priced = price(holds=True)
    except TraceError:  # a condition that guards an error holds, too
        priced = price(holds=False)
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
                memo[id(value)] = torch.zeros_like(value, device=device) if value.is_meta else value.detach().to(device)
    return copy.deepcopy(model, memo)


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
        and type(modules[w]).forward is not nn.Module.forward  # a container cannot be wrapped
        and sum(m is modules[w] for m in modules.values()) == 1
    ]  # fmt: skip
