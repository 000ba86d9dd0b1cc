"""Profiles as data: files, look-ups, and what rows do to a graph and to a cluster."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from planner.cluster import Cluster, OptimizerSeconds
from planner.collectives import all_reduce_seconds, axis_group, send_recv_seconds
from planner.costs import least_seconds, price
from planner.errors import ProfileError
from planner.graph import Affine, Batch, BlockClass, Kernel, MeasuredPasses, Operand
from planner.operators import class_seconds, kernel_seconds, measured_seconds, roofline_seconds
from planner.plan import Mesh
from planner.profile import (
    BlockRow,
    CollectiveRow,
    CopyRow,
    Machine,
    OperatorRow,
    OptimizerRow,
    OverlapRow,
    Profile,
    TopologyRow,
    block_key,
    measured_cluster,
    measured_graph,
    measured_part,
    operator_key,
    unlike,
)
from tests.test_costs import gpt_graph

A100 = Cluster.load("1x8xA100-80GB")
MACHINE = Machine(
    device="NVIDIA A100-SXM4-80GB", kind="cuda", capability="8.0", driver="550.1", torch="2.13.0", python="3.11.7",
    host="0123456789ab", processes=8, threads=8, date="2026-01-01",
)  # fmt: skip


def operator_row(kernel, micro_batch, seconds):
    return OperatorRow(
        op=kernel.op, phase=kernel.phase, operands=tuple(o.text(micro_batch) for o in kernel.operands),
        flop=kernel.flop.at(micro_batch), seconds=seconds, spread=0.01, repeats=10, made_bytes=1.0, saved_bytes=0.0,
        peak_bytes=1.0,
    )  # fmt: skip


def block_row(kind, micro_batch, seconds, host=1e-4):
    return BlockRow(
        key=block_key(kind, micro_batch), name="m blocks.0", micro_batch=micro_batch, forward_seconds=seconds,
        backward_seconds=2 * seconds, forward_host_seconds=host, backward_host_seconds=host, spread=0.0, repeats=5,
        saved_bytes=1e6, forward_peak_bytes=1e6, backward_peak_bytes=2e6,
    )  # fmt: skip


def collective_row(collective, num_bytes, seconds, ranks=8, nodes=1, groups=1):
    return CollectiveRow(
        collective=collective, ranks=ranks, nodes=nodes, groups=groups, stride=1, num_bytes=num_bytes, seconds=seconds,
        spread=0.0, repeats=9,
    )  # fmt: skip


def a_kernel(phase="forward", op="aten.mm.default", width=512):
    return Kernel(
        op=op, phase=phase, kind="matmul", dtype="bfloat16", flop=Affine(0.0, 2.0 * 1024 * width * width),
        num_bytes=Affine(2.0 * width * width, 2.0 * 2048 * width),
        operands=(Operand("bfloat16", (Batch(1024), width)), Operand("bfloat16", (width, width), is_strided=True)),
    )  # fmt: skip


def a_class(**changes):
    fields = {
        "kernels": (a_kernel(), a_kernel("backward"), a_kernel("backward", width=256)), "saved": Affine(),
        "saves_input": (), "saves_output": (), "forward_peak": Affine(), "backward_peak": Affine(),
    }  # fmt: skip
    return BlockClass(**{**fields, **changes})


def full_profile():
    kind = a_class()
    return Profile(machine=MACHINE).with_rows(
        [
            operator_row(kind.kernels[0], 2, 1e-3),
            block_row(kind, 2, 3e-3),
            collective_row("all_reduce", 1e6, 1e-4),
            OverlapRow(
                collective="all_gather", ranks=8, compute_seconds=1.0, link_seconds=0.5, both_seconds=1.2, repeats=5
            ),
            CopyRow(direction="h2d", devices=8, num_bytes=1e8, seconds=1e-2, spread=0.0, repeats=5),
            TopologyRow(first=0, second=1, connection="NV12"),
        ]
    )  # fmt: skip


def test_a_profile_reads_back_as_it_was_written(tmp_path):
    profile = full_profile()
    path = tmp_path / "profile.json"

    profile.save(path)

    assert Profile.load(path) == profile
    assert Profile.load(path).dumps() == profile.dumps()
    assert json.loads(path.read_text())["units"]["seconds"] == "s"
    assert [p.name for p in tmp_path.iterdir()] == ["profile.json"]


def test_the_order_in_which_rows_were_measured_leaves_no_trace():
    rows = [operator_row(a_kernel(width=width), 2, 1e-3) for width in (64, 128, 256)]

    assert Profile(machine=MACHINE).with_rows(rows) == Profile(machine=MACHINE).with_rows(rows[::-1])


def test_a_newer_row_takes_the_place_of_an_older_one():
    old = Profile(machine=MACHINE).with_rows([operator_row(a_kernel(), 2, 1e-3)])
    new = Profile(machine=replace(MACHINE, date="2026-02-02")).with_rows([operator_row(a_kernel(), 2, 2e-3)])

    assert [row.seconds for row in old.merged(new).operators] == [2e-3]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"torch": "2.12.0"}, "another torch"),
        ({"host": "other"}, "another machine"),
        ({"device": "T4"}, "another device"),
    ],
)
def test_profiles_of_two_machines_are_not_merged(change, words):
    other = Profile(machine=replace(MACHINE, **change))

    with pytest.raises(ProfileError, match=words):
        full_profile().merged(other)
    assert full_profile().merged(other, any_machine=True) == full_profile()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda data: data.update(schema_version=99), "schema_version 99, this release reads 1"),
        (lambda data: data.update(extra=1), "'extra' is no key of a profile"),
        (
            lambda data: data["operators"][0].update(seconds=-1.0),
            r"operators\[0\].seconds must be a number, at least 0",
        ),
        (lambda data: data["operators"][0].update(seconds=float("nan")), r"operators\[0\].seconds must be a number"),
        (lambda data: data["blocks"][0].update(micro_batch="2"), r"blocks\[0\].micro_batch must be a whole number"),
        (lambda data: data["blocks"][0].pop("key"), r"blocks\[0\].key must be text"),
        (lambda data: data.pop("machine"), "machine is missing"),
        (lambda data: data.update(collectives={}), "collectives must be a list"),
    ],
)
def test_a_corrupt_profile_is_refused_in_one_sentence(damage, words):
    data = json.loads(full_profile().dumps())
    damage(data)

    with pytest.raises(ProfileError, match=words) as caught:
        Profile.loads(json.dumps(data), origin="p.json")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null"])
def test_what_is_no_profile_is_refused(text):
    with pytest.raises(ProfileError, match=r"p.json (is no JSON|holds no profile)"):
        Profile.loads(text, origin="p.json")


def test_files_that_cannot_be_read_or_written_are_named(tmp_path):
    with pytest.raises(ProfileError, match="cannot read the profile"):
        Profile.load(tmp_path / "none.json")
    with pytest.raises(ProfileError, match="cannot write"):
        full_profile().save(tmp_path / "no folder" / "p.json")


def test_a_profile_is_for_its_device_alone():
    assert unlike(full_profile(), A100, None) == []
    assert unlike(full_profile(), Cluster.load("1x8xH100-80GB"), None) == [
        "another device (NVIDIA A100-SXM4-80GB, not H100-80GB)"
    ]
    assert unlike(full_profile(), A100, MACHINE) == []
    assert "another machine" in unlike(full_profile(), A100, replace(MACHINE, host="x"))[0]


def test_a_measured_kernel_takes_what_was_measured():
    kernel = replace(a_kernel(), measured=((4, 7e-3),))

    assert kernel_seconds(A100.device, [kernel, a_kernel()], 4) == pytest.approx(
        [7e-3, roofline_seconds(A100.device, [kernel], 4)[0]]
    )


def test_between_and_beyond_measured_micro_batches_the_roofline_is_corrected():
    roofline = {size: float(roofline_seconds(A100.device, [a_kernel()], size)[0]) for size in (1, 2, 4, 16, 64)}
    kernel = replace(a_kernel(), measured=((4, 2 * roofline[4]), (16, 8 * roofline[16])))

    def factor(size):
        return float(kernel_seconds(A100.device, [kernel], size)[0]) / roofline[size]

    assert [factor(size) for size in (1, 4, 16, 64)] == pytest.approx([2, 2, 8, 8])
    between = float(kernel_seconds(A100.device, [kernel], 8)[0] / roofline_seconds(A100.device, [kernel], 8)[0])
    assert between == pytest.approx(4)


def test_a_measured_pass_is_what_a_block_takes():
    passes = MeasuredPasses(
        micro_batch=2,
        forward_seconds=3e-3,
        backward_seconds=5e-3,
        forward_host_seconds=1e-3,
        backward_host_seconds=2e-3,
    )
    device = A100.device

    seconds, sent = class_seconds(device, a_class(measured=(passes,)), 2)

    assert seconds == pytest.approx([3e-3, 5e-3])
    assert sent * device.dispatch_seconds + device.block_seconds == pytest.approx([1e-3, 2e-3])


def test_a_part_of_a_measured_block_is_off_the_roofline_as_the_whole_is():
    device, plain = A100.device, a_class()
    expected = class_seconds(device, plain, 2)[0]
    passes = MeasuredPasses(
        micro_batch=2, forward_seconds=3 * expected[0], backward_seconds=2 * expected[1], forward_host_seconds=1e-3,
        backward_host_seconds=1e-3,
    )  # fmt: skip
    whole = a_class(measured=(passes,), kernels=tuple(replace(k, measured=((2, 1.0),)) for k in plain.kernels))

    seconds, _ = class_seconds(device, replace(plain, part_of=whole), 2)
    known = replace(plain.kernels[0], measured=((2, 5e-3),))
    mixed, _ = class_seconds(device, replace(plain, kernels=(known, *plain.kernels[1:]), part_of=whole), 2)

    assert seconds == pytest.approx([3 * expected[0], 2 * expected[1]])
    assert mixed == pytest.approx([5e-3, 2 * expected[1]])


def test_what_rests_on_measurements_is_counted_between_them_and_not_beyond():
    passes = [
        MeasuredPasses(
            micro_batch=size, forward_seconds=size * 1e-3, backward_seconds=size * 2e-3, forward_host_seconds=1e-4,
            backward_host_seconds=1e-4,
        )
        for size in (2, 8)
    ]  # fmt: skip
    kind = a_class(measured=tuple(passes))

    assert measured_seconds(A100.device, kind, 2) == pytest.approx(6e-3)
    assert measured_seconds(A100.device, kind, 4) > 0
    assert measured_seconds(A100.device, kind, 16) == 0
    assert measured_seconds(A100.device, a_class(), 2) == 0


def test_a_graph_finds_its_rows_and_its_price_follows():
    graph = gpt_graph(num_layers=3)
    kinds = [replace(kind, kernels=tuple(_named(k) for k in kind.kernels)) for kind in graph.classes]
    graph = replace(graph, classes=tuple(kinds))
    cluster = Cluster.load("1x1xA100-80GB")
    rows = [block_row(kind, 2, 1e-2, host=1e-6) for kind in kinds if kind.kernels]

    measured = measured_graph(graph, Profile(machine=MACHINE).with_rows(rows))

    blocks = [b for b in graph.blocks if kinds[b.class_index].kernels]
    assert measured.fingerprint == graph.fingerprint
    assert [len(kind.measured) for kind in measured.classes] == [int(bool(kind.kernels)) for kind in kinds]
    seconds = least_seconds(measured, cluster, mesh=Mesh(), micro_batch=2)
    assert seconds == pytest.approx(len(blocks) * 3e-2, rel=0.01)
    assert least_seconds(graph, cluster, mesh=Mesh(), micro_batch=2) < seconds / 2


def _named(kernel):
    return replace(kernel, operands=(Operand(kernel.dtype, (Batch(8), 4)),))


def test_rows_of_other_shapes_or_dtypes_are_not_taken():
    graph = gpt_graph(num_layers=2)
    kinds = tuple(replace(kind, kernels=tuple(_named(k) for k in kind.kernels)) for kind in graph.classes)
    graph = replace(graph, classes=kinds)
    kernel = next(kind.kernels[0] for kind in kinds if kind.kernels)
    others = [
        replace(kernel, operands=(Operand(kernel.dtype, (Batch(8), 5)),)),
        replace(kernel, operands=(Operand("float64", (Batch(8), 4)),)),
        replace(kernel, operands=(Operand(kernel.dtype, (Batch(8), 4), is_strided=True),)),
        replace(kernel, phase="backward" if kernel.phase == "forward" else "forward"),
    ]

    rows = [operator_row(other, 2, 9.0) for other in others]
    found = measured_graph(graph, Profile(machine=MACHINE).with_rows([*rows, block_row(a_class(), 2, 1.0)]))

    assert len({operator_key(k, 2) for k in (kernel, *others)}) == 5
    assert all(9.0 not in dict(k.measured).values() for k in found.classes[0].kernels if k.phase == kernel.phase)


def test_parts_of_measured_blocks_point_to_them():
    graph = gpt_graph(num_layers=2)
    rows = [block_row(kind, 2, 1e-2) for kind in graph.classes if kind.kernels]
    profile = Profile(machine=MACHINE).with_rows(rows)
    whole = measured_graph(graph, profile)
    halves = tuple(
        replace(
            kind, kernels=tuple(replace(k, flop=Affine(k.flop.fixed / 2, k.flop.per_sample / 2)) for k in kind.kernels)
        )
        for kind in graph.classes
    )

    part = measured_part(replace(graph, classes=halves), whole, profile)

    assert [kind.part_of is not None for kind in part.classes] == [
        kind.flop("forward").per_sample > 0 for kind in halves
    ]


def test_collectives_are_priced_as_they_were_measured():
    sizes = (1e4, 1e6, 1e8)
    rows = [collective_row("all_reduce", size, 2e-5 + size / 1e11) for size in sizes]
    rows += [collective_row("send_recv", size, 3e-5 + size / 5e10) for size in sizes]
    rows += [collective_row("all_reduce", 1e8, 1.0, ranks=2), collective_row("all_reduce", 1e8, 1.0, groups=4, ranks=8)]

    cluster = measured_cluster(A100, Profile(machine=MACHINE).with_rows(rows))

    group = axis_group(cluster, {"dp": 8}, "dp")
    for size in sizes:
        assert all_reduce_seconds(size, group) == pytest.approx(2e-5 + size / 1e11, rel=0.02)
        assert send_recv_seconds(size, group) == pytest.approx(3e-5 + size / 5e10, rel=0.02)
    assert cluster.inter_node_link == A100.inter_node_link
    assert cluster.fingerprint != A100.fingerprint
    assert Cluster.from_dict(json.loads(cluster.to_json())) == cluster


OPTIMIZER_ROWS = [
    OptimizerRow(
        optimizer="adamw", dtype="float32", elements=elements, tensors=10, seconds=1e-3 + elements * 4e-9,
        spread=0.0, repeats=5,
    )
    for elements in (1000, 1_000_000)
]  # fmt: skip


def test_a_profile_of_plain_tensors_leaves_what_sharded_ones_take_more():
    known = {"adamw": OptimizerSeconds(1e-9, 2e-5, 5e-5), "sgd": OptimizerSeconds(1e-9, 1e-5, 4e-5)}
    base = replace(A100, device=replace(A100.device, optimizer_seconds=known))

    found = measured_cluster(base, Profile(machine=MACHINE).with_rows(OPTIMIZER_ROWS)).device.optimizer_seconds

    assert found is not None
    assert found["adamw"] == pytest.approx((1e-9, 1e-4, 1.3e-4), rel=1e-3)
    assert found["sgd"] == known["sgd"]


def test_overlap_and_copies_become_the_devices():
    cluster = measured_cluster(A100, full_profile())

    assert cluster.slowdown(cluster.intra_node_link) == pytest.approx((1.4, 1.4))
    assert cluster.device.host_bytes_per_second == pytest.approx(1e10)
    assert cluster.device.source["host_bytes_per_second"] == "measured, from a profile"


def test_a_step_of_an_optimizer_takes_what_was_measured():
    graph = gpt_graph(num_layers=2)

    cluster = measured_cluster(A100, Profile(machine=MACHINE).with_rows(OPTIMIZER_ROWS))

    options: dict[str, Any] = {
        "mesh": Mesh(), "micro_batch": 1, "num_microbatches": 1, "schedule": "gpipe", "precision": "fp32",
        "optimizer": "adamw",
    }  # fmt: skip
    tensors = sum(len(block.parameters) for block in graph.blocks)
    found = price(replace(graph, dtype="float32"), cluster, **options).optimizer_seconds[:, 0].sum()
    assert found == pytest.approx(tensors * 1e-4 + graph.num_parameters * 4e-9, rel=1e-3)
    assert Cluster.from_dict(json.loads(cluster.to_json())) == cluster


@pytest.mark.parametrize(
    ("words", "link"), [(("NV12", "NV12"), "nvlink3"), (("NV12", "PIX"), "pcie4"), (("NV12", "SYS"), "pcie4-staged")]
)
def test_devices_without_nvlink_between_them_use_pcie(words, link):
    rows = [TopologyRow(first=0, second=1 + i, connection=word) for i, word in enumerate(words)]

    assert measured_cluster(A100, Profile(machine=MACHINE).with_rows(rows)).intra_node_link.name == link


def test_without_rows_nothing_changes():
    empty = Profile(machine=MACHINE)
    graph = gpt_graph(num_layers=2)

    assert measured_cluster(A100, empty) == A100
    assert measured_graph(graph, empty) == graph
    assert np.array_equal(class_seconds(A100.device, a_class(), 2)[1], [1, 2])
