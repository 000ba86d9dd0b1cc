"""How software holds memory: data with a source, apart from the graph and the hardware."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any

from planner.errors import ProfileError
from planner.validate.data import table


@dataclass(frozen=True, slots=True, kw_only=True)
class Conventions:
    """How one software stack holds memory."""

    gradient_bytes: float  # of an element of the buffer that gradients stay in; 0: as `planner.memory` has them
    step_bytes: float  # of an own element, beside its state, while the optimizer steps
    logit_bytes: float  # of a logit when the loss holds most; 0: as traced
    live_elements: float  # of parameters that ZeRO-3 has gathered at a time; 0: whole blocks
    checkpoint_parts: bool  # inputs of recomputed layers are kept once in a tensor-parallel group
    loads_whole: bool  # a sharded model is loaded on each device in full
    workspace_bytes: float  # that libraries allocate through torch, on devices before Hopper
    hopper_workspace_bytes: float  # the same from compute capability 9.0
    reserved_fraction: float  # of what torch reserves, not allocated at the peak
    source: Mapping[str, str] = field(hash=False)


@cache
def conventions(name: str) -> Conventions:
    """Those of an engine or a source; what an entry leaves out is as in `default`.

    Raises:
        ProfileError: a key is not known.
    """
    found = table("memory")
    text: dict[str, Any] = {**found["default"], **found.get(name, {})}
    names = {item.name for item in fields(Conventions)}
    if odd := set(text) ^ names:
        raise ProfileError(f"profiles/published/memory.toml: {name} lacks or has no {', '.join(sorted(odd))}")
    return Conventions(**text)
