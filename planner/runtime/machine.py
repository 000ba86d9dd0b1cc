"""Which machine this is: what a profile, or the record of a run, says of where it was measured."""

import contextlib
import hashlib
import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Literal

import torch

from planner.profile import Machine

_DRIVER_SECONDS = 10.0


def this_machine(kind: Literal["cuda", "cpu"], processes: int) -> Machine:
    """This machine, measuring with `processes` at once."""
    if kind == "cuda":
        properties = torch.cuda.get_device_properties(0)
        device, capability = properties.name, f"{properties.major}.{properties.minor}"
        driver, threads = _driver(), torch.get_num_threads()
    else:
        device, capability = f"{cpu_model()}, {num_cores()} cores", "none"
        driver, threads = "none", 1
    return Machine(
        device=device, kind=kind, capability=capability, driver=driver, torch=torch_release(),
        python=platform.python_version(), host=_host(), processes=processes, threads=threads,
        date=time.strftime("%Y-%m-%d"),
    )  # fmt: skip


def torch_release() -> str:
    """The release of torch that runs here, with its build."""
    return str(torch.__version__)


def _driver() -> str:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        found = subprocess.run(query, capture_output=True, text=True, timeout=_DRIVER_SECONDS, check=True)
        return found.stdout.splitlines()[0].strip()
    return "unknown"


def _host() -> str:
    """A hash of what tells this machine from others."""
    parts = [platform.node(), cpu_model()]
    with contextlib.suppress(OSError):
        parts.append(Path("/etc/machine-id").read_text(encoding="ascii").strip())
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def num_cores() -> int:
    """Cores that this process may use: its affinity, or less if its control group says so."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        cores = min(cores or 1, max(1, int(quota) // int(period)))  # "max" has no limit
    return max(1, cores or 1)


def cpu_model() -> str:
    """The processor's name."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith(("model name", "CPU part")):
                return line.split(":", 1)[1].strip()
    return os.uname().machine
