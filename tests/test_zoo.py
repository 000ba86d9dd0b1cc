from typing import Any

import pytest
import torch

from planner.errors import ModelError
from planner.zoo import NAMES, build, text_batch
from planner.zoo.registry import default_sequence_length


def test_every_name_of_the_design_is_there():
    wanted = (
        "gpt2 gpt2-medium gpt2-large gpt2-xl gpt3-1.3b gpt3-2.7b gpt3-6.7b gpt3-13b gpt3-175b llama2-7b llama2-13b "
        "llama2-70b llama3-8b llama3-70b llama3-405b resnet50 resnet101 resnet152 mlp gpt-tiny llama-tiny resnet-tiny "
        "mlp-tiny"
    )

    assert list(NAMES) == wanted.split()


@pytest.mark.parametrize(
    ("name", "millions", "digits"),
    [
        ("gpt2", 124.4, 1),  # tied embeddings counted once
        ("gpt2-xl", 1558, 0),
        ("gpt3-175b", 175_000, -3),
        ("llama2-7b", 6738, 0),
        ("llama2-70b", 68_977, 0),
        ("llama3-8b", 8030, 0),
        ("llama3-70b", 70_550, -1),
        ("llama3-405b", 405_850, -1),
        ("resnet50", 25.557, 3),
        ("resnet101", 44.549, 3),
        ("resnet152", 60.193, 3),
    ],
)
def test_the_parameters_are_as_many_as_published(name, millions, digits):
    module, _ = build(name, device="meta")
    count = sum(parameter.numel() for parameter in module.parameters())

    assert round(count / 1e6, digits) == millions


@pytest.mark.parametrize("name", NAMES)
def test_every_model_builds_on_meta_and_gives_a_scalar_loss(name):
    if name.startswith(("gpt3", "llama")) and not name.endswith("tiny"):
        module, batch = build(name, device="meta", sequence_length=64)
    else:
        module, batch = build(name, device="meta")
    loss = module(**batch)

    assert loss.shape == ()
    assert all(tensor.is_meta for tensor in [*module.parameters(), *module.buffers(), *batch.values()])
    assert {tensor.shape[0] for tensor in batch.values()} == {2}


@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny", "resnet-tiny", "mlp-tiny"])
def test_a_fresh_model_knows_nothing_and_every_parameter_has_a_gradient(name):
    torch.manual_seed(0)
    module, batch = build(name)
    loss = module(**batch)
    loss.backward()
    config: Any = module.config
    classes = config.classes if hasattr(config, "classes") else config.vocabulary

    assert loss.item() == pytest.approx(torch.tensor(float(classes)).log().item(), rel=0.25)
    assert all(parameter.grad is not None for parameter in module.parameters())


@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny", "resnet-tiny", "mlp-tiny"])
def test_a_model_cast_to_float64_computes_in_float64(name):
    module, batch = build(name)
    loss = module.double()(**{k: v.double() if v.is_floating_point() else v for k, v in batch.items()})

    assert loss.dtype == torch.float64


@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny"])
def test_a_token_does_not_see_later_ones(name):
    torch.manual_seed(0)
    module, batch = build(name, sequence_length=16)
    labels = torch.full_like(batch["labels"], -100)
    labels[:, :8] = batch["labels"][:, :8]  # the loss counts the first half only
    changed = batch["input_ids"].clone()
    changed[:, 8:] = (changed[:, 8:] + 1) % 256

    assert module(batch["input_ids"], labels).item() == pytest.approx(module(changed, labels).item(), rel=1e-6)


def test_llama_depends_on_the_distance_of_tokens():
    torch.manual_seed(0)
    module, _ = build("llama-tiny")
    ids = torch.tensor([[1, 2, 3, 4]])
    swapped = torch.tensor([[2, 1, 3, 4]])
    labels = torch.tensor([[-100, -100, -100, 5]])

    assert module(ids, labels).item() != module(swapped, labels).item()


def test_tied_embeddings_are_one_parameter():
    module, _ = build("gpt2", device="meta")

    assert module.get_parameter("head.weight") is module.get_parameter("tokens.weight")


def test_the_sequence_length_is_the_trained_one_unless_given():
    assert [default_sequence_length(name) for name in ("gpt2", "gpt3-175b", "llama2-7b", "llama3-8b", "mlp")] == [
        1024,
        2048,
        4096,
        8192,
        None,
    ]
    assert build("llama3-8b", device="meta")[1]["input_ids"].shape == (2, 8192)
    assert build("llama2-7b", device="meta", sequence_length=100_000)[1]["labels"].shape == (2, 100_000)


@pytest.mark.parametrize(
    ("name", "length", "message"),
    [
        ("gpt2", 2048, "gpt2 has learned positions for 1024 tokens, 2048 do not fit; use a sequence length of 1024"),
        ("resnet50", 8, "resnet50 has no sequence; leave out"),
        ("llama3-8b", 0, "a sequence length of 0 is no length; give 1 or more"),
    ],
)
def test_a_wrong_sequence_length_is_refused(name, length, message):
    with pytest.raises(ModelError, match=message):
        build(name, sequence_length=length, device="meta")


def test_the_default_training_run_learns():
    torch.manual_seed(0)
    module, _ = build("gpt-tiny")
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    losses = []
    for step in range(60):
        loss = module(**text_batch(step, 4, 128, seed=0))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    assert losses[0] == pytest.approx(5.55, abs=0.1)
    assert min(losses[-5:]) < 3.0
