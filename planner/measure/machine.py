"""Which machine this is: what a profile says of where it was measured."""

import contextlib
import hashlib
import platform
import subprocess
import time
from pathlib import Path
from typing import Literal

import torch

from planner.measure.local import cpu_model, num_cores
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
