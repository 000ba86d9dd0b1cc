"""An end to forwards that would take hours to trace: a Python loop over a long sequence is one operator per step."""

import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from torch.overrides import TorchFunctionMode

from planner.errors import ModelError

MOST_CALLS = 300_000  # a transformer of 126 layers has 30,000


class TooLongError(ModelError):
    """Forward calls more functions of torch than a graph can hold."""


class Bounded(TorchFunctionMode):
    """Within it the calls of torch's functions are counted. `line_of` finds the user's line in a stack.

    Raises:
        TooLongError: there are more than `MOST_CALLS`.
    """

    def __init__(self, line_of: Callable[[Sequence[traceback.FrameSummary]], str]) -> None:
        super().__init__()
        self.calls = 0
        self.line_of = line_of

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        if self.calls > MOST_CALLS:
            line = self.line_of(traceback.extract_stack(sys._getframe(1)))
            raise TooLongError(
                f"{line}: forward calls more than {MOST_CALLS:,} functions of torch on one batch, as a Python loop "
                "over a long sequence does; give a batch with a shorter sequence, or compute the loop in one operator"
            )
        return func(*args, **(kwargs or {}))
