"""Models on meta get the same values for every plan and for one device, module by module."""

import pickle
from typing import Any

import pytest
import torch
from torch import nn

from planner.errors import ModelError
from planner.runtime.initialise import Initialiser, materialise
from tests import families, models
from tests.distributed_cases import Kind
from tests.ranks import RankPool
from tests.weight_cases import drawn, on_meta


class Net(nn.Module):
    """Torch's layers, a module that initialises its children, a buffer that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8, padding_idx=3)
        self.attention = nn.MultiheadAttention(8, 2)
        self.norm = nn.BatchNorm1d(8)
        self.rnn = nn.LSTM(8, 8)
        self.head = nn.Linear(8, 11)
        self.head.weight = self.embed.weight

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.5)
            if module.bias is not None:
                nn.init.constant_(module.bias, 0.25)


def meta(make: Any) -> Any:
    with torch.device("meta"):
        return make()


def test_modules_are_initialised_by_their_own_methods_and_those_around_them() -> None:
    model = materialise(meta(Net), seed=1)

    assert not any(t.is_meta for t in (*model.parameters(), *model.buffers()))
    assert model.embed.weight is model.head.weight
    assert model.embed.weight[3].count_nonzero() == 0  # padding
    assert model.embed.weight.std() > 0.7  # the embedding's own: the head is tied to it
    assert model.head.bias.tolist() == [0.25] * 11
    assert model.attention.in_proj_bias.count_nonzero() == 0
    assert model.attention.out_proj.weight.std() > 0.3
    assert model.attention.out_proj.bias.tolist() == [0.25] * 8
    assert model.norm.running_var.tolist() == [1.0] * 8
    assert model.norm.num_batches_tracked == 0
    assert 0 < model.rnn.weight_hh_l0.std() < 1


def test_values_depend_on_the_seed_and_on_the_modules_name_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one, two, other = (materialise(meta(Net), seed=seed).state_dict() for seed in (1, 1, 2))
    alone = Initialiser(meta(Net), seed=1, init=None, device=torch.device("cpu")).module("attention.out_proj")

    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(one[k], two[k]) for k in one)
    assert not torch.equal(one["embed.weight"], other["embed.weight"])
    assert torch.equal(alone["attention.out_proj.weight"], one["attention.out_proj.weight"])
    twins = materialise(meta(lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))))
    assert not torch.equal(twins[0].weight, twins[1].weight)


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.ones(4))
        self.fc = nn.Linear(4, 4)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("mask", torch.ones(4, dtype=torch.bool), persistent=False)


def test_what_nothing_initialises_is_refused_by_name_all_at_once() -> None:
    model = meta(lambda: nn.Sequential(Gate(), nn.Linear(4, 4), Gate()))

    with pytest.raises(ModelError) as error:
        materialise(model)

    assert str(error.value).startswith("0.gate, 0.steps, 0.mask, 2.gate and 2 more are on meta and no method")
    assert all(t.is_meta for t in model.parameters())  # nothing was changed


def fill_gate(module: nn.Module) -> None:
    if isinstance(module, Gate):
        with torch.no_grad():
            module.gate.fill_(2.0)
            module.get_buffer("steps").zero_()
            module.get_buffer("mask").fill_(True)


def zeros(module: nn.Module) -> None:
    for parameter in module.parameters():
        nn.init.zeros_(parameter)
    fill_gate(module)


def half(module: nn.Module) -> None:
    fill_gate(module)
    if isinstance(module, Gate):
        with torch.no_grad():
            module.gate[:2].fill_(torch.nan)  # as it was before


def test_init_covers_what_has_no_method_and_wins() -> None:
    model = materialise(meta(lambda: nn.Sequential(Gate(), nn.Linear(4, 4))), init=fill_gate)
    empty = materialise(meta(Gate), init=zeros)

    assert model[0].gate.tolist() == [2.0] * 4
    assert model[0].mask.dtype == torch.bool
    assert "mask" in model[0]._non_persistent_buffers_set
    assert empty.fc.weight.count_nonzero() == 0


def test_an_init_that_covers_a_part_of_a_tensor_is_refused() -> None:
    with pytest.raises(ModelError, match="gate is on meta and no method of its module initialises it"):
        materialise(meta(Gate), init=half)


def test_an_init_that_fails_names_the_module() -> None:
    def init(module: nn.Module) -> None:
        raise ValueError("no such thing")

    with pytest.raises(
        ModelError, match=r"init\(Linear\) fails while module 0 is initialised alone: ValueError: no such"
    ):
        materialise(meta(lambda: nn.Sequential(nn.Linear(2, 2))), init=init)


def test_values_that_a_model_holds_already_stay() -> None:
    model = meta(Net)
    model.head.bias = nn.Parameter(torch.arange(11.0))

    materialise(model, seed=1)

    assert model.head.bias.tolist() == list(range(11))


class Tying(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.tie_weights()

    def tie_weights(self) -> None:
        self.head.weight = self.embed.weight


def test_ties_that_moving_to_meta_separated_are_refused() -> None:
    assert materialise(meta(Tying)).head.weight.shape == (5, 4)
    with pytest.raises(ModelError, match=r"embed\.weight and head\.weight are two parameters.*tie_weights\(\)"):
        materialise(Tying().to("meta"))


def same_distribution(made: nn.Module, eager: nn.Module) -> None:
    wanted = {name: t.detach() for name, t in (*eager.named_parameters(), *eager.named_buffers())}
    found = {name: t.detach() for name, t in (*made.named_parameters(), *made.named_buffers())}
    assert list(found) == list(wanted)
    for key, value in wanted.items():
        if value.is_floating_point() and value.numel() > 1 and value.std() > 0:
            spread = 1.7 if value.numel() > 50 else 4.0  # the deviation of a few draws is itself random
            assert 1 / spread < float(found[key].std() / value.std()) < spread, key
        else:
            assert torch.allclose(found[key], value), key


@pytest.mark.parametrize("name", ["hf-gpt2", "hf-llama", "hf-bert", "gpt", "llama", "resnet", "bert", "t5", "vit"])
def test_values_are_distributed_as_those_of_the_constructor(name: str) -> None:
    same_distribution(materialise(on_meta(name), seed=3), models.build(name))


def of_family(name: str, device: str) -> nn.Module:
    import transformers

    family = families.FAMILIES[name]
    torch.manual_seed(5)
    with torch.device(device):
        module: nn.Module = getattr(transformers, family.model)(getattr(transformers, family.config)(**family.settings))
    return module


@pytest.mark.parametrize("name", sorted(families.FAMILIES))
def test_hugging_face_families_are_initialised_by_their_own_methods(name: str) -> None:
    made, eager = of_family(name, "meta"), of_family(name, "cpu")
    init = None
    if hasattr(made, "logit_scale"):  # the library itself leaves CLIP's as it is in memory
        with pytest.raises(ModelError, match="logit_scale is on meta and no method of its module initialises it"):
            materialise(made)
        init = scaled

    same_distribution(materialise(made, seed=3, init=init), eager)


def scaled(module: nn.Module) -> None:
    if isinstance(found := getattr(module, "logit_scale", None), nn.Parameter):
        nn.init.constant_(found, 2.6592)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "kind", "steps"),
    [
        ("gpt-tied", Kind(name="ZeRO-3", dp=2, zero=(3,)), 1),
        ("gpt-tied", Kind(name="PP2", pp=2), 0),
        ("gpt", Kind(name="ZeRO-0", dp=2), 0),
        ("hf-llama", Kind(name="ZeRO-1", dp=2, zero=(1,)), 1),
        ("hf-gpt2", Kind(name="PP2", pp=2, zero=(1,)), 1),
        ("resnet", Kind(name="ZeRO-2", dp=2, zero=(2,)), 0),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_every_plan_starts_from_the_values_of_one_device(two: RankPool, name: str, kind: Kind, steps: int) -> None:
    for result in two.run(drawn, name, kind, steps):
        assert result["different"] == []
        assert result["error"] < 1e-9


@pytest.mark.distributed
def test_one_rank_starts_from_the_values_of_one_device(one: RankPool) -> None:
    (result,) = one.run(drawn, "gpt-tied", Kind(name=""), 1)

    assert result["different"] == []
    assert result["error"] < 1e-9


def test_a_materialised_model_is_an_ordinary_one() -> None:
    model = materialise(meta(Net))

    copied = pickle.loads(pickle.dumps(model))

    assert torch.equal(copied.embed.weight, model.embed.weight)
