import pytest
import torch

from tests import models
from tests.float64 import NoFloat32, explicit_float32_as_float64

HUGGING_FACE = [name for name, model in models.MODELS.items() if model.needs_float64_mode]


@pytest.mark.parametrize("name", models.MODELS)
def test_training_in_the_mode_has_no_float32_tensor(name):
    with explicit_float32_as_float64():
        module = models.build(name)
        with NoFloat32():
            output = module(**models.batch(name, 2, step=0))
            loss = output if isinstance(output, torch.Tensor) else output.loss
            loss.backward()

    assert loss.dtype == torch.float64


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_export_in_the_mode_has_no_float32_tensor(name):
    with explicit_float32_as_float64():
        module = models.build(name, device="meta")
        batch = {key: value.to("meta") for key, value in models.batch(name, 2, step=0).items()}
        program = torch.export.export(module, (), batch, strict=False)
    found = [
        (node.name, value.dtype)
        for node in program.graph.nodes
        for value in torch.utils._pytree.tree_leaves(node.meta.get("val"))
        if isinstance(value, torch.Tensor) and value.dtype is torch.float32
    ]

    assert found == []


def test_the_check_can_fail():
    with pytest.raises(AssertionError, match="float32"), NoFloat32():
        models.build("hf-llama")(**models.batch("hf-llama", 2, step=0))


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.float(),
        lambda x: x.to(torch.float32),
        lambda x: x.to(dtype=torch.float32),
        lambda x: torch.softmax(x, -1, dtype=torch.float32),
        lambda x: torch.nn.functional.softmax(x, dim=-1, dtype=torch.float32),
        lambda x: torch.zeros(2, dtype=torch.float32),
        lambda x: torch.ones(2),
        lambda x: x.type(torch.float32),
        lambda x: x.new_zeros(2, dtype=torch.float32),
    ],
    ids=range(9),
)
def test_every_way_to_ask_for_float32_gives_float64(make):
    with explicit_float32_as_float64():
        value = make(torch.ones(3, dtype=torch.float16))

    assert value.dtype == torch.float64
    assert torch.get_default_dtype() == torch.float32
