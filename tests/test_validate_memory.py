"""Predicted memory of published runs: states by hand, what is in flight, kinds of measurement, adapters."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.fit_memory import PUBLISHED, measured, reserved_fractions, workspaces
from planner.errors import ProfileError
from planner.validate import conventions as module
from planner.validate.cases import case_of
from planner.validate.conventions import conventions
from planner.validate.memory import chunks_in_flight, measured_stage, stage_memory
from planner.validate.price import predict, shares
from planner.validate.rows import Row

BASE = Row(
    id="own-1", model="GPT tiny", layers=4, hidden=64, heads=4, vocab=256, seq_len=64, gpu="A100", gpu_mem_gb=80.0,
    n_gpus=2, gpus_per_node=8, interconnect="NVLink", dp=2, tp=1, pp=1, zero_stage=0, activation_recompute="none",
    precision="bf16", flash_attention=True, micro_batch=2, global_batch=32, iter_time_s=0.1,
)  # fmt: skip
# Of a layer 12 h^2 + 13 h, the word and position embeddings, and the last norm.
PARAMETERS = 4 * (12 * 64**2 + 13 * 64) + (256 + 64) * 64 + 2 * 64


@pytest.fixture(autouse=True, scope="module")
def _own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def memory(p=0, *, conventions_of="megatron", **changes):
    case = replace(case_of(replace(BASE, **changes)), conventions=conventions(conventions_of))
    share = shares(case)[p]
    return stage_memory(case, share.stage, p, share.priced, share.weights, share.recomputed)


def states(found):
    return found.parameters_bytes, found.gradients_bytes, found.optimizer_bytes


@pytest.mark.parametrize(
    ("zero", "own", "expected"), [(0, "megatron", (2, 4, 12)), (1, "megatron", (2, 4, 6)), (0, "mist", (2, 2, 12))]
)
def test_a_rank_holds_the_states_of_its_engine(zero, own, expected):
    found = states(memory(conventions_of=own, zero_stage=zero))
    assert found == pytest.approx([each * PARAMETERS for each in expected], rel=1e-9)


def test_zero_3_keeps_a_part_of_everything():
    whole, part = states(memory(conventions_of="deepspeed")), states(memory(conventions_of="deepspeed", zero_stage=3))
    assert part == pytest.approx([each / 2 for each in whole], rel=1e-9)


def test_embedding_and_head_are_two_matrices_where_a_row_unties_them():
    notes = "flags: untie-embeddings-and-output-weights"
    more = memory(notes=notes).parameters_bytes - memory().parameters_bytes
    assert more == pytest.approx(2 * 256 * 64, rel=1e-9)


def test_the_loss_holds_its_logits_once():
    ours = conventions("megatron")
    wide = {"vocab": 2048}
    found = memory(**wide)
    assert found.logits_bytes == ours.logit_bytes * 2 * 64 * wide["vocab"]
    # Interleaved, more micro-batches are in flight, but the loss of one.
    staged = {"pp": 2, "dp": 1, "vp_interleave": 2, **wide}
    assert memory(1, **staged).logits_bytes == found.logits_bytes
    # What the last block keeps is part of them, and no activation.
    assert memory(activation_recompute="full", **wide).activations_bytes < 0.1 * found.logits_bytes
    # A loss that is no language model's has none.
    assert memory(model="GPT tiny SQuAD", **wide).logits_bytes == 0


def test_earlier_stages_hold_more_micro_batches():
    staged = {"pp": 2, "dp": 1, "layers": 8}
    first, last = (memory(p, **staged) for p in (0, 1))
    assert first.activations_bytes > 1.8 * last.activations_bytes
    case = case_of(replace(BASE, pp=2, dp=1, notes="max_memory_allocated on the LAST rank"))
    assert measured_stage(case, (2.0, 1.0)) == 1
    assert measured_stage(replace(case, row=replace(case.row, notes="")), (2.0, 1.0)) == 0


@pytest.mark.parametrize(
    ("m", "v", "p", "expected"),
    [(16, 1, 0, 4), (16, 1, 3, 1), (2, 1, 0, 2), (16, 3, 3, 9 / 3), (16, 3, 0, 15 / 3), (5, 3, 3, 11 / 3)],
)
def test_micro_batches_in_flight(m, v, p, expected):
    case = case_of(replace(BASE, pp=4, dp=1, n_gpus=4, layers=12, vp_interleave=v, global_batch=2 * m))
    assert chunks_in_flight(case, p) == pytest.approx(expected)


def test_kinds_of_measurement_are_apart():
    found = memory()
    allocated, reserved, seen = (found.of_kind(kind) for kind in ("allocated", "reserved", "nvidia-smi"))
    assert reserved == pytest.approx(allocated / (1 - conventions("megatron").reserved_fraction), rel=1e-12)
    device = case_of(BASE).cluster.device
    assert seen == pytest.approx(reserved + device.context_bytes + device.communicator_bytes, rel=1e-12)
    assert allocated == found.allocated_bytes


def test_work_spaces_are_larger_on_hopper():
    ours = conventions("megatron-core")
    found = [memory(conventions_of="megatron-core", gpu=gpu).buffers_bytes for gpu in ("A100", "H100", "B200")]
    more = ours.hopper_workspace_bytes - ours.workspace_bytes
    np.testing.assert_allclose(np.diff(found), [more, 0.0], rtol=1e-9)


def test_operators_that_hold_most_are_recomputed_first():
    unfused = {"id": "mist-aceso-1", "flash_attention": False, "dp": 1, "n_gpus": 1, "micro_batch": 2}
    notes = "stage0: 1 GPU tp=1 dp=1 ops=52 recompute={}% of ops"
    kept = [memory(**unfused, notes=notes.format(share)).activations_bytes for share in (0, 31, 62, 100)]
    assert kept[0] > kept[1] > kept[2] > kept[3]
    # The first four of 13 are the core of attention: five bytes of a score.
    layers, scores = 4, 4 * 64**2 * 2
    assert kept[0] - kept[1] == pytest.approx(5 * layers * scores, rel=0.02)


def test_an_optimizer_that_copies_can_need_more_than_the_passes():
    small = {"micro_batch": 1, "activation_recompute": "full", "layers": 24}
    plain, copying = (memory(conventions_of=name, **small).allocated_bytes for name in ("mist", "internevo"))
    parameters = memory(conventions_of="mist", **small).parameters_bytes / 2
    assert copying > plain
    assert copying == pytest.approx((16 + 10) * parameters, rel=0.02)


def test_frozen_weights_are_held_as_they_are_quantized():
    tuned = {"model": "Llama LoRA", "zero_stage": None, "dp": 1, "n_gpus": 1, "ffn_hidden": 256, "global_batch": None}
    half, four, double = (
        memory(conventions_of="litgpt", precision=text, **tuned)
        for text in ("bf16-true", "bf16-true + bnb.nf4", "bf16-true + bnb.nf4-dq")
    )
    assert (half.gradients_bytes, half.optimizer_bytes) == (0, 0)
    words = 256 * 64
    linear = half.parameters_bytes - 2 * words
    assert (four.parameters_bytes - 2 * words) / linear == pytest.approx(4.5 / 16)
    assert double.parameters_bytes < four.parameters_bytes
    assert case_of(replace(BASE, model="Llama LoRA", ffn_hidden=256)).measured_seconds is None
    assert four.activations_bytes > half.activations_bytes  # inputs of products with 4 bits are kept


def test_zero_3_of_deepspeed_gathers_parameters_not_layers():
    whole = memory(conventions_of="deepspeed", zero_stage=3)
    assert 0 < whole.allocated_bytes < memory(conventions_of="deepspeed").allocated_bytes


def test_conventions_that_are_not_known_are_refused(monkeypatch):
    text = {"default": {"gradient_bytes": 0}, "odd": {"gradient_bites": 4}}
    monkeypatch.setattr(module, "table", lambda name: text)
    conventions.cache_clear()
    try:
        with pytest.raises(ProfileError, match=r"odd lacks or has no .*gradient_bites"):
            conventions("odd")
    finally:
        conventions.cache_clear()


def test_published_memory_of_a_small_megatron_run(tmp_path):
    # Megatron-LM's golden values print what is allocated at the peak, and between steps, on the last stage.
    header, *rows = PUBLISHED.read_text(encoding="utf-8").splitlines()
    path = tmp_path / "rows.csv"
    path.write_text(
        "\n".join([header, *(line for line in rows if line.startswith(("mcore-ci-022,", "mcore-ci-023,")))])
    )
    found = measured([path])
    assert [each.row.id for each in found] == ["mcore-ci-022", "mcore-ci-023"]
    assert max(abs(each.error()) for each in found) < 0.02
    assert workspaces(found)["workspace_bytes"] == pytest.approx(conventions("megatron-core").workspace_bytes, rel=0.2)
    assert reserved_fractions(found) == []
    assert predict(found[0].case).fits
