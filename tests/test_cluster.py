import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.cluster import (
    _NO_SOURCE,
    Cluster,
    Curve,
    all_devices,
    all_links,
    all_presets,
    device_named,
    link_named,
)
from planner.errors import ClusterError
from planner.resources import profiles_path


@pytest.mark.parametrize("cluster", all_presets(), ids=lambda cluster: cluster.name)
def test_every_preset_loads_by_its_name_and_survives_a_file(cluster, tmp_path):
    path = tmp_path / "cluster.json"
    path.write_text(cluster.to_json())

    loaded = Cluster.load(str(path))

    assert Cluster.load(cluster.name.upper()) == cluster
    assert loaded == cluster
    assert loaded.fingerprint == cluster.fingerprint
    assert 0.8 < cluster.capacity_bytes / cluster.device.memory_bytes < 1


@pytest.mark.parametrize("part", [*all_devices(), *all_links()], ids=lambda part: part.name)
def test_every_number_has_its_own_source(part):
    numbers = [key for key, value in part.to_dict().items() if key not in _NO_SOURCE and value is not None]

    assert sorted(part.source) == sorted(numbers)
    assert all(len(text) > 8 for text in part.source.values())


def test_what_the_issue_asks_for_is_there():
    devices = {device.name for device in all_devices()}
    links = {link.name for link in all_links()}

    assert {"V100-32GB", "A10G", "RTX3090", "RTX4090", "A100-40GB", "A100-80GB", "H100-80GB", "H200"} <= devices
    assert {"nvlink2", "nvlink3", "nvlink4", "pcie3", "pcie4", "pcie5", "gloo"} <= links
    assert {"infiniband-hdr", "infiniband-ndr", "ethernet-100g"} <= links
    assert {"V100-16GB", "T4", "L4", "A100-80GB-PCIe", "H100-80GB-PCIe", "B200"} <= devices
    assert {"nvlink5", "roce-100g", "roce-200g", "roce-400g", "ethernet-10g", "ethernet-25g"} <= links
    assert not any(device_named(name).supports("bfloat16") for name in ("V100", "V100-16", "T4"))
    assert not any(device_named(name).supports("tf32") for name in ("V100", "V100-16", "T4"))


def test_every_description_is_used_or_at_least_named_by_its_file():
    for folder, parts in (("devices", all_devices()), ("links", all_links()), ("clusters", all_presets())):
        files = sorted(path.stem for path in (profiles_path() / folder).glob("*.toml"))
        assert files == sorted(part.name.lower() for part in parts)


def test_a_name_means_one_device():
    names = [name for d in all_devices() for name in {n.lower() for n in (d.name, *d.aliases, *d.cuda_names)}]

    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("name", "float16", "memory", "bandwidth"),
    [  # data sheets: dense TFLOP/s, GB, GB/s
        ("V100-16", 125, 16, 900),
        ("T4", 65, 16, 320),
        ("L4", 121, 24, 300),
        ("A100-PCIe", 312, 80, 1935),
        ("H100-PCIe", 756, 80, 2000),
        ("B200", 2250, 180, 7700),
    ],
)
def test_peaks_are_those_of_the_data_sheet_without_sparsity(name, float16, memory, bandwidth):
    device = device_named(name)

    assert device.peak_flop_per_second["float16"] == pytest.approx(float16 * 1e12, rel=1e-3)
    assert memory * 0.95e9 < device.memory_bytes < memory * 1.075e9
    assert device.memory_bytes_per_second == pytest.approx(bandwidth * 1e9, rel=5e-3)


@pytest.mark.parametrize(
    ("text", "within", "between", "cards"),
    [
        ("4xT4", "pcie3-staged", "ethernet-50g", 1),
        ("2x4xL4", "pcie4-l4", "ethernet-100g", 1),
        ("8xB200", "nvlink5", "infiniband-ndr", 8),
        ("2x8xH100-PCIe", "pcie5", "infiniband-ndr", 2),
        ("4xa100-pcie", "pcie4", "infiniband-hdr", 1),
        ("2x8xV100-16GB", "nvlink2", "ethernet-25g", 1),
    ],
)
def test_a_shorthand_has_the_links_of_the_usual_machine(text, within, between, cards):
    cluster = Cluster.load(text)

    assert (cluster.intra_node_link.name, cluster.inter_node_link.name) == (within, between)
    assert cluster.nics_per_node == cards


def test_a_newer_link_carries_more():
    nvlinks = [link_named(f"nvlink{k}").bytes_per_second for k in (2, 3, 4, 5)]
    ethernets = [link_named(f"ethernet-{k}g").bytes_per_second for k in (10, 25, 50, 100)]
    roces = [link_named(f"roce-{k}g").bytes_per_second for k in (100, 200, 400)]

    for rates in (nvlinks, ethernets, roces):
        assert rates == sorted(rates)


@pytest.mark.parametrize(
    ("text", "nodes", "per_node", "device"),
    [
        ("2x8xA100-80GB", 2, 8, "A100-80GB"),
        ("8xA100-80GB", 1, 8, "A100-80GB"),
        (" 4X8xh100 ", 4, 8, "H100-80GB"),
        ("8x4090", 1, 8, "RTX4090"),
        ("2x4x4090", 2, 4, "RTX4090"),
        ("4090", 1, 1, "RTX4090"),
        ("A100-80", 1, 1, "A100-80GB"),
        ("2xV100-32", 1, 2, "V100-32GB"),
        ("8xrtx 3090", 1, 8, "RTX3090"),
    ],
)
def test_the_shorthand_is_nodes_by_devices_by_name(text, nodes, per_node, device):
    cluster = Cluster.load(text)

    assert (cluster.num_nodes, cluster.devices_per_node, cluster.device.name) == (nodes, per_node, device)
    assert cluster.num_devices == nodes * per_node


def test_half_a_node_has_half_of_the_network_cards():
    assert Cluster.load("2x4xH100").nics_per_node == 4
    assert Cluster.load("2x1xA10G").nics_per_node == 1


def test_capacity_by_hand():
    device = dataclasses.replace(
        device_named("H100"),
        memory_bytes=1000,
        context_bytes=100,
        communicator_bytes=100,
        allocator_slack_fraction=0.25,
    )

    assert device.capacity_bytes == 600


def test_rates_by_hand():
    device = dataclasses.replace(
        device_named("H100"),
        peak_flop_per_second={"float32": 100.0},
        efficiency={**device_named("H100").efficiency, "matmul": Curve(points=((10.0, 0.1), (1000.0, 0.9)))},
    )

    assert device.flop_per_second("float32", "matmul", 100.0) == pytest.approx(100 * 0.3)  # sqrt(0.1 * 0.9)


@given(st.floats(1, 1e15), st.floats(1, 1e15))
def test_more_work_is_never_faster(one, other):
    small, large = sorted((one, other))
    for device in all_devices():
        for curve in device.efficiency.values():
            assert small / curve.at(small) <= large / curve.at(large) * (1 + 1e-9)


@pytest.mark.parametrize(
    "points", [(), ((1.0, 0.0),), ((1.0, 1.5),), ((2.0, 0.5), (1.0, 0.5)), ((1.0, 0.1), (2.0, 0.5))]
)
def test_a_curve_that_means_nothing_is_refused(points):
    with pytest.raises(ClusterError):
        Curve(points=points)


def test_the_fingerprint_is_of_numbers_and_not_of_words():
    cluster = Cluster.load("8xH100")

    reworded = dataclasses.replace(cluster, source={"*": "elsewhere"})
    faster = dataclasses.replace(
        cluster,
        intra_node_link=dataclasses.replace(cluster.intra_node_link, latency_seconds=1e-9),
    )

    assert reworded.fingerprint == cluster.fingerprint
    assert faster.fingerprint != cluster.fingerprint
    assert len(cluster.fingerprint) == 64
    assert hash(cluster) == hash(Cluster.load("8xH100"))


CLUSTER_FILE = """
name = "mine"
num_nodes = 2
devices_per_node = 4
nics_per_node = 2
source = "our invoice"

[device]
base = "A100-80GB"
name = "A100-half"
memory_bytes = 40e9
source = "our invoice"

[intra_node_link]
base = "pcie4"
bytes_per_second = 10e9
source = { bytes_per_second = "measured by us" }
"""


def test_a_file_can_change_single_numbers_of_a_known_device_or_link(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(CLUSTER_FILE)

    cluster = Cluster.load(str(path))

    assert cluster.num_devices == 8
    assert cluster.device.memory_bytes == 40_000_000_000
    assert cluster.device.source["memory_bytes"] == "our invoice"
    assert cluster.device.peak_flop_per_second == device_named("A100").peak_flop_per_second
    assert cluster.intra_node_link.bytes_per_second == 10e9
    assert cluster.intra_node_link.latency_seconds == link_named("pcie4").latency_seconds
    assert cluster.inter_node_link == link_named("infiniband-hdr")


def test_all_errors_of_a_file_are_named_at_once_with_their_keys(tmp_path):
    path = tmp_path / "bad.toml"
    path.write_text(
        CLUSTER_FILE.replace("num_nodes = 2", "num_nodes = 0")
        .replace("40e9", "-40e9")
        .replace("bytes_per_second = 10e9", 'bytes_per_secnd = "fast"')
        .replace('source = "our invoice"\n\n[device]', "[device]")
    )

    with pytest.raises(ClusterError) as caught:
        Cluster.load(str(path))

    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "num_nodes must be a whole number >= 1, got 0" in message
    assert "device.memory_bytes must be a number of bytes >= 0, got -40000000000.0" in message
    assert "intra_node_link.bytes_per_secnd is an unknown key; nearest are bytes_per_second" in message
    assert "source is missing" in message
    assert "\n" not in message


def test_a_number_without_a_source_is_refused():
    table = json.loads(Cluster.load("8xH100").to_json())
    del table["device"]["source"]["memory_bytes"]

    with pytest.raises(ClusterError, match=r"device\.source\.memory_bytes is missing"):
        Cluster.from_dict(table)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("2x8xB100", "no cluster or device is named 'B100'; nearest are .*H100"),
        ("dgx-a10", "nearest are dgx-a100"),
        ("2xdgx-h100", "dgx-h100 is a whole cluster; for 2 of them write 2x8xH100-80GB"),
        ("qqqq", "no cluster or device is named 'qqqq'; write a preset"),
        ("", "name is empty"),
        ("0x8xH100", "at least 1"),
        ("local", "local_cluster"),
        ("nowhere/none.toml", r"nowhere/none\.toml: cannot be read: No such file"),
    ],
)
def test_a_wrong_name_is_one_sentence_that_helps(text, part):
    with pytest.raises(ClusterError, match=part) as caught:
        Cluster.load(text)

    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        ("a.toml", "name = ", "is no valid TOML"),
        ("a.json", "{", "is no valid JSON"),
        ("a.json", "[1]", "must hold one table"),
        ("a.json", "{}", "device is missing; name is missing"),
        ("a.toml", 'device = "H1000"', "device: no device is named 'H1000'; nearest are"),
        ("a.toml", "device = 3", "device: must be a name or a table"),
        ("a.toml", 'device = { base = "H100", memory_bytes = true }', "device.memory_bytes must be"),
        ("a.toml", 'device = { base = "H100", overlap_slowdown = {} }', "no overlap_slowdown|missing"),
        ("a.toml", 'device = { base = "H100", peak_flop_per_second = { int3 = 1 } }', "unknown key 'int3'"),
        ("a.toml", 'device = { base = "H100", memory_bytes = 1 }\nname = "x"', "used up by context_bytes"),
    ],
)
def test_a_wrong_file_is_one_sentence_with_its_name(tmp_path, name, content, part):
    path = tmp_path / name
    path.write_text(content)

    with pytest.raises(ClusterError, match=part) as caught:
        Cluster.load(str(path))

    assert str(caught.value).startswith(str(path))


def test_a_file_that_is_no_text_is_refused(tmp_path):
    path = tmp_path / "a.toml"
    path.write_bytes(b"\xff\xfe\x00")

    with pytest.raises(ClusterError, match="no text in UTF-8"):
        Cluster.load(str(path))


def test_json_is_si_and_complete():
    table = json.loads(Cluster.load("p5").to_json())

    assert table["device"]["memory_bytes"] > 80e9
    assert set(table) == {field.name for field in dataclasses.fields(Cluster)}
