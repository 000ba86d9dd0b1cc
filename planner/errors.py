"""Every error that is raised on purpose: one sentence that says what is wrong, by how much, and what to do.

The tree:

    PlannerError
    - ModelError          the model cannot be found, built or fed with its batch
      - TraceError        the model cannot be had as a graph (the fallback may still plan it)
    - ClusterError        the hardware description is unknown or wrong
    - InfeasibleError     no plan fits, proven
    - SolverError         the solver ended without an answer
      - TimeLimitError    it was stopped before it found one
    - PlanError           a plan is corrupt, or made for another model or cluster
    - ProfileError        a profile of measured times is corrupt, or of another machine
    - RunError            training by a plan failed
      - CheckError        what would be trained is not what the eager module computes
"""


class PlannerError(Exception):
    """Base of all errors that the command line prints as one line, without a traceback."""


class ModelError(PlannerError):
    """A model or batch that cannot be found, built or run."""


class TraceError(ModelError):
    """A model that cannot be exported as one graph."""


class ClusterError(PlannerError):
    """An unknown or inconsistent hardware description."""


class InfeasibleError(PlannerError):
    """No plan fits in memory, proven."""


class SolverError(PlannerError):
    """The solver ended without a usable answer."""


class TimeLimitError(SolverError):
    """The solver was stopped before it found an answer; one may exist."""


class PlanError(PlannerError):
    """A plan that is corrupt, or that was made for another model or cluster."""


class ProfileError(PlannerError):
    """A profile of measured times that is corrupt, or that was measured on another machine."""


class RunError(PlannerError):
    """A training run that failed."""


class CheckError(RunError):
    """The lowered blocks do not compute what the user's eager module does."""
