"""Rules of convolutions, norms of channels, selecting, joining and sorting: every line proven by examples."""

from typing import Any

import pytest
import torch

from benchmarks.sharding_rules import rows
from planner.graph import Batch, Node, Ref, Tensor
from planner.shard.placement import Placement
from planner.shard.rules import convolution, has_rule, indexing, line_of, options
from tests.shard_proofs import Example, buffer, check, example, integers, normal, tensor

B = Batch(1)
_FUSED = "S2*3[8]"
_TOKENS = "S0*B[6]"


def _shuffled(generator: torch.Generator, shape: list[int]) -> torch.Tensor:
    return torch.randperm(6, generator=generator)[: shape[0]]


def _complex(generator: torch.Generator, shape: list[int]) -> torch.Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.complex128)


def _convolutions() -> list[Example]:
    x = tensor(B, 4, 5, 6, values=normal)
    conv2d, transposed = "aten.conv2d.default", "aten.conv_transpose2d.input"
    spatial = {1: (6,), 2: (6, 5), 3: (4, 5, 3)}
    found = [
        example(f"aten.conv{d}d.default", tensor(B, 4, *spatial[d]), tensor(8, 4, *(3 for _ in range(d))), tensor(8))
        for d in spatial
    ] + [
        example(f"aten.conv_transpose{d}d.{'default' if d == 1 else 'input'}", tensor(B, 4, *spatial[d]),
                tensor(4, 8, *(2 for _ in range(d))), tensor(8))
        for d in spatial
    ]  # fmt: skip
    return [
        *found,
        example(
            conv2d, x, tensor(8, 4, 3, 3), tensor(8), (2, 2), (1, 1), degrees=(2, 4),
            expected=("Q,S0[8],S0[8]>S1[8]", "S1[4],S1[4],P>P"), never=("S2", "S3", "S0[B]"),
        ),
        example(conv2d, x, tensor(12, 4, 1, 1), made_seeds={0: ["S1[8,4]"]}, expected=("Q,S0[8,4]>S1[8,4]",)),
        example(conv2d, tensor(Batch(4), 4, 5, 6, seeds=["S0*B[4]"]), tensor(8, 4, 3, 3), tensor(8),
                expected=("S0*B[4],Q,Q>S0*B[4]",)),
        example(conv2d, tensor(4, 5, 6), tensor(8, 4, 3, 3), tensor(8), expected=("Q,S0[8],S0[8]>S0[8]",)),
        example(conv2d, x, tensor(8, 2, 3, 3), tensor(8), (1, 1), (1, 1), (1, 1), 2, never=("P",),
                expected=("S1[4],S0[8],S0[8]>S1[8]",)),
        example(conv2d, x, tensor(4, 1, 3, 3), tensor(4), (1, 1), (1, 1), (1, 1), 4, degrees=(2, 4),
                expected=("S1[4],S0[4],S0[4]>S1[4]",)),
        example(conv2d, x, tensor(8, 1, 3, 3), None, groups=4, expected=("S1[4],S0[8]>S1[8]",)),
        example(conv2d, tensor(B, 12, 5, 6, seeds=["S1[8,4]"]), tensor(6, 2, 3, 3), tensor(6), groups=6,
                expected=("S1[8,4],S0[4,2],S0[4,2]>S1[4,2]",)),
        example("aten.conv2d.padding", x, tensor(8, 4, 3, 3), tensor(8), (1, 1), "same"),
        example("aten.conv1d.padding", tensor(B, 8, 6), tensor(8, 1, 3), None, (1,), "same", (1,), 8),
        example(transposed, x, tensor(4, 8, 2, 2), tensor(8), (2, 2), degrees=(2, 4),
                expected=("Q,S1[8],S0[8]>S1[8]", "S1[4],S0[4],P>P")),
        example(transposed, x, tensor(4, 3, 2, 2), tensor(6), (2, 2), (0, 0), (0, 0), 2,
                expected=("S1[4],S0[4],S0[6]>S1[6]",)),
        example("aten.convolution.default", x, tensor(8, 2, 3, 3), tensor(8), (1, 1), (1, 1), (1, 1), False, (0, 0), 2,
                expected=("S1[4],S0[8],S0[8]>S1[8]",)),
        example("aten.convolution.default", x, tensor(4, 8, 3, 3), None, (1, 1), (1, 1), (1, 1), True, (0, 0), 1,
                expected=("Q,S1[8]>S1[8]", "S1[4],S0[4]>P")),
    ]  # fmt: skip


def _channels() -> list[Example]:
    x = tensor(B, 8, 5, 6, values=normal)
    statistics = buffer(8), buffer(8)
    running = "S1[8],S0[8],S0[8],S0[8],S0[8]>S1[8]"
    batch_norm, instance_norm = "aten.batch_norm.default", "aten.instance_norm.default"
    return [
        example(batch_norm, x, tensor(8), tensor(8), *statistics, True, 0.1, 1e-5, False, mutates=(3, 4),
                degrees=(2, 4), expected=(running,), never=("S2",)),
        example(batch_norm, tensor(4, 8, values=normal), tensor(8), tensor(8), *statistics, True, 0.1, 1e-5, False,
                mutates=(3, 4), never=("S0[4]",)),
        example(batch_norm, tensor(4, 8, values=normal), tensor(8), tensor(8), *statistics, False, 0.1, 1e-5, False,
                expected=("S0[4],Q,Q,R,R>S0[4]",)),
        example(batch_norm, x, None, None, None, None, True, 0.1, 1e-5, False, expected=("S1[8]>S1[8]",)),
        example("aten.native_batch_norm.default", x, tensor(8), tensor(8), *statistics, True, 0.1, 1e-5,
                mutates=(3, 4), expected=("S1[8],S0[8],S0[8],S0[8],S0[8]>S1[8],S0[8],S0[8]",)),
        example(instance_norm, x, tensor(8), tensor(8), None, None, True, 0.1, 1e-5, False,
                expected=("S1[8],S0[8],S0[8]>S1[8]",)),
        example(instance_norm, tensor(4, 8, 5), tensor(8), tensor(8), None, None, True, 0.1, 1e-5, False,
                expected=("S0[4],Q,Q>S0[4]",)),
        example(instance_norm, tensor(4, 8, 5), tensor(8), tensor(8), *statistics, True, 0.1, 1e-5, False,
                mutates=(3, 4), never=("S0[4]",)),
        example("aten.group_norm.default", x, 4, tensor(8), tensor(8), degrees=(2, 4),
                expected=("S1[8],S0[8],S0[8]>S1[8]",)),
        example("aten.group_norm.default", tensor(4, 12, 5, seeds=["S1[8,4]"]), 6, tensor(12), tensor(12),
                expected=("S1[8,4],S0[8,4],S0[8,4]>S1[8,4]", "S0[4],Q,Q>S0[4]")),
        example("aten.group_norm.default", tensor(4, 9, 5), 3, tensor(9), tensor(9), never=("S1",)),
        example("aten._weight_norm.default", tensor(8, 6, values=normal), tensor(8, 1), 0, never=("S1",),
                expected=("S0[8],S0[8]>S0[8]",)),
        example("aten._weight_norm_interface.default", tensor(4, 6, 8, values=normal), tensor(1, 1, 8), 2,
                expected=("S2[8],S2[8]>S2[8],S2[8]",)),
        example("aten.prelu.default", tensor(B, 8, 5, values=normal), tensor(8), expected=("S1[8],S0[8]>S1[8]",)),
        example("aten.prelu.default", tensor(B, 8, 5, values=normal), tensor(1), expected=("S1[8],Q>S1[8]",)),
    ]  # fmt: skip


def _places() -> list[Example]:
    of = {1: tensor(B, 4, 6), 2: tensor(B, 4, 6, 8), 3: tensor(B, 4, 4, 6, 4)}
    images = of[2]
    pools = [
        *(example(f"aten.max_pool{d}d.default", of[d], (2,) * d, (2,) * d, never=("P", "S2")) for d in of),
        *(example(f"aten.max_pool{d}d_with_indices.default", of[d], (2,) * d) for d in (2, 3)),
        example("aten.max_pool1d_with_indices.default", of[1], (2,)),
        *(example(f"aten.adaptive_max_pool{d}d.default", of[d], (2,) * d) for d in of),
        *(example(f"aten.avg_pool{d}d.default", of[d], (2,) * d, expected=("P>P", "S1[4]>S1[4]")) for d in of),
        *(example(f"aten.adaptive_avg_pool{d}d.default", of[d], (1,) * d) for d in of),
        example("aten.max_pool2d.default", tensor(4, 6, 8), (2, 2)),
    ]
    scaled = {
        "upsample_nearest1d": (1, ()), "upsample_nearest2d": (2, ()), "upsample_nearest3d": (3, ()),
        "_upsample_nearest_exact1d": (1, ()), "_upsample_nearest_exact2d": (2, ()),
        "_upsample_nearest_exact3d": (3, ()), "upsample_linear1d": (1, (False,)), "upsample_bilinear2d": (2, (True,)),
        "upsample_bicubic2d": (2, (False,)), "upsample_trilinear3d": (3, (False,)),
        "_upsample_bilinear2d_aa": (2, (False,)), "_upsample_bicubic2d_aa": (2, (False,)),
    }  # fmt: skip
    resized = [example(f"aten.{name}.vec", of[d], None, *flags, (2.0,) * d) for name, (d, flags) in scaled.items()]
    return [
        *pools, *resized,
        example("aten.pad.default", images, (1, -1), never=("S3",), expected=("S2[6]>S2[6]",)),
        example("aten.pad.default", images, (1, 2), expected=("P>P", "S2[6]>S2[6]"), never=("S3",)),
        example("aten.pad.default", images, (0, 0, 1, 1), "constant", 2.0, never=("P", "S2"),
                expected=("S3[8]>S3[8]",)),
        example("aten.pad.default", images, (1, 1, 0, 0), "reflect", expected=("P>P",)),
        example("aten.constant_pad_nd.default", images, (1, 0), 1.0, never=("P",)),
        *(example(f"aten.{kind}_pad{d}d.default", of[d], (1,) * 2 * d) for kind in ("reflection", "replication")
          for d in of),
        example("aten.pixel_shuffle.default", tensor(B, 16, 3, 4), 2, degrees=(2, 4), expected=("S1[16]>S1[4]",)),
        example("aten.pixel_shuffle.default", tensor(4, 12, 3, 4), 2, never=("S1[12]",), expected=("S0[4]>S0[4]",)),
        example("aten.pixel_unshuffle.default", tensor(B, 4, 6, 8), 2, expected=("S1[4]>S1[16]",)),
        example("aten.im2col.default", tensor(B, 4, 6, 8), (2, 2), (1, 1), (0, 0), (2, 2),
                expected=("S1[4]>S1[16]",)),
        example("aten.col2im.default", tensor(B, 16, 12), (6, 8), (2, 2), (1, 1), (0, 0), (2, 2),
                expected=("S1[16]>S1[4]",)),
        example("aten.grid_sampler.default", images, tensor(B, 4, 6, 2, values=normal), 0, 0, False,
                expected=("S1[4],Q>S1[4]", "Q,S2[6]>S3[6]")),
    ]  # fmt: skip


def _along() -> list[Example]:
    x = tensor(B, 4, 6, values=normal)
    drawn = tensor(B, 4, 6)
    kept: Any = {"never": ("S1",), "expected": ("S2[6]>S2[6]",)}
    both: Any = {"never": ("S1",), "expected": ("S2[6]>S2[6],S2[6]",)}
    gone: Any = {"never": ("S1[4]",), "expected": ("S2[6]>S1[6],S1[6]",)}
    return [
        example("aten.cumsum.default", x, 1, expected=("P>P", "S2[6]>S2[6]"), never=("S1",)),
        *(example(f"aten.{name}.default", drawn, 1, **kept) for name in ("cumprod", "logcumsumexp")),
        *(example(f"aten.{name}.default", x, 1, **both) for name in ("cummax", "cummin")),
        example("aten.sort.default", x, 1, True, **both),
        example("aten.sort.stable", x, stable=True, never=("S2",), expected=("S1[4]>S1[4],S1[4]",)),
        example("aten.argsort.default", x, 1, **kept),
        example("aten.argsort.stable", x, stable=True, dim=1, **kept),
        example("aten.topk.default", x, 2, 1, expected=("S2[6]>S2[6],S2[6]",), never=("S1",)),
        example("aten.topk.default", tensor(Batch(6), 8, seeds=[_TOKENS], values=normal), 2,
                expected=("S0*B[6]>S0*B[6],S0*B[6]",)),
        example("aten.flip.default", x, (1,), **kept),
        example("aten.roll.default", x, (2,), (1,), **kept),
        example("aten.diff.default", x, 1, 1, **kept),
        example("aten.slice_scatter.default", x, tensor(B, 2, 6), 1, 1, 3, never=("S1",),
                expected=("S2[6],S2[6]>S2[6]",)),
        *(example(f"aten.{name}.dim", x, 1, **gone) for name in ("max", "min", "median", "nanmedian")),
        example("aten.max.dim", x, 1, True, expected=("S2[6]>S2[6],S2[6]",)),
        *(example(f"aten.{name}.default", x, 1, expected=("S2[6]>S1[6]",), never=("S1[4]", "P"))
          for name in ("argmax", "argmin")),
        example("aten.mode.default", x, 1, **gone),
        example("aten.kthvalue.default", x, 2, 1, **gone),
        example("aten.cosine_similarity.default", x, drawn, 1, expected=("S2[6],S2[6]>S1[6]",), never=("S1[4]",)),
        example("aten.cdist.default", x, tensor(B, 8, 6), expected=("S1[4],Q>S1[4]", "Q,S1[8]>S2[8]")),
        *(example(f"aten.{name}.default", tensor(4, 6, 6), expected=("P>P", "S0[4]>S0[4]"), never=("S1",))
          for name in ("tril", "triu")),
        example("aten.glu.default", tensor(B, 16, seeds=["S1[4,4,8]"]), never=("S1[4,4,8]",)),
        example("aten.glu.default", tensor(B, 4, 16, values=normal), expected=("S2*2[8]>S2[8]", "S1[4]>S1[4]"),
                never=("S2[16]",)),
    ]  # fmt: skip


def _joined() -> list[Example]:
    x, y = tensor(B, 4, 6), tensor(B, 2, 6)
    fused = tensor(B, 6, 24, seeds=[_FUSED])
    apart = "S2*3[8]>S2[8],S2[8],S2[8]"
    return [
        example("aten.cat.default", [x, y], 1, never=("S1[6]",),
                expected=("S1[4],S1[2]>S1[4,2]", "S2[6],S2[6]>S2[6]", "P,P>P")),
        example("aten.cat.default", [x, x], -1, expected=("S2[6]>S2*2[6]",)),
        example("aten.cat.default", [tensor(B, 16, seeds=["S1[8,8]"]), tensor(B, 16)], 1, degrees=(2, 4),
                expected=("S1*2[8],S1*2[8]>S1*4[8]", "S1[16],S1[16]>S1*2[16]")),
        example("aten.cat.default", [tensor(8), tensor(4)], made_seeds={0: ["S0*3[4]"]},
                expected=("S0*2[4],S0[4]>S0*3[4]",)),
        example("aten.cat.default", [tensor(4, 3, seeds=["S0[4]"]), tensor(3, 3)], never=("S0",), degrees=(3,),
                made_seeds={0: ["S1[3]"]}),
        example("aten.concat.default", [x, y], 1),
        example("aten.concatenate.default", [x, y], 1),
        example("aten.stack.default", [x, tensor(B, 4, 6)], 1, expected=("S1[4],S1[4]>S2[4]", "P,P>P")),
        example("aten.stack.default", [x, x], -1),
        example("aten.chunk.default", fused, 3, -1, degrees=(2, 4), expected=(apart, "P>P,P,P"), never=("S2[24]",)),
        example("aten.chunk.default", tensor(B, 10), 3, 1, expected=("S1[4,4,2]>S1[4],S1[4],S1[2]",)),
        example("aten.unsafe_chunk.default", fused, 3, -1, expected=(apart,)),
        example("aten.split.Tensor", fused, 8, 2, expected=(apart,)),
        example("aten.split.Tensor", tensor(B, 6, 20), 8, 2, expected=("S2[8,8,4]>S2[8],S2[8],S2[4]",)),
        example("aten.split.sizes", tensor(B, 6, 16), (8, 4, 4), -1, degrees=(2, 4),
                expected=("S2[8,4,4]>S2[8],S2[4],S2[4]",)),
        example("aten.unsafe_split.Tensor", fused, 8, 2, expected=(apart,)),
        example("aten.split_with_sizes.default", tensor(B, 6, 16), (8, 4, 4), -1, made_seeds={0: ["S2*2[4]"]},
                expected=("S2[8,4,4]>S2[8],S2[4],S2[4]", "S2*4[4]>S2*2[4],S2[4],S2[4]")),
        example("aten.split_with_sizes.default", tensor(B, 6, 9), (1, 4, 4), -1, never=("S2",)),
        example("aten.unsafe_split_with_sizes.default", tensor(B, 6, 16), (8, 8), -1),
        example("aten.split.Tensor", tensor(Batch(6), 8, seeds=[_TOKENS]), 4, 1, expected=("S0*B[6]>S0*B[6],S0*B[6]",)),
        example("aten.unbind.int", tensor(3, B, 4, 6), expected=("S2[4]>S1[4],S1[4],S1[4]", "P>P,P,P")),
        example("aten.unbind.int", tensor(B, 4, 6), -2),
        example("aten.select.int", x, 1, 0, expected=("S2[6]>S1[6]", "P>P"), never=("S1[4]",)),
        example("aten.select.int", x, -1, 2, expected=("S1[4]>S1[4]",)),
    ]  # fmt: skip


def _sliced() -> list[Example]:
    x = tensor(B, 6, 16)
    end = (1 << 63) - 1
    ranged = "aten.slice.Tensor"
    return [
        example(ranged, x, 2, 0, end, expected=("S2[16]>S2[16]", "S1[6]>S1[6]", "P>P"), degrees=(2, 4)),
        example(ranged, x, 2, 0, 8, expected=("S2*2[8]>S2[8]",), never=("S2[16]",), degrees=(2, 4)),
        example(ranged, x, 2, -4, end, expected=("S2[12,4]>S2[4]",)),
        example(ranged, x, 2, 4, 12, expected=("S2[4,8,4]>S2[8]",)),
        example(ranged, tensor(B, 6, 16, seeds=["S2[8,4,4]"]), 2, 0, 8, expected=("S2[8,4,4]>S2[8]", "S2*2[8]>S2[8]")),
        example(ranged, tensor(B, 6, 16, seeds=["S2*4[4]"]), 2, 4, 12, expected=("S2*4[4]>S2*2[4]",)),
        example(ranged, x, 2, 0, 15, never=("S2",)),
        example(ranged, x, -1, 0, end, 2, expected=("S2[16]>S2[8]",), degrees=(2, 4)),
        example(ranged, x, 2, 1, end, 2, expected=("S2[16]>S2[8]",)),
        example(ranged, x, 2, 2, end, 2, never=("S2",)),
        example(ranged, tensor(B, 6, 24, seeds=["S2*2[12]"]), 2, 2, end, 3, expected=("S2*2[12]>S2*2[4]",)),
        example(ranged, tensor(Batch(6), 8, seeds=[_TOKENS]), 0, 0, end, expected=("S0*B[6]>S0*B[6]",)),
        example(ranged, tensor(Batch(6), 8, seeds=[_TOKENS]), 0, 0, Batch(6), expected=("S0*B[6]>S0*B[6]",)),
        example(ranged, tensor(Batch(6), 8, seeds=[_TOKENS]), 1, 0, 4, expected=("S0*B[6]>S0*B[6]",)),
        example("aten.narrow.default", x, 2, 4, 4, expected=("S2[4,4,8]>S2[4]",)),
        example("aten.narrow.default", x, 2, -8, 8, expected=("S2*2[8]>S2[8]",)),
        example("aten.repeat.default", tensor(B, 4, 6), (1, 3, 1), expected=("S1[4]>S1*3[4]", "S2[6]>S2[6]", "P>P")),
        example("aten.repeat.default", tensor(4, 1, 6), (B, 1, 4, 1), expected=("Q>S2[4]", "S0[4]>S1[4]")),
        example("aten.repeat.default", tensor(1, 6), (B, 1), expected=("S1[6]>S1[6]",)),
        example("aten.tile.default", tensor(B, 4, 6), (2,), expected=("S2[6]>S2*2[6]",)),
        example("aten.repeat_interleave.self_int", tensor(B, 4, 6), 3, 1, expected=("S1[4]>S1[12]",), degrees=(2, 4)),
        example("aten.repeat_interleave.self_int", tensor(6), 2),
        example("aten.repeat_interleave.self_int", tensor(B, 12, 2, seeds=["S1[8,4]"]), 2, 1,
                expected=("S1[8,4]>S1[16,8]",)),
    ]  # fmt: skip


def _indexed() -> list[Example]:
    table = tensor(7, 4, 6, values=normal)
    ids = tensor(Batch(6), values=integers(7), seeds=[_TOKENS])
    x = tensor(B, 4, 6, values=normal)
    places = tensor(B, 2, 6, values=integers(4))
    wide = tensor(B, 4, 6, values=integers(6))
    ordered = tensor(5, values=lambda g, s: torch.arange(5.0, dtype=torch.float64), has_gradient=False)
    return [
        example("aten.index_select.default", table, 0, ids, expected=("Q,S0*B[6]>S0*B[6]", "S1[4],R>S1[4]", "P,R>P")),
        example("aten.index_select.default", x, 2, tensor(8, values=integers(6)), expected=("Q,S0[8]>S2[8]",)),
        example("aten.gather.default", x, 1, places, expected=("Q,S1[2]>S1[2]", "S2[6],S2[6]>S2[6]", "P,R>P"),
                never=("S1[4]",)),
        example("aten.gather.default", x, 1, tensor(B, 2, 4, values=integers(4)), never=("S2",)),
        example("aten.take_along_dim.default", x, places, 1, expected=("Q,S1[2]>S1[2]",)),
        example("aten.scatter.value", x, 1, places, 2.0, never=("P,", "S1"), expected=("S2[6],S2[6]>S2[6]",)),
        example("aten.scatter.src", x, 1, tensor(B, 1, 6, values=integers(4)), tensor(B, 2, 6, has_gradient=False),
                never=("P,", "S1"),
                expected=("S2[6],S2[6],S2[6]>S2[6]",)),
        example("aten.scatter_add.default", x, 2, wide, tensor(B, 4, 6, values=normal),
                expected=("P,S2[6],S2[6]>P", "S1[4],S1[4],S1[4]>S1[4]")),
        example("aten.scatter_add_.default", x, 2, wide, tensor(B, 4, 6), mutates=(0,), expected=("P,S2[6],S2[6]>P",)),
        example("aten.scatter_reduce.two", x, 2, wide, tensor(B, 4, 6), "amax", never=("P,",)),
        example("aten.index_add.default", table, 0, ids, tensor(Batch(6), 4, 6, seeds=["S0*B[6]"]),
                expected=("P,S0*B[6],S0*B[6]>P", "S1[4],R,S1[4]>S1[4]")),
        example("aten.index_add_.default", table, 0, ids, tensor(Batch(6), 4, 6), mutates=(0,)),
        example("aten.index_copy.default", tensor(7, 4), 0, tensor(3, values=_shuffled),
                tensor(3, 4), never=("S0", "P"), expected=("S1[4],R,S1[4]>S1[4]",)),
        example("aten.index_copy.default", tensor(7, 4), 0, tensor(4, values=_shuffled), tensor(4, 4),
                never=("S0", "P")),
        example("aten.index_fill.int_Scalar", tensor(7, 4), 0, tensor(3, values=integers(7)), 2.0, never=("S0",)),
        example("aten.index.Tensor", table, (ids,), expected=("Q,S0*B[6]>S0*B[6]", "S2[6],R>S2[6]", "P,R>P")),
        example("aten.index.Tensor", tensor(B, 4, 6, 8), (None, None, tensor(1, values=integers(6))),
                expected=("S1[4],R>S1[4]", "S3[8],R>S3[8]")),
        example("aten.index.Tensor", tensor(4, 6, 8),
                (None, tensor(2, 4, values=integers(6)), tensor(4, values=integers(8))),
                expected=("S0[4],R,R>S0[4]", "Q,S0[2],R>S1[2]", "Q,S1[4],S0[4]>S2[4]")),
        example("aten.index.Tensor", tensor(4, 6, 8),
                (tensor(4, values=integers(4)), None, tensor(4, values=integers(8))),
                expected=("S1[6],R,R>S1[6]", "Q,S0[4],S0[4]>S0[4]")),
        example("aten.index.Tensor", tensor(2, 4, 3, 4),
                (None, tensor(6, values=integers(4)), None, tensor(6, values=integers(4))),
                expected=("S0[2],R,R>S1[2]", "Q,S0[6],S0[6]>S0[6]")),
        example("aten.index.Tensor", tensor(6, 4), (tensor(2, 3, values=integers(6)),), degrees=(2, 3)),
        example("aten.index_put.default", table, (ids,), tensor(Batch(6), 4, 6), True,
                expected=("P,S0*B[6],S0*B[6]>P", "S1[4],R,S1[4]>S1[4]")),
        example("aten.index_put_.default", tensor(6, 4), (tensor(6, values=_shuffled),),
                tensor(6, 4), mutates=(0,), never=("S0", "P"), expected=("S1[4],R,S1[4]>S1[4]",)),
        example("aten.index_put.default", table, (ids,), tensor(1, 6), expected=("S2[6],R,S1[6]>S2[6]",)),
        example("aten.one_hot.default", tensor(B, 6, values=integers(4)), 4, expected=("S1[6]>S1[6]",)),
        example("aten.bucketize.Tensor", x, ordered,
                expected=("S2[6],R>S2[6]",)),
        example("aten.searchsorted.Tensor", ordered, x),
        example("aten.histc.default", tensor(Batch(6), seeds=[_TOKENS], has_gradient=False), 4, 0, 3,
                expected=("S0*B[6]>P",)),
        example("aten.new_zeros.default", x, (4, 8), expected=("R>S1[8]",)),
        example("aten.new_ones.default", tensor(B, 4, seeds=["S1[4]"]), (4, 8), expected=("S1[4]>R",)),
        example("aten.new_full.default", x, (4, 8), 2.0),
        example("aten.unfold.default", x, 1, 2, 1, expected=("S2[6]>S2[6]",), never=("S1",)),
        example("aten.diagonal.default", tensor(B, 6, 4, 6), 1, 1, 3, never=("S1[6]",),
                expected=("S2[4]>S1[4]", "P>P")),
        example("aten.view_as_real.default", tensor(B, 4, values=_complex)),
        example("aten.view_as_complex.default", tensor(B, 4, 2), never=("S2",)),
    ]  # fmt: skip


def _transforms() -> list[Example]:
    real = tensor(B, 4, 6)
    spectrum = tensor(B, 4, 6, values=_complex)
    return [
        *(example(f"aten.{name}.default", spectrum, None, -1, never=("S2",), expected=("S1[4]>S1[4]", "P>P"))
          for name in ("fft_fft", "fft_ifft", "fft_irfft")),
        example("aten.fft_rfft.default", real, None, 1, expected=("S2[6]>S2[6]",)),
        *(example(f"aten.{name}.default", tensor(4, 4, 6, values=spectrum.values))
          for name in ("fft_fft2", "fft_ifft2", "fft_irfft2")),
        example("aten.fft_rfft2.default", tensor(4, 4, 6)),
    ]  # fmt: skip


EXAMPLES = [
    *_convolutions(), *_channels(), *_places(), *_along(), *_joined(), *_sliced(), *_indexed(), *_transforms(),
]  # fmt: skip
UNINITIALISED = {"aten.empty_like", "aten.new_empty"}
LINES = sorted({*convolution.TABLE, *indexing.TABLE} - UNINITIALISED)


@pytest.mark.parametrize("line", LINES)
def test_every_option_of_every_example_is_the_whole_forward_and_backward(line: str) -> None:
    found = [given for given in EXAMPLES if line_of(given.op) == line]
    assert found, f"{line} has no example"
    for given in found:
        check(given)


def test_memory_that_is_not_initialised_has_the_local_size() -> None:
    tensors = (
        Tensor(name="x", shape=(B, 8), dtype="float32", kind="activation"),
        Tensor(name="y", shape=(B, 4), dtype="float32", kind="activation"),
    )
    like = Node(name="n", op="aten.empty_like.default", args=(Ref(0),), outputs=(0,))
    new = Node(name="n", op="aten.new_empty.default", args=(Ref(0), (B, 4)), outputs=(1,))
    assert "S1[8]>S1[8]" in [str(option) for option in options(like, tensors, 2)]
    (split_one,) = [o for o in options(new, tensors, 2) if o.outputs == (Placement.parse("S1[4]"),)]
    assert split_one.args == (Ref(0), (B, 2))
    assert {line_of(node.op) for node in (like, new)} == UNINITIALISED
    assert not has_rule("aten.nonzero.default")


def _first_half_masked(generator: torch.Generator, shape: list[int]) -> torch.Tensor:
    drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
    drawn[..., : shape[-1] // 2] = float("-inf")
    return drawn


@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_a_part_may_be_masked_altogether(reduction: int) -> None:
    """The largest of a rank's part is -inf, whose difference to itself is no number."""
    logits = tensor(Batch(6), 8, values=_first_half_masked)
    targets = tensor(Batch(6), values=lambda generator, shape: torch.randint(4, 8, shape, generator=generator))
    check(example("aten.cross_entropy_loss.default", logits, targets, None, reduction, expected=("S1[8],R>R",)
                  if reduction else ()))  # fmt: skip
    check(example("aten.softmax.int", logits, -1, expected=("S1[8]>S1[8]",)))


def test_the_work_of_models_is_split_by_rules() -> None:
    """`benchmarks.sharding_rules` says it of more models, at their real sizes."""
    found = list(rows(["moe-tiny", "resnet-tiny", "unet-tiny"], 2))
    assert len(found) == 3
    for row in found:
        assert row.is_met, row
        assert row.lighter_share > 0.99, row
        assert row.bytes_share > 0.9, row
        assert not row.without_rule, row
