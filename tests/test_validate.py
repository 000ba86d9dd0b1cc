"""`autoplan validate`: rows with holes, cases, terms of a prediction, figures of accuracy."""

import csv
import json
import random
from dataclasses import asdict, replace

import numpy as np
import pytest

from planner.cli import main
from planner.costs import price
from planner.engine import engine_named
from planner.engine_seconds import HEAD
from planner.errors import ProfileError, RunError
from planner.graph import reads
from planner.plan import Mesh
from planner.simulate import simulate
from planner.validate import explain, validate
from planner.validate.cases import case_of
from planner.validate.metrics import Pair, accuracy, kendall_tau, regret
from planner.validate.models import TraceKey, _made, rank_graph
from planner.validate.price import features, predict, shares
from planner.validate.rows import LENGTH, RefusedError, Row, _row, read_rows
from planner.validate.software import layer_places
from tests.published_rows import OWN_ROW

pytestmark = pytest.mark.usefixtures("own_trace_cache")
BASE = replace(OWN_ROW, dp=2, pp=2)


# Plain FSDP2 on the zoo's own models: nothing beside what `planner.costs` prices.
EAGER = replace(engine_named("stock"), memory_traffic=1.0, head_traffic=1.0, overlap=1.0)


def row(**changes):
    return replace(BASE, **changes)


def seconds(**changes):
    return predict(case_of(row(**changes))).seconds


def cell(value):
    return ("y" if value else "n") if isinstance(value, bool) else "" if value is None else value


def write(path, rows):
    names = [name for name in asdict(BASE) if name != "unreadable"]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        for each in rows:
            writer.writerow({name: cell(getattr(each, name)) for name in names})
    return path


# --- rows -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "known"), [("A100_80GB", True), ("RTX3090 Ti", True), ("NOTH100", False), ("T400", False)]
)
def test_a_gpus_name_is_a_word_and_no_part_of_one(name, known):
    if known:
        assert case_of(row(gpu=name)).cluster.device.name.startswith(name[:4])
    else:
        with pytest.raises(RefusedError, match=f"GPU {name} is not known"):
            case_of(row(gpu=name))


def test_samples_of_a_rank_that_the_micro_batch_does_not_divide_are_said():
    made = case_of(row(global_batch=4, micro_batch=8, dp=2, pp=1, n_gpus=2))

    assert (made.stages[0].micro_batch, made.num_microbatches) == (2, 1)
    assert made.stages[0].micro_batch == 2
    assert "2 samples of a rank are priced in micro-batches of 2, not of 8" in made.notes


def test_rows_say_in_which_unit_and_of_what_kind_memory_was_measured():
    notes = "mem_unit=GB (1e9); mem_kind=torch max_memory_allocated on the LAST rank"
    told = row(peak_mem_gb=2.0, notes=notes)
    assert (told.peak_memory_bytes, told.memory_kind, told.memory_is_of_last_rank) == (2e9, "allocated", True)
    other = row(peak_mem_gb=2.0, notes="mem_unit=GiB; mem_kind=torch max_reserved, max over all GPUs")
    assert (other.peak_memory_bytes, other.memory_kind) == (2 * 2**30, "reserved")


def test_a_row_with_any_cells_is_priced_or_refused(tmp_path):
    """No traceback, whatever a cell holds."""
    chance = random.Random(0)
    texts = ("", "0", "-1", "3.5", "many", "1e400", "nan", "7", "ё", "16,384")
    names = [name for name in asdict(BASE) if name not in ("id", "unreadable")]
    good = {name: cell(value) for name, value in asdict(BASE).items()}
    path = tmp_path / "rows.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["id", *names])
        writer.writeheader()
        for number in range(60):
            cells = {name: good[name] for name in names} | {"id": f"odd-{number}"}
            for name in chance.sample(names, chance.randint(1, 4)):
                cells[name] = chance.choice(texts)
            if cells["hidden"] != good["hidden"] or cells["seq_len"] != good["seq_len"] or cells["vocab"] == "16,384":
                cells["layers"] = ""  # no new trace for each: this test is about reading
            writer.writerow(cells)
    rows = read_rows([path])
    told = [_refusal(each) for each in rows]
    assert 0 < sum(bool(text) for text in told) < len(rows)
    assert all(text is None or text.strip() for text in told)


def _refusal(each):
    try:
        case_of(each)
    except RefusedError as error:
        return str(error)
    return None


def test_a_file_without_the_columns_is_refused(tmp_path):
    path = tmp_path / "other.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ProfileError, match="no column id, gpu, n_gpus"):
        read_rows([path])
    with pytest.raises(ProfileError, match="cannot be read"):
        read_rows([tmp_path / "missing.csv"])


@pytest.mark.parametrize(
    ("text", "reason"),
    [("", "is empty, "), ("id;gpu;n_gpus\n1;A100;8\n", "else than commas, "), ("i\0d\0\n", "is not UTF-8, ")],
)
def test_a_file_that_is_no_table_says_why(tmp_path, text, reason):
    path = tmp_path / "rows.csv"
    path.write_text(text)
    with pytest.raises(ProfileError, match=reason):
        read_rows([path])


def texts_of(each: Row) -> dict[str | None, object]:
    return {name: str(cell(value)) for name, value in asdict(each).items() if name != "unreadable"}


@pytest.mark.parametrize(
    ("changes", "cell_name"),
    [
        ({"ep": "99999999999999999999"}, "ep"), ({"ffn_hidden": "1e15"}, "ffn_hidden"), ({"hidden": "1e8"}, "hidden"),
        ({"layers": "20000"}, "layers"), ({"kv_heads": "8,000"}, "kv_heads"),
        ({"global_batch": "1e20"}, "global_batch"), ({"ep": "64"}, "ep"),
        ({"activation_recompute": "abc"}, "activation_recompute"),
        ({"activation_recompute": "1.5"}, "activation_recompute"), ({"precision": "fp64"}, "precision"),
        ({"offload": "everything"}, "offload"), ({"outcome": "banana"}, "outcome"),
        ({"iter_time_s": "2,457"}, "iter_time_s"),
    ],
)  # fmt: skip
def test_a_cell_that_cannot_be_true_refuses_its_row(changes, cell_name):
    cells = texts_of(BASE)
    assert _refusal(_row(cells)) is None
    assert _refusal(_row({**cells, **changes})) == f"a cell cannot be read ({cell_name})"


def test_words_for_the_same_are_read_alike():
    cells = texts_of(BASE)
    assert _row({**cells, "outcome": "Out of memory"}).outcome == "oom"
    moved = [
        case_of(_row({**cells, "offload": word})).stages[0].offloaded_optimizer for word in ("none", "cpu", "optim")
    ]
    assert moved == [0.0, 1.0, 1.0]
    wide, narrow = ([case_of(_row({**cells, "precision": p})) for p in pair] for pair in
                    (("fp32", "float32"), ("bf16", "bfloat16")))  # fmt: skip
    assert [each.single_precision for each in (*wide, *narrow)] == [True, True, False, False]
    assert predict(wide[0]).seconds == predict(wide[1]).seconds
    assert predict(narrow[0]).seconds == predict(narrow[1]).seconds


def test_a_row_of_another_length_than_the_header_is_refused():
    cells = texts_of(BASE)
    shorter: dict[str | None, object] = {**cells, "notes": None}
    longer: dict[str | None, object] = {**cells, None: ["more"]}
    assert [_refusal(_row(odd)) for odd in (shorter, longer)] == [LENGTH, LENGTH]


# --- cases ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"gpu": ""}, "GPU is not stated"),
        ({"gpu": "mixed: 12x V100 + 4x T4"}, "several kinds"),
        ({"layers": None}, "layers not stated"),
        ({"seq_len": None}, "sequence length not stated"),
        ({"notes": "INCONSISTENT as published"}, "inconsistent"),
        ({"dp": 3}, "inconsistent"),
        ({"global_batch": 33}, "no multiple of dp"),
        ({"micro_batch": None}, "micro-batch is not stated"),
        ({"model": "Mamba 2.8B LoRA"}, "adapters of a model"),
        ({"heads": 3}, "do not divide"),
        ({"pp": 8, "dp": 1, "n_gpus": 8}, "8 stages for 4 layers"),
        ({"ep": 3}, "ep=3 is no divisor of 8 experts"),
    ],
)
def test_what_cannot_be_priced_is_refused_with_its_reason(changes, reason):
    with pytest.raises(RefusedError, match=reason):
        case_of(row(**changes))


@pytest.mark.parametrize(
    ("text", "gpu", "name", "cards"),
    [
        ("NVLink/NVSwitch intra-node; 8x 200Gb/s HDR InfiniBand per node", "A100", "infiniband-hdr", 8),
        ("1600 Gbps RoCE per node", "A100", "roce-200g", 8),
        ("NVLink; 4x 100Gb RoCE per node", "A100", "roce-100g", 4),
        ("NVLink intra-node; RDMA 400 Gb/s per GPU inter-node", "H100", "infiniband-ndr", 8),
        ("AWS p4d: 400 Gbps EFA", "A100", "efa-100g", 4),
        ("", "H100", "infiniband-ndr", 8),
    ],
)
def test_words_become_links(text, gpu, name, cards):
    cluster = case_of(row(interconnect=text, gpu=gpu, n_gpus=16, dp=8, global_batch=128)).cluster
    assert (cluster.num_nodes, cluster.inter_node_link.name, cluster.nics_per_node) == (2, name, cards)


def test_stages_of_the_notes_have_degrees_of_their_own():
    notes = (
        "per-stage plan: stage0: 2 GPU tp=2 dp=1 ops=10 recompute=50% of ops; "
        "stage1: 4 GPU tp=4 dp=1 ops=30 recompute=0% of ops"
    )
    case = case_of(row(notes=notes, n_gpus=6, dp=1, tp=None, pp=2, micro_batch=1))
    assert [(s.tp, s.layers, s.recompute_share) for s in case.stages] == [(2, 1.0, 0.5), (4, 3.0, 0.0)]
    prediction = predict(case)
    assert len(prediction.peak_bytes) == 2
    assert prediction.seconds > 0


# --- prices -----------------------------------------------------------------------------------------


def test_a_plan_of_stock_pytorch_costs_what_the_simulator_says():
    """The same numbers as those of a plan that the search makes, but for what the ranks of our runtime agree on."""
    case = case_of(row(zero_stage=2, activation_recompute="full"))
    case = replace(case, engine=EAGER)
    found = predict(case)
    rank = rank_graph(case.key(case.stages[0]), case.spec.layers)
    costs = price(
        rank.graph, case.cluster, mesh=Mesh(pp=2, dp_shard=2), micro_batch=2, num_microbatches=8, schedule="1f1b",
        precision="bf16", optimizer="adamw",
    )  # fmt: skip
    plain, again = (next(i for i, s in enumerate(costs.strategies) if (s.zero, s.recompute) == (2, r)) for r in (0, 1))
    rows = [(i, again if b.kind == "block" else plain) for i, b in enumerate(rank.graph.blocks)]
    expected = simulate(costs, [rows[:3], rows[3:]], "1f1b", 8)
    assert costs.agreement_seconds > 0
    assert found.seconds == pytest.approx(expected.step_seconds - costs.agreement_seconds, rel=1e-9)
    np.testing.assert_allclose(found.peak_bytes, expected.peak_bytes, rtol=1e-9)


def test_terms_add_up():
    prediction = predict(case_of(row(tp=2, n_gpus=8, zero_stage=1, activation_recompute="full")))
    assert prediction.terms.total_seconds == pytest.approx(prediction.seconds, rel=1e-12)
    assert min(asdict(prediction.terms).values()) >= -1e-12
    assert prediction.terms.tp_seconds > 0
    assert prediction.memory.allocated_bytes == pytest.approx(max(prediction.peak_bytes), rel=1e-12)
    assert min(asdict(prediction.memory).values()) >= 0


def matmul_seconds(each):
    return predict(case_of(each)).terms.gemm_seconds


def test_every_choice_has_its_price():
    plain = seconds()
    assert seconds(activation_recompute="full") > plain
    assert seconds(vp_interleave=2) != plain
    offloaded = predict(case_of(row(offload="optimizer")))
    assert offloaded.terms.offload_seconds > 0
    assert offloaded.terms.optimizer_seconds < predict(case_of(row())).terms.optimizer_seconds
    assert offloaded.memory.optimizer_bytes == 0
    assert predict(case_of(row(offload="activation checkpoints"))).terms.offload_seconds > 0
    assert matmul_seconds(row(precision="fp8")) < 0.8 * matmul_seconds(row())  # what is left is the head, in 16 bits
    assert seconds(compiled=True) <= plain
    long = {"seq_len": 128, "pp": 1, "dp": 1, "n_gpus": 2, "tp": 1, "cp": 2, "global_batch": 8}
    assert predict(case_of(row(**long))).terms.cp_seconds > 0
    experts = {"notes": "MoE: 4 experts top-2", "ep": 2}
    assert predict(case_of(row(**experts))).terms.ep_seconds > 0
    for name in ("ZB-1p", "ZB-2p"):
        assert seconds(notes=f"schedule {name}") < plain


def test_experts_that_are_assumed_are_said():
    told = {model: case_of(row(ep=2, model=model)).notes for model in ("GPT tiny", "GPT tiny 4experts")}
    assert [note for note in told["GPT tiny"] if "experts" in note] == ["experts are not stated: 8, 1 for each token"]
    assert not [note for note in told["GPT tiny 4experts"] if "experts" in note]


def test_unfused_attention_takes_longer_and_keeps_the_scores():
    fused = predict(case_of(row(seq_len=64)))
    unfused_case = case_of(row(seq_len=64, flash_attention=False))
    unfused = predict(unfused_case)
    assert unfused.seconds >= fused.seconds
    assert unfused.memory.activations_bytes > fused.memory.activations_bytes
    # Selective recomputation drops them again, and runs the core twice (Korthikanti et al. 2022, section 5).
    selective = predict(case_of(row(seq_len=64, flash_attention=False, activation_recompute="selective")))
    assert selective.memory.activations_bytes < unfused.memory.activations_bytes


def test_scores_are_five_bytes_each():
    """5 a s^2 b bytes of a layer with dropout: Korthikanti et al. 2022 (arXiv 2205.05198), equation 1."""
    flash, plain = (
        rank.graph.blocks[1].saved.per_sample for rank in (_implemented(flash=True), _implemented(flash=False))
    )
    assert plain - flash == pytest.approx(5 * 4 * 64 * 64, rel=1e-6)


def _implemented(*, flash):
    from types import SimpleNamespace

    from planner.validate.price import _tables

    case = case_of(row(flash_attention=flash))
    case = replace(case, dropout=0.1, spec=replace(case.spec, dropout=0.1))
    return SimpleNamespace(graph=_tables(case, case.stages[0]).graph)


def test_megatron_pads_a_vocabulary_and_has_its_own_loss():
    """Where the vocabulary is not split either; PyTorch alone does neither."""
    odd = {"vocab": 50257, "pp": 1, "dp": 4, "hidden": 2048, "heads": 16}
    padded, raw = case_of(row(**odd)), case_of(row(**odd, id="fsdp-blog-1"))
    assert (padded.engine.name, raw.engine.name) == ("megatron", "stock")
    assert (padded.spec.vocabulary, raw.spec.vocabulary) == (50304, 50257)
    assert case_of(row(**odd, id="vtrain-s-1")).spec.vocabulary == 50257

    def passes(case):
        """Bytes of each pass over the logits, two samples."""
        work = shares(case)[0].priced.work.classes[-1]
        found = work.table.num_bytes[work.kind == HEAD] / (2 * case.spec.vocabulary * case.spec.sequence)
        return found[found > 1].round(2).tolist()

    assert passes(padded) == [6.0, 4.0, 8.0, 8.0, 4.0, 8.0, 8.0, 6.0]
    assert passes(raw) == [4.0, 2.0, 6.0]  # the soft-max, zeros for its gradient, that


def test_collectives_of_async_tensor_parallelism_are_partly_hidden():
    tp = {"id": "torchtitan-1", "tp": 2, "pp": 1, "dp": 2, "zero_stage": 3}
    vanilla, asynchronous = (case_of(row(**tp, notes=f"{word} TP; H100")) for word in ("vanilla", "async"))
    assert vanilla.question == asynchronous.question
    assert vanilla.plan != asynchronous.plan
    took = [predict(case).terms.tp_seconds for case in (vanilla, asynchronous)]
    assert took[1] == pytest.approx(0.67 * took[0])
    always = case_of(row(**{**tp, "id": "nemo-1"}, sequence_parallel=True))  # its recipes say so, its rows need not
    assert always.async_tp
    engine = always.engine
    both = [predict(replace(always, async_tp=is_async)).terms.tp_seconds for is_async in (False, True)]
    assert both[1] / both[0] == pytest.approx(engine.async_collectives / engine.collectives)


def test_an_older_fused_attention_takes_longer():
    """Tables of A100 from before torch 2; those of H100 are later."""
    older, later = (case_of(row(id="mpt-1", gpu=gpu, seq_len=2048)) for gpu in ("A100", "H100"))
    assert (older.attention_speed, later.attention_speed) == (0.555, 1.0)
    took = [predict(replace(older, attention_speed=speed)).terms.attention_seconds for speed in (1.0, 0.5)]
    assert took[1] == pytest.approx(2 * took[0])


def test_megatrons_split_gathers_no_weights():
    """At the prices of an NVSwitch node it would be faster to gather a layer's matrices, which Megatron never does."""
    spec = case_of(row()).spec
    spec = replace(spec, layers=2, hidden=4096, heads=32, key_value_heads=32, ffn_hidden=16384, sequence=2048)
    found = _made(TraceKey(spec=spec, tp=8, sequence_parallel=False, precision="bf16"))
    assert not isinstance(found, str), found
    graph, _ = found
    weights = {index for index, tensor in enumerate(graph.tensors) if tensor.kind == "parameter"}

    made = [node for node in graph.nodes if node.op.startswith("planner.")]
    assert made
    assert not [node.name for node in made if node.op == "planner.gather.default" and weights & set(reads(node))]


def test_samples_that_are_batched_by_length_have_fewer_tokens():
    bert = {
        "id": "dle-1",
        "model": "BERT-large pretraining",
        "seq_len": 512,
        "pp": 1,
        "dp": 4,
        "notes": "container 21.11",
    }
    binned = case_of(row(**bert))
    assert binned.spec.sequence == 288
    assert any("binned by length" in note for note in binned.notes)
    assert case_of(row(**{**bert, "notes": "container 20.06"})).spec.sequence == 512
    assert case_of(row(**{**bert, "seq_len": 128})).spec.sequence == 128


def test_an_optimizer_that_steps_parameter_by_parameter_sends_its_operations():
    case = case_of(row(id="dle-1", model="Transformer-XL base", pp=1, dp=4))
    assert case.optimizer_operations == 29
    assert case_of(row(id="dle-1", model="BERT-large pretraining", pp=1, dp=4)).optimizer_operations == 0
    more = predict(case).seconds - predict(replace(case, optimizer_operations=0.0)).seconds
    each = 29 * case.engine.dispatch * case.cluster.device.dispatch_seconds
    parameters = 12 * case.spec.layers + 4  # of the layers; both embeddings and the last norm
    assert more / each == pytest.approx(parameters, abs=1.01)  # a head of its own is one more


def test_features_count_the_work_of_a_step():
    case = case_of(row(activation_recompute="full"))
    rank = rank_graph(case.key(case.stages[0]), case.spec.layers)
    flop = sum(
        k["flop"] * k["count"]
        for stage in features(case)
        for k in stage["kernels"]
        if k["kind"] in ("matmul", "attention")
    )  # fmt: skip
    once = rank.graph.flop_per_sample() * 16
    forward = sum(
        rank.graph.classes[b.class_index].flop("forward").at(1) for b in rank.graph.blocks if b.kind == "block"
    )
    assert flop == pytest.approx(once + 16 * forward, rel=0.02)


def test_a_narrow_model_has_all_of_its_layers():
    """Where tokens are many for the width, layers of a shallow trace are cut within: it cannot be repeated."""
    case = case_of(row(id="mcore-ci-1", hidden=512, heads=8, seq_len=1024, vocab=50257, layers=5))
    layers = layer_places(rank_graph(case.key(case.stages[0]), 5).graph)
    assert list(dict.fromkeys(layers.values())) == [0, 1, 2, 3, 4]
    assert predict(case).seconds > 0


# --- figures ----------------------------------------------------------------------------------------


def test_figures_by_hand():
    pairs = [
        Pair(group="a", plan=str(p), predicted=p, measured=m)
        for p, m in ((1.0, 1.0), (2.2, 2.0), (2.7, 3.0), (4.0, 4.0), (6.0, 5.0))
    ]
    found = accuracy(pairs)
    assert (found.count, found.tau, found.regret) == (5, 1.0, 0.0)
    assert found.median_ape == pytest.approx(0.1)
    assert found.mean_ape == pytest.approx(0.08)
    assert found.p90_ape == pytest.approx(0.16)
    assert found.bias == pytest.approx(0.0)
    # Four pairs in order, one against it, one tie in the first: (4 - 1) / sqrt(5 x 6).
    assert kendall_tau([1, 1, 2, 3], [1, 2, 4, 3]) == pytest.approx(3 / np.sqrt(30))
    assert regret([Pair(group="", plan=str(p), predicted=p, measured=m) for p, m in ((1.0, 3.0), (2.0, 2.0))]) == 0.5


def test_rows_of_one_plan_are_no_choice():
    """What a plan does not decide, other software and other data, makes another question."""
    one, again, other = row(iter_time_s=0.2), row(id="own-2", iter_time_s=0.1), row(id="own-3", dp=1, pp=4)
    found = [case_of(each) for each in (one, again, other)]
    assert found[0].question == found[1].question == found[2].question
    assert found[0].plan == found[1].plan != found[2].plan
    # Which software it is may follow from the plan: Megatron-LM shards no parameters.
    split, sharded = (case_of(row(zero_stage=zero, pp=1, dp=4, tp=1)) for zero in (0, 3))
    assert (split.engine.name, sharded.engine.name) == ("megatron", "stock")
    assert split.question == sharded.question
    pairs = [Pair(group="a", plan="one", predicted=1.0, measured=m) for m in (1.0, 2.0)]
    assert accuracy(pairs).regret is None
    bert = {"model": "BERT 4B", "layers": 48, "hidden": 2560, "heads": 32, "seq_len": 512, "micro_batch": 8}
    padded, binned = (
        case_of(row(id="nemo-launcher-1", notes=f"{word} LDDL data loader; with LDDL sequences are binned", **bert))
        for word in ("without", "with")
    )
    assert (padded.plan, padded.spec) == (binned.plan, binned.spec)
    assert padded.question != binned.question
    assert any("to how many tokens is not stated" in note for note in binned.notes)
    words = ("PyTorch; samples/s", "DeepSpeed transformer kernel; samples/s")
    plain, fused = (case_of(row(id="ds-bert-1", notes=each, **bert)) for each in words)
    assert (plain.engine.name, fused.engine.name) == ("ddp", "deepspeed")
    assert plain.question != fused.question


def test_the_command_prints_figures_by_source(tmp_path, capsys):
    rows = [
        row(),
        row(id="own-2", dp=1, pp=4),
        row(id="other-1", iter_time_s=0.2, outcome="OOM"),
        row(id="other-2", gpu="[/bold] :fire:"),
    ]
    path = write(tmp_path / "rows.csv", rows)
    page = tmp_path / "page.html"
    assert main(["validate", str(path), "--json", "--html", str(page)]) == 0
    data = json.loads(capsys.readouterr().out)
    (data_reason,) = data["refused"]["reasons"]
    assert data_reason.startswith("GPU [/bold] :fire: is not known; known are A100")
    assert (data["rows"], data["priced"], data["refused"]) == (
        4, 3, {"count": 1, "reasons": {data_reason: 1}},
    )  # fmt: skip
    assert list(data["by_source"]) == ["own", "other"]
    assert {"median_ape", "mean_ape", "p90_ape", "bias", "tau", "regret"} <= set(data["time"])
    assert data["oom"] == {"tp": 0, "fp": 0, "fn": 1, "tn": 0}
    assert "own-2" in page.read_text()
    assert "rows of sources that are not known are taken to have run on megatron" in page.read_text()
    assert "[/bold] :fire: is not known" in page.read_text()
    assert main(["validate", str(path)]) == 0
    table = capsys.readouterr().out
    assert "own" in table
    assert "1 rows are not priced: GPU [/bold] :fire: is not known" in table
    assert "(other-2)" in table
    each = {found["id"]: found for found in data["each"]}
    assert list(each) == ["own-1", "own-2", "other-1", "other-2"]
    assert each["other-1"]["measured_seconds"] == 0.2
    assert each["other-1"]["time_error"] == pytest.approx(each["other-1"]["predicted_seconds"] / 0.2 - 1)
    assert (each["other-1"]["outcome"], each["other-1"]["fits"], each["other-1"]["refused"]) == ("oom", True, "")
    assert (each["other-2"]["predicted_seconds"], each["other-2"]["refused"]) == (None, data_reason)
    line = next(line for line in table.splitlines() if line.startswith("other-1"))
    assert f"{each['other-1']['time_error']:+.1%}" in line


def test_what_runs_of_a_source_that_is_not_known_ran_on_is_said_and_can_be_given(tmp_path, capsys):
    path = write(tmp_path / "rows.csv", [row(), row(id="torchtitan-1", pp=1, dp=4, zero_stage=3)])
    found = {name: validate([path], engine=name) for name in (None, "megatron", "stock")}
    assert found[None].to_dict() == found["megatron"].to_dict()
    assert found["stock"].assumed_engines == {"stock": 1}
    took = {name: [r.prediction.seconds for r in each.results if r.prediction] for name, each in found.items()}
    assert took["stock"][0] != took[None][0]
    assert took["stock"][1] == took[None][1]  # its source says what it ran
    assert explain([path], "own-1", engine="stock")["predicted_seconds"] == took["stock"][0]
    assert main(["validate", str(path)]) == 0
    assert "1 rows of sources that are not known are taken to have run on megatron" in capsys.readouterr().out
    assert main(["validate", str(path), "--engine", "mine"]) != 0
    assert "no engine is named 'mine'; known are" in capsys.readouterr().err


def test_a_rate_that_gives_no_time_is_said(tmp_path, capsys):
    path = write(tmp_path / "rows.csv", [row(iter_time_s=None, tflops_per_gpu=120.0), row(id="own-2")])
    assert main(["validate", str(path)]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "1 rows state tflops_per_gpu or mfu alone and are not compared" in told


def test_what_of_a_file_is_not_read_is_said(tmp_path, capsys):
    path = write(tmp_path / "rows.csv", [row(iter_time_s=None), row(iter_time_s=None)])
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0] + ",iter_time_ms", *(f"{line},100" for line in lines[1:])]))
    assert main(["validate", str(path)]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "no row that is priced was measured: there is nothing to compare" in told
    assert "columns that are not known are not read: 'iter_time_ms'" in told
    assert "1 ids occur more than once, and all of their rows count: own-1" in told
    assert "UTF-8" not in told
    path.write_bytes(path.read_bytes().replace(b"GPT tiny", b"GPT t\xefny"))
    assert main(["validate", str(path)]) == 0
    assert "rows.csv has bytes that are no UTF-8" in "".join(capsys.readouterr().out.split("\n"))
    path.write_text(lines[0] + "\n")
    assert main(["validate", str(path)]) == 1
    assert "rows.csv: has no rows below its header" in capsys.readouterr().err
    assert main(["validate", str(path), "--explain", "own-1", "--html", str(tmp_path / "page.html")]) == 1
    assert "leave out --html" in capsys.readouterr().err


def test_one_row_is_explained(tmp_path):
    path = write(tmp_path / "rows.csv", [row()])
    told = explain([path], "own-1")
    assert told["predicted_seconds"] == pytest.approx(sum(told["time"].values()))
    assert told["features"][0]["kernels"]
    assert told["engine"] == "megatron"
    with pytest.raises(RunError, match="no row has the id"):
        explain([path], "nothing")
    path.write_text(path.read_text().replace("bf16", "int4"))
    with pytest.raises(RunError, match="own-1 is not priced: precision is 'int4', not bf16"):
        explain([path], "own-1")


def test_rows_are_the_same_whatever_was_traced_before(tmp_path):
    path = write(tmp_path / "rows.csv", [row(), row(id="own-2", layers=8)])
    assert validate([path]).to_dict() == validate([path]).to_dict()
