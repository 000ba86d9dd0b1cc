"""The definition of correct: plain eager training of the plain module on one device, in a process without planner.

    reference = reference_run(partial(models.build, "gpt"), models.batches("gpt", 24, 3), models.sgd, chunks=6)

runs `train_reference` in a child process that refuses to go on if planner is among its modules.
"""

import sys
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from tests.float64 import explicit_float32_as_float64
from tests.ranks import run_alone

BuildFn = Callable[[], nn.Module]
OptimizerFn = Callable[[Iterable[tuple[str, nn.Parameter]]], torch.optim.Optimizer]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """What one device computes; names are those of `named_parameters()`, so a tied parameter is there once."""

    losses: list[float]  # of each step: the mean of the micro-batches' means
    gradient_norms: list[float]  # of each step, before clipping
    first_gradients: dict[str, Tensor]  # after the first backward, before clipping; absent where None
    first_parameters: dict[str, Tensor]  # before the first step
    parameters: dict[str, Tensor]  # after the last step
    buffers: dict[str, Tensor]  # after the last step

    @property
    def zero_gradients(self) -> frozenset[str]:
        """Parameters whose gradient is rounding noise (the bias of a key, say): Adam makes steps of it, and no two
        ways of summing agree on them, so their values after Adam must not be compared.
        """
        limit = 1e-12 * self.gradient_norms[0]
        return frozenset(name for name, gradient in self.first_gradients.items() if gradient.abs().max() < limit)


def train_reference(
    build_fn: BuildFn,
    batches: Sequence[Mapping[str, Tensor]],
    optimizer_fn: OptimizerFn,
    *,
    chunks: int,
    max_grad_norm: float | None = None,
    steps: int | None = None,
    dtype: torch.dtype | None = None,
    float64_mode: bool = False,
) -> Reference:
    """Train the module that `build_fn` makes: each global batch in `chunks` equal micro-batches along dim 0.

    `steps` (default: all) of `batches`; `dtype` casts the module and the floats of the batches;
    `float64_mode` turns the model's own float32 into float64 (tests.float64).
    """
    with explicit_float32_as_float64() if float64_mode else nullcontext():
        module = build_fn()
        if dtype is not None:
            module = module.to(dtype)
        module.train()
        optimizer = optimizer_fn(module.named_parameters())
        first_parameters = _copies(module.named_parameters())
        first_gradients: dict[str, Tensor] = {}
        losses, norms = [], []
        for step, batch in enumerate(batches[:steps]):
            total = 0.0
            for micro_batch in _micro_batches(batch, chunks, dtype):
                output = module(**micro_batch)
                loss = output if isinstance(output, Tensor) else output["loss"]
                (loss / chunks).backward()
                total += loss.item() / chunks
            if step == 0:
                first_gradients = _copies((n, p.grad) for n, p in module.named_parameters() if p.grad is not None)
            limit = float("inf") if max_grad_norm is None else max_grad_norm
            norms.append(nn.utils.clip_grad_norm_(module.parameters(), limit).item())
            optimizer.step()
            optimizer.zero_grad()
            losses.append(total)
    return Reference(
        losses=losses,
        gradient_norms=norms,
        first_gradients=first_gradients,
        first_parameters=first_parameters,
        parameters=_copies(module.named_parameters()),
        buffers=_copies(module.named_buffers()),
    )


def reference_run(
    build_fn: BuildFn,
    batches: Sequence[Mapping[str, Tensor]],
    optimizer_fn: OptimizerFn,
    *,
    chunks: int,
    tmp_path: Path,
    max_grad_norm: float | None = None,
    steps: int | None = None,
    dtype: torch.dtype | None = None,
    float64_mode: bool = False,
    timeout_seconds: float = 100.0,
) -> Reference:
    """`train_reference` in a process of its own without planner; the functions must be importable by name."""
    result = tmp_path / f"reference-{uuid.uuid4().hex}.pt"
    options = {
        "chunks": chunks,
        "max_grad_norm": max_grad_norm,
        "steps": steps,
        "dtype": dtype,
        "float64_mode": float64_mode,
    }
    run_alone(_child, build_fn, batches, optimizer_fn, options, result, timeout_seconds=timeout_seconds)
    reference = torch.load(result, weights_only=False)
    result.unlink()
    assert isinstance(reference, Reference)
    return reference


def relative_errors(expected: Mapping[str, Tensor], actual: Mapping[str, Tensor]) -> dict[str, float]:
    """Of each tensor: the largest difference by the largest expected value. Names and shapes must be the same."""
    assert expected.keys() == actual.keys(), f"not in both: {sorted(expected.keys() ^ actual.keys())}"
    errors = {}
    for name, value in expected.items():
        assert value.shape == actual[name].shape, f"{name}: {actual[name].shape} is not {value.shape}"
        if value.numel():
            scale = value.abs().max().item() or 1.0
            errors[name] = (actual[name].to(value) - value).abs().max().item() / scale
    return errors


def _child(
    build_fn: BuildFn,
    batches: Sequence[Mapping[str, Tensor]],
    optimizer_fn: OptimizerFn,
    options: Mapping[str, object],
    result: Path,
) -> None:
    reference = train_reference(build_fn, batches, optimizer_fn, **options)  # type: ignore[arg-type]
    foreign = sorted(name for name in sys.modules if name.split(".")[0] == "planner")
    if foreign:
        raise AssertionError(f"the reference process imported {foreign}")
    torch.save(reference, result)


def _micro_batches(batch: Mapping[str, Tensor], chunks: int, dtype: torch.dtype | None) -> list[dict[str, Tensor]]:
    samples = next(iter(batch.values())).shape[0]
    if samples % chunks:
        raise ValueError(f"{samples} samples are not {chunks} equal micro-batches")
    parts = {
        key: (value.to(dtype) if dtype is not None and value.is_floating_point() else value).chunk(chunks)
        if isinstance(value, Tensor)
        else (value,) * chunks
        for key, value in batch.items()
    }
    return [{key: values[i] for key, values in parts.items()} for i in range(chunks)]


def _copies(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in named}
