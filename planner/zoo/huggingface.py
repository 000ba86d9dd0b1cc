"""A Hugging Face `config.json` as a model with a batch: built from the config alone, nothing is downloaded.

The task is read off the architecture's name in the library's own tables; the batch is made of its kind of input.
"""

import difflib
import json
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from planner.errors import ModelError

EXAMPLE_BATCH = 2
DEFAULT_SEQUENCE_LENGTH = 512  # where the config names none, as with relative positions
DEFAULT_IMAGE = 224
AUDIO_SAMPLES = 16_000  # one second
LABEL_TOKENS = 16  # transcript of that second

# Task -> the library's table of its architectures. Where a config names no architecture, or one without a loss, the
# first task that knows its model type is taken; so the order counts.
_TASKS = {
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "causal-lm": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked-lm": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "sequence-classification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "token-classification": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    "question-answering": "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES",
    "image-classification": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "speech-seq2seq": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "ctc": "MODEL_FOR_CTC_MAPPING_NAMES",
    "audio-classification": "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES",
}
# Encoders are in the table of causal language models too (BertLMHeadModel); they are trained as masked ones.
_TASKS_BY_MODEL_TYPE = ["seq2seq", "masked-lm", *(t for t in _TASKS if t not in ("seq2seq", "masked-lm"))]


def load_huggingface(
    path: Path, *, sequence_length: int | None, device: str, seed: int, batch_device: str | None = None
) -> tuple[nn.Module, dict[str, Tensor], str, int | None]:
    """The model of a `config.json`, a batch of two samples, its task, and its trained sequence length if it has one.

    Raises:
        ModelError: the file is no such config, or the architecture is unknown or not of a known task.
    """
    values = _read(path)
    try:
        import transformers
        from transformers.models.auto import modeling_auto
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    except ImportError:
        raise ModelError(
            f"{path} is a Hugging Face config, which needs transformers; run: pip install 'torch-autoplan[hf]'"
        ) from None

    model_type = values["model_type"]
    if model_type not in CONFIG_MAPPING:
        nearest = difflib.get_close_matches(model_type, list(CONFIG_MAPPING.keys()), n=3)
        hint = f"did you mean {' or '.join(nearest)}?" if nearest else "write a factory (file.py:factory) for it"
        raise ModelError(f"{path}: transformers {transformers.__version__} knows no model type {model_type!r}; {hint}")
    tables = {task: _architectures_of(modeling_auto, table) for task, table in _TASKS.items()}
    architecture, task = _architecture(path, values, tables)
    try:
        config = CONFIG_MAPPING[model_type].from_dict(values)
        _prepare(config, task)
        if device != "meta":
            torch.manual_seed(seed)
        with torch.device(device) if device != "cpu" else nullcontext():
            module = getattr(transformers, architecture)(config)
        if task == "causal-lm" and getattr(module, "loss_type", "") is None:
            module.loss_type = (
                "ForCausalLM"  # what it takes anyhow, but with a warning where the class has another name
            )
        if device == "meta":
            _move_stray_parameters_to_meta(module)
    except Exception as error:  # the library's own, of any type
        text = " ".join(str(error).split())[:300]
        raise ModelError(f"{path}: {architecture} cannot be built from it: {type(error).__name__}: {text}") from error
    trained = _trained_length(config, task)
    length = _checked_length(path, module, sequence_length, trained)
    batch = {key: value.to(batch_device or device) for key, value in _batch(config, task, length).items()}
    return module, batch, task, trained


def batch_of(module: nn.Module) -> dict[str, Tensor] | None:
    """The example batch of a Hugging Face model of a known task, on its device; None for another model."""
    library = sys.modules.get("transformers")
    if library is None or not isinstance(module, library.PreTrainedModel):
        return None
    from transformers.models.auto import modeling_auto

    config: Any = module.config
    for task, table in _TASKS.items():
        if type(module).__name__ in _architectures_of(modeling_auto, table).values():
            batch = _batch(config, task, _trained_length(config, task) or 0)
            device = next(module.parameters()).device
            return {key: value.to(device) for key, value in batch.items()}
    return None


def _architectures_of(modeling_auto: Any, table: str) -> dict[str, str]:
    """Model type -> architecture of one of the library's tables; of several architectures the first."""
    found: Mapping[str, str | tuple[str, ...]] = getattr(modeling_auto, table, {})
    return {kind: names if isinstance(names, str) else names[0] for kind, names in found.items()}


def _read(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror}); give the path of a config.json") from None
    except ValueError as error:  # bad JSON or bad UTF-8
        raise ModelError(f"{path} is not valid JSON ({error}); repair it or fetch it again") from None
    if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
        raise ModelError(f'{path} has no "model_type"; give the config.json of a Hugging Face model')
    return values


def _architecture(path: Path, values: Mapping[str, Any], tables: Mapping[str, Mapping[str, str]]) -> tuple[str, str]:
    named = values.get("architectures") or []
    for architecture in named:
        for task, table in tables.items():
            if architecture in table.values():
                return str(architecture), task
    for task in _TASKS_BY_MODEL_TYPE:
        if values["model_type"] in tables[task]:
            return tables[task][values["model_type"]], task
    what = f"the architecture {named[0]}" if named else f"the model type {values['model_type']}"
    raise ModelError(
        f"{path}: no training batch is known for {what}; write a factory (file.py:factory) that returns one"
    )


def _prepare(config: Any, task: str) -> None:
    """Fill in what training needs and a config may leave out."""
    config.use_cache = False  # caches of keys and values are for generation
    if task == "sequence-classification" and getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = 0  # else decoders refuse a batch of more than one sample
    if task in ("seq2seq", "speech-seq2seq"):
        if getattr(config, "pad_token_id", None) is None:
            config.pad_token_id = 0
        if getattr(config, "decoder_start_token_id", None) is None:
            config.decoder_start_token_id = config.pad_token_id


def _move_stray_parameters_to_meta(module: nn.Module) -> None:
    """Some are made by `torch.Tensor(n)`, which ignores the default device. One that is shared stays one."""
    moved: dict[int, nn.Parameter] = {}
    for submodule in module.modules():
        for name, parameter in submodule.named_parameters(recurse=False):
            if not parameter.is_meta:
                on_meta = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
                setattr(submodule, name, moved.setdefault(id(parameter), on_meta))


def _trained_length(config: Any, task: str) -> int | None:
    if task in ("image-classification", "ctc", "audio-classification"):
        return None
    if task == "speech-seq2seq":
        return int(getattr(config, "max_target_positions", None) or DEFAULT_SEQUENCE_LENGTH)
    text = config.get_text_config()
    length = next(
        (
            value
            for name in ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "n_ctx")
            if isinstance(value := getattr(text, name, None), int) and value > 0
        ),
        DEFAULT_SEQUENCE_LENGTH,
    )
    if re.search(r"roberta|camembert|xmod|longformer|mpnet|esm|data2vec-text", str(config.model_type)):
        length -= (text.pad_token_id or 0) + 1  # these count positions from after the padding index
    return length


def _checked_length(path: Path, module: nn.Module, wanted: int | None, trained: int | None) -> int:
    if trained is None:
        if wanted is not None:
            raise ModelError(f"{path} describes a model without a text sequence; leave out the sequence length")
        return 0
    if wanted is None:
        return trained
    if wanted < 1:
        raise ModelError(f"a sequence length of {wanted} is no length; give 1 or more")
    learned = [
        name
        for name, submodule in module.named_modules()
        if isinstance(submodule, nn.Embedding)
        and re.search(r"(^|[._])(wpe|positions?_embeddings|embed_positions|position_embedding)$", name)
    ]
    if wanted > trained and learned:
        raise ModelError(
            f"{path} has learned positions ({learned[0]}) for {trained} tokens, {wanted} do not fit; "
            f"use a sequence length of {trained} or less"
        )
    return wanted


def _batch(config: Any, task: str, length: int) -> dict[str, Tensor]:
    """Two samples with fixed values; no token is the padding token."""
    generator = torch.Generator().manual_seed(0)

    def integers(high: int, *shape: int) -> Tensor:
        return torch.randint(high, (EXAMPLE_BATCH, *shape), generator=generator)

    def floats(*shape: int) -> Tensor:
        return torch.randn(EXAMPLE_BATCH, *shape, generator=generator)

    def tokens(count: int) -> Tensor:
        text = config.get_text_config()
        drawn = integers(text.vocab_size, count)
        padding = getattr(text, "pad_token_id", None)
        return drawn if padding is None else drawn.where(drawn != padding, (padding + 1) % text.vocab_size)

    def language_model() -> dict[str, Tensor]:
        drawn = tokens(length)
        return {"input_ids": drawn, "labels": drawn.clone()}

    def image() -> tuple[int, int, int]:
        size = getattr(config, "image_size", None) or DEFAULT_IMAGE
        height, width = (size, size) if isinstance(size, int) else tuple(size)[:2]
        return int(getattr(config, "num_channels", 3)), height, width

    def audio() -> dict[str, Tensor]:
        if (
            hasattr(config, "num_mel_bins")
            and hasattr(config, "max_length")
            and config.model_type.endswith("-transformer")
        ):
            return {"input_values": floats(config.max_length, config.num_mel_bins)}
        return {"input_values": floats(AUDIO_SAMPLES)}

    makers: dict[str, Callable[[], dict[str, Tensor]]] = {
        "causal-lm": language_model,
        "masked-lm": language_model,
        "seq2seq": lambda: {"input_ids": tokens(length), "labels": tokens(length)},
        "sequence-classification": lambda: {"input_ids": tokens(length), "labels": integers(config.num_labels)},
        "token-classification": lambda: {"input_ids": tokens(length), "labels": integers(config.num_labels, length)},
        "question-answering": lambda: {
            "input_ids": tokens(length),
            "start_positions": integers(length),
            "end_positions": integers(length),
        },
        "image-classification": lambda: {"pixel_values": floats(*image()), "labels": integers(config.num_labels)},
        "speech-seq2seq": lambda: {
            "input_features": floats(config.num_mel_bins, 2 * config.max_source_positions),
            "labels": tokens(length),
        },
        "ctc": lambda: {**audio(), "labels": tokens(LABEL_TOKENS)},
        "audio-classification": lambda: {**audio(), "labels": integers(config.num_labels)},
    }
    return makers[task]()
