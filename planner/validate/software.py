"""A graph as a training system runs it: its attention kernels, its fused elementwise chains, its FP8 layers.

The traced graph has the kernels of eager PyTorch with fused attention. What another software stack does to the same
blocks is said here, as changes of block classes; everything after that prices them as any other graph.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from planner.engine_seconds import ATTENTION_PASS
from planner.graph import Affine, BlockClass, Communicated, Graph, Kernel, Tensor

_LAYER = re.compile(r"(?:encoder\.|decoder\.)?blocks\.\d+\b")
HALF_BYTES, MASK_BYTES = 2, 1  # of a score in 16 bits, and of a dropout mask


@dataclass(frozen=True, slots=True, kw_only=True)
class Implementation:
    """What is different from eager PyTorch with fused attention."""

    unfused_attention: bool
    recomputes_attention: bool  # selective recomputation: the core of attention runs again in the backward pass
    attention_work: float  # FLOP of attention in units of the traced: context parallelism, longer memories
    gathers_again: bool  # sequence parallelism: what is gathered for a matmul is gathered again in backward, not kept
    head: int  # width of an attention head
    is_causal: bool
    has_dropout: bool
    tp: int
    expert_ranks: int  # ep
    is_frozen: bool = False  # no gradients of weights: backward has one matrix product of each, not two


def implemented(graph: Graph, by: Implementation) -> Graph:
    """The graph with the kernels, saved bytes and parameters that a rank really has."""
    layers = {graph.blocks[place].class_index for place in layer_places(graph)}
    classes = tuple(
        _class(kind, by, is_layer=index in layers, is_wide=_is_wide(graph, index))
        for index, kind in enumerate(graph.classes)
    )
    saved = {
        index: Affine(after.saved.fixed - before.saved.fixed, after.saved.per_sample - before.saved.per_sample)
        for index, (before, after) in enumerate(zip(graph.classes, classes, strict=True))
    }
    blocks = tuple(replace(b, saved=_at_least_none(b.saved, saved[b.class_index])) for b in graph.blocks)
    tensors = graph.tensors
    if by.expert_ranks > 1:
        tensors = tuple(_of_experts(t, by.expert_ranks) for t in tensors)
    return replace(graph, classes=classes, blocks=blocks, tensors=tensors)


def _is_wide(graph: Graph, class_index: int) -> bool:
    """Whether blocks of a class work in float32: nothing is saved by scores in half."""
    return graph.dtype == "float32" and class_index >= 0


def _class(kind: BlockClass, by: Implementation, *, is_layer: bool, is_wide: bool) -> BlockClass:
    kernels: list[Kernel] = []
    saved_scores, again = Affine(), list[Kernel]()
    width = 2 * HALF_BYTES if is_wide else HALF_BYTES
    for kernel in kind.kernels:
        if kernel.kind == "attention":
            kernel = replace(kernel, flop=_scaled(kernel.flop, by.attention_work))
            if by.unfused_attention:
                parts = _unfused(kernel, by, width)
                kernels += parts
                if kernel.phase == "forward":
                    scores = _scores(kernel, by)
                    kept = width + (MASK_BYTES + width if by.has_dropout else 0)
                    saved_scores += _scaled(scores, kept)
                    again += [replace(part, phase="backward") for part in parts]
                continue
            if kernel.phase == "forward" and by.recomputes_attention:
                again.append(replace(kernel, phase="backward"))
        if by.is_frozen and kernel.kind == "matmul" and kernel.phase == "backward":
            kernel = replace(kernel, flop=_scaled(kernel.flop, 0.5), num_bytes=_scaled(kernel.num_bytes, 0.5))
        kernels.append(kernel)
    if by.recomputes_attention and by.unfused_attention:
        kernels += again
        saved_scores = Affine()
    peak = _scaled(saved_scores, 0.5) if by.unfused_attention else Affine()
    saved, collectives = kind.saved + saved_scores, kind.collectives
    if by.gathers_again and is_layer:
        extra, dropped = _gathered_again(kind.collectives, by.tp)
        collectives = (*collectives, *extra)
        saved = _at_least_none(saved, _scaled(dropped, -1.0))
    return replace(
        kind,
        kernels=tuple(kernels),
        saved=saved,
        forward_peak=kind.forward_peak + peak,
        backward_peak=kind.backward_peak + peak,  # the softmax is passed back where its gradient lies
        collectives=collectives,
    )


def _gathered_again(made: Iterable[Communicated], tp: int) -> tuple[tuple[Communicated, ...], Affine]:
    """Gathers of activations that backward makes once more, and the bytes that are not kept for it.

    Source: Korthikanti et al. 2022 (arXiv 2205.05198), section 4.2.2: only the part of a rank is stored.
    """
    again = [
        replace(each, phase="backward")
        for each in made
        if each.collective == "all_gather" and each.phase == "forward" and each.num_bytes.per_sample
    ]
    dropped = Affine()
    for each in again:
        dropped += _scaled(each.num_bytes, 1 - 1 / tp)
    return tuple(again), dropped


def _scores(kernel: Kernel, by: Implementation) -> Affine:
    """Elements of the score matrices of a forward attention kernel, all of them.

    A fused kernel has 4 FLOP for each score and element of a head, of a causal one only half of the scores.
    """
    seen = 2.0 if by.is_causal else 1.0
    return _scaled(kernel.flop, seen / (4.0 * by.head))


def _unfused(kernel: Kernel, by: Implementation, width: int) -> list[Kernel]:
    """Attention as matmuls and a softmax (Vaswani et al. 2017, equation 1), with scaling and mask fused into it."""
    seen = 2.0 if by.is_causal else 1.0
    backward = kernel.phase == "backward"
    # Fused backward has 2.5 times the FLOP of forward: five products, one of them to find the scores anew.
    scores = _scaled(kernel.flop, seen / (4.0 * by.head) / (2.5 if backward else 1.0))
    product = replace(kernel, op="aten.bmm.default", kind="matmul", flop=_scaled(scores, 2.0 * by.head),
                      num_bytes=_scaled(scores, width))  # fmt: skip

    def pass_(op: str, reads_and_writes: float) -> Kernel:
        return replace(
            kernel, op=op, kind="memory", flop=Affine(),
            num_bytes=_scaled(scores, reads_and_writes),
        )  # fmt: skip

    dropout = [pass_(f"{ATTENTION_PASS}dropout", 2 * width + MASK_BYTES)] if by.has_dropout else []
    if not backward:
        return [product, pass_(f"{ATTENTION_PASS}softmax", 2 * width), *dropout, product]
    return [product, product, *dropout, pass_(f"{ATTENTION_PASS}softmax_backward", 3 * width), product, product]


def _of_experts(tensor: Tensor, ranks: int) -> Tensor:
    """An expert's weights are [experts, in, out]; a rank has its part of the experts."""
    is_expert = tensor.kind == "parameter" and len(tensor.shape) == 3 and isinstance(tensor.shape[0], int)
    if not is_expert:
        return tensor
    experts = tensor.shape[0]
    assert isinstance(experts, int)
    return replace(tensor, shape=(max(1, experts // ranks), *tensor.shape[1:]))


def _scaled(quantity: Affine, by: float) -> Affine:
    return Affine(quantity.fixed * by, quantity.per_sample * by)


def _at_least_none(quantity: Affine, change: Affine) -> Affine:
    return Affine(max(0.0, quantity.fixed + change.fixed), max(0.0, quantity.per_sample + change.per_sample))


def layer_places(graph: Graph) -> dict[int, int]:
    """The number of its layer for each block that is one or part of one: those of a decoder come behind the encoder's.

    What is before, between and behind the layers is absent. Layers of the zoo are `blocks.N` of the model or a stack.
    """
    numbers: dict[str, int] = {}
    found = ((place, _LAYER.match(block.name)) for place, block in enumerate(graph.blocks))
    return {place: numbers.setdefault(match[0], len(numbers)) for place, match in found if match}
