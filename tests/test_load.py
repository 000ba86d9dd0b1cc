import json
import sys
import textwrap
from typing import Any

import pytest
import torch

from planner.errors import ModelError
from planner.zoo import load_model
from planner.zoo.infer import infer_batch

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 50}
VIT = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
WAV2VEC2 = {
    **SIZES,
    "model_type": "wav2vec2",
    "conv_dim": [8, 8],
    "conv_kernel": [10, 8],
    "conv_stride": [40, 8],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
}
CONFIGS = {
    "gpt2": (
        {
            "model_type": "gpt2",
            "architectures": ["GPT2LMHeadModel"],
            "n_embd": 16,
            "n_layer": 2,
            "n_head": 2,
            "n_positions": 24,
            "vocab_size": 50,
        },
        "causal-lm",
        {"input_ids": (2, 24), "labels": (2, 24)},
    ),
    "llama": (
        {**SIZES, "model_type": "llama", "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 32},
        "causal-lm",
        {"input_ids": (2, 32), "labels": (2, 32)},
    ),
    "llama without architectures": (
        {**SIZES, "model_type": "llama", "max_position_embeddings": 32},
        "causal-lm",
        {"input_ids": (2, 32), "labels": (2, 32)},
    ),
    "llama to classify": (
        {
            **SIZES,
            "model_type": "llama",
            "architectures": ["LlamaForSequenceClassification"],
            "max_position_embeddings": 8,
        },
        "sequence-classification",
        {"input_ids": (2, 8), "labels": (2,)},
    ),
    "bert without a loss": (
        {**SIZES, "model_type": "bert", "architectures": ["BertModel"], "max_position_embeddings": 20},
        "masked-lm",
        {"input_ids": (2, 20), "labels": (2, 20)},
    ),
    "bert to classify tokens": (
        {**SIZES, "model_type": "bert", "architectures": ["BertForTokenClassification"], "max_position_embeddings": 20},
        "token-classification",
        {"input_ids": (2, 20), "labels": (2, 20)},
    ),
    "bert to answer": (
        {**SIZES, "model_type": "bert", "architectures": ["BertForQuestionAnswering"], "max_position_embeddings": 20},
        "question-answering",
        {"input_ids": (2, 20), "start_positions": (2,), "end_positions": (2,)},
    ),
    "roberta": (
        {**SIZES, "model_type": "roberta", "architectures": ["RobertaForMaskedLM"], "max_position_embeddings": 22},
        "masked-lm",
        {"input_ids": (2, 20), "labels": (2, 20)},  # two positions are padding's
    ),
    "t5": (
        {
            "model_type": "t5",
            "architectures": ["T5ForConditionalGeneration"],
            "d_model": 16,
            "d_kv": 8,
            "d_ff": 32,
            "num_layers": 2,
            "num_heads": 2,
            "vocab_size": 50,
            "n_positions": 16,
        },
        "seq2seq",
        {"input_ids": (2, 16), "labels": (2, 16)},
    ),
    "vit": (
        {**VIT, "model_type": "vit", "architectures": ["ViTForImageClassification"], "image_size": 32, "patch_size": 8},
        "image-classification",
        {"pixel_values": (2, 3, 32, 32), "labels": (2,)},
    ),
    "whisper": (
        {
            "model_type": "whisper",
            "architectures": ["WhisperForConditionalGeneration"],
            "d_model": 16,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 32,
            "decoder_ffn_dim": 32,
            "vocab_size": 60,
            "pad_token_id": 1,
            "bos_token_id": 2,
            "eos_token_id": 3,
            "decoder_start_token_id": 4,
            "max_source_positions": 20,
            "max_target_positions": 12,
            "num_mel_bins": 8,
        },
        "speech-seq2seq",
        {"input_features": (2, 8, 40), "labels": (2, 12)},
    ),
    "wav2vec2": (
        {**WAV2VEC2, "architectures": ["Wav2Vec2ForSequenceClassification"]},
        "audio-classification",
        {"input_values": (2, 16000), "labels": (2,)},
    ),
}


def _write(directory, values):
    path = directory / "config.json"
    path.write_text(values if isinstance(values, str) else json.dumps(values))
    return str(path)


def _factory_file(directory, body):
    path = directory / "mine.py"
    path.write_text("import torch\nfrom torch import nn\n" + textwrap.dedent(body))
    return str(path)


def test_a_name_of_the_zoo_is_built_from_the_seed():
    first, again, other = (load_model("mlp-tiny", device="cpu", seed=seed) for seed in (1, 1, 2))
    weight, same, different = (loaded.module.get_parameter("head.weight") for loaded in (first, again, other))

    assert first.is_zoo
    assert first.kind == "classification"
    assert torch.equal(weight, same)
    assert not torch.equal(weight, different)


def test_the_sequence_length_reaches_the_batch_and_the_default_is_told():
    loaded = load_model("llama3-8b", sequence_length=128)

    assert isinstance(loaded.batch, dict)
    assert loaded.batch["input_ids"].shape == (2, 128)
    assert loaded.default_sequence_length == 8192
    assert loaded.batch["input_ids"].is_meta


@pytest.mark.parametrize("name", CONFIGS)
def test_a_hugging_face_config_gives_a_model_with_its_kind_of_batch_and_a_loss(tmp_path, name):
    values, kind, shapes = CONFIGS[name]
    loaded = load_model(_write(tmp_path, values), device="cpu")
    assert isinstance(loaded.batch, dict)
    loss = loaded.module(**loaded.batch)["loss"]
    loss.backward()

    assert loaded.kind == kind
    assert {key: tuple(value.shape) for key, value in loaded.batch.items()} == shapes
    assert loss.isfinite()


@pytest.mark.parametrize("name", CONFIGS)
def test_a_hugging_face_config_on_meta_allocates_nothing(tmp_path, name):
    values, _, shapes = CONFIGS[name]
    loaded = load_model(_write(tmp_path, values))
    assert isinstance(loaded.batch, dict)

    assert all(parameter.is_meta for parameter in loaded.module.parameters())
    assert {key: tuple(value.shape) for key, value in loaded.batch.items()} == shapes
    assert all(value.is_meta for value in loaded.batch.values())


def test_a_directory_with_a_config_will_do_and_rotary_positions_take_any_length(tmp_path):
    _write(tmp_path, CONFIGS["llama"][0])
    loaded = load_model(str(tmp_path), sequence_length=100)

    assert loaded.name == tmp_path.name
    assert loaded.default_sequence_length == 32
    assert isinstance(loaded.batch, dict)
    assert loaded.batch["input_ids"].shape == (2, 100)


@pytest.mark.parametrize("spec", ["gpt-tiny", "mlp-tiny", *CONFIGS])
def test_the_batch_of_a_model_is_inferred(tmp_path, spec):
    loaded = load_model(_write(tmp_path, CONFIGS[spec][0]) if spec in CONFIGS else spec)
    batch = infer_batch(loaded.module)
    assert isinstance(loaded.batch, dict)

    assert {key: (value.shape, value.dtype, value.device) for key, value in batch.items()} == {
        key: (value.shape, value.dtype, value.device) for key, value in loaded.batch.items()
    }


def test_the_batch_of_another_model_is_not_inferred():
    with pytest.raises(ModelError, match="what Linear takes cannot be inferred; give an example"):
        infer_batch(torch.nn.Linear(2, 2))


def test_dropout_of_a_config_stays(tmp_path):
    loaded = load_model(_write(tmp_path, {**CONFIGS["gpt2"][0], "attn_pdrop": 0.3}))

    config: Any = loaded.module.config

    assert config.attn_pdrop == 0.3


FACTORIES = """
    def good():
        return nn.Linear(3, 1), {"input": torch.randn(4, 3)}

    def good_tuple():
        return nn.Linear(3, 1), [torch.randn(4, 3)]

    def good_tensor():
        return nn.Linear(3, 1), torch.randn(4, 3)

    def needs_values():
        model = nn.Linear(3, 1)
        assert model.weight.abs().max().item() > 0
        return model, torch.randn(4, 3)

    def raises():
        return nn.Linear(3, 1), torch.randn(2, 3).view(
            5)

    def nothing():
        pass

    def three():
        return 1, 2, 3

    def no_module():
        return "model", torch.ones(1)

    def bad_batch():
        return nn.Linear(3, 1), 7

    def empty_batch():
        return nn.Linear(3, 1), {}

    _private = 5
"""


@pytest.mark.parametrize("factory", ["good", "good_tuple", "good_tensor"])
def test_a_factory_gives_its_model_and_batch_on_the_wanted_device(tmp_path, factory):
    path = _factory_file(tmp_path, FACTORIES)
    on_meta, on_cpu = (load_model(f"{path}:{factory}", device=device) for device in ("meta", "cpu"))
    batch = on_cpu.batch
    output = on_cpu.module(**batch) if isinstance(batch, dict) else on_cpu.module(*batch)

    assert output.shape == (4, 1)
    assert on_meta.module.weight.is_meta
    assert (on_meta.kind, on_meta.name) == ("factory", f"mine-{factory}")


def test_a_factory_that_needs_values_is_run_on_the_cpu(tmp_path):
    loaded = load_model(_factory_file(tmp_path, FACTORIES) + ":needs_values")

    assert loaded.module.weight.device.type == "cpu"


def test_a_factory_is_seeded(tmp_path):
    path = _factory_file(tmp_path, FACTORIES)
    first, again = (load_model(f"{path}:good", device="cpu", seed=3) for _ in range(2))

    assert torch.equal(first.module.get_parameter("weight"), again.module.get_parameter("weight"))


def test_a_file_can_import_its_neighbour_and_hold_dataclasses(tmp_path):
    (tmp_path / "neighbour_of_mine.py").write_text("WIDTH = 3\n")
    path = _factory_file(
        tmp_path,
        """
        from dataclasses import dataclass
        from neighbour_of_mine import WIDTH

        @dataclass
        class Config:
            width: "int" = WIDTH

        def make():
            return nn.Linear(Config().width, 1), torch.ones(2, 3)
        """,
    )

    assert load_model(path + ":make").module.in_features == 3
    assert str(tmp_path) not in sys.path


def test_a_factory_of_a_package_is_found(tmp_path, monkeypatch):
    package = tmp_path / "my_models_pkg"
    package.mkdir()
    (package / "__init__.py").touch()
    _factory_file(package, FACTORIES)
    monkeypatch.chdir(tmp_path)
    loaded = load_model("my_models_pkg.mine:good")

    assert loaded.module.in_features == 3
    with pytest.raises(
        ModelError, match=r"my_models_pkg.mine has no factory 'god'; it offers bad_batch, empty_batch, good"
    ):
        load_model("my_models_pkg.mine:god")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("gpt3-13", "there is no model 'gpt3-13'; did you mean gpt3-13b"),
        ("lama3-70b", "did you mean llama3-70b"),
        ("xyzzy", "there is no model 'xyzzy'; give one of gpt2, "),
        ("no/config.json", "there is no file no/config.json; give the path of a Hugging Face config.json"),
        ("no.py:make", "there is no file no.py; give file.py:factory"),
        ("no.py", "there is no file no.py; give file.py:factory"),
        ("no_such_package.models:make", "there is no module no_such_package; give package.module:factory"),
        ("{file}", "names no factory; write .*:NAME, where the file offers bad_batch, empty_batch, good,"),
        ("{file}:god", "has no factory 'god'; it offers bad_batch, empty_batch, good, .*three$"),
        (
            "{file}:raises",
            r"the factory raises RuntimeError: shape '\[5\]' is invalid for input of size 6 \(.*mine.py:19\)",
        ),
        ("{file}:nothing", "the factory returns None; it must return"),
        ("{file}:three", "the factory returns 3 values; it must return"),
        ("{file}:no_module", "the factory's first value is a value of type str; it must return"),
        ("{file}:bad_batch", "the factory's batch is a value of type int; it must return"),
        ("{file}:empty_batch", "the factory's batch holds no tensor; it must return"),
    ],
)
def test_a_wrong_spec_is_one_sentence(tmp_path, spec, message):
    path = _factory_file(tmp_path, FACTORIES)
    with pytest.raises(ModelError, match=message) as caught:
        load_model(spec.format(file=path))

    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("def broken(:\n", r"the file cannot be imported: SyntaxError: .*mine.py:3\)"),
        ("import no_such_thing\n", r"the file cannot be imported: ModuleNotFoundError: .*no_such_thing.*mine.py:3\)"),
        ("raise SystemExit(3)\n", r"the file cannot be imported: SystemExit: 3 .*mine.py:3\)"),
    ],
)
def test_a_file_that_cannot_be_imported_is_one_sentence(tmp_path, body, message):
    path = _factory_file(tmp_path, body)
    with pytest.raises(ModelError, match=message):
        load_model(path + ":make")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ("{", "config.json is not valid JSON"),
        ("[]", 'has no "model_type"; give the config.json of a Hugging Face model'),
        ({"model_type": "lama"}, "knows no model type 'lama'; did you mean llama"),
        ({"model_type": "sam"}, "no training batch is known for the model type sam; write a factory"),
        ({**CONFIGS["gpt2"][0], "n_head": 3}, "GPT2LMHeadModel cannot be built from it: ValueError: "),
    ],
)
def test_a_wrong_config_is_one_sentence(tmp_path, values, message):
    with pytest.raises(ModelError, match=message) as caught:
        load_model(_write(tmp_path, values))

    assert "\n" not in str(caught.value)


def test_learned_positions_limit_the_sequence_length(tmp_path):
    with pytest.raises(ModelError, match=r"has learned positions \(transformer.wpe\) for 24 tokens, 25 do not fit"):
        load_model(_write(tmp_path, CONFIGS["gpt2"][0]), sequence_length=25)


def test_a_sequence_length_where_there_is_none_is_refused(tmp_path):
    with pytest.raises(ModelError, match="without a text sequence; leave out"):
        load_model(_write(tmp_path, CONFIGS["vit"][0]), sequence_length=25)
    with pytest.raises(ModelError, match="comes from its factory; set the sequence length there"):
        load_model("mine.py:make", sequence_length=25)


def test_missing_transformers_is_said(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModelError, match=r"needs transformers; run: pip install 'torch-autoplan\[hf\]'"):
        load_model(_write(tmp_path, CONFIGS["gpt2"][0]))
