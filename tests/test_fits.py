"""The commands that fit links and overlap on published measurements, and what the bundled profiles make of those."""

import dataclasses
import json
import statistics

import pytest

from benchmarks import collectives, fit_links, fit_overlap
from benchmarks.collectives import LEAST_BYTES, PUBLISHED, Measured
from planner.cluster import Curve, Slowdown, device_named, link_named
from planner.collectives import overlapped_seconds

HEADER = "collective,gpu,n_gpus,nodes,interconnect,message_bytes,algbw_GBps,busbw_GBps,latency_us,source,notes\n"
# Figures of people who asked why they are so low, and of fabrics guessed from them.
CONTRADICTORY = ("infiniband-edr", "infiniband-ndr", "omni-path-100g", "gloo")


def rows_of(tmp_path, *lines):
    path = tmp_path / "rows.csv"
    path.write_text(HEADER + "".join(f"{line}\n" for line in lines), encoding="utf-8")
    return collectives.read(path)


def made_up(link, sizes, *, collective="all_gather", ranks=(2, 4, 8), source="one"):
    """Rows that a link would have given."""
    rows = []
    for num_ranks in ranks:
        for size in sizes:
            row = Measured(
                collective=collective, num_bytes=float(size), seconds=1.0, num_ranks=num_ranks, num_nodes=1,
                devices_per_node=8, nics_per_node=8, rivals=1, intra="nvlink2", inter="infiniband-edr", switch=True,
                noisy=False, sized=True, witness=True, source=source,
            )  # fmt: skip
            rows.append(dataclasses.replace(row, seconds=fit_links.predicted([row], link)[0]))
    return rows


def test_a_published_time_is_read_from_whatever_the_source_prints(tmp_path):
    rows, refused = rows_of(
        tmp_path,
        "all_reduce,H100,8,1,NVSwitch,1000000,,,50,a/b x.md,",
        "all_reduce,H100,8,1,NVSwitch,8000000,,100,,a/b issue 7,NCCL_NVLS_ENABLE=0 (ring)",
        "all_gather,A10G,8,1,PCIe,8000000,2,,,a/b,NOISY",
        "all_reduce,A100,16,2,NVSwitch,,,86,,a/b,",
        "all_reduce,H100,,1,NVSwitch,8,1,1,1,a/b,",
        "all_reduce,MI300X,8,1,xGMI,8,1,1,1,a/b,",
        "barrier,H100,8,1,NVSwitch,8,1,1,1,a/b,",
        "all_reduce,H100,8,1,NVSwitch,8,,,,a/b,",
        "all_reduce,H100,9,1,NVSwitch,8,1,,,a/b,",
    )

    # Bus bandwidth of n ranks is 2 (n - 1) / n times that of the tensor.
    assert [row.seconds for row in rows] == pytest.approx([50e-6, 14e6 / 100e9, 8e6 / 2e9, 2**30 * 1.875 / 86e9])
    assert [row.fabric for row in rows] == ["nvlink4", "nvlink4", "pcie4-g5", "infiniband-hdr"]
    assert [row.switch for row in rows] == [True, False, True, True]
    assert [row.noisy for row in rows] == [False, False, True, False]
    assert [row.source for row in rows] == ["a/b", "a/b issue 7", "a/b", "a/b"]
    assert refused.total() == 5
    assert any("ranks do not lie on 1 nodes of 8" in reason for reason in refused)


def test_copies_of_lists_of_tensors_are_no_time_of_the_link(tmp_path):
    line = "all_gather,V100 32GB,8,1,single node,1073741824,,,12000,a/b,{}"
    [plain, listed], _ = rows_of(tmp_path, line.format(""), line.format("list-based call"))

    copied = 2 * 2**30 / device_named("V100-32GB").copy_bytes_per_second(2 * 2**30)
    assert plain.seconds - listed.seconds == pytest.approx(copied)


def test_a_fit_finds_the_link_that_made_the_rows():
    start = link_named("nvlink2")
    shape = ((1e5, 0.05), (1e6, 0.3), (1e7, 0.6), (1e8, 0.9), (1e9, 1.0))
    truth = dataclasses.replace(
        start,
        bytes_per_second=0.7 * start.bytes_per_second,
        efficiency={"any": Curve(points=shape)},
        group_efficiency=Curve(points=((2.0, 0.45), (4.0, 0.8), (8.0, 1.0))),
    )
    rows = made_up(truth, [2**k for k in range(18, 31, 2)])

    found = fit_links.fit(start, rows)

    errors = [abs(s / row.seconds - 1) for s, row in zip(fit_links.predicted(rows, found), rows, strict=True)]
    assert statistics.median(errors) < 0.01
    assert max(errors) < 0.1
    assert found.bytes_per_second == pytest.approx(truth.bytes_per_second, rel=0.05)
    assert found.group_efficiency is not None
    assert found.group_efficiency.at(2) == pytest.approx(0.45, rel=0.1)


def test_few_rows_fit_the_rate_alone():
    start = link_named("nvlink2")
    rows = made_up(dataclasses.replace(start, bytes_per_second=6e10), [2**30], ranks=(8,))

    found = fit_links.fit(start, rows)

    assert found.bytes_per_second == pytest.approx(6e10, rel=0.01)
    assert found.efficiency == start.efficiency


def test_a_source_is_predicted_by_the_others_alone():
    start = link_named("nvlink2")
    slow = dataclasses.replace(start, bytes_per_second=start.bytes_per_second / 2)
    sizes = [2**k for k in range(24, 31)]
    rows = made_up(start, sizes) + made_up(slow, sizes, source="two")

    errors = fit_links.unseen(start, rows)

    assert errors["one"] == pytest.approx(1.0, abs=0.1)  # half the rate: twice the time
    assert errors["two"] == pytest.approx(0.5, abs=0.05)


def test_a_curve_is_written_so_that_it_can_be_read():
    # As steep as may be, and a little more once rounded to three digits: 1.0049 to 1.00, and 512 times that to 515.
    points = tuple((1000.0 * 2**k, 1.0049e-4 * 2.0**k) for k in range(10))

    text = fit_links.points_text(Curve(points=points))

    written = Curve(points=tuple(tuple(pair) for pair in json.loads(text)))
    assert len(written.points) < len(points)  # what lies on a line is left out
    assert all(written.at(size) == pytest.approx(share, rel=0.02) for size, share in points)


def test_two_factors_are_found_again():
    slow = Slowdown(1.8, 1.2)
    alone = [(c, t) for c in (0.01, 0.03, 0.05) for t in (0.005, 0.02, 0.08)]

    assert fit_overlap.fit_two([(c, t, overlapped_seconds(c, t, slow)) for c, t in alone]) == pytest.approx(
        slow, abs=0.021
    )


def test_two_factors_tell_what_one_cannot():
    pairs, _ = fit_overlap.read(fit_overlap.FOLDER / "published" / "interference.csv")
    for gpu, ranks in (("A100-SXM4-40GB", 8), ("L4", 2), ("V100-SXM2-16GB", 8)):
        beside = pairs[fit_overlap.Setting(gpu, 1, ranks), "allgather_mib"]

        assert fit_overlap.two_error(fit_overlap.fit_two(beside), beside) < 0.02
        assert fit_overlap.one_error(fit_overlap.fit_one(beside), beside) > 0.06


@pytest.mark.parametrize(("name", "gpu"), [("A100-40GB", "A100-SXM4-40GB"), ("L4", "L4")])
def test_the_profiles_hold_what_the_command_fits(name, gpu):
    pairs, _ = fit_overlap.read(fit_overlap.FOLDER / "published" / "interference.csv")

    assert device_named(name).overlap_slowdown == fit_overlap.slowdowns(pairs, gpu)


def test_the_profiles_predict_the_published_collectives():
    rows, _ = collectives.read(PUBLISHED)
    rows = [row for row in rows if row.num_bytes >= LEAST_BYTES and not row.noisy]
    errors: dict[str, list[float]] = {}
    for row in rows:
        errors.setdefault(row.fabric, []).append(abs(row.predicted() / row.seconds - 1))

    assert len(rows) > 1250
    medians = {name: statistics.median(values) for name, values in errors.items() if len(values) > 1}
    assert {name for name, value in medians.items() if value > 0.15} <= {*CONTRADICTORY}
    assert statistics.median(error for values in errors.values() for error in values) < 0.06
