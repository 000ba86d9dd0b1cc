"""Training state in host memory: what copies and an optimizer step on the processor take. No torch.

A host is data (`profiles/hosts/*.toml`, every number with a source): memory of a node, its bandwidth by specification,
what an Adam step makes of that, and what one device alone gets of its PCIe link. Formulas:

- A node's devices divide what all of them get at once (`Device.host_bytes_per_second`, measured that way); a device
  alone gets its link. Every byte that is copied passes host memory once.
- Adam on the processor is bound by memory: it reads parameter, gradient and both moments in float32 and writes all but
  the gradient, 28 bytes of a parameter (Ren et al. 2021, ZeRO-Offload, arXiv 2101.06840, section 4), at the share of
  the bandwidth that such a loop reaches, or at what its threads reach.
- Offloaded parameters come by a rank's own part, one block after the other, in each pass, then are gathered as under
  ZeRO-3: the links of all devices to the host work at once (Rajbhandari et al. 2021, ZeRO-Infinity, arXiv 2104.07857,
  section 6.1). Recomputation asks for nothing more: a block is still there when its backward pass begins.
- Offloaded gradients go to the host after each micro-batch; from the second on what is there comes back to be added
  (DeepSpeed runtime/zero/stage_1_and_2.py, async_accumulate_grad_in_cpu_via_gpu).
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache

from planner.cluster import Cluster, Device
from planner.errors import ClusterError
from planner.resources import profiles_path

ADAM_BYTES = 28  # of a parameter in float32: four numbers are read, three are written
ANY_HOST = "epyc-server"  # of a device that no host lists
# Of the seconds of matrix products and attention, what copies run beside; of a copy, what is left over all the same.
HIDDEN, LEFT = 0.8, 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """The processors and the memory of one node."""

    name: str
    devices: tuple[str, ...]  # that it usually carries
    memory_bytes: int
    memory_bytes_per_second: float  # of all channels, by specification
    adam_share: float  # of that bandwidth, what an Adam step over all cores reaches
    thread_bytes_per_second: float  # what one thread reaches in that step
    device_bytes_per_second: float  # between it and one device, while no other copies
    threads_per_process: int = 0  # that the optimizer runs on; 0: enough for the memory
    source: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        """Reject numbers that would make every cost meaningless."""
        for item in fields(self):
            value = getattr(self, item.name)
            if item.type not in (int, float) or item.name == "threads_per_process":
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise ClusterError(f"host {self.name!r}: {item.name} must be a number > 0, got {value!r}")


def host_named(name: str) -> Host:
    """The bundled host of this name.

    >>> host_named("dgx-a100").memory_bytes_per_second
    409600000000.0

    Raises:
        ClusterError: there is none.
    """
    if name not in _hosts():
        raise ClusterError(f"no host is named {name!r}; known are {', '.join(_hosts())}")
    return _hosts()[name]


def usual_host(device: Device) -> Host:
    """The host that usually carries a device, else one of PCIe cards.

    >>> from planner.cluster import device_named
    >>> usual_host(device_named("A100-40GB")).name
    'p4d'
    """
    return next((host for host in _hosts().values() if device.name in host.devices), host_named(ANY_HOST))


def copy_bytes_per_second(host: Host, cluster: Cluster, active: int) -> float:
    """What each of `active` devices of a node gets between it and host memory while all of them copy.

    By hand: 8 A100-80GB get 12 GB/s each, one gets its link's 24.4; of host memory of 40 GB/s each of 8 gets 5.

    >>> cluster, host = Cluster.load("8xA100-80GB"), host_named("dgx-a100")
    >>> [round(copy_bytes_per_second(host, cluster, n) / 1e9, 1) for n in (8, 1)]
    [12.0, 24.4]
    """
    together = cluster.device.host_bytes_per_second * cluster.device.devices_per_node
    shared = min(together, host.memory_bytes_per_second) / max(1, active)
    return min(host.device_bytes_per_second, shared)


def adam_seconds(num_parameters: float, host: Host, processes: int) -> float:
    """An Adam step of each of a node's `processes` on `num_parameters` of its own.

    By hand: 10 billion by one process at 0.43 of 409.6 GB/s are 280 GB at 176 GB/s.

    >>> round(adam_seconds(1e10, host_named("dgx-a100"), 1), 2)
    1.59
    """
    rate = host.adam_share * host.memory_bytes_per_second / max(1, processes)
    if host.threads_per_process:
        rate = min(rate, host.threads_per_process * host.thread_bytes_per_second)
    return ADAM_BYTES * num_parameters / rate


def exposed_copy_seconds(copies: float, beside: float, *, same_link: float = 0.0) -> float:
    """What copies of so many seconds add to matrix products and attention of `beside` seconds.

    Beside these, collectives may take the same link for `same_link` seconds.

    >>> round(exposed_copy_seconds(1.0, 0.5), 6), round(exposed_copy_seconds(1.0, 10.0), 6)
    (0.7, 0.1)
    >>> round(exposed_copy_seconds(1.0, 10.0, same_link=7.5), 6)
    0.6
    """
    return max(0.0, copies - max(0.0, HIDDEN * beside - same_link)) + LEFT * copies


def gradient_copies(num_microbatches: int) -> float:
    """Copies of a rank's gradients for each micro-batch: out, and from the second on also in.

    >>> gradient_copies(1), gradient_copies(4)
    (1.0, 1.75)
    """
    return 1 + (num_microbatches - 1) / num_microbatches


@cache
def _hosts() -> Mapping[str, Host]:
    found = {}
    for path in sorted((profiles_path() / "hosts").glob("*.toml")):
        text = tomllib.loads(path.read_text(encoding="utf-8"))
        names = [item.name for item in fields(Host) if item.name != "threads_per_process"]
        odd = [f"lacks {key}" for key in names if key not in text] + [f"has no {k}" for k in text if k not in names]
        if odd:
            raise ClusterError(f"host {path.stem!r}: {', '.join(odd)}")
        host = Host(**{**text, "devices": tuple(text["devices"])})
        found[host.name] = host
    return found
