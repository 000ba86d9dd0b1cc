from functools import partial

import pytest
import torch

from tests import models
from tests.eager_oracle import reference_run, relative_errors, train_reference


@pytest.mark.parametrize("name", models.MODELS)
def test_every_model_builds_alike_twice_and_trains_in_float64(name):
    model = models.MODELS[name]
    batches = models.batches(name, 4, 2)
    build = partial(models.build, name)
    first, again = (
        train_reference(build, batches, models.sgd, chunks=2, float64_mode=model.needs_float64_mode) for _ in range(2)
    )

    assert first.losses == again.losses
    assert {tensor.dtype for tensor in first.parameters.values()} == {torch.float64}
    assert first.first_gradients.keys() == first.parameters.keys()
    assert all(torch.equal(value, again.parameters[key]) for key, value in first.parameters.items())


def test_micro_batches_give_the_gradient_of_the_whole_batch():
    build, batches = partial(models.build, "gpt"), models.batches("gpt", 6, 3)
    whole = train_reference(build, batches, models.adamw, chunks=1, max_grad_norm=0.1)
    parts = train_reference(build, batches, models.adamw, chunks=6, max_grad_norm=0.1)

    assert parts.losses == pytest.approx(whole.losses, rel=1e-12)
    assert parts.gradient_norms == pytest.approx(whole.gradient_norms, rel=1e-12)
    assert min(whole.gradient_norms) > 0.1  # clipping is active


def test_clipping_changes_the_parameters_by_hand():
    build, batches = partial(models.build, "llama"), models.batches("llama", 2, 1)
    reference = train_reference(build, batches, models.sgd, chunks=1, max_grad_norm=0.1)
    scale = 0.1 / (reference.gradient_norms[0] + 1e-6)

    for name, before in reference.first_parameters.items():
        expected = before - 0.05 * scale * reference.first_gradients[name]
        torch.testing.assert_close(reference.parameters[name], expected, rtol=1e-12, atol=1e-15)


def test_the_gradient_of_a_key_bias_is_zero():
    name = "hf-bert"
    reference = train_reference(
        partial(models.build, name), models.batches(name, 2, 1), models.sgd, chunks=1, float64_mode=True
    )

    assert reference.zero_gradients == {f"bert.encoder.layer.{i}.attention.self.key.bias" for i in range(4)}


def test_errors_are_relative_to_the_largest_value():
    expected = {"a": torch.tensor([1.0, -4.0]), "b": torch.zeros(2)}

    assert relative_errors(expected, {"a": torch.tensor([1.0, -3.0]), "b": torch.zeros(2)}) == {"a": 0.25, "b": 0.0}
    with pytest.raises(AssertionError, match=r"not in both: \['b'\]"):
        relative_errors(expected, {"a": expected["a"]})


def test_a_batch_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="5 samples are not 2 equal micro-batches"):
        train_reference(partial(models.build, "gpt"), models.batches("gpt", 5, 1), models.sgd, chunks=2)


@pytest.mark.distributed
def test_the_reference_process_gives_what_this_one_gives_and_has_no_planner(tmp_path):
    build, batches = partial(models.build, "gpt-tied"), models.batches("gpt-tied", 6, 2)
    here = train_reference(build, batches, models.adamw, chunks=3, max_grad_norm=1.0)
    there = reference_run(build, batches, models.adamw, chunks=3, max_grad_norm=1.0, tmp_path=tmp_path)

    assert there.losses == pytest.approx(here.losses, rel=1e-12)
    assert "head.weight" not in there.parameters  # tied: one parameter, under its first name


@pytest.mark.distributed
def test_a_reference_process_that_imports_planner_fails(tmp_path):
    with pytest.raises(AssertionError, match="the reference process imported"):
        reference_run(_build_with_planner, models.batches("gpt", 2, 1), models.sgd, chunks=1, tmp_path=tmp_path)


def _build_with_planner():
    import planner.errors  # noqa: F401

    return models.build("gpt")
