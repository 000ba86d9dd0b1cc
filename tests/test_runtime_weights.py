"""Weights that are given, from disk or memory, read part by part; and the weights of a running trainer on disk."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, load_model, save_file
from torch import Tensor, nn

from planner.errors import ModelError
from planner.runtime.weight_files import open_weights
from tests import models, weight_cases
from tests.distributed_cases import Kind, build
from tests.distributed_references import SAMPLES
from tests.ranks import RankPool
from tests.test_runtime_trainer import FROZEN_FRONT

pytestmark = pytest.mark.distributed

ZERO3 = Kind(name="ZeRO-3", dp=2, zero=(3,))
PP2 = Kind(name="PP2", pp=2)
TP2 = Kind(name="TP2", tp=2, variant="lean")
SPLIT_ON_FOUR = (
    Kind(name="TP2xDP2 ZeRO-3", tp=2, dp=2, zero=(3,), variant="lean"),
    Kind(name="PP2xTP2 ZeRO-1", tp=2, pp=2, zero=(1,), variant="lean"),
    Kind(name="CP2xDP2 ZeRO-3", cp=2, dp=2, zero=(3,), variant="lean"),
    Kind(name="TP4", tp=4, variant="leanest"),
)


def write(state: dict[str, Tensor], folder: Path, *, files: int = 2) -> Path:
    """Safetensors with an index, as Hugging Face writes them."""
    folder.mkdir(parents=True, exist_ok=True)
    names = list(state)
    of = {name: f"model-{i % files + 1:05d}-of-{files:05d}.safetensors" for i, name in enumerate(names)}
    for file in sorted(set(of.values())):
        save_file({n: state[n].contiguous() for n in names if of[n] == file}, folder / file, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": of}))
    return folder


def untied(model: nn.Module) -> dict[str, Tensor]:
    """Each tensor of the state_dict once."""
    kept = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    return {name: value.detach().clone() for name, value in model.state_dict().items() if name in kept}


@pytest.fixture(scope="module")
def gpt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(untied(build("gpt")), tmp_path_factory.mktemp("weights") / "gpt")


@pytest.mark.parametrize("name", ["gpt-tied", "resnet", "hf-llama"])
@pytest.mark.parametrize("kind", [ZERO3, Kind(name="PP2 ZeRO-1", pp=2, zero=(1,))], ids=lambda kind: kind.name)
def test_weights_on_disk_train_as_the_model_that_has_them(two: RankPool, tmp_path: Path, name: str, kind: Kind) -> None:
    folder = write(untied(build(name)), tmp_path / "weights")

    for result in two.run(weight_cases.loaded, name, kind, str(folder)):
        assert result["different"] == []


def test_the_loss_is_that_of_the_model_with_these_weights(two: RankPool, gpt: Path) -> None:
    for result in two.run(weight_cases.loaded, "gpt", ZERO3, str(gpt), timeout_seconds=100):
        assert result["different"] == []
    for weights in (str(gpt), None):
        for result in two.run(_loaded_and_trained, weights):
            assert result["different"] == []
            assert result["error"] < 1e-9


def _loaded_and_trained(weights: str | None) -> dict[str, Any]:
    """On a model that has other values of its own."""
    return weight_cases.loaded("gpt", ZERO3, weights, real=True, steps=2)


def test_each_rank_reads_its_part_alone(two: RankPool, four: RankPool, gpt: Path) -> None:
    model = build("gpt")
    everything = sum(p.nbytes for p in model.parameters())

    for pool, kind in ((two, ZERO3), (two, PP2), (four, Kind(name="", dp=4, zero=(3,)))):
        results = pool.run(weight_cases.loaded, "gpt", kind, str(gpt))

        assert [r["read"] for r in results] == [r["own"] for r in results]
        assert sum(r["read"] for r in results) == everything
    hybrid = four.run(weight_cases.loaded, "gpt", Kind(name="HSDP", dp=4, shards=2, zero=(3,)), str(gpt))
    assert [r["different"] for r in hybrid] == [[]] * 4
    assert [r["read"] for r in hybrid] == [r["own"] for r in hybrid]
    assert sum(r["read"] for r in hybrid) == 2 * everything
    replicated = two.run(weight_cases.loaded, "gpt", Kind(name="ZeRO-0", dp=2), str(gpt))
    assert [r["read"] for r in replicated] == [everything] * 2


def test_no_rank_holds_more_than_its_part_and_one_tensor_while_it_reads(two: RankPool, gpt: Path) -> None:
    for held in two.run(weight_cases.held_while_starting, ZERO3, str(gpt)):
        assert held["read"] < held["model"] * 0.51
        assert held["most"] <= held["padded"] * 1.1 + held["largest tensor"] < held["model"] * 0.8


def test_no_rank_holds_more_than_its_part_and_one_module_while_it_draws(two: RankPool) -> None:
    for held in two.run(weight_cases.held_while_starting, ZERO3, None):
        assert held["most"] <= held["padded"] * 1.1 + 2 * held["largest module"]


@pytest.mark.parametrize(
    "kind",
    [
        Kind(name="ZeRO-0", dp=2),
        Kind(name="ZeRO-3", dp=2, zero=(3,), recompute=("full",)),
        Kind(name="1F1B", pp=2, sizes=(2,), longest=1),
    ],
    ids=lambda kind: kind.name,
)
@pytest.mark.parametrize("frozen", [(), FROZEN_FRONT])
def test_scalars_frozen_and_unread_parameters_are_read(two: RankPool, kind: Kind, frozen: tuple[str, ...]) -> None:
    for result in two.run(weight_cases.frozen_from_weights, kind, frozen):
        assert result["error"] < 1e-9
        assert result["keys"]


def test_fewer_rows_than_ranks_are_read(four: RankPool) -> None:
    for result in four.run(weight_cases.frozen_from_weights, Kind(name="ZeRO-3", dp=4, zero=(3,)), ()):
        assert result["error"] < 1e-9


def test_bf16_starts_from_weights_on_fp32_masters(one: RankPool, two: RankPool, gpt: Path) -> None:
    alone = one.run(weight_cases.low_precision_start, Kind(name="", zero=(1,)), str(gpt))[0]

    for kind in (ZERO3, PP2):
        for losses in two.run(weight_cases.low_precision_start, kind, str(gpt)):
            assert losses == pytest.approx(alone, rel=5e-3)


@pytest.mark.parametrize("given", [False, True])
def test_a_model_without_a_graph_starts_from_meta(two: RankPool, one: RankPool, given: bool) -> None:
    for result in two.run(weight_cases.without_graph, ZERO3, given):
        assert result["different"] == []
        assert result["error"] < 1e-9
    (result,) = one.run(weight_cases.without_graph, Kind(name=""), given)
    assert result["different"] == []
    assert result["error"] < 1e-9


def test_a_plain_attribute_on_meta_is_refused(one: RankPool) -> None:
    (said,) = one.run(weight_cases.lost_attribute)

    assert said.startswith("shift is a tensor on meta that is no parameter and no buffer, and has no value;")


def spoilt(tmp_path: Path, how: str) -> Path:
    """Weights of the test GPT with one fault."""
    state = untied(build("gpt"))
    if how == "missing":
        state = {name: value for name, value in state.items() if "blocks.3" not in name}
    if how == "renamed":
        state = {f"transformer.{name}": value for name, value in state.items()}
    if how == "unexpected":
        state["extra.weight"] = torch.zeros(2)
    if how == "shape":
        state["norm.bias"] = torch.zeros(17)
    if how == "dtype":
        state["norm.bias"] = torch.zeros(16, dtype=torch.int64)
    folder = write(state, tmp_path / how)
    if how == "file lost":
        (folder / "model-00002-of-00002.safetensors").unlink()
    if how == "cut short":
        file = folder / "model-00002-of-00002.safetensors"
        file.write_bytes(file.read_bytes()[:-100])
    if how == "empty":
        for file in folder.iterdir():
            file.unlink()
    if how == "dcp":
        for file in folder.iterdir():
            file.unlink()
        (folder / ".metadata").write_bytes(b"")
    return folder


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("missing", "12 of 53 names missing (blocks.3.norm1.weight, blocks.3.norm1.bias, ...), 0 unexpected;"),
        ("renamed", "53 of 53 names missing (tokens.weight, positions.weight, ...), 53 unexpected (transformer."),
        ("unexpected", "0 of 53 names missing, 1 unexpected (extra.weight);"),
        ("shape", "norm.bias has shape [17] in "),
        ("dtype", "norm.bias is torch.int64 in "),
        ("file lost", "names model-00002-of-00002.safetensors, which is not there (1 of 2 files missing)"),
        ("cut short", "model-00002-of-00002.safetensors is no whole file of safetensors ("),
        ("empty", "holds no weights"),
        ("dcp", "is a checkpoint of torch.distributed.checkpoint; turn it into a file"),
    ],
)
def test_weights_that_do_not_fit_are_refused_alike_on_all_ranks(
    two: RankPool, tmp_path: Path, how: str, said: str
) -> None:
    given = {"weights": str(spoilt(tmp_path, how))}

    sentences = two.run(weight_cases.sentence, weight_cases.meta_gpt, given, ZERO3)

    assert sentences[0] == sentences[1]
    assert sentences[0].startswith("ModelError: ")
    assert said in sentences[0]
    assert "\n" not in sentences[0]


def test_weights_that_one_rank_lacks_are_refused_on_all(two: RankPool, tmp_path: Path, gpt: Path) -> None:
    shutil.copytree(gpt, tmp_path / "of-0")

    sentences = two.run(weight_cases.sentence, weight_cases.meta_gpt, {"weights": f"{tmp_path}/of-{{rank}}"}, ZERO3)

    assert sentences == [f"ModelError: rank 1: there are no weights {tmp_path}/of-1; give a directory or file of "
                         "safetensors, or a state_dict"] * 2  # fmt: skip


def test_weights_that_differ_between_ranks_are_refused(two: RankPool, tmp_path: Path, gpt: Path) -> None:
    shutil.copytree(gpt, tmp_path / "of-0")
    write({n: v.float() for n, v in untied(build("gpt")).items()}, tmp_path / "of-1")

    for said in two.run(weight_cases.sentence, weight_cases.meta_gpt, {"weights": f"{tmp_path}/of-{{rank}}"}, ZERO3):
        assert "the given weights of rank 0 and the given weights of rank 1 differ" in said


@pytest.mark.parametrize("kind", [ZERO3, PP2], ids=lambda kind: kind.name)
def test_what_nothing_initialises_is_refused_on_all_ranks(two: RankPool, gpt: Path, kind: Kind) -> None:
    make = weight_cases.gpt_with_a_norm_without_init

    sentences = two.run(weight_cases.sentence, make, {}, kind)

    assert sentences[0] == sentences[1]
    assert sentences[0].startswith("ModelError: norm.weight, norm.bias are on meta and no method of their module")
    assert two.run(weight_cases.sentence, make, {"weights": str(gpt)}, kind) == ["", ""]


def test_values_of_its_own_that_differ_are_refused_beside_drawn_ones(two: RankPool) -> None:
    for said in two.run(weight_cases.sentence, weight_cases.differently_initialised, {}, ZERO3):
        assert "norm.bias of rank 0 and norm.bias of rank 1 differ" in said


def test_files_of_torch_save_and_mappings_are_read(tmp_path: Path) -> None:
    state = {"a": torch.arange(6.0).reshape(3, 2), "s": torch.tensor(2.0)}
    torch.save(state, tmp_path / "pytorch_model.bin")

    for given in (tmp_path, tmp_path / "pytorch_model.bin", state):
        weights = open_weights(given)
        assert torch.equal(weights.read("a", (slice(1, 3), slice(0, 2))), state["a"][1:])
        assert torch.equal(weights.read("s", ()), state["s"])
        assert weights.bytes_read == 16 + 4


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"model": {"a": torch.ones(1)}}, "'model' of the given state_dict is a dict"),
        ({"a": torch.ones(1, device="meta")}, "'a' of the given state_dict is on meta"),
        ("no/such/place", "there are no weights no/such/place"),
    ],
)
def test_what_holds_no_weights_is_refused(given: Any, said: str) -> None:
    with pytest.raises(ModelError) as error:
        open_weights(given)
    assert said in str(error.value)


def test_an_object_that_is_no_state_dict_is_refused(tmp_path: Path) -> None:
    torch.save([torch.ones(2)], tmp_path / "a.pt")
    torch.save({"a": Path()}, tmp_path / "b.pt")

    with pytest.raises(ModelError, match="holds a list"):
        open_weights(tmp_path / "a.pt")
    with pytest.raises(ModelError, match=r"cannot be read by torch\.load"):
        open_weights(tmp_path / "b.pt")
    with pytest.raises(ModelError, match=r"has 2 files a\.pt"):
        open_weights(tmp_path)


@pytest.mark.parametrize("name", ["gpt-tied", "resnet"])
def test_saved_weights_are_those_of_the_trained_model(four: RankPool, two: RankPool, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "new" / "saved"
    kind = Kind(name="PP2xDP2 ZeRO-3", pp=2, dp=2, zero=(3,))

    results = four.run(weight_cases.saved, name, kind, folder, 20_000, None)

    files = results[0]["files"]
    assert all(result["files"] == files for result in results)
    assert sorted(p.name for p in folder.iterdir()) == sorted(files)
    assert files[-1] == "model.safetensors.index.json"
    state = results[0]["state"]
    assert all(result["state"] == {} for result in results[1:])
    index = json.loads((folder / files[-1]).read_text())
    stored = {n: v for file in files[:-1] for n, v in load_file(folder / file).items()}
    assert {n: index["weight_map"][n] for n in stored} == index["weight_map"]
    assert set(stored) == set(untied(build(name)))
    assert all(torch.equal(value, state[n]) for n, value in stored.items())
    assert all(stored[n].dtype == state[n].dtype for n in stored)
    assert len(files) > 4
    assert all("holds weights already (model-00001" in result["again"] for result in results)

    fresh = build(name)
    if name == "gpt-tied":
        fresh.load_state_dict(stored | {"head.weight": stored["tokens.weight"]}, strict=True)
    else:
        fresh.load_state_dict(stored, strict=True)
        return  # a batch is coupled
    loss = fresh(**models.batch(name, SAMPLES, step=9)).item()
    assert results[0]["loss"] == pytest.approx(loss, rel=1e-9)
    for result in two.run(_losses_from, name, str(folder)):
        assert result == pytest.approx(loss, rel=1e-9)


def _losses_from(name: str, weights: str) -> float:
    """The first loss under another plan."""
    from planner.runtime import apply_plan
    from tests.distributed_cases import graph_of, make_plan, own_part

    graph = graph_of(name)
    trainer = apply_plan(
        make_plan(graph, PP2),
        weight_cases.on_meta(name),
        graph=graph,
        weights=weights,
        optimizer=models.sgd,
        check=False,
    )
    return trainer.step(own_part(models.batch(name, SAMPLES, step=9), trainer))


def test_a_hugging_face_model_loads_what_was_saved(two: RankPool, tmp_path: Path) -> None:
    results = two.run(weight_cases.saved, "hf-gpt2", PP2, tmp_path, 10_000, None)

    model: Any = build("hf-gpt2")
    model.config.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype=torch.float64)
    state = results[0]["state"]
    assert all(torch.equal(value, state[name]) for name, value in loaded.state_dict().items())
    assert loaded.lm_head.weight is loaded.transformer.wte.weight


def test_one_small_file_has_no_index_and_may_be_converted(two: RankPool, tmp_path: Path) -> None:
    results = two.run(weight_cases.saved, "gpt-tied", ZERO3, tmp_path, 10**9, torch.bfloat16)

    assert [p.name for p in tmp_path.iterdir() if p.suffix] == ["model.safetensors"]
    fresh = models.build("gpt-tied", dtype=torch.bfloat16)
    load_model(fresh, tmp_path / "model.safetensors")
    state = results[0]["state"]
    assert all(torch.equal(v, state[n].bfloat16()) for n, v in fresh.state_dict().items())


def test_no_rank_holds_more_than_its_part_and_a_tensor_while_it_saves(two: RankPool, tmp_path: Path) -> None:
    largest = max(p.nbytes for p in build("gpt").parameters())

    for result in two.run(weight_cases.saved, "gpt", ZERO3, tmp_path / "saved", 10**9, None):
        assert result["held"] <= 4 * largest  # a gathered tensor, torch's buffers for it, the copy for the file


def test_a_full_disk_leaves_nothing_and_is_told_to_all(two: RankPool, tmp_path: Path) -> None:
    folder = tmp_path / "saved"

    for said in two.run(weight_cases.save_that_fails, folder):
        assert said == (
            f"rank 0: {folder} cannot be written (No space left on device); make room, or give another directory"
        )
    assert list(folder.iterdir()) == []


def _check_read(results: list[dict[str, Any]], name: str, pp: int = 1) -> None:
    """The values of one device, the loss of two steps, and no byte read but this rank's part of the parameters.

    Buffers are read whole, by the stage and for the state.
    """
    model = build(name)
    buffers = sum(buffer.nbytes for key, buffer in model.named_buffers() if key in model.state_dict())
    for result in results:
        assert result["different"] == []
        assert result["error"] < 1e-9
        assert result["own"] <= result["read"] <= result["own"] + 2 * buffers
        assert pp > 1 or result["read"] == result["own"] + 2 * buffers


def test_split_weights_are_read_by_part_and_train_as_the_model_that_has_them(two: RankPool, tmp_path: Path) -> None:
    folder = write(untied(build("hf-gpt2")), tmp_path / "weights")

    results = two.run(_loaded_for_two_steps, "hf-gpt2", TP2, str(folder))

    _check_read(results, "hf-gpt2")
    everything = sum(p.nbytes for p in build("hf-gpt2").parameters())
    assert sum(r["own"] for r in results) < 1.6 * everything  # not all is split


def _loaded_for_two_steps(name: str, kind: Kind, weights: str) -> dict[str, Any]:
    return weight_cases.loaded(name, kind, weights, steps=0 if name == "resnet" else 2)  # a batch of it is coupled


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["gpt-tied", "hf-llama", "resnet"])
@pytest.mark.parametrize("kind", SPLIT_ON_FOUR, ids=lambda kind: kind.name)
def test_split_weights_on_four_ranks_are_read_drawn_and_written(
    four: RankPool, two: RankPool, tmp_path: Path, name: str, kind: Kind
) -> None:
    """From files, from meta, and to files that another plan reads."""
    folder = write(untied(build(name)), tmp_path / "weights")

    _check_read(four.run(_loaded_for_two_steps, name, kind, str(folder), timeout_seconds=200), name, kind.pp)
    for result in four.run(weight_cases.drawn, name, kind, 0 if name == "resnet" else 1):
        assert result["different"] == []
        assert result["error"] < 1e-9
    results = four.run(weight_cases.saved, name, kind, tmp_path / "saved", 20_000, None)
    state, files = results[0]["state"], results[0]["files"]
    stored = {n: v for file in files[:-1] for n, v in load_file(tmp_path / "saved" / file).items()}
    assert set(stored) == set(untied(build(name)))
    assert all(torch.equal(value, state[n]) for n, value in stored.items())
    if name != "resnet":
        for loss in two.run(_losses_from, name, str(tmp_path / "saved")):
            assert loss == pytest.approx(results[0]["loss"], rel=1e-9)
