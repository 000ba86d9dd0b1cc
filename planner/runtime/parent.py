"""End with the process that started this one; run as a file, torchrun that does so.

A process that dies by SIGKILL cannot end its children. So torchrun asks Linux to end with `autoplan run`, and each rank
to end with torchrun. They ask for themselves: code between fork and exec of a process with threads may hang. As a file,
because torchrun has no need of the rest of the package.
"""

import ctypes
import os
import runpy
import signal
import sys

PARENT_VARIABLE = "AUTOPLAN_PARENT"
_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)


def die_with_parent() -> None:
    """Ask Linux to end this process when its parent, whose id is in the environment, ends, however it ends."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != int(os.environ.get(PARENT_VARIABLE, os.getppid())):  # it ended before we asked
        sys.exit("the process that started this one is gone")
    os.environ[PARENT_VARIABLE] = str(os.getpid())


if __name__ == "__main__":
    del sys.path[0]  # this folder, whose files are not top-level modules
    die_with_parent()
    sys.argv[0] = "torchrun"
    runpy.run_module("torch.distributed.run", run_name="__main__", alter_sys=True)
