"""Expert parallelism among the outer choices: which degrees are tried, and what may be fixed."""

from collections.abc import Sequence
from dataclasses import replace

from planner.cluster import Cluster
from planner.errors import PlanError
from planner.graph import Graph
from planner.search.choices import Configuration, Pins
from planner.shard.spread import numbers_of_experts, spread_experts, why_not


def with_experts_spread(
    found: Sequence[Configuration], graph: Graph, cluster: Cluster, pins: Pins, *, may_split: bool
) -> list[Configuration]:
    """Every configuration, and those with its experts spread over some of the ranks that shard parameters.

    Their ranks, with those of `tp`, lie in one node, whose fast link rows travel on; a fixed `ep` may be any that
    divides the experts.
    """
    degrees = _degrees(graph, cluster, pins) if may_split and not graph.fallbacks else ()
    result = [] if (pins.ep or 1) > 1 else list(found)
    for each in found:
        for degree in degrees:
            fits = degree * each.tp <= cluster.devices_per_node or pins.ep is not None
            if fits and each.cp == 1 and each.dp_shard % degree == 0:
                result.append(replace(each, ep=degree))
    return sorted(result)


def _degrees(graph: Graph, cluster: Cluster, pins: Pins) -> tuple[int, ...]:
    """Degrees above 1 that are tried: none where the matrices of experts are no parameters that can be spread."""
    if pins.ep is not None:
        return (pins.ep,) if pins.ep > 1 else ()
    counts = numbers_of_experts(graph)
    most = min(cluster.devices_per_node, cluster.num_devices)
    found = [d for d in range(2, most + 1) if most % d == 0 and any(count % d == 0 for count in counts)]
    try:
        for degree in found[:1]:  # what else there is to it is the same for all
            spread_experts(graph, degree)
    except PlanError:
        return ()
    return tuple(found)


def check_expert_pins(graph: Graph, pins: Pins) -> None:
    """Refuse a fixed `ep` that contradicts the model or what else is fixed.

    Raises:
        PlanError: it does.
    """
    if (pins.ep or 1) == 1 or pins.ep is None:
        return
    if all(count % pins.ep for count in numbers_of_experts(graph)):
        raise PlanError(why_not(graph, pins.ep))
    if (pins.cp or 1) > 1:
        raise PlanError(f"ep={pins.ep} and cp={pins.cp} cannot be in one plan yet; fix one of them")
    if pins.zero == 0:
        raise PlanError(
            f"zero=0 keeps whole copies, but the ranks of ep={pins.ep} share out the states of all parameters; fix "
            "zero to 1, or one of the two"
        )
    for name in ("dp", "dp_shard"):
        given = getattr(pins, name)
        if given is not None and given % pins.ep:
            raise PlanError(
                f"ep={pins.ep} is no divisor of {name}={given}: its ranks are data-parallel ranks that share out "
                "parameters; fix another of the two"
            )
