"""Folklore: formulas of offload and of buckets, offload in a priced plan, and claims put to small models."""

import json
from dataclasses import fields, replace

import pytest

from benchmarks import folklore
from benchmarks.folklore import IF, NOT, judged
from planner.buckets import bucket_ends, exposed_reduction_seconds, pieces_seconds
from planner.cluster import Cluster, Slowdown, all_links
from planner.collectives import _example_link, all_gather_seconds, all_reduce_seconds, example_group
from planner.errors import ClusterError
from planner.offload import (
    ADAM_BYTES,
    Host,
    adam_seconds,
    copy_bytes_per_second,
    exposed_copy_seconds,
    gradient_copies,
    host_named,
    usual_host,
)
from planner.resources import profiles_path
from planner.validate.cases import case_of
from planner.validate.price import predict
from tests.published_rows import OWN_ROW

ALONE = Slowdown(1.0, 1.0)
GROUP = example_group(4, _example_link())
pytestmark = pytest.mark.usefixtures("own_trace_cache")
ROW = replace(OWN_ROW, zero_stage=3, iter_time_s=None)


def offloaded(row=ROW, *, link="", host=None, **shares):
    case = case_of(row)
    stages = tuple(replace(s, **{f"offloaded_{k}": v for k, v in shares.items()}) for s in case.stages)
    cluster = case.cluster
    if link:
        cluster = replace(cluster, intra_node_link=next(each for each in all_links() if each.name == link))
    return predict(replace(case, stages=stages, cluster=cluster, host=host or case.host))


# --- hosts ------------------------------------------------------------------------------------------


def test_every_number_of_a_host_has_a_source():
    paths = list((profiles_path() / "hosts").glob("*.toml"))
    assert paths
    for path in paths:
        host = host_named(path.stem)
        assert set(host.source) == {"*", "adam_share", "thread_bytes_per_second", "device_bytes_per_second"}
        assert all(text.strip() for text in host.source.values())


def test_an_odd_host_is_refused():
    with pytest.raises(ClusterError, match=r"host 'dgx-a100': memory_bytes must be a number > 0, got 0"):
        replace(host_named("dgx-a100"), memory_bytes=0)
    with pytest.raises(ClusterError, match="no host is named 'none'; known are desktop,"):
        host_named("none")


def test_a_device_has_the_host_that_lists_it_else_one_of_cards():
    assert usual_host(Cluster.load("8xH100-80GB").device).name == "dgx-h100"
    assert usual_host(replace(Cluster.load("8xH100-80GB").device, name="other")).name == "epyc-server"


# --- offload by hand --------------------------------------------------------------------------------


def test_devices_divide_the_links_and_the_memory_of_their_host():
    host, cluster = host_named("dgx-a100"), Cluster.load("8xA100-80GB")  # 12 GB/s each while all 8 copy
    assert copy_bytes_per_second(host, cluster, 8) == pytest.approx(12e9)
    assert copy_bytes_per_second(host, cluster, 5) == pytest.approx(96e9 / 5)
    assert copy_bytes_per_second(host, cluster, 1) == pytest.approx(24.4e9)
    assert copy_bytes_per_second(replace(host, memory_bytes_per_second=4e10), cluster, 8) == pytest.approx(5e9)


def test_adam_is_bound_by_memory_or_by_its_threads():
    host = Host(
        name="own", devices=(), memory_bytes=1, memory_bytes_per_second=1e11, adam_share=0.5,
        thread_bytes_per_second=1e10, device_bytes_per_second=1.0,
    )  # fmt: skip
    assert adam_seconds(1e9, host, 1) == pytest.approx(ADAM_BYTES * 1e9 / 5e10)
    assert adam_seconds(1e9, host, 8) == pytest.approx(8 * adam_seconds(1e9, host, 1))  # they divide the memory
    assert adam_seconds(1e9, replace(host, threads_per_process=1), 1) == pytest.approx(2.8)


def test_adam_is_as_fast_as_published():
    """10 billion parameters in 2.57 s on a DGX-2 (arXiv 2101.06840, table 4): 12 channels of DDR4-2666."""
    dgx2 = replace(host_named("dgx-1"), memory_bytes_per_second=2.56e11)
    assert adam_seconds(1e10, dgx2, 1) == pytest.approx(2.57, rel=0.02)


def test_copies_hide_beside_computing_less_what_takes_their_link():
    assert exposed_copy_seconds(2.0, 1.0) == pytest.approx(2.0 - 0.8 + 0.2)
    assert exposed_copy_seconds(2.0, 1.0, same_link=0.5) == pytest.approx(2.0 - 0.3 + 0.2)
    assert exposed_copy_seconds(2.0, 1.0, same_link=9.0) == pytest.approx(2.2)
    assert [gradient_copies(m) for m in (1, 2)] == [1.0, 1.5]


# --- buckets by hand --------------------------------------------------------------------------------


def test_the_parameter_that_reaches_the_cap_closes_a_bucket():
    assert bucket_ends([2.0, 1.0, 5.0, 1.0, 1.0, 1.0], 3.0, first=1.0) == [1, 3, 6]
    assert bucket_ends([1.0], 3.0) == [1]


def test_a_bucket_is_reduced_when_it_is_complete_and_the_link_is_free():
    size = 4e6
    each = all_reduce_seconds(size, GROUP)
    # The first is reduced beside the second's backward pass, the second after it.
    assert exposed_reduction_seconds([size] * 2, [1.0, 1.0], size, GROUP, ALONE) == pytest.approx(each)
    together = all_reduce_seconds(2 * size, GROUP)
    grown = exposed_reduction_seconds([1.0, 2 * size - 1], [1.0, 1.0], 2 * size, GROUP, ALONE)
    assert grown == pytest.approx(together, rel=1e-3)
    # A pass shorter than the reductions: they queue.
    assert exposed_reduction_seconds([size] * 3, [1e-6] * 3, size, GROUP, ALONE) == pytest.approx(3 * each, abs=3e-6)
    assert exposed_reduction_seconds([size], [1.0], size, example_group(1, _example_link()), ALONE) == 0.0


def test_computing_is_slowed_beside_a_reduction():
    size = 4e6
    slowed = exposed_reduction_seconds([size] * 2, [1.0, 1.0], size, GROUP, Slowdown(2.0, 1.0))
    assert slowed == pytest.approx(1.5 * all_reduce_seconds(size, GROUP))


def test_small_buckets_wait_for_latencies_large_ones_for_the_last():
    sizes, backward = [1e6] * 64, [1e-3] * 64
    added = [exposed_reduction_seconds(sizes, backward, cap, GROUP, ALONE) for cap in (1e6, 8e6, 64e6)]
    slow = replace(_example_link(), launch_seconds=5e-3)
    latent = [exposed_reduction_seconds(sizes, backward, cap, example_group(4, slow), ALONE) for cap in (1e6, 8e6)]
    assert added[0] < added[2]
    assert latent[0] > latent[1]


def test_the_first_piece_is_waited_for():
    whole = all_gather_seconds(8e6, GROUP)
    assert pieces_seconds(8e6, 8e6, 1.0, GROUP, ALONE) == pytest.approx(whole)
    assert pieces_seconds(8e6, 2e6, 1.0, GROUP, ALONE) == pytest.approx(all_gather_seconds(2e6, GROUP))
    # Nothing to hide behind: all pieces, one after the other.
    assert pieces_seconds(8e6, 2e6, 0.0, GROUP, ALONE) == pytest.approx(4 * all_gather_seconds(2e6, GROUP))


# --- offload in a priced plan -----------------------------------------------------------------------


def test_what_is_offloaded_is_off_the_device_and_takes_time():
    plain = offloaded()
    hosted = offloaded(optimizer=1.0, gradients=1.0)
    assert hosted.memory.optimizer_bytes == hosted.memory.gradients_bytes == 0
    assert plain.memory.optimizer_bytes > 0 < plain.memory.gradients_bytes
    assert hosted.terms.optimizer_seconds < plain.terms.optimizer_seconds
    streamed = offloaded(optimizer=1.0, gradients=1.0, parameters=1.0)
    terms = [each.terms.offload_seconds for each in (plain, hosted, streamed)]
    assert terms[0] == 0 < terms[1]
    assert terms[1] != terms[2]
    assert offloaded(optimizer=0.5).memory.optimizer_bytes == pytest.approx(plain.memory.optimizer_bytes / 2)


def test_offloaded_parameters_leave_two_blocks_on_a_device_alone():
    alone = replace(ROW, n_gpus=1, dp=1, zero_stage=2)
    plain, streamed = offloaded(alone), offloaded(alone, parameters=1.0)
    assert 0 < streamed.memory.parameters_bytes < plain.memory.parameters_bytes


def test_a_step_waits_for_host_memory_and_for_threads():
    host = host_named("dgx-a100")
    shares = {"optimizer": 1.0, "gradients": 1.0}
    fast, slow = (offloaded(host=replace(host, memory_bytes_per_second=rate), **shares) for rate in (4e11, 1e9))
    few = offloaded(host=replace(host, threads_per_process=1, thread_bytes_per_second=1e6), **shares)
    assert fast.terms.offload_seconds < slow.terms.offload_seconds
    assert fast.terms.offload_seconds < few.terms.offload_seconds
    assert fast.terms.gemm_seconds == slow.terms.gemm_seconds


def test_where_gathers_take_the_link_to_the_host_copies_do_not_hide_beside_them():
    wide = replace(ROW, hidden=512, heads=8, micro_batch=8, seq_len=512)
    shares = {"optimizer": 1.0, "gradients": 1.0, "parameters": 1.0}
    apart, shared = (offloaded(wide, link=link, **shares).terms.offload_seconds for link in ("nvlink3", "pcie4-staged"))
    assert shared > 1.05 * apart


# --- claims -----------------------------------------------------------------------------------------


def test_a_verdict_follows_from_the_cases():
    assert judged([folklore.Tested("a", True), folklore.Tested("b", True)]) == ("holds", "true of a, b")
    assert judged([folklore.Tested("a", False)]) == (NOT, "not true of a")
    assert judged([folklore.Tested("a", False), folklore.Tested("b", True)]) == (IF, "true of b; not of a")


def test_equal_stages_have_the_bubble_of_the_formula():
    answer = folklore.bubble("gpt-tiny", stages=(2, 4), counts=(8,))
    assert [row[2] for row in answer.rows] == [row[3] for row in answer.rows] == ["11.1%", "27.3%"]
    assert "equal stages" in answer.why.split(";")[0]


def test_recomputation_saves_activations():
    answer = folklore.checkpointing({"gpt-tiny": 4}, selective=())
    assert float(answer.rows[0][4].rstrip("%")) > 70
    assert answer.verdict in (NOT, "holds")


def test_the_rule_of_stages_is_compared_with_all_of_them():
    answer = folklore.zero_rule({"gpt-tiny": 4}, counts=(2, 8))
    assert [row[5] for row in answer.rows] == ["ZeRO-1", "ZeRO-2"]
    assert all(cell != "-" for row in answer.rows for cell in row)


def test_gradients_come_from_the_last_block_to_the_first():
    graph = folklore.graph_of("gpt-tiny")
    backward = [float(i + 1) for i in range(len(graph.blocks))]
    sizes, seconds = folklore.gradients_in_order(graph, backward)
    trained = [t for t in graph.tensors if t.kind == "parameter"]
    assert sum(sizes) == 4 * sum(t.num_elements.fixed for t in trained)
    assert len(sizes) == len(seconds) == len(trained)
    assert sum(seconds) == pytest.approx(sum(backward))
    assert seconds[0] > 0


def test_the_command_prints_claims_and_verdicts(monkeypatch, capsys):
    monkeypatch.setattr(folklore, "QUERIES", {"bubble": lambda: folklore.bubble("gpt-tiny", (2,), (8,))})
    folklore.main(["bubble"])
    printed = capsys.readouterr()
    assert "bubble: of p stages and m micro-batches" in printed.out
    assert "-> HOLDS" in printed.out
    assert "1 of 1: bubble" in printed.err
    folklore.main(["--json"])
    (answer,) = json.loads(capsys.readouterr().out)
    assert set(answer) == {item.name for item in fields(folklore.Answer)}
    with pytest.raises(SystemExit):
        folklore.main(["none"])
    assert "'none' is none of bubble" in capsys.readouterr().err
