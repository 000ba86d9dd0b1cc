"""What the ranks of the tests of counted experts run."""

from collections.abc import Sequence

import pytest
import torch

from tests import distributed_cases, models
from tests.distributed_cases import Kind, own_part, trainer_of
from tests.distributed_references import SAMPLES
from tests.test_shard_experts import _forced

SHORTER = 5  # tokens of the last step: another graph


def counted(kind: Kind, form: str | None, shorter: bool) -> tuple[list[dict[str, list[int]]], dict[str, torch.Tensor]]:
    """Tokens of each expert after each step, and after an evaluation; and the parameters after the first step.

    `form` is the operator that all grouped products are to be.
    """
    with pytest.MonkeyPatch.context() as patch:
        if form is not None:
            found = _forced("moe", form, kind.tp)[0].shardings
            assert form in {option.op for sharding in found for option in sharding.options}
            patch.setattr(distributed_cases, "found_shardings", lambda *_, **__: found)
        trainer = trainer_of("moe", kind)
    seen = []
    state: dict[str, torch.Tensor] = {}
    for batch in batches(shorter=shorter):
        trainer.step(own_part(batch, trainer))
        seen.append(trainer.expert_loads())
        state = state or trainer.state_dict()
    if shorter:
        trainer.evaluate(own_part(batch, trainer))
        seen.append(trainer.expert_loads())
    return seen, state


def batches(*, shorter: bool) -> Sequence[dict[str, torch.Tensor]]:
    """Two global batches; the second one may have fewer tokens."""
    first, second = models.batches("moe", SAMPLES, 2)
    return first, {name: value[:, :SHORTER] for name, value in second.items()} if shorter else second


def directly(batch: dict[str, torch.Tensor], state: dict[str, torch.Tensor] | None = None) -> dict[str, list[int]]:
    """What the routers of the eager model choose for a batch."""
    model = models.build("moe")
    if state:
        model.load_state_dict(state)
    found = {}

    def note(name: str, count: int) -> None:
        def hook(module: torch.nn.Module, args: object, scores: torch.Tensor) -> None:
            experts = scores.topk(2).indices.flatten()
            found[name] = torch.bincount(experts, minlength=count).tolist()

        model.get_submodule(f"{name}.router").register_forward_hook(hook)

    for name, module in model.named_modules():
        if name.endswith(".mlp"):
            note(name, module.router.out_features)
    model(**batch)
    return found
