"""Engines: constants of training systems as data, what they change in a step, and the fit that finds them."""

import tomllib
from dataclasses import fields, replace
from itertools import pairwise

import numpy as np
import pytest

from benchmarks import fit
from planner.cluster import device_named
from planner.engine import Engine, engine_named, engine_of
from planner.errors import ClusterError
from planner.resources import profiles_path
from planner.validate.cases import case_of
from planner.validate.price import shares
from planner.validate.rows import Row
from planner.validate.step import step_terms

BASE = Row(
    id="own-1", model="GPT tiny", layers=4, hidden=64, heads=4, vocab=256, seq_len=64, gpu="A100", gpu_mem_gb=80.0,
    n_gpus=4, gpus_per_node=8, interconnect="NVLink", dp=2, tp=1, pp=2, zero_stage=0, activation_recompute="full",
    precision="fp16", flash_attention=False, micro_batch=2, global_batch=32, iter_time_s=0.1,
)  # fmt: skip
MEGATRON = engine_named("megatron")
A100 = device_named("A100")


@pytest.fixture(autouse=True, scope="module")
def _own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def terms(engine, **changes):
    case = replace(case_of(replace(BASE, **changes)), engine=engine)
    return step_terms(case, shares(case), case.cluster.device, engine)


# --- the files --------------------------------------------------------------------------------------


def test_every_number_of_an_engine_has_a_source():
    for path in (profiles_path() / "engines").glob("*.toml"):
        engine = engine_named(path.stem)
        named = {item.name for item in fields(Engine)} - {"name", "source"}
        assert set(engine.source) == named, path.stem
        assert all(text.strip() for text in engine.source.values())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dispatch": None}, "lacks dispatch"),
        ({"speed": 1.0}, "has no speed"),
        ({"memory_traffic": -1.0}, "memory_traffic must be a number >= 0"),
        ({"by_block": 1}, "by_block must be true or false"),
    ],
)
def test_an_odd_file_is_refused(change, reason):
    text = tomllib.loads((profiles_path() / "engines" / "stock.toml").read_text())
    odd = {key: value for key, value in (text | change).items() if value is not None}
    with pytest.raises(ClusterError, match=reason):
        engine_of(odd, "odd")


def test_an_unknown_engine_is_named():
    with pytest.raises(ClusterError, match="no engine is named 'none'; known are"):
        engine_named("none")


# --- what they change -------------------------------------------------------------------------------


def test_a_small_model_waits_for_the_processor():
    """Kernels of a few microseconds: the step follows the time to send them, and grows with the slowest of tp ranks."""
    slow = replace(MEGATRON, dispatch=20.0)
    assert terms(slow).launch_seconds > 5 * terms(replace(MEGATRON, dispatch=0.0, block_dispatches=0.0)).launch_seconds
    alone, of_two = (terms(replace(slow, straggling=s), tp=2, n_gpus=8).launch_seconds for s in (0.0, 1.0))
    assert of_two > 1.5 * alone


def test_traffic_of_chains_and_of_softmax_are_apart():
    """Large enough that no kernel is bound by its launch: time follows bytes up to the curve of the bandwidth."""
    large = {"hidden": 1024, "heads": 16, "seq_len": 1024, "micro_batch": 8, "global_batch": 64}
    base = terms(replace(MEGATRON, memory_traffic=1.0, attention_passes=1.0), **large).memory_bound_seconds
    chains = terms(replace(MEGATRON, memory_traffic=2.0, attention_passes=1.0), **large).memory_bound_seconds - base
    softmax = terms(replace(MEGATRON, memory_traffic=1.0, attention_passes=2.0), **large).memory_bound_seconds - base
    assert chains > 0
    assert softmax > 0
    assert chains + softmax == pytest.approx(base, rel=0.15)


def test_what_is_once_a_step_is_counted_once():
    more = replace(MEGATRON, step_seconds=MEGATRON.step_seconds + 1.0)
    assert terms(more).total_seconds - terms(MEGATRON).total_seconds == pytest.approx(1.0)
    hops = [terms(replace(MEGATRON, hop_seconds=s)).total_seconds for s in (0.0, 0.01)]
    # Two stages, eight micro-batches: at least one of the two messages of each waits for nothing else.
    assert 8 * 0.01 * 0.99 <= hops[1] - hops[0] <= 2 * 8 * 0.01 * 1.01


def test_what_is_outside_of_layers_has_a_traffic_of_its_own():
    """The loss moves float32 logits in several chains: more of them for a larger vocabulary, none for more layers."""

    def more(vocab, layers=4):
        once, twice = (
            terms(
                replace(MEGATRON, head_traffic=factor), vocab=vocab, layers=layers, hidden=1024, heads=8, seq_len=1024,
                micro_batch=8, global_batch=64, pp=1, n_gpus=2,
            ).memory_bound_seconds
            for factor in (1.0, 2.0)
        )  # fmt: skip
        return twice - once

    base = more(16384)
    assert more(32768) == pytest.approx(2 * base, rel=0.2)
    assert more(16384, layers=8) == pytest.approx(base, rel=1e-6)
    assert base > 0


def test_calling_a_layer_takes_the_processor_and_the_rest_of_a_model_is_no_layer():
    slow = replace(MEGATRON, dispatch=1e-3, block_dispatches=1e6, straggling=0.0)
    for layers, vocab in ((4, 256), (8, 256), (4, 50257)):  # the last: layers are cut within
        found = terms(
            slow, layers=layers, vocab=vocab, pp=1, dp=1, n_gpus=1, global_batch=2, activation_recompute="none"
        )
        expected = 2 * layers * 1e6 * case_of(BASE).cluster.device.dispatch_seconds  # forward and backward
        assert found.total_seconds == pytest.approx(expected, rel=1e-3)


def test_the_processor_of_a_device_scales_what_an_engine_takes_of_it():
    """Constants are for one that sends a kernel in 8 us."""
    slow = replace(MEGATRON, step_seconds=5.0)
    found = {gpu: terms(slow, gpu=gpu).optimizer_seconds - terms(MEGATRON, gpu=gpu).optimizer_seconds
             for gpu in ("A100", "H100")}  # fmt: skip
    assert found["A100"] == pytest.approx(5.0 - MEGATRON.step_seconds)
    h100 = case_of(replace(BASE, gpu="H100")).cluster.device.dispatch_seconds
    assert found["H100"] / found["A100"] == pytest.approx(h100 / 8e-6)


def test_each_chunk_of_a_stage_is_passed_by_itself():
    slow = replace(MEGATRON, pass_seconds=MEGATRON.pass_seconds + 1.0)

    def more(**changes):
        return terms(slow, **changes).launch_seconds - terms(MEGATRON, **changes).launch_seconds

    one = more()
    assert one == pytest.approx(2 * 8 * 1.0)  # forward and backward of eight micro-batches
    assert more(vp_interleave=2) == pytest.approx(2 * one)


def test_ranks_of_tp_send_parts_of_what_all_of_them_have():
    def messages(engine, *, split=False):
        return terms(
            engine, hidden=4096, heads=32, seq_len=2048, tp=2, dp=1, gpus_per_node=2, activation_recompute="none",
            interconnect="100 Gb/s Ethernet", sequence_parallel=split,
        ).pp_seconds  # fmt: skip

    apart = replace(MEGATRON, scatters_messages=False)
    assert (
        0.45 * messages(apart) < messages(MEGATRON) < 0.75 * messages(apart)
    )  # half between nodes, gathered by NVLink
    # With sequence parallelism a rank has no more than its part.
    assert messages(MEGATRON, split=True) == pytest.approx(messages(apart, split=True))
    assert messages(apart, split=True) < messages(MEGATRON)


def test_hidden_gradients_cost_less_than_shown_ones():
    large = {"hidden": 1024, "heads": 16, "seq_len": 1024, "pp": 1, "dp": 4}
    shown = terms(MEGATRON, **large).dp_seconds
    hidden = terms(replace(MEGATRON, overlaps_gradients=True, hidden=1.0), **large).dp_seconds
    wide = terms(replace(MEGATRON, gradient_bytes=4), **large).dp_seconds
    assert hidden < shown < wide


# --- the fit ----------------------------------------------------------------------------------------


def test_larger_products_never_take_less_time():
    curve = fit.matmul_curve(0.8, 1e10)
    sizes = np.logspace(6, 15, 500)
    seconds = [size / curve.at(size) for size in sizes]
    assert all(later >= earlier * (1 - 1e-6) for earlier, later in pairwise(seconds))
    assert curve.at(1e13) == pytest.approx(0.8, rel=2e-3)


def test_a_fit_gives_what_is_outside_of_layers_the_traffic_of_layers_where_it_is_not_fitted_apart():
    model = fit.Model(fit.constants())
    for name, is_apart in (("stock", False), ("ddp", False), ("megatron", True)):
        x = model.start + 0.1 * np.arange(len(model.start))  # no two constants alike
        engine = model._engine(engine_named(name), model.part(f"engine.{name}.", x))
        assert (engine.head_traffic != engine.memory_traffic) == is_apart, name


def test_a_fit_slows_odd_products_down():
    found = fit.fitted_device(A100, {"best": 0.8, "half": 1e9, "misaligned": 0.3})
    assert found.misaligned_matmul == 0.3
    assert fit.fitted_device(A100, {"best": 0.8, "half": 1e9}).misaligned_matmul == A100.misaligned_matmul


def test_a_fit_finds_the_constants_that_made_the_rows():
    """Rows made by known constants: the fit gives these steps back, and one that was left out."""
    found = {
        name: each
        for name, each in fit.constants().items()
        if name in ("engine.megatron.dispatch", "engine.megatron.memory_traffic", "engine.megatron.step_seconds")
    }
    model = fit.Model(found)
    truth = model.start + np.array([np.log(v) for v in (0.7, 2.0, 3.0)])
    size = replace(BASE, hidden=512, heads=8, seq_len=512, global_batch=64)
    runs = []
    for micro_batch in (1, 2, 4, 8):
        for pp, dp in ((1, 4), (2, 2)):
            case = case_of(replace(size, pp=pp, dp=dp, micro_batch=micro_batch))
            case = replace(case, engine=MEGATRON)
            runs.append(fit.Run(case=case, shares=shares(case), seconds=1.0, family=""))
    runs = [replace(run, seconds=model.seconds(run, truth)) for run in runs]
    done = fit.fitted(model, runs, lambda _: None)
    assert np.abs(done.residual).max() < 0.03
    keep = np.arange(len(runs)) != 3
    held = model.seconds(runs[3], fit.each_without(model, done, runs, [keep])[0]) / runs[3].seconds
    assert held == pytest.approx(1.0, abs=0.05)
