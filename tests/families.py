"""Tiny models of Hugging Face families, from configs alone: at least two blocks a stack, real losses, train mode.

Nothing here imports planner: the reference process must not.

>>> len({name.partition("+")[0] for name in FAMILIES})
15
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.eager_oracle import Reference, train_reference
from tests.float64 import explicit_float32_as_float64
from tests.models import sgd

VOCABULARY = 61  # prime: no size of another tensor equals it
SEQUENCE = 10
WIDTH = 16
LAYERS = 4
PATCHED_IMAGE = 12
CLASSES = 7
MEL_BINS = 8
FRAMES = 20
SEED = 4321
SAMPLES = 12  # of a global batch: divisible by 3 micro-batches on 1, 2 or 4 data ranks
NUM_MICROBATCHES = 3
STEPS = 3
MAX_GRAD_NORM = 0.05  # below every gradient norm, so that clipping acts

Batch = dict[str, Any]

_TEXT = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_DECODER: dict[str, Any] = {
    **_TEXT, "num_hidden_layers": LAYERS, "hidden_size": WIDTH, "num_attention_heads": 4, "intermediate_size": 40,
    "max_position_embeddings": SEQUENCE, "use_cache": False,
}  # fmt: skip
_GROUPED = {**_DECODER, "num_key_value_heads": 2}
_EXPERTS = {**_GROUPED, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.1}
_STACKS: dict[str, Any] = {
    **_TEXT, "d_model": WIDTH, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 40, "decoder_ffn_dim": 40, "decoder_start_token_id": 2,
    "use_cache": False,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One model. `dropout` names the settings of its config that drop elements, all 0 unless asked for."""

    config: str
    model: str
    settings: Mapping[str, Any]
    batch: Callable[[int, torch.Generator], Batch]
    dropout: tuple[str, ...] = ()
    couples_samples: bool = False  # one micro-batch on one data rank is all there is
    is_separable: bool = True  # else the reference is one device with the same micro-batches


def make(name: str, *, dropout: float = 0.0, **changes: Any) -> nn.Module:
    """A family's module in float64 and train mode, the same values in every process."""
    import transformers

    family = FAMILIES[name]
    settings = {**family.settings, **dict.fromkeys(family.dropout, dropout), **changes}
    torch.manual_seed(SEED)
    with explicit_float32_as_float64():
        config = getattr(transformers, family.config)(**settings)
        module: nn.Module = getattr(transformers, family.model)(config).double().train()
    with torch.no_grad():
        for parameter in module.parameters():  # no zero or one that hides a fault
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return module


def batch(name: str, samples: int, *, step: int = 0) -> Batch:
    """Samples for one step; every step's differ."""
    return FAMILIES[name].batch(samples, torch.Generator().manual_seed(SEED + 1 + step))


def layers(module: nn.Module) -> list[str]:
    """Names of the layers: the children of every outermost list of modules, in the order of their names."""
    lists = [name for name, child in module.named_modules() if isinstance(child, nn.ModuleList)]
    outer = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    return [f"{name}.{child}" for name in outer for child, _ in module.get_submodule(name).named_children()]


def reference(name: str, chunks: int) -> Reference:
    """Three clipped steps of the eager module on one device, in a process without planner."""
    result = train_reference(
        partial(make, name), [batch(name, SAMPLES, step=i) for i in range(STEPS)], sgd,
        chunks=chunks, max_grad_norm=MAX_GRAD_NORM, float64_mode=True,
    )  # fmt: skip
    if foreign := sorted(name for name in sys.modules if name.split(".")[0] == "planner"):
        raise AssertionError(f"the reference process imported {foreign}")
    return result


def _tokens(samples: int, generator: torch.Generator) -> Batch:
    drawn = torch.randint(3, VOCABULARY, (samples, SEQUENCE), generator=generator)
    return {"input_ids": drawn, "labels": drawn.flip(1)}


def _translation(samples: int, generator: torch.Generator) -> Batch:
    def drawn(length: int) -> Tensor:
        return torch.randint(3, VOCABULARY, (samples, length), generator=generator)

    return {"input_ids": drawn(SEQUENCE), "labels": drawn(SEQUENCE - 3)}


def _images(samples: int, generator: torch.Generator) -> Batch:
    size = samples, 3, PATCHED_IMAGE, PATCHED_IMAGE
    return {
        "pixel_values": torch.randn(size, generator=generator, dtype=torch.float64),
        "labels": torch.randint(CLASSES, (samples,), generator=generator),
    }


def _speech(samples: int, generator: torch.Generator) -> Batch:
    return {
        "input_features": torch.randn(samples, MEL_BINS, FRAMES, generator=generator, dtype=torch.float64),
        "labels": torch.randint(3, VOCABULARY, (samples, SEQUENCE - 3), generator=generator),
    }


def _pairs(samples: int, generator: torch.Generator) -> Batch:
    return {
        "input_ids": _tokens(samples, generator)["input_ids"],
        "pixel_values": _images(samples, generator)["pixel_values"],
        "return_loss": True,
    }


FAMILIES: Mapping[str, Family] = {
    "gpt2": Family(
        config="GPT2Config", model="GPT2LMHeadModel", batch=_tokens,
        settings={**_TEXT, "n_layer": LAYERS, "n_embd": WIDTH, "n_head": 2, "n_positions": SEQUENCE,
                  "use_cache": False},
        dropout=("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    ),
    "llama": Family(config="LlamaConfig", model="LlamaForCausalLM", batch=_tokens, settings=_GROUPED),
    "bert": Family(
        config="BertConfig", model="BertForMaskedLM", batch=_tokens, settings=_DECODER,
        dropout=("hidden_dropout_prob", "attention_probs_dropout_prob"),
    ),
    "t5": Family(
        config="T5Config", model="T5ForConditionalGeneration", batch=_translation,
        settings={**_TEXT, "num_layers": 3, "num_decoder_layers": 3, "d_model": WIDTH, "d_kv": 8, "num_heads": 2,
                  "d_ff": 40, "decoder_start_token_id": 0, "use_cache": False},
        dropout=("dropout_rate",),
    ),
    "vit": Family(
        config="ViTConfig", model="ViTForImageClassification", batch=_images,
        settings={"num_hidden_layers": LAYERS, "hidden_size": WIDTH, "num_attention_heads": 2, "intermediate_size": 40,
                  "image_size": PATCHED_IMAGE, "patch_size": 4, "num_labels": CLASSES},
        dropout=("hidden_dropout_prob", "attention_probs_dropout_prob"),
    ),
    "mixtral": Family(
        config="MixtralConfig", model="MixtralForCausalLM", batch=_tokens,
        settings={**_EXPERTS, "num_local_experts": 4},
    ),
    "mixtral+router": Family(
        config="MixtralConfig", model="MixtralForCausalLM", batch=_tokens, is_separable=False,
        settings={**_EXPERTS, "num_local_experts": 4, "output_router_logits": True},
    ),
    "qwen2-moe": Family(
        config="Qwen2MoeConfig", model="Qwen2MoeForCausalLM", batch=_tokens,
        settings={**_EXPERTS, "num_experts": 4, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24},
    ),
    "qwen2-moe+router": Family(
        config="Qwen2MoeConfig", model="Qwen2MoeForCausalLM", batch=_tokens,
        is_separable=False,
        settings={**_EXPERTS, "num_experts": 4, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24,
                  "decoder_sparse_step": 2, "output_router_logits": True},
    ),
    "gemma3": Family(
        config="Gemma3TextConfig", model="Gemma3ForCausalLM", batch=_tokens,
        settings={**_GROUPED, "head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8,
                  "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "phi3": Family(
        config="Phi3Config", model="Phi3ForCausalLM", batch=_tokens, settings=_GROUPED,
        dropout=("resid_pdrop", "embd_pdrop"),
    ),
    "opt": Family(
        config="OPTConfig", model="OPTForCausalLM", batch=_tokens,
        settings={**_DECODER, "ffn_dim": 40, "word_embed_proj_dim": 12, "layerdrop": 0.0},
        dropout=("dropout", "attention_dropout"),
    ),
    "whisper": Family(
        config="WhisperConfig", model="WhisperForConditionalGeneration", batch=_speech,
        settings={**_STACKS, "num_mel_bins": MEL_BINS, "max_source_positions": FRAMES // 2,
                  "max_target_positions": SEQUENCE, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0},
        dropout=("dropout", "attention_dropout", "activation_dropout"),
    ),
    "clip": Family(
        config="CLIPConfig", model="CLIPModel", batch=_pairs, couples_samples=True,
        settings={
            "projection_dim": 12,
            "text_config": {**_DECODER, "num_hidden_layers": 2},
            "vision_config": {"num_hidden_layers": 2, "hidden_size": WIDTH, "num_attention_heads": 2,
                              "intermediate_size": 40, "image_size": PATCHED_IMAGE, "patch_size": 4},
        },
    ),
    "distilbert": Family(
        config="DistilBertConfig", model="DistilBertForMaskedLM", batch=_tokens,
        settings={**_TEXT, "n_layers": LAYERS, "dim": WIDTH, "n_heads": 2, "hidden_dim": 40,
                  "max_position_embeddings": SEQUENCE},
        dropout=("dropout", "attention_dropout"),
    ),
    "bart": Family(
        config="BartConfig", model="BartForConditionalGeneration", batch=_translation,
        settings={**_STACKS, "max_position_embeddings": SEQUENCE, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0},
        dropout=("dropout", "attention_dropout", "activation_dropout"),
    ),
    "mamba": Family(
        config="MambaConfig", model="MambaForCausalLM", batch=_tokens,
        settings={**_TEXT, "num_hidden_layers": LAYERS, "hidden_size": WIDTH, "state_size": 4, "use_cache": False},
    ),
}  # fmt: skip
