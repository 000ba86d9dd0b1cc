import itertools
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from planner.errors import ModelError
from planner.runtime.initialise import materialise
from planner.trace import trace
from planner.zoo import NAMES, build, text_batch
from planner.zoo.llama import Experts, Llama, LlamaConfig
from planner.zoo.registry import CONFIGS, default_sequence_length
from tests import models
from tests.float64 import explicit_float32_as_float64
from tests.test_trace import assert_equals_eager


def test_every_name_of_the_design_is_there():
    wanted = (
        "gpt2 gpt2-medium gpt2-large gpt2-xl gpt3-1.3b gpt3-2.7b gpt3-6.7b gpt3-13b gpt3-175b llama2-7b llama2-13b "
        "llama2-70b llama3-1b llama3-8b llama3-70b llama3-405b mixtral-8x7b mixtral-8x22b bert-base bert-large "
        "t5-small t5-base t5-large t5-3b t5-11b vit-b16 vit-l16 vit-h14 unet-small unet unet-large resnet50 "
        "resnet101 resnet152 mlp gpt-tiny llama-tiny moe-tiny bert-tiny t5-tiny vit-tiny unet-tiny resnet-tiny "
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
        ("llama3-1b", 1498, 0),  # 1236 and a head of 263 of its own
        ("llama3-8b", 8030, 0),
        ("llama3-70b", 70_550, -1),
        ("llama3-405b", 405_850, -1),
        # Jiang et al. 2024: 47B; the model card of 8x22B: 141B; the exact sum of the released checkpoints.
        ("mixtral-8x7b", 46_702.792704, 6),
        ("mixtral-8x22b", 140_620.634112, 6),
        # BertForMaskedLM of the released checkpoints: 110M and 340M of the paper are with the pooler.
        ("bert-base", 109.514298, 6),
        ("bert-large", 335.174458, 6),
        # The released checkpoints; the paper rounds to 60M, 220M, 770M, 2.8B and 11B.
        ("t5-small", 60.506624, 6),
        ("t5-base", 222.903552, 6),
        ("t5-large", 737.668096, 6),
        ("t5-3b", 2851.598336, 6),
        ("t5-11b", 11307.321344, 6),
        # B and L: torchvision's documentation; the paper's table 1 has 86M, 307M (with a larger head) and 632M.
        ("vit-b16", 86.567656, 6),
        ("vit-l16", 304.326632, 6),
        ("vit-h14", 632, 0),
        ("resnet50", 25.557, 3),
        ("resnet101", 44.549, 3),
        ("resnet152", 60.193, 3),
    ],
)
def test_the_parameters_are_as_many_as_published(name, millions, digits):
    module, _ = build(name, device="meta")
    count = sum(parameter.numel() for parameter in module.parameters())

    assert round(count / 1e6, digits) == millions


def test_the_unet_has_the_23_convolutions_of_the_paper():
    module, _ = build("unet", device="meta")
    widths = [64, 128, 256, 512, 1024]

    def pair(inputs: int, outputs: int) -> int:
        return 9 * inputs * outputs + outputs + 9 * outputs * outputs + outputs

    down = sum(pair(a, b) for a, b in zip([1, *widths], widths, strict=False))
    up = sum(4 * b * a + a + pair(2 * a, a) for a, b in itertools.pairwise(widths))
    convolutions = [m for m in module.modules() if isinstance(m, torch.nn.Conv2d | torch.nn.ConvTranspose2d)]

    assert sum(p.numel() for p in module.parameters()) == down + up + 64 * 2 + 2 == 31_030_658
    assert len(convolutions) == 23


@pytest.mark.parametrize("name", NAMES)
def test_every_model_builds_on_meta_and_gives_a_scalar_loss(name):
    if name.startswith(("gpt3", "llama", "mixtral")) and not name.endswith("tiny"):
        module, batch = build(name, device="meta", sequence_length=64)
    else:
        module, batch = build(name, device="meta")
    loss = module(**batch)

    assert loss.shape == ()
    assert all(tensor.is_meta for tensor in [*module.parameters(), *module.buffers(), *batch.values()])
    assert {tensor.shape[0] for tensor in batch.values()} == {2}


@pytest.mark.parametrize("name", [n for n in NAMES if n.endswith("tiny")])
def test_a_fresh_model_knows_nothing_and_every_parameter_has_a_gradient(name):
    torch.manual_seed(0)
    module, batch = build(name)
    loss = module(**batch)
    loss.backward()
    config: Any = module.config
    classes = config.classes if hasattr(config, "classes") else config.vocabulary

    assert loss.item() == pytest.approx(torch.tensor(float(classes)).log().item(), rel=0.25)
    assert all(parameter.grad is not None for parameter in module.parameters())


@pytest.mark.parametrize("name", [n for n in NAMES if n.endswith("tiny")])
def test_a_model_from_meta_is_initialised_as_by_its_constructor(name):
    torch.manual_seed(0)
    eager, _ = build(name)
    drawn = materialise(build(name, device="meta")[0])

    for (key, mine), (_, theirs) in zip(drawn.named_parameters(), eager.named_parameters(), strict=True):
        if theirs.numel() > 200:
            assert mine.std().item() == pytest.approx(theirs.std().item(), rel=0.2), key
        else:
            assert bool(mine.eq(0).all()) == bool(theirs.eq(0).all()), key


@pytest.mark.parametrize("name", [n for n in NAMES if n.endswith("tiny")])
def test_a_model_cast_to_float64_computes_in_float64(name):
    module, batch = build(name)
    loss = module.double()(**{k: v.double() if v.is_floating_point() else v for k, v in batch.items()})

    assert loss.dtype == torch.float64


@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny", "moe-tiny"])
def test_a_token_does_not_see_later_ones(name):
    torch.manual_seed(0)
    module, batch = build(name, sequence_length=16)
    labels = torch.full_like(batch["labels"], -100)
    labels[:, :8] = batch["labels"][:, :8]  # the loss counts the first half only
    changed = batch["input_ids"].clone()
    changed[:, 8:] = (changed[:, 8:] + 1) % 256

    assert module(batch["input_ids"], labels).item() == pytest.approx(module(changed, labels).item(), rel=1e-6)


def test_a_decoder_token_of_t5_sees_all_of_the_input_and_nothing_that_comes_after_it():
    torch.manual_seed(0)
    module, batch = build("t5-tiny", sequence_length=16)
    labels = batch["labels"]
    first = labels.clone()
    first[:, 8:] = -100  # the loss counts the first half only
    later, source = labels.clone(), batch["input_ids"].clone()
    source[:, -1] = (source[:, -1] + 1) % 256
    loss = module(batch["input_ids"], first).item()
    later[:, 8:] = (later[:, 8:] + 1) % 256  # what the decoder reads at the ninth place and after it

    def first_half(ids: torch.Tensor, read: torch.Tensor) -> float:
        return _first_half_loss(module, ids, read, first).item()

    assert first_half(batch["input_ids"], labels) == pytest.approx(first_half(batch["input_ids"], later), rel=1e-6)
    assert loss != pytest.approx(module(source, first).item(), rel=1e-6)


def _first_half_loss(module: Any, ids: torch.Tensor, read: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """T5's loss with what the decoder reads apart from what it is to predict."""
    shifted = F.pad(read[:, :-1], (1, 0))
    decoded = module.decoder(module.tokens(shifted), module.encoder(module.tokens(ids)))
    logits = F.linear(decoded * module.config.width**-0.5, module.tokens.weight)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def test_an_encoder_sees_both_sides():
    torch.manual_seed(0)
    module, batch = build("bert-tiny", sequence_length=16)
    labels = torch.full_like(batch["labels"], -100)
    labels[:, 7] = 5

    for place in (0, 15):
        changed = batch["input_ids"].clone()
        changed[:, place] = (changed[:, place] + 1) % 256
        assert module(batch["input_ids"], labels).item() != pytest.approx(module(changed, labels).item(), rel=1e-6)


def test_the_masked_tokens_of_berts_batch_are_as_many_in_each_sample_and_hidden():
    _, batch = build("bert-base", device="cpu", sequence_length=40)
    masked = batch["labels"] != -100

    assert masked.sum(1).tolist() == [6, 6]  # 15 %
    assert set(batch["input_ids"][masked].tolist()) == {103}
    assert batch["labels"][masked].min() >= 0


# Zoo's name of a parameter -> the library's; `*` is the number of the layer.
PARITY = {
    "bert": {
        "embeddings.tokens": "bert.embeddings.word_embeddings",
        "embeddings.positions": "bert.embeddings.position_embeddings",
        "embeddings.segments": "bert.embeddings.token_type_embeddings",
        "embeddings.norm": "bert.embeddings.LayerNorm",
        "blocks.*.attention.query": "bert.encoder.layer.*.attention.self.query",
        "blocks.*.attention.key": "bert.encoder.layer.*.attention.self.key",
        "blocks.*.attention.value": "bert.encoder.layer.*.attention.self.value",
        "blocks.*.attention.out": "bert.encoder.layer.*.attention.output.dense",
        "blocks.*.norm1": "bert.encoder.layer.*.attention.output.LayerNorm",
        "blocks.*.up": "bert.encoder.layer.*.intermediate.dense",
        "blocks.*.down": "bert.encoder.layer.*.output.dense",
        "blocks.*.norm2": "bert.encoder.layer.*.output.LayerNorm",
        "transform": "cls.predictions.transform.dense",
        "norm": "cls.predictions.transform.LayerNorm",
        "head": "cls.predictions.decoder",
    },
    "t5": {
        "tokens": "shared",
        **{
            f"{stack}.{mine}": f"{stack}.{theirs}"
            for stack, last in (("encoder", 1), ("decoder", 2))
            for mine, theirs in {
                "blocks.*.position_bias.table": "block.*.layer.0.SelfAttention.relative_attention_bias",
                "blocks.*.norm1": "block.*.layer.0.layer_norm",
                "blocks.*.attention.query": "block.*.layer.0.SelfAttention.q",
                "blocks.*.attention.key": "block.*.layer.0.SelfAttention.k",
                "blocks.*.attention.value": "block.*.layer.0.SelfAttention.v",
                "blocks.*.attention.out": "block.*.layer.0.SelfAttention.o",
                "blocks.*.cross_norm": "block.*.layer.1.layer_norm",
                "blocks.*.cross.query": "block.*.layer.1.EncDecAttention.q",
                "blocks.*.cross.key": "block.*.layer.1.EncDecAttention.k",
                "blocks.*.cross.value": "block.*.layer.1.EncDecAttention.v",
                "blocks.*.cross.out": "block.*.layer.1.EncDecAttention.o",
                "blocks.*.norm2": f"block.*.layer.{last}.layer_norm",
                "blocks.*.mlp.up": f"block.*.layer.{last}.DenseReluDense.wi",
                "blocks.*.mlp.down": f"block.*.layer.{last}.DenseReluDense.wo",
                "norm": "final_layer_norm",
            }.items()
        },
    },
    "moe": {
        "tokens": "model.embed_tokens",
        "blocks.*.norm1": "model.layers.*.input_layernorm",
        "blocks.*.attention.query": "model.layers.*.self_attn.q_proj",
        "blocks.*.attention.key": "model.layers.*.self_attn.k_proj",
        "blocks.*.attention.value": "model.layers.*.self_attn.v_proj",
        "blocks.*.attention.out": "model.layers.*.self_attn.o_proj",
        "blocks.*.norm2": "model.layers.*.post_attention_layernorm",
        "blocks.*.mlp.router": "model.layers.*.mlp.gate",
        "blocks.*.mlp.gate_up": "model.layers.*.mlp.experts.gate_up_proj",
        "blocks.*.mlp.down": "model.layers.*.mlp.experts.down_proj",
        "norm": "model.norm",
        "head": "lm_head",
    },
    "vit": {
        "patches.class_token": "vit.embeddings.cls_token",
        "patches.positions": "vit.embeddings.position_embeddings",
        "patches.project": "vit.embeddings.patch_embeddings.projection",
        "blocks.*.norm1": "vit.layers.*.layernorm_before",
        "blocks.*.attention.out": "vit.layers.*.attention.o_proj",
        "blocks.*.norm2": "vit.layers.*.layernorm_after",
        "blocks.*.up": "vit.layers.*.mlp.fc1",
        "blocks.*.down": "vit.layers.*.mlp.fc2",
        "norm": "vit.layernorm",
        "head": "classifier",
    },
}


def _of_the_library(name: str, batch: dict[str, torch.Tensor]) -> tuple[Any, torch.Tensor]:
    """The library's model of the same sizes as the small one of the tests, and its loss."""
    import transformers as library

    sizes = {"hidden_size": 16, "num_hidden_layers": models.LAYERS, "vocab_size": models.VOCABULARY}
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    torch.manual_seed(1)
    module: Any
    match name:
        case "bert":
            module = library.BertForMaskedLM(
                library.BertConfig(
                    num_attention_heads=2, intermediate_size=64, max_position_embeddings=models.SEQUENCE,
                    pad_token_id=None, **sizes, **no_dropout,
                )
            )  # fmt: skip
        case "t5":
            module = library.T5ForConditionalGeneration(
                library.T5Config(
                    d_model=16, d_kv=6, d_ff=40, num_layers=2, num_heads=2, vocab_size=models.VOCABULARY,
                    relative_attention_num_buckets=8, relative_attention_max_distance=10, dropout_rate=0.0,
                    decoder_start_token_id=0,
                )
            )  # fmt: skip
        case "moe":
            module = library.MixtralForCausalLM(
                library.MixtralConfig(
                    num_attention_heads=4, num_key_value_heads=2, intermediate_size=24, num_local_experts=4,
                    rope_theta=10_000.0, max_position_embeddings=models.SEQUENCE, **sizes,
                )
            )  # fmt: skip
        case _:
            module = library.ViTForImageClassification(
                library.ViTConfig(
                    num_attention_heads=2, intermediate_size=64, image_size=models.IMAGE, patch_size=16,
                    num_labels=models.CLASSES, layer_norm_eps=1e-6, hidden_size=16, num_hidden_layers=models.LAYERS,
                    **no_dropout,
                )
            )  # fmt: skip
    module = module.double().train()
    if name == "moe":  # the zoo's labels are shifted already
        logits = module(input_ids=batch["input_ids"]).logits
        return module, F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
    if name == "vit":
        return module, module(pixel_values=batch["images"], labels=batch["labels"]).loss
    return module, module(**batch).loss


@pytest.mark.parametrize("name", PARITY)
def test_a_model_is_the_librarys_with_the_same_weights(name):
    batch = models.batch(name, 3, step=0)
    with explicit_float32_as_float64():
        theirs, wanted = _of_the_library(name, batch)
    wanted.backward()
    library = dict(theirs.named_parameters(remove_duplicate=False))

    def of_library(key: str, read: Any) -> torch.Tensor:
        leaf = key.rpartition(".")[2]
        number = re.search(r"blocks\.(\d+)", key)
        pattern = re.sub(r"blocks\.\d+", "blocks.*", key)
        if pattern.startswith("blocks.*.attention.qkv"):
            parts = [f"vit.layers.{number[1]}.attention.{p}_proj.{leaf}" for p in "qkv"] if number else []
            return torch.cat([read(library[part]) for part in parts])
        found = PARITY[name].get(pattern)
        if found is None:
            found = f"{PARITY[name][pattern.rpartition('.')[0]]}.{leaf}"
        if number:
            found = found.replace("*", number[1])
        value: torch.Tensor = read(library[found])
        return value.transpose(1, 2) if "experts" in found else value

    module = models.build(name)
    with torch.no_grad():
        for key, parameter in module.named_parameters():
            parameter.copy_(of_library(key, lambda p: p.detach()))
    loss = module(**batch)
    loss.backward()

    assert loss.item() == pytest.approx(wanted.item(), rel=1e-12)
    scale = max(float(p.grad.abs().max()) for p in module.parameters() if p.grad is not None)
    for key, parameter in module.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(
            parameter.grad, of_library(key, lambda p: p.grad), rtol=1e-9, atol=1e-12 * scale, msg=key
        )


def test_the_balance_loss_is_one_with_equally_busy_experts_and_couples_the_samples():
    config = CONFIGS["moe-tiny"]
    assert isinstance(config, LlamaConfig)
    torch.manual_seed(0)
    module = Llama(replace(config, balance_loss=0.5, layers=2)).double()
    experts = [m for m in module.modules() if isinstance(m, Experts)]
    _, batch = build("moe-tiny")

    def share_of_balance() -> float:
        """The loss with the balance loss less the loss without it."""
        for layer in experts:
            layer.balance_loss = 0.5
        whole = module(**batch).item()
        for layer in experts:
            layer.balance_loss = 0.0
        return float(whole - module(**batch).item())

    assert share_of_balance() == pytest.approx(0.5, rel=0.05)
    for layer in experts:
        torch.nn.init.zeros_(layer.router.weight)  # every expert as likely: 4 experts · 1/4 for each choice, in all 1
    assert share_of_balance() == pytest.approx(0.5, rel=1e-9)


def test_with_a_balance_loss_the_blocks_are_the_eager_model_and_the_samples_are_coupled():
    config = LlamaConfig(
        layers=3, width=16, heads=4, key_value_heads=2, hidden=24, vocabulary=models.VOCABULARY,
        context=models.SEQUENCE, experts=4, balance_loss=0.5,
    )  # fmt: skip
    torch.manual_seed(0)
    module = Llama(config).double()
    graph = trace(module, models.batch("moe", 2, step=0), precision="fp64", device_kind="cpu")

    assert not graph.fallbacks
    assert graph.not_separable or graph.couples_samples
    assert [len(carried) for carried in graph.carried] == [1, 2, 2, 2]  # the stream, and the sum of balance losses
    for samples in (1, 3):
        assert_equals_eager(graph, module, models.batch("moe", samples, step=samples))


def test_llama_depends_on_the_distance_of_tokens():
    torch.manual_seed(0)
    module, _ = build("llama-tiny")
    ids = torch.tensor([[1, 2, 3, 4]])
    swapped = torch.tensor([[2, 1, 3, 4]])
    labels = torch.tensor([[-100, -100, -100, 5]])

    assert module(ids, labels).item() != module(swapped, labels).item()


def test_tied_embeddings_are_one_parameter():
    gpt, bert = build("gpt2", device="meta")[0], build("bert-base", device="meta")[0]

    assert gpt.get_parameter("head.weight") is gpt.get_parameter("tokens.weight")
    assert bert.get_parameter("head.weight") is bert.get_parameter("embeddings.tokens.weight")


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
        ("bert-base", 1024, "bert-base has learned positions for 512 tokens, 1024 do not fit"),
        ("resnet50", 8, "resnet50 has no sequence; leave out"),
        ("vit-b16", 8, "vit-b16 has no sequence; leave out"),
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
