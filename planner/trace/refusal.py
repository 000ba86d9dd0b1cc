"""Why a model has no graph, and the user's own line for it."""

import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from planner.errors import TraceError
from planner.graph import Fallback

_TORCH_FOLDER = str(Path(torch.__file__).parent)
_PLANNER_FOLDER = str(Path(__file__).parents[1])
_PYTHON_FOLDER = str(Path(traceback.__file__).parent)
_ZOO_FOLDER = str(Path(__file__).parents[1] / "zoo")
UNKNOWN = "unknown place"
TRAINS_WITHOUT = "or train it as it is, without a pipeline and without recomputation"


class NoGraphError(TraceError):
    """The model has no graph; `couples_samples` is set where its loss is no mean over samples.

    `may_branch` is off where every forward is known to call the same modules, whatever the values in the batch, and to
    run no backward of its own.
    """

    def __init__(self, fallbacks: Sequence[Fallback], couples_samples: str = "", *, may_branch: bool = False) -> None:
        super().__init__("; ".join(str(f) for f in fallbacks))
        self.fallbacks = tuple(fallbacks)
        self.couples_samples = couples_samples
        self.may_branch = may_branch


def refused(source: str, reason: str, cure: str, *, couples: bool = False, may_branch: bool = False) -> NoGraphError:
    """The error for one line of the user's; with `couples` it is also why a batch must not be split."""
    fallback = Fallback(source=source, reason=reason, cure=cure)
    return NoGraphError([fallback], f"{source}: {reason}" if couples else "", may_branch=may_branch)


def is_user_file(name: str) -> bool:
    """Whether a file is neither torch's, Python's nor ours; the zoo counts as a user's."""
    if name.startswith(_ZOO_FOLDER):
        return True
    if name.startswith(_PYTHON_FOLDER) and "-packages" not in name:
        return False
    return not name.startswith((_TORCH_FOLDER, _PLANNER_FOLDER, "<"))


def user_line(frames: Sequence[traceback.FrameSummary]) -> str:
    """`file:line` of the innermost frame that is neither torch's nor ours."""
    for frame in reversed(frames):
        if is_user_file(frame.filename):
            return f"{frame.filename}:{frame.lineno}"
    return UNKNOWN


def where_defined(thing: Any) -> str:
    """`file:line` where a function, method or class is defined."""
    code = getattr(thing, "__code__", None) or getattr(getattr(thing, "__func__", None), "__code__", None)
    if code is None:
        kind = thing if isinstance(thing, type) else type(thing)
        for member in vars(kind).values():
            code = getattr(getattr(member, "__func__", member), "__code__", None)
            if code is not None:
                break
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else UNKNOWN


def first_line(error: BaseException) -> str:
    """The first line of an error's message, cut to a sentence's length."""
    return (str(error).strip().split("\n")[0][:200] or "no message").rstrip(".")
