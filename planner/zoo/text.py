"""Batches that every machine has: the bytes of Python's own standard library, and random values for any model.

A batch is a pure function of (seed, step), so every rank of every plan can make the global batch and take its part.
"""

import functools
import sysconfig
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from planner.errors import ModelError

TEXT_VOCABULARY = 256  # bytes
MASKED_FRACTION = 0.15  # of the tokens that a masked language model has to fill in (Devlin et al. 2018)
IGNORED = -100  # a label that does not count

Batch = dict[str, Tensor] | tuple[Tensor, ...]


@functools.cache
def _corpus() -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """The bytes of the standard library's top-level modules, in the order of their names."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"), key=lambda path: path.name)
    if not files:
        raise ModelError("this Python has no sources of its standard library to train on; give data of your own")
    return np.frombuffer(b"\n".join(path.read_bytes() for path in files), dtype=np.uint8)


def _generator(seed: int, step: int, purpose: int) -> np.random.Generator:
    return np.random.default_rng([seed % 2**64, step, purpose])


def text_batch(step: int, global_batch: int, sequence_length: int, seed: int) -> dict[str, Tensor]:
    """`input_ids` and `labels` [global_batch, sequence_length], int64: bytes of real text and the byte after each."""
    rows = _text(step, global_batch, sequence_length + 1, seed)
    return {"input_ids": rows[:, :-1].contiguous(), "labels": rows[:, 1:].contiguous()}


def masked_text_batch(
    step: int, global_batch: int, sequence_length: int, seed: int, *, mask_token: int
) -> dict[str, Tensor]:
    """The same text with 15 % of the bytes, as many in every sample, to be filled in; other labels are -100."""
    rows = _text(step, global_batch, sequence_length, seed)
    drawn = _generator(seed, step, 2).random((global_batch, sequence_length)).argsort(axis=1)
    masked = torch.from_numpy(drawn < max(1, round(MASKED_FRACTION * sequence_length)))
    return {"input_ids": rows.where(~masked, mask_token), "labels": rows.where(masked, IGNORED)}


def continued_text_batch(step: int, global_batch: int, sequence_length: int, seed: int) -> dict[str, Tensor]:
    """Text as input and what follows it as `labels`, each [global_batch, sequence_length]."""
    rows = _text(step, global_batch, 2 * sequence_length, seed)
    return {"input_ids": rows[:, :sequence_length].contiguous(), "labels": rows[:, sequence_length:].contiguous()}


def _text(step: int, global_batch: int, length: int, seed: int) -> Tensor:
    """[global_batch, length] int64: pieces of the corpus."""
    corpus = _corpus()
    starts = _generator(seed, step, 0).integers(0, len(corpus) - length + 1, size=global_batch)
    return torch.from_numpy(corpus[starts[:, None] + np.arange(length)].astype(np.int64))


def random_batch(
    example: Mapping[str, Tensor] | tuple[Tensor, ...],
    *,
    global_batch: int,
    seed: int,
    step: int,
    vocabulary: int = 2,
) -> Batch:
    """A batch like `example` with `global_batch` samples: same keys, dtypes and other dims, on the CPU.

    Integers lie between the smallest and the largest of the example's (where it is on `meta`, below `vocabulary`);
    where the example holds negative ones, such as labels to ignore, its own values are drawn again. So are floats, as
    a label of 0 or 1 must stay one of both; where the example has no two of them, or is on `meta`, they are normal.
    A tensor whose first dim is not the batch, which is that of the first tensor, is taken over as it is.

    Raises:
        ModelError: the example has no batch dim.
    """
    names = list(example) if isinstance(example, Mapping) else None
    tensors = list(example.values()) if isinstance(example, Mapping) else list(example)
    if not tensors or tensors[0].ndim == 0:
        raise ModelError("the example batch's first tensor has no batch dim; put the batch on its dim 0")
    batch = tensors[0].shape[0]
    generator = _generator(seed, step, 1)
    values = [
        _random_like(tensor, global_batch, generator, vocabulary)
        if tensor.ndim and tensor.shape[0] == batch
        else tensor.detach().cpu()
        for tensor in tensors
    ]
    return tuple(values) if names is None else dict(zip(names, values, strict=True))


def _random_like(example: Tensor, global_batch: int, generator: np.random.Generator, vocabulary: int) -> Tensor:
    shape = (global_batch, *example.shape[1:])
    if example.is_meta and not example.is_floating_point():
        return torch.from_numpy(generator.integers(0, vocabulary, size=shape)).to(example.dtype)
    known = torch.empty(0) if example.is_meta else example.detach().cpu().flatten()
    if example.is_floating_point() and not (known.isfinite().all() and (known != known[:1]).any()):
        return torch.from_numpy(generator.standard_normal(shape)).to(example.dtype)
    if known.numel() == 0:
        return torch.zeros(shape, dtype=example.dtype)
    if example.is_floating_point() or example.dtype == torch.bool or int(known.min()) < 0:
        drawn = torch.from_numpy(generator.integers(0, known.numel(), size=int(np.prod(shape))))
        return known[drawn].reshape(shape)
    low, high = int(known.min()), int(known.max())
    return torch.from_numpy(generator.integers(low, high, size=shape, endpoint=True)).to(example.dtype)
