"""Measured numbers of this machine: the cluster called `local`, and profiles of operators, blocks and collectives."""

from planner.measure.local import available_bytes, local_cluster
from planner.runtime.machine import num_cores

__all__ = ["available_bytes", "local_cluster", "num_cores"]
