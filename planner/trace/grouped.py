"""Matrices of experts times ragged groups of rows: one operator of the graph, whatever the library called it.

Export writes a grouped product down as `aten._grouped_mm`, or as Hugging Face's fallback where torch's own has no
shape function for the dtype. In the graph both are `aten._grouped_mm`, so that there is one price and one rule, and
a plan made on a CPU runs the device's kernel.
"""

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

NAME = "aten._grouped_mm.default"
# Other spellings with the same operands: (rows, matrices, ends of the groups).
SPELLINGS = (
    "planner.grouped_mm.default", "transformers.grouped_mm_fallback.default",
    "autoplan_zoo.grouped_mm_fallback.default",
)  # fmt: skip
_NATIVE = (torch.bfloat16, torch.float16, torch.float32)


def grouped_mm(
    rows: torch.Tensor,
    matrices: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """`aten._grouped_mm` in every dtype, on real and on fake tensors.

    Ragged `rows` [tokens, in] times `matrices` [experts, in, out] gives [tokens, out]: the rows up to `offs[0]` meet
    the first matrix, and so on. Torch's kernel takes no float64, and its shape function bfloat16 only: there the
    product is one operator over a loop.
    """
    has_kernel = matrices.dtype == torch.bfloat16 or (
        matrices.dtype in _NATIVE and not _is_fake(rows) and not _is_fake(matrices)
    )
    if has_kernel or rows.ndim != 2 or matrices.ndim != 3 or offs is None or bias is not None or out_dtype is not None:
        if offs is not None:
            offs = offs.to(torch.int32)
        product: torch.Tensor = torch.ops.aten._grouped_mm(rows, matrices, offs, bias, out_dtype)
        return product
    result: torch.Tensor = torch.ops.planner.grouped_mm(rows, matrices, offs)
    return result


class EveryDtype(TorchFunctionMode):
    """Within it torch's grouped product runs in every dtype on fake tensors, too."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (grouped_mm if func is torch._grouped_mm else func)(*args, **(kwargs or {}))


def _is_fake(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "meta" or isinstance(tensor, torch._subclasses.FakeTensor)


def _groups(offs: torch.Tensor) -> list[tuple[int, int, int]]:
    """(group, first row, row after the last) of the groups that have rows."""
    ends = offs.tolist()
    return [(i, a, b) for i, (a, b) in enumerate(zip([0, *ends[:-1]], ends, strict=True)) if b > a]


@torch.library.custom_op("planner::grouped_mm", mutates_args=())
def _by_group(rows: torch.Tensor, matrices: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """[tokens, in] x [experts, in, out] -> [tokens, out]; rows of no group are zero."""
    result = rows.new_zeros(rows.shape[0], matrices.shape[2])
    for group, start, end in _groups(offs):
        result[start:end] = rows[start:end] @ matrices[group]
    return result


@torch.library.custom_op("planner::grouped_mm_backward", mutates_args=())
def _by_group_backward(
    gradient: torch.Tensor, rows: torch.Tensor, matrices: torch.Tensor, offs: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of rows and matrices: two products for the forward's one."""
    of_rows, of_matrices = torch.zeros_like(rows), torch.zeros_like(matrices)
    for group, start, end in _groups(offs):
        of_rows[start:end] = gradient[start:end] @ matrices[group].T
        of_matrices[group] = rows[start:end].T @ gradient[start:end]
    return of_rows, of_matrices


@_by_group.register_fake
def _(rows: torch.Tensor, matrices: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    return rows.new_empty(rows.shape[0], matrices.shape[2])


@_by_group_backward.register_fake
def _(
    gradient: torch.Tensor, rows: torch.Tensor, matrices: torch.Tensor, offs: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(rows), torch.empty_like(matrices)


def _keep(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
    rows, matrices, offs = ctx.saved_tensors
    of_rows, of_matrices = torch.ops.planner.grouped_mm_backward(gradient, rows, matrices, offs)
    return of_rows, of_matrices, None


_by_group.register_autograd(_differentiate, setup_context=_keep)
