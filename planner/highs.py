"""Integer programs through PuLP and HiGHS. The only module that knows either, and nothing of what they are about."""

import functools
import os
import sys
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import highspy
import numpy as np
import pulp

from planner.errors import SolverError

Variable: TypeAlias = pulp.LpVariable  # its value after `Program.solve` is `varValue`
Terms: TypeAlias = list[tuple[Variable, float]]

# HiGHS 1.16 called a program with a plan infeasible: its presolve found the optimum and could not undo the "aggregator"
# (rule 12) for it; the family of HiGHS issues 942 and 2204. That rule is off, and "infeasible" is asked twice.
_AGGREGATOR = 1 << 12
_LIMITS = (
    highspy.HighsModelStatus.kTimeLimit,
    highspy.HighsModelStatus.kSolutionLimit,  # nodes
    highspy.HighsModelStatus.kIterationLimit,
)


class Program:
    """Variables from 0 on, rows and an objective to be minimised."""

    def __init__(self, name: str) -> None:
        self._lp = pulp.LpProblem(name, pulp.LpMinimize)

    def variable(self, name: str, most: float | None, *, integer: bool = False) -> Variable:
        """A variable of 0..`most` (None = without limit)."""
        return self._lp.add_variable(name, 0, most, pulp.LpInteger if integer else pulp.LpContinuous)

    def row(self, terms: Terms, sense: Literal["<=", ">=", "=="], right: float = 0.0) -> None:
        """Sum of terms (sense) right; a variable may occur in several. A row without terms is left out."""
        senses = {"<=": pulp.LpConstraintLE, ">=": pulp.LpConstraintGE, "==": pulp.LpConstraintEQ}
        expression = _sum(terms)
        if len(expression) or right:
            self._lp.addConstraint(pulp.LpConstraint(expression, senses[sense], rhs=right))

    def minimise(self, terms: Terms) -> None:
        """Set the objective."""
        self._lp.setObjective(_sum(terms))

    def solve(self, *, gap: float, node_limit: int, time_limit_seconds: float | None = None) -> "Outcome":
        """Run HiGHS; one thread and a fixed seed, so that the same program gives the same answer.

        Every solve of a process takes the same number of threads: HiGHS does nothing otherwise, and says nothing.

        Raises:
            SolverError: HiGHS ended in a way that says nothing.
        """
        options = {"threads": 1, "gapRel": gap, "timeLimit": time_limit_seconds, "random_seed": 0}
        options |= {"mip_max_nodes": node_limit, "presolve_rule_off": _AGGREGATOR}
        solver = self._run(options)
        if self._lp.sol_status == pulp.LpSolutionInfeasible:
            solver = self._run(options | {"presolve": "off"})  # see _AGGREGATOR: no proof without a second look
        if self._lp.sol_status == pulp.LpSolutionInfeasible:
            return Outcome(lower=float("inf"), found=False, nodes=0, stopped=False)
        stopped = self._lp.sol_status != pulp.LpSolutionOptimal
        if stopped and solver.native not in _LIMITS:
            raise SolverError(f"HiGHS ended with {solver.native}")
        lower = float(solver.info.mip_dual_bound)
        nodes = max(0, int(solver.info.mip_node_count))
        lower = lower if np.isfinite(lower) else -float("inf")
        return Outcome(lower=lower, found=solver.found, nodes=nodes, stopped=stopped)

    def _run(self, options: dict[str, Any]) -> "_Highs":
        _print_banner_to_nowhere()
        solver = _Highs(msg=False, **options)
        self._lp.solve(solver)
        return solver


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What HiGHS says. `lower` bounds the objective; inf when there is no solution.

    `found`: the variables have values. `stopped`: a limit ended the search.
    """

    lower: float
    found: bool
    nodes: int
    stopped: bool


@functools.cache
def _print_banner_to_nowhere() -> None:
    """HiGHS 1.16 prints its banner when the first solver of a process is made, whatever the options.

    Standard output belongs to the caller (`--json`), so that moment gets another file descriptor 1.
    """
    sys.stdout.flush()
    kept = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        highspy.Highs()
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


class _Highs(pulp.HiGHS):  # type: ignore[misc]
    """PuLP's HiGHS, which says what HiGHS said.

    PuLP 3.3.2 calls a search that a limit stopped Optimal, has no word for a node limit (KeyError), and keeps bound and
    node count to itself.
    """

    native: Any = None
    info: Any = None
    found = False

    def findSolutionValues(self, lp: pulp.LpProblem) -> tuple[int, int]:  # noqa: N802
        """Read values, status, bound and nodes off the solver."""
        self.native = lp.solverModel.getModelStatus()
        self.info = lp.solverModel.getInfo()
        self.found = self.info.primal_solution_status == highspy.kSolutionStatusFeasible
        if self.found:
            values = lp.solverModel.getSolution().col_value
            for variable in lp.variables():
                variable.varValue = values[variable.index]
        if self.native == highspy.HighsModelStatus.kOptimal:
            return pulp.LpStatusOptimal, pulp.LpSolutionOptimal
        if self.native in (
            highspy.HighsModelStatus.kInfeasible,
            highspy.HighsModelStatus.kUnboundedOrInfeasible,  # all variables are bounded
        ):
            return pulp.LpStatusInfeasible, pulp.LpSolutionInfeasible
        if self.found:
            return pulp.LpStatusNotSolved, pulp.LpSolutionIntegerFeasible
        return pulp.LpStatusNotSolved, pulp.LpSolutionNoSolutionFound


def _sum(terms: Terms) -> pulp.LpAffineExpression:
    """The terms as an expression; a variable may occur in several."""
    total: dict[Variable, float] = {}
    for variable, factor in terms:
        total[variable] = total.get(variable, 0.0) + factor
    return pulp.LpAffineExpression(total)
