"""What one launched ATen operator costs: its FLOP, its bytes, and which operator the device picks.

The FLOP of every operator that computes more than an elementwise function are in one table,
`FORMULAS`; an operator that should be there and is not is marked, so that a plan can say what it does not count.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, cast

import torch
from torch import nn
from torch.nn.attention.bias import CausalVariant
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from planner.trace.grouped import grouped_mm
from planner.trace.parallel_attention import attention_to_lower_right

DeviceKind = Literal["cuda", "cpu"]
Kind = Literal["matmul", "attention", "convolution", "memory"]
Arguments = Mapping[str, Any]  # an operator's arguments by the names of its schema
Formula = Callable[[Arguments, Any], float]  # (arguments, result) -> FLOP

aten = torch.ops.aten
_LOWER_RIGHT = int(CausalVariant.LOWER_RIGHT)  # `custom_mask_type` of efficient attention


@dataclass(frozen=True, slots=True)
class Launched:
    """One kernel at one micro-batch size; without `has_formula` it may compute more than the FLOP that are counted."""

    op: str
    kind: Kind
    dtype: str
    flop: float
    num_bytes: float
    has_formula: bool = True
    operands: tuple[tuple[str, tuple[int, ...], bool], ...] = ()  # dtype, shape, whether strided


def launched(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any, matrices: Collection[int]
) -> Launched | None:
    """What a dispatched operator launches; None for a view or an allocation.

    `matrices` are the parameters with at least two dims, by `storage_key`.
    """
    name = func._schema.name.rpartition("::")[2]
    if func.is_view or name in _FREE or name.startswith("_assert") or func.namespace == "prim":
        return None
    names = (argument.name for argument in func._schema.arguments)
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    operands = [*tensors_in(list(given.values())), *tensors_in(out)]
    if not operands:
        return None
    is_foreign = func.namespace not in _NAMESPACES
    registered = flop_registry.get(func.overloadpacket) if is_foreign else None
    has_formula = registered is not None or (name in FORMULAS and not is_foreign)
    kind, formula = _MEMORY if is_foreign else FORMULAS.get(name, _MEMORY)
    if registered is not None:  # the user's own operator, with the formula that torch's counter would use
        kind, formula = "matmul", lambda _, out: float(registered(*args, **kwargs, out_val=out))
    leading = next((t for t in operands if t.is_floating_point()), operands[0])
    return Launched(
        op=_STANDS_FOR.get(str(func), str(func)),
        kind=kind,
        dtype=str(leading.dtype).removeprefix("torch."),
        flop=formula(given, out),
        num_bytes=_bytes_moved(name, given, out),
        has_formula=has_formula or not _may_compute(func, name, operands, matrices),
        operands=_operands(kind, given),
    )


# Of attention these alone: what its kernels are given besides differs with the one that a device picks.
_OF_ATTENTION = ("query", "key", "value")


def _operands(kind: Kind, given: Arguments) -> tuple[tuple[str, tuple[int, ...], bool], ...]:
    """Dtype, shape and layout of what a kernel reads; scalars and states of generators do not tell its time."""
    values = [given[name] for name in _OF_ATTENTION if name in given] if kind == "attention" else list(given.values())
    return tuple(
        (
            str(t.dtype).removeprefix("torch."),
            tuple(t.shape),
            t.ndim > 1 and t.shape[-1] > 1 and t.stride(-1) != 1,
        )
        for t in tensors_in(values)
        if t.ndim and t.dtype != torch.uint64
    )


def _may_compute(func: Any, name: str, operands: Sequence[torch.Tensor], matrices: Collection[int]) -> bool:
    """Whether an operator without formula may have FLOP: by its name, or because it reads a matrix of parameters."""
    if name in _MOVES or _RESIZES.match(name) or {torch.Tag.pointwise, torch.Tag.reduction} & set(func.tags):
        return False
    return _COMPUTES.search(name) is not None or any(storage_key(tensor) in matrices for tensor in operands)


def priced_by_bytes(op: str) -> str:
    """The sentence for an operator that may compute and has no FLOP formula.

    >>> priced_by_bytes("mylib.mix.default")  # doctest: +ELLIPSIS
    'operator mylib.mix.default has no FLOP formula and is priced by its bytes alone; give it one with ...
    """
    namespace, _, name = op.partition(".")
    said = f"operator {op} has no FLOP formula and is priced by its bytes alone"
    if namespace in _NAMESPACES:
        return f"{said}; where it computes much, steps take longer than predicted"
    name = name.removesuffix(".default")
    return f"{said}; give it one with torch.utils.flop_counter.register_flop_formula(torch.ops.{namespace}.{name})"


def storage_key(tensor: torch.Tensor) -> int:
    """Identity of a tensor's storage while it lives."""
    return int(tensor.untyped_storage()._cdata)


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """The tensors in nested arguments or results."""
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


# --- FLOP -----------------------------------------------------------------------------------------


def _product_flop(a: torch.Tensor, b: torch.Tensor) -> float:
    """A multiply-add for each element of `a` and column of `b`, batched or not."""
    return 2.0 * float(a.numel() * b.shape[-1])


def _attention_flop(given: Arguments, *, to_lower_right: bool = False) -> float:
    """QK^T and PV. A causal mask leaves the lower triangle, aligned to the top left, or to the lower right.

    `[batch, heads, sequence, head_dim]`; the query's heads count, however few the keys have.
    """
    query, key, value = given["query"], given["key"], given["value"]
    rows, columns = query.shape[-2], key.shape[-2]
    pairs = float(rows * columns)
    if given.get("is_causal"):
        corner = min(rows, columns)
        behind = corner * (columns - corner) if to_lower_right else (rows - corner) * columns
        pairs = corner**2 / 2 + behind
    batch_heads = prod(query.shape[:-2])
    return 2.0 * float(batch_heads * pairs * (query.shape[-1] + value.shape[-1]))


def _flash_flop(given: Arguments) -> float:
    """Of flash attention, whose causal mask ends with the last key (FlashAttention-2 from version 2.1)."""
    return _attention_flop(given, to_lower_right=True)


def _efficient_flop(given: Arguments) -> float:
    """Of `aten._efficient_attention_forward`: `[batch, sequence, heads, head_dim]`, and a number for the mask."""
    moved = {name: given[name].transpose(1, 2) for name in ("query", "key", "value")}
    kind = given["custom_mask_type"]
    return _attention_flop({**moved, "is_causal": kind > 0}, to_lower_right=kind == _LOWER_RIGHT)


def _convolution_flop(given: Arguments, out: torch.Tensor) -> float:
    """A multiply-add per weight element and position; the weight's shape knows about groups.

    Positions are those of the output (or of its gradient), transposed ones those of the input.
    """
    positions = given["input"] if given["transposed"] else out
    return 2.0 * float(given["weight"].numel() * positions.shape[0] * prod(positions.shape[2:]))


def _grouped_mm_flop(a: torch.Tensor, b: torch.Tensor) -> float:
    """Each row (or column, or inner slice) of a ragged operand meets one group only."""
    groups = a.shape[0] if a.ndim == b.ndim == 3 else 1
    return 2.0 * float(groups * a.shape[-2] * a.shape[-1] * b.shape[-1])


def _trilinear_flop(given: Arguments) -> float:
    """Of two products in a row, as ATen makes them: the first two factors, then that with the third.

    Each factor lacks the dims of its `expand` list; a dim that the third lacks is summed in the first product.
    """
    factors = [(given[f"i{k}"].shape, set(given[f"expand{k}"])) for k in (1, 2, 3)]
    num_dims = len(factors[0][0]) + len(factors[0][1])
    sizes = [1] * num_dims
    for shape, lacks in factors:
        for dim, size in zip((d for d in range(num_dims) if d not in lacks), shape, strict=True):
            sizes[dim] = max(sizes[dim], size)
    (_, first), (_, second), (_, third) = factors
    one = [d for d in range(num_dims) if d not in first & second]
    kept = [d for d in range(num_dims) if (d in one and not (d in given["sumdim"] and d in third)) or d not in third]
    return 2.0 * float(prod(sizes[d] for d in one) + prod(sizes[d] for d in kept))


def _recurrent_flop(given: Arguments, weights: tuple[str, str]) -> float:
    """Every row of the input meets every weight once."""
    rows = given["input"].numel() // given["input"].shape[-1]
    return 2.0 * float(rows * sum(given[name].numel() for name in weights))


# What counts FLOP, by operator name without namespace. A new operator is one line. Attention's
# backward has five products for the forward's two (QK^T again, dV, dP, dQ, dK): Dao et al. 2022.
FORMULAS: dict[str, tuple[Kind, Formula]] = {
    "mm": ("matmul", lambda g, _: _product_flop(g["self"], g["mat2"])),
    "addmm": ("matmul", lambda g, _: _product_flop(g["mat1"], g["mat2"])),
    "bmm": ("matmul", lambda g, _: _product_flop(g["self"], g["mat2"])),
    "baddbmm": ("matmul", lambda g, _: _product_flop(g["batch1"], g["batch2"])),
    "addbmm": ("matmul", lambda g, _: _product_flop(g["batch1"], g["batch2"])),
    "_scaled_mm": ("matmul", lambda g, _: _product_flop(g["self"], g["mat2"])),
    "mv": ("matmul", lambda g, _: 2.0 * g["self"].numel()),
    "addmv": ("matmul", lambda g, _: 2.0 * g["mat"].numel()),
    "dot": ("matmul", lambda g, _: 2.0 * g["self"].numel()),
    "_cdist_forward": ("matmul", lambda g, out: 2.0 * out.numel() * g["x1"].shape[-1]),
    "_euclidean_dist": ("matmul", lambda g, out: 2.0 * out.numel() * g["x1"].shape[-1]),
    "_cdist_backward": ("matmul", lambda g, out: 4.0 * g["cdist"].numel() * g["x1"].shape[-1]),
    "_grouped_mm": ("matmul", lambda g, _: _grouped_mm_flop(g["self"], g["mat2"])),
    "grouped_mm": ("matmul", lambda g, _: _grouped_mm_flop(g["rows"], g["matrices"])),
    "grouped_mm_backward": ("matmul", lambda g, _: 2 * _grouped_mm_flop(g["rows"], g["matrices"])),
    "_trilinear": ("matmul", lambda g, _: _trilinear_flop(g)),
    "mkldnn_rnn_layer": ("matmul", lambda g, _: _recurrent_flop(g, ("weight0", "weight1"))),
    "mkldnn_rnn_layer_backward": (
        "matmul", lambda g, _: 2 * _recurrent_flop(g, ("weight1", "weight2"))),
    **dict.fromkeys(
        ("convolution", "_convolution", "cudnn_convolution", "mkldnn_convolution"),
        ("convolution", lambda g, out: _convolution_flop({"transposed": False, **g}, out))),
    "convolution_backward": (
        "convolution",
        lambda g, _: sum(g["output_mask"][:2]) * _convolution_flop(g, g["grad_output"])),
    "_scaled_dot_product_flash_attention": ("attention", lambda g, _: _flash_flop(g)),
    "_scaled_dot_product_flash_attention_backward": ("attention", lambda g, _: 2.5 * _flash_flop(g)),
    "_efficient_attention_forward": ("attention", lambda g, _: _efficient_flop(g)),
    "_efficient_attention_backward": ("attention", lambda g, _: 2.5 * _efficient_flop(g)),
    **dict.fromkeys(
        (
            "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
            "_scaled_dot_product_flash_attention_for_cpu",
        ),
        ("attention", lambda g, _: _attention_flop(g))),
    **dict.fromkeys(
        (
            "_scaled_dot_product_efficient_attention_backward",
            "_scaled_dot_product_cudnn_attention_backward",
            "_scaled_dot_product_flash_attention_for_cpu_backward",
        ),
        ("attention", lambda g, _: 2.5 * _attention_flop(g))),
}  # fmt: skip

# Whose operators have the names of FORMULAS; others are the user's.
_NAMESPACES = ("aten", "prims", "prim", "planner", "mkldnn", "mkldnn_prepacked", "transformers", "torchvision")

_MEMORY: tuple[Kind, Formula] = ("memory", lambda g, out: 0.0)

# Such a name promises FLOP. ("cummax", "_convert_..." do not match.)
_COMPUTES = re.compile(r"mm(_|$)|attention|conv(?!ert)|lstm|gru|rnn")

# Without FLOP although they may read a matrix of parameters; elementwise operators and reductions
# are known by their tag.
_MOVES = {
    "_to_copy", "cat", "clone", "copy", "copy_", "cumsum", "embedding", "_embedding_bag",
    "flip", "gather", "index", "index_add", "index_copy", "index_put", "index_put_", "index_select",
    "_index_put_impl_", "masked_fill", "masked_fill_", "native_group_norm", "native_layer_norm",
    "native_layer_norm_backward", "repeat", "repeat_interleave", "roll", "scatter", "scatter_add",
    "select_scatter", "slice_scatter", "stack", "tril", "triu", "where", "_softmax", "_log_softmax",
    "fused_rms_norm", "fused_rms_norm_backward", "native_batch_norm", "native_dropout",
    "_weight_norm_interface", "_weight_norm_interface_backward", "_unsafe_index", "sort",
    "topk", "zeros_like", "ones_like", "empty_like", "full_like", "new_zeros", "new_ones", "new_empty", "new_full",
}  # fmt: skip
_RESIZES = re.compile(r"^_?(upsample|grid_sampler|(constant|reflection|replication)_pad|\w*pool)")


# --- bytes ----------------------------------------------------------------------------------------

# Launch nothing, although their schema names no alias.
_FREE = {
    "_unsafe_view", "_reshape_alias", "empty", "empty_like", "empty_strided", "new_empty",
    "new_empty_strided", "lift_fresh", "sym_size",
}  # fmt: skip

# Read no more of this argument than they return (gathers) or than another one holds (scatters).
_SPARSE = {
    "embedding": "weight", "_embedding_bag": "weight", "index_select": "self", "gather": "self",
    "index": "self", "nll_loss_forward": "self", "nll_loss2d_forward": "self",
    "index_put_": "self", "_index_put_impl_": "self", "index_add_": "self", "index_copy_": "self",
    "scatter_": "self", "scatter_add_": "self",
}  # fmt: skip

# Are given this argument for its shape, or only write it.
_UNREAD = {
    "nll_loss_backward": "self", "nll_loss2d_backward": "self", "copy_": "self", "fill_": "self",
    "zero_": "self", "bernoulli_": "self", "uniform_": "self", "normal_": "self",
}  # fmt: skip


def _num_bytes(tensor: torch.Tensor) -> int:
    """Bytes that moving a tensor takes: an expanded one has no more than its storage."""
    return min(tensor.numel() * tensor.itemsize, tensor.untyped_storage().nbytes())


def _bytes_moved(name: str, given: Arguments, out: object) -> int:
    """Bytes read plus written by a kernel; what is written in place counts once each way."""
    written = {id(t): _num_bytes(t) for t in tensors_in(out)}
    if name.endswith("_like") or name.startswith("new_"):
        return sum(written.values())
    sparse, unread = _SPARSE.get(name), _UNREAD.get(name)
    if sparse is not None and name.endswith("_"):
        values = (value for key, value in given.items() if key != sparse)
        touched = max((_num_bytes(t) for t in tensors_in(list(values))), default=0)
        return 3 * touched  # the values, and their places read and written
    read = {}
    for key, value in given.items():
        if key == unread:
            continue
        for tensor in tensors_in(value):
            limit = sum(written.values()) if key == sparse else None
            size = _num_bytes(tensor)
            read[id(tensor)] = size if limit is None else min(size, limit)
    return sum(read.values()) + sum(written.values())


# --- scratch --------------------------------------------------------------------------------------

_CHANNELS_OF_A_VECTOR = 16  # of float32 in AVX-512; an input of fewer is read as it lies


def _blocked_bytes(tensor: torch.Tensor, *channel_dims: int) -> int:
    """Bytes of a copy whose channels are filled up to whole vectors."""
    num_bytes = tensor.itemsize
    for dim, size in enumerate(tensor.shape):
        num_bytes *= -(-size // _CHANNELS_OF_A_VECTOR) * _CHANNELS_OF_A_VECTOR if dim in channel_dims else size
    return num_bytes


def _convolution_scratch(given: Arguments, out: torch.Tensor) -> int:
    """The copies of input and weight that it reads, then that of the output, which it makes first."""
    few = given["input"].shape[1] < _CHANNELS_OF_A_VECTOR
    read = 0 if few else _blocked_bytes(given["input"], 1)
    weight = 0 if few else _blocked_bytes(given["weight"], *((0, 1) if given.get("groups", 1) == 1 else (0,)))
    return max(read + weight, _blocked_bytes(out, 1))


def _convolution_backward_scratch(given: Arguments, _: object) -> int:
    """The copies of input and gradient; the gradient of a strided one's input needs another as large as the input."""
    gradient = _blocked_bytes(given["grad_output"], 1)
    if given["input"].shape[1] < _CHANNELS_OF_A_VECTOR:
        return gradient
    read = _blocked_bytes(given["input"], 1)
    strided = given["output_mask"][0] and max(given["stride"]) > 1
    return read + (max(read, gradient) if strided else gradient)


# Bytes that an operator takes from torch's allocator and gives back before it ends, beyond its results. On a CPU oneDNN
# convolves copies in blocks of channels: read off the allocator's records, torch 2.13 on AVX-512.
_SCRATCH: dict[tuple[DeviceKind, str], Callable[[Arguments, Any], int]] = {
    **dict.fromkeys((("cpu", "convolution"), ("cpu", "_convolution")), _convolution_scratch),
    ("cpu", "convolution_backward"): _convolution_backward_scratch,
}  # fmt: skip
_BLOCKED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def scratch_bytes(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    """What a dispatched operator holds for a moment besides its arguments and results, by `_SCRATCH`."""
    made = next((t for t in tensors_in(out)), None)
    if made is None or made.dtype not in _BLOCKED_DTYPES:
        return 0
    formula = _SCRATCH.get((cast("DeviceKind", made.device.type), func._schema.name.rpartition("::")[2]))
    if formula is None:
        return 0
    names = (argument.name for argument in func._schema.arguments)
    return formula({**dict(zip(names, args, strict=False)), **kwargs}, out)


# --- what the device would run --------------------------------------------------------------------


def _cuda_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    to_lower_right: bool = False,
) -> torch.Tensor:
    """Scaled dot product attention by the operator that CUDA picks on Ampere and later.

    The order and the conditions are those of ATen's `sdp_utils.cpp`: flash, else efficient, else
    the composite; efficient takes no grouped keys, and pads no head. What is causal `to_lower_right`, not
    to the top left, goes to the same kernels, as `torch.nn.attention.bias` has it.
    """
    heads = {query.shape[-1], key.shape[-1], value.shape[-1]}
    is_half = query.dtype in (torch.float16, torch.bfloat16)
    is_plain = query.ndim == key.ndim == value.ndim == 4
    dim = query.shape[-1]
    if (
        is_plain and is_half and attn_mask is None and len(heads) == 1 and dim <= 256
        and (to_lower_right or not (is_causal and query.shape[-2] != key.shape[-2]))
    ):  # fmt: skip
        if padding := -dim % 8:
            scale = dim**-0.5 if scale is None else scale
            query, key, value = (torch.constant_pad_nd(t, (0, padding)) for t in (query, key, value))
        out = _first(
            aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)
        )
        return out[..., :dim] if padding else out
    aligned = all(head % (8 if is_half else 4) == 0 for head in heads)
    same_heads = query.shape[:-2] == key.shape[:-2] == value.shape[:-2]
    if is_plain and aligned and same_heads and (is_half or query.dtype == torch.float32):
        if attn_mask is not None:
            if attn_mask.dtype == torch.bool:
                bias = torch.zeros_like(attn_mask, dtype=query.dtype)
                attn_mask = bias.masked_fill_(attn_mask.logical_not(), float("-inf"))
            attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
        keeps_sum = any(t.requires_grad for t in (query, key, value))
        if to_lower_right:
            query, key, value = (t.transpose(1, 2) for t in (query, key, value))
            # Without `scale`, of which no price depends: torch's backward for fake tensors mistakes it (seen in 2.13).
            found = aten._efficient_attention_forward(
                query, key, value, None, None, None, None, None, dropout_p, _LOWER_RIGHT, keeps_sum
            )
            return _first(found).transpose(1, 2)
        return _first(
            aten._scaled_dot_product_efficient_attention(
                query, key, value, attn_mask, keeps_sum, dropout_p, is_causal, scale=scale
            )
        )
    if to_lower_right:
        rows, columns = query.shape[-2], key.shape[-2]
        attn_mask, is_causal = query.new_ones(rows, columns, dtype=torch.bool).tril(columns - rows), False
    return _first(
        aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    )


def _cuda_lower_right_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None, enable_gqa: bool
) -> torch.Tensor:
    """`parallel_attention.attention_to_lower_right` as CUDA runs it."""
    return _cuda_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=enable_gqa, to_lower_right=True)


def _cuda_dropout(x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """Dropout as CUDA fuses it: a mask of one byte an element is kept, not a scaled copy."""
    if train and 0.0 < p < 1.0 and x.numel():
        return _first(aten.native_dropout(x, p, train))
    return _first([aten.dropout(x, p, train)])


def _masked_in_place(x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """Dropout in place: no fused kernel, and a mask of one byte an element."""
    if not train or p == 0.0:
        return x
    mask = torch.empty(x.shape, dtype=torch.bool, device=x.device).bernoulli_(1.0 - p)
    return x.mul_(mask).mul_(1.0 / (1.0 - p) if p < 1.0 else 0.0)


@torch.library.custom_op("planner::fused_rms_norm", mutates_args=())
def _fused_rms_norm(x: torch.Tensor, weight: torch.Tensor | None, num_dims: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Stands for `aten._fused_rms_norm`, which without CUDA is a composite of other operators."""
    raise NotImplementedError


@torch.library.custom_op("planner::fused_rms_norm_backward", mutates_args=())
def _fused_rms_norm_backward(
    grad: torch.Tensor, x: torch.Tensor, rstd: torch.Tensor, weight: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Stands for `aten._fused_rms_norm_backward`."""
    raise NotImplementedError


def _fake_rms_norm(x: torch.Tensor, weight: torch.Tensor | None, num_dims: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The result and the reciprocal of the root mean square of every row, at least in float32."""
    kind = torch.promote_types(x.dtype, torch.float32)
    rows = [*x.shape[:-num_dims], *[1] * num_dims]
    return torch.empty(x.shape, dtype=x.dtype, device=x.device), x.new_empty(rows, dtype=kind)


def _fake_rms_norm_backward(
    grad: torch.Tensor, x: torch.Tensor, rstd: torch.Tensor, weight: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), x.new_empty(0) if weight is None else torch.empty_like(weight)


def _keep_for_rms_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    ctx.save_for_backward(inputs[0], output[1], inputs[1])


def _differentiate_rms_norm(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[torch.Tensor, torch.Tensor | None, None]:
    x, rstd, weight = ctx.saved_tensors
    grad_x, grad_weight = torch.ops.planner.fused_rms_norm_backward(grad, x, rstd, weight)
    return grad_x, None if weight is None else grad_weight, None


_fused_rms_norm.register_fake(_fake_rms_norm)
_fused_rms_norm_backward.register_fake(_fake_rms_norm_backward)
_fused_rms_norm.register_autograd(_differentiate_rms_norm, setup_context=_keep_for_rms_norm)

_STANDS_FOR = {
    "planner.fused_rms_norm.default": "aten._fused_rms_norm.default",
    "planner.fused_rms_norm_backward.default": "aten._fused_rms_norm_backward.default",
    "planner.grouped_mm.default": "aten._grouped_mm.default",
    "planner.grouped_mm_backward.default": "aten._grouped_mm.default",
}


def _cuda_rms_norm(
    x: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> torch.Tensor:
    """RMS norm as CUDA fuses it, where the weight has the input's dtype."""
    if weight is not None and weight.dtype != x.dtype:
        return _first([aten.rms_norm(x, list(normalized_shape), weight, eps)])
    return _first(torch.ops.planner.fused_rms_norm(x, weight, len(normalized_shape)))


def _cuda_functional_dropout(
    input: torch.Tensor,  # noqa: A002 the name is torch's
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> torch.Tensor:
    """`torch.nn.functional.dropout`; in place there is no fused kernel."""
    if inplace:
        return _first([aten.dropout_(input, p, training)])
    return _cuda_dropout(input, p, training)


def _first(results: Sequence[torch.Tensor]) -> torch.Tensor:
    return results[0]


# The strides that `view` was written for are those of the device's own kernels.
_VIEWS: dict[str, Callable[..., Any]] = {
    "aten.view.default": aten.reshape.default,
    "aten._unsafe_view.default": aten.reshape.default,
}
# What the runtime makes of dropout, on every device (planner.runtime.random).
_DROPOUT: dict[str, Callable[..., Any]] = {
    "aten.dropout.default": _cuda_dropout,
    "aten.dropout_.default": _masked_in_place,
}
_CUDA: dict[str, Callable[..., Any]] = {
    "aten.scaled_dot_product_attention.default": _cuda_attention,
    "aten.rms_norm.default": _cuda_rms_norm,
}
REPLACEMENTS: dict[DeviceKind, dict[str, Callable[..., Any]]] = {
    "cuda": _VIEWS | _DROPOUT | _CUDA,
    "cpu": _VIEWS | _DROPOUT,
}


_FUNCTIONS: dict[Any, Callable[..., Any]] = {torch._grouped_mm: grouped_mm}
_CUDA_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    aten.scaled_dot_product_attention.default: _cuda_attention,
    nn.functional.scaled_dot_product_attention: _cuda_attention,
    attention_to_lower_right: _cuda_lower_right_attention,
    nn.functional.dropout: _cuda_functional_dropout,
    nn.functional.rms_norm: _cuda_rms_norm,
    torch.dropout: _cuda_dropout,
    torch.rms_norm: _cuda_rms_norm,
}


class DeviceFunctions(TorchFunctionMode):
    """The same replacements for a module, or an operator of ours, that runs as it is."""

    def __init__(self, kind: DeviceKind) -> None:
        super().__init__()
        self.functions = _FUNCTIONS | (_CUDA_FUNCTIONS if kind == "cuda" else {})

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.functions.get(func, func)(*args, **(kwargs or {}))


def device_of(kind: DeviceKind) -> torch.device:
    """Where fake tensors that stand for such a device live."""
    return torch.device("meta" if kind == "cuda" else "cpu")
