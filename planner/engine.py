"""What a training system makes of a plan: constants of its software, as data; nothing of the hardware.

The same layers take other times under eager PyTorch, under torch.compile and under the fused kernels of Megatron-LM;
gradients are reduced beside the backward pass or after it. `profiles/engines/*.toml` hold these constants with their
sources. Those that no document states are fitted on published runs by `python -m benchmarks.fit`.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any

from planner.errors import ClusterError
from planner.resources import profiles_path

STOCK = "stock"  # PyTorch as it is, which runs every plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """One software stack. Factors are in units of what eager PyTorch with fused attention does, which has 1."""

    name: str
    overlaps_gradients: bool  # gradients are reduced beside the backward pass
    overlaps_gathers: bool  # parameters are gathered beside the passes
    by_block: bool  # it reduces block by block, as FSDP2 and DDP do, not all in one piece
    receives_all_at_once: bool  # buffers of all micro-batches, as torch.distributed.pipelining has them
    scatters_messages: bool  # a rank of tp sends its part of an activation to the next stage, where it is gathered
    loss_in_parts: bool  # a loss over a vocabulary takes several passes in float32, whether that is split or not
    gradient_bytes: int  # of an element while it is reduced; 0: as the precision says
    memory_traffic: float  # bytes of elementwise chains
    head_traffic: float  # bytes of elementwise chains outside of layers: embedding and loss
    compiled_memory_traffic: float  # the same under torch.compile
    attention_passes: float  # bytes of the softmax of attention that is not fused, in units of one pass for each step
    attention_speed: float  # rate of fused attention
    matmul_speed: float  # rate of matrix products
    dispatch: float  # processor time of an operation
    backward_dispatch: float  # of one in the backward pass, which the autograd engine sends, in units of that
    block_dispatches: float  # of calling a block, per pass, in units of the device's time of an operation
    straggling: float  # more of it for each doubling of tp: all ranks wait for the slowest processor
    collectives: float  # seconds of collectives inside of layers, in units of what the links take
    async_collectives: float  # the same where they run beside parts of the products that they belong to
    hidden: float  # of the passes of one micro-batch, the share that gradients and parameters may hide behind
    fp8_speed: float  # rate of layers in FP8, in units of that in 16 bit
    overlap: float  # slow-down of computing and communicating at once, in units of the measured one
    optimizer_traffic: float  # bytes of the optimizer step
    hop_seconds: float  # of a message between stages, beside the link's own
    pass_seconds: float  # processor time of a micro-batch on a stage, per pass
    step_seconds: float  # once a step
    source: Mapping[str, str] = field(hash=False)

    def __post_init__(self) -> None:
        """Reject numbers that would make every cost meaningless."""
        for item in fields(self):
            value = getattr(self, item.name)
            if item.type in (int, float) and not (isinstance(value, int | float) and value >= 0):
                raise ClusterError(f"engine {self.name!r}: {item.name} must be a number >= 0, got {value!r}")
            if item.type is bool and not isinstance(value, bool):
                raise ClusterError(f"engine {self.name!r}: {item.name} must be true or false, got {value!r}")


def engine_named(name: str) -> Engine:
    """The bundled engine of this name.

    >>> engine_named("stock").memory_traffic > 0
    True

    Raises:
        ClusterError: there is none.
    """
    engines = _engines()
    if name not in engines:
        raise ClusterError(f"no engine is named {name!r}; known are {', '.join(sorted(engines))}")
    return engines[name]


def engine_of(text: Mapping[str, Any], name: str) -> Engine:
    """An engine as a file states it.

    Raises:
        ClusterError: a key is missing, not known, or without a source.
    """
    names = [item.name for item in fields(Engine)]
    odd = [f"lacks {key}" for key in names if key not in text] + [f"has no {key}" for key in text if key not in names]
    if odd:
        raise ClusterError(f"engine {name!r}: {', '.join(odd)}")
    values: dict[str, Any] = {
        key: float(v) if isinstance(v, int) and not isinstance(v, bool) and key in _FLOATS else v
        for key, v in text.items()
    }
    return Engine(**values)


_FLOATS = frozenset(item.name for item in fields(Engine) if item.type is float)


@cache
def _engines() -> Mapping[str, Engine]:
    found = {}
    for path in sorted((profiles_path() / "engines").glob("*.toml")):
        text = tomllib.loads(path.read_text(encoding="utf-8"))
        found[str(text.get("name", path.stem))] = engine_of(text, path.stem)
    return found
