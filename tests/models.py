"""Small models for tests of equality: at least four blocks, no dropout, fixed seeds, able to run in float64.

Nothing here imports planner: the reference process must not. The zoo's models are loaded from their source files.

>>> sorted(MODELS)
['bert', 'gpt', 'gpt-tied', 'hf-bert', 'hf-gpt2', 'hf-llama', 'llama', 'moe', 'resnet', 't5', 'unet', 'vit']
"""

import importlib.util
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor, nn

ZOO = Path(__file__).resolve().parent.parent / "planner" / "zoo"
VOCABULARY = 61  # prime: no size of another tensor equals it
SEQUENCE = 12
LAYERS = 4
CLASSES = 10
IMAGE = 48
PIXELS = 8  # of an image whose every pixel is classified
SEED = 1234


@dataclass(frozen=True, slots=True, kw_only=True)
class TestModel:
    """One model of the equality matrix."""

    __test__ = False  # not a test class

    make: Callable[[], nn.Module]
    batch: Callable[[int, torch.Generator], dict[str, Tensor]]  # (samples, generator) -> keyword arguments of forward
    needs_float64_mode: bool = False  # has float32 written in its code: tests.float64
    has_batch_norm: bool = False  # couples the samples of a micro-batch


def zoo_module(name: str) -> ModuleType:
    """The zoo's file `name`.py, executed under another module name."""
    alias = f"_zoo_{name}"
    if alias not in sys.modules:
        spec = importlib.util.spec_from_file_location(alias, ZOO / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[alias] = module  # before running it: dataclasses look their module up
        spec.loader.exec_module(module)
    return sys.modules[alias]


def build(name: str, *, dtype: torch.dtype = torch.float64, device: str = "cpu") -> nn.Module:
    """The model `name` in train mode; the same values in every process (drawn in float32, then cast)."""
    torch.manual_seed(SEED)
    with torch.device(device):
        module = MODELS[name].make()
    return module.to(dtype).train()


def batch(name: str, samples: int, *, step: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Samples for one step; every step's differ."""
    made = MODELS[name].batch(samples, torch.Generator().manual_seed(SEED + 1 + step))
    return {key: value.to(dtype) if value.is_floating_point() else value for key, value in made.items()}


def batches(name: str, samples: int, steps: int, dtype: torch.dtype = torch.float64) -> list[dict[str, Tensor]]:
    """The global batches of the first `steps` steps."""
    return [batch(name, samples, step=step, dtype=dtype) for step in range(steps)]


def sgd(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """SGD with momentum, which sees an error in the scale of the gradients."""
    return torch.optim.SGD([parameter for _, parameter in named_parameters], lr=0.05, momentum=0.9)


def adamw(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """AdamW with weight decay on matrices only: two groups, as people train."""
    parameters = [parameter for _, parameter in named_parameters]
    matrices = [parameter for parameter in parameters if parameter.ndim > 1]
    vectors = [parameter for parameter in parameters if parameter.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=1e-3)


OPTIMIZERS: Mapping[str, Callable[[Iterable[tuple[str, nn.Parameter]]], torch.optim.Optimizer]] = {
    "sgd": sgd,
    "adamw": adamw,
}


def _make_gpt(*, tied: bool) -> nn.Module:
    zoo = zoo_module("gpt")
    config = zoo.GPTConfig(
        layers=LAYERS, width=16, heads=2, context=SEQUENCE, vocabulary=VOCABULARY, tied_embeddings=tied
    )
    module: nn.Module = zoo.GPT(config)
    return module


def _make_llama() -> nn.Module:
    zoo = zoo_module("llama")
    module: nn.Module = zoo.Llama(
        zoo.LlamaConfig(
            layers=LAYERS, width=16, heads=4, key_value_heads=2, hidden=40, vocabulary=VOCABULARY, context=SEQUENCE
        )
    )
    return module


def _make_moe() -> nn.Module:
    zoo = zoo_module("llama")
    module: nn.Module = zoo.Llama(
        zoo.LlamaConfig(
            layers=LAYERS, width=16, heads=4, key_value_heads=2, hidden=24, vocabulary=VOCABULARY, context=SEQUENCE,
            experts=4,
        )
    )  # fmt: skip
    return module


def _make_bert() -> nn.Module:
    zoo = zoo_module("bert")
    module: nn.Module = zoo.BERT(
        zoo.BERTConfig(layers=LAYERS, width=16, heads=2, context=SEQUENCE, vocabulary=VOCABULARY)
    )
    return module


def _make_t5() -> nn.Module:
    zoo = zoo_module("t5")
    module: nn.Module = zoo.T5(
        zoo.T5Config(
            layers=LAYERS // 2, width=16, heads=2, head=6, hidden=40, vocabulary=VOCABULARY, buckets=8, max_distance=10
        )
    )
    return module


def _make_vit() -> nn.Module:
    zoo = zoo_module("vit")
    module: nn.Module = zoo.ViT(zoo.ViTConfig(layers=LAYERS, width=16, heads=2, patch=16, image=IMAGE, classes=CLASSES))
    return module


def _make_unet() -> nn.Module:
    zoo = zoo_module("unet")
    module: nn.Module = zoo.UNet(zoo.UNetConfig(levels=3, channels=4, inputs=3, classes=CLASSES, image=PIXELS))
    return module


def _make_resnet() -> nn.Module:
    zoo = zoo_module("resnet")
    module: nn.Module = zoo.ResNet(zoo.ResNetConfig(blocks=(2, 1, 1, 1), channels=4, classes=CLASSES, image=IMAGE))
    return module


def _make_hf_gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    module: nn.Module = GPT2LMHeadModel(
        GPT2Config(
            n_layer=LAYERS,
            n_embd=16,
            n_head=2,
            n_positions=SEQUENCE,
            vocab_size=VOCABULARY,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    return module


def _make_hf_llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    module: nn.Module = LlamaForCausalLM(
        LlamaConfig(
            num_hidden_layers=LAYERS,
            hidden_size=16,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=40,
            vocab_size=VOCABULARY,
            max_position_embeddings=SEQUENCE,
            use_cache=False,
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    return module


def _make_hf_bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    module: nn.Module = BertForMaskedLM(
        BertConfig(
            num_hidden_layers=LAYERS,
            hidden_size=16,
            num_attention_heads=2,
            intermediate_size=40,
            vocab_size=VOCABULARY,
            max_position_embeddings=SEQUENCE,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )
    return module


def _tokens(samples: int, generator: torch.Generator) -> dict[str, Tensor]:
    drawn = torch.randint(1, VOCABULARY, (samples, SEQUENCE + 1), generator=generator)  # 0 is BERT's padding
    return {"input_ids": drawn[:, :-1].contiguous(), "labels": drawn[:, 1:].contiguous()}


def _masked_tokens(samples: int, generator: torch.Generator) -> dict[str, Tensor]:
    """A third of the tokens is to be filled in, as many in every sample."""
    tokens = _tokens(samples, generator)["input_ids"]
    masked = torch.rand(samples, SEQUENCE, generator=generator).argsort(dim=1) < SEQUENCE // 3
    return {"input_ids": tokens.where(~masked, 0), "labels": tokens.where(masked, -100)}


def _pixels(samples: int, generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "images": torch.randn(samples, 3, PIXELS, PIXELS, generator=generator),
        "labels": torch.randint(CLASSES, (samples, PIXELS, PIXELS), generator=generator),
    }


def _images(samples: int, generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "images": torch.randn(samples, 3, IMAGE, IMAGE, generator=generator),
        "labels": torch.randint(CLASSES, (samples,), generator=generator),
    }


MODELS: Mapping[str, TestModel] = {
    "gpt": TestModel(make=partial(_make_gpt, tied=False), batch=_tokens),
    "gpt-tied": TestModel(make=partial(_make_gpt, tied=True), batch=_tokens),
    "llama": TestModel(make=_make_llama, batch=_tokens),
    "moe": TestModel(make=_make_moe, batch=_tokens),
    "bert": TestModel(make=_make_bert, batch=_masked_tokens),
    "t5": TestModel(make=_make_t5, batch=_tokens),
    "vit": TestModel(make=_make_vit, batch=_images),
    "unet": TestModel(make=_make_unet, batch=_pixels),
    "resnet": TestModel(make=_make_resnet, batch=_images, has_batch_norm=True),
    "hf-gpt2": TestModel(make=_make_hf_gpt2, batch=_tokens, needs_float64_mode=True),
    "hf-llama": TestModel(make=_make_hf_llama, batch=_tokens, needs_float64_mode=True),
    "hf-bert": TestModel(make=_make_hf_bert, batch=_tokens, needs_float64_mode=True),
}
