"""What an operator computes, and what autograd keeps of it, from shapes alone: enough to choose between splits.

`planner.trace` prices the graph of a rank that is chosen in the end on real kernels; here only ways to split the same
node are compared.
"""

from collections.abc import Collection, Iterator, Sequence
from math import prod

from planner.graph import CONVERSIONS, Batch, Node, Ref, Size, Tensor
from planner.shard.placement import operands_of

# Operators that are linear in all operands together, or keep a mask at most.
_KEEPS_NOTHING = {
    "add", "sub", "rsub", "neg", "cat", "stack", "sum", "mean", "clone", "to", "_to_copy", "constant_pad_nd", "pad",
    "roll", "flip", "copy", "cumsum", "repeat", "repeat_interleave", "index_select", "gather", "index", "embedding",
    "masked_fill", "where", "scatter", "scatter_add", "index_add", "avg_pool2d", "adaptive_avg_pool2d", "type_as",
    "contiguous", "reshape", "flatten", "upsample_nearest2d", "upsample_bilinear2d", "dropout",
}  # fmt: skip
# Operators that read the part of their first operand that their indices say.
LOOKS_UP = {"embedding", "index_select", "gather", "index", "select", "slice"}
_GROUPED = ("_grouped_mm", "grouped_mm_fallback")
# Of two factors, each is kept for the gradient of the other.
_PRODUCTS = {
    "mul", "linear", "mm", "bmm", "matmul", "addmm", "baddbmm", "einsum", "convolution", "conv1d", "conv2d", "conv3d",
    "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", *_GROUPED, "outer", "addcmul", "dot", "mv",
}  # fmt: skip
_ATTENTION = {
    "scaled_dot_product_attention", "causal_attention", "balanced_causal_attention", "shared_heads_attention",
}  # fmt: skip
_KEEPS_OUTPUT = {
    "softmax", "_softmax", "log_softmax", "_log_softmax", "relu", "sigmoid", "tanh", "exp", "sqrt", "rsqrt",
    "reciprocal",
}  # fmt: skip


def base_name(node: Node) -> str:
    """`add` of `aten.add_.Tensor`."""
    parts = node.op.split(".")
    name = parts[1] if len(parts) > 1 else node.op
    return name if name.startswith("_") else name.rstrip("_")


def kept_by(node: Node, tensors: Sequence[Tensor], gradients: Collection[int]) -> Iterator[tuple[int, int | None]]:
    """What autograd keeps of a node for backward: (tensor, operand position; None = its own output)."""
    name, operands = base_name(node), operands_of(node)
    made = [t for t in node.outputs if t is not None]
    is_view = bool(node.aliases) and not node.mutates
    if node.op.startswith("planner.") and name in CONVERSIONS:
        return
    if is_view or name in _KEEPS_NOTHING or not any(t in gradients for t in (*made, *node.mutates)):
        return
    if name in _KEEPS_OUTPUT or name in _ATTENTION:
        yield from ((t, None) for t in made[:1])
    if name in _KEEPS_OUTPUT:
        return
    for position, t in enumerate(operands):
        others = [other for other in operands if other != t] if name in _PRODUCTS else operands
        is_needed = any(other in gradients for other in others) or len(operands) == 1
        if is_needed and tensors[t].kind not in ("parameter", "buffer", "constant"):
            yield t, position


def size_at(size: Size, micro_batch: int) -> int:
    """A size for so many samples."""
    return size.per_sample * micro_batch if isinstance(size, Batch) else size


def flop_of(node: Node, tensors: Sequence[Tensor], micro_batch: int) -> float:
    """FLOP of the forward of a whole product, convolution or attention, from shapes (a multiply-add is two); else 0."""
    name = base_name(node)
    shapes = [
        tuple(size_at(size, micro_batch) for size in tensors[arg.tensor].shape) if isinstance(arg, Ref) else ()
        for arg in node.args
    ]
    made = [t for t in node.outputs if t is not None]
    if not made:
        return 0.0
    elements = tensors[made[0]].num_elements.at(micro_batch)
    if name in ("linear", "mm", "bmm", "matmul", "mv", *_GROUPED):
        return 2.0 * elements * shapes[0][-1]
    if name in ("addmm", "baddbmm"):
        return 2.0 * elements * shapes[1][-1]
    if name.startswith("conv"):
        is_transposed = "transpose" in name or (name == "convolution" and node.args[6:7] == (True,))
        return 2.0 * (prod(shapes[0]) if is_transposed else elements) * prod(shapes[1][1:])
    if name in _ATTENTION:
        is_causal = (*node.args[5:6], *(value for key, value in node.kwargs if key == "is_causal")) == (True,)
        is_causal = name == "balanced_causal_attention" or (is_causal and name != "causal_attention")  # that has a mask
        return 4.0 * elements * shapes[1][-2] * (0.5 if is_causal else 1.0)
    if name == "einsum" and isinstance(node.args[0], str):
        return _einsum_flop(node, tensors, micro_batch)
    return 0.0


def _einsum_flop(node: Node, tensors: Sequence[Tensor], micro_batch: int) -> float:
    """Twice the product of all dims that the equation names."""
    equation, operands = str(node.args[0]).replace(" ", ""), node.args[1]
    sizes: dict[str, int] = {}
    items = operands if isinstance(operands, tuple) else ()
    for letters, arg in zip(equation.partition("->")[0].split(","), items, strict=False):
        if isinstance(arg, Ref) and "." not in letters:
            shape = tensors[arg.tensor].shape
            sizes |= {letter: size_at(size, micro_batch) for letter, size in zip(letters, shape, strict=False)}
    return 2.0 * prod(sizes.values())
