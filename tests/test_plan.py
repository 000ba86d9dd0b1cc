import contextlib
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.errors import PlanError
from planner.plan import BlockPlan, CollectivePlan, InputSpec, Mesh, Plan, Prediction, ShardingPlan, StagePlan
from planner.report import describe_layout, plan_text, sharding_text

PLAN = Plan(
    model="gpt-small",
    cluster="1x4xA100-80GB",
    graph_fingerprint="a1" * 32,
    cluster_fingerprint="b2" * 32,
    precision="bf16",
    optimizer="adamw",
    global_batch=32,
    micro_batch=2,
    num_microbatches=8,
    schedule="1f1b",
    mesh=Mesh(pp=2, dp_shard=2),
    stages=(
        StagePlan(
            blocks=(
                BlockPlan(name="embed", zero=2, recompute="none"),
                BlockPlan(name="layers.0", zero=3, recompute="full"),
                BlockPlan(name="layers.1", zero=3, recompute="full"),
            )
        ),
        StagePlan(
            blocks=(
                BlockPlan(name="layers.2", zero=1, recompute="none"),
                BlockPlan(name="head", zero=1, recompute="none"),
            )
        ),
    ),
    inputs=(
        InputSpec(name="input_ids", shape=(-1, 128), dtype="int64"),
        InputSpec(name="labels", shape=(-1, 128), dtype="int64"),
    ),
    prediction=Prediction(
        step_seconds=0.25,
        bubble=0.125,
        peak_bytes=(3.0 * 2**30, 2.5 * 2**30),
        capacity_bytes=70.0 * 2**30,
        gap=0.0005,
        mfu=0.41,
        parts_seconds=(("compute", 0.2), ("communication", 0.01875), ("bubble", 0.03125), ("sync", 0.0)),
    ),
    notes=("no global batch was given: 32, 8 per device, is assumed",),
)
GOLDEN = """\
gpt-small on 1x4xA100-80GB: 4 devices (pp 2, dp_shard 2)
  global batch 32 = 2 data-parallel ranks x 8 micro-batches of 2, schedule 1f1b
  precision bf16, optimizer adamw
  step 250 ms, MFU 41.0%, bubble 12.5%; within 0.05% of the best of its configuration
  of which compute 200 ms, communication 18.8 ms, bubble 31.2 ms
  stage 0: peak 3.0 GiB of 70.0 GiB
    1 block: ZeRO-2  (embed)
    2 blocks: ZeRO-3, recompute  (layers.0 .. layers.1)
  stage 1: peak 2.5 GiB of 70.0 GiB
    2 blocks: ZeRO-1  (layers.2 .. head)
  note: no global batch was given: 32, 8 per device, is assumed"""


def _changed(**changes: Any) -> str:
    return json.dumps({**PLAN.to_dict(), **changes})


def test_a_plan_is_read_back_equal_and_written_with_the_same_bytes():
    text = PLAN.dumps()
    again = Plan.loads(text)

    assert again == PLAN
    assert again.dumps() == text


def test_a_saved_plan_is_the_text_and_leaves_nothing_beside_it(tmp_path):
    PLAN.save(tmp_path / "plan.json")

    assert Plan.load(tmp_path / "plan.json") == PLAN
    assert (tmp_path / "plan.json").read_text() == PLAN.dumps()
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


def test_the_json_has_every_axis_and_plain_units():
    data = PLAN.to_dict()

    assert data["mesh"] == {"pp": 2, "dp_replicate": 1, "dp_shard": 2, "cp": 1, "ep": 1, "tp": 1}
    assert data["peak_bytes"] == [3 * 2**30, 2.5 * 2**30]
    assert data["fits"] is True
    assert data["devices"] == 4


@pytest.mark.parametrize("step", ["fsync", "replace"])
@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failure_while_writing_leaves_no_file(step, failure, tmp_path, monkeypatch):
    def fail(*_args: object) -> None:
        raise failure

    monkeypatch.setattr(os if step == "fsync" else Path, step, fail)
    with pytest.raises((PlanError, KeyboardInterrupt)):
        PLAN.save(tmp_path / "plan.json")

    assert list(tmp_path.iterdir()) == []


def test_a_failure_while_writing_keeps_the_old_file(tmp_path, monkeypatch):
    PLAN.save(tmp_path / "plan.json")
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(PlanError, match=r"cannot write .*plan.json: No space left on device"):
        replace(PLAN, global_batch=64, num_microbatches=16).save(tmp_path / "plan.json")

    assert Plan.load(tmp_path / "plan.json") == PLAN


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is no JSON .* truncated or not a plan"),
        (PLAN.dumps()[:300].encode(), "is no JSON"),
        (b"\x80\x00\xff\xfe", "cannot read the plan .*: not a text file"),
        (b"[" * 100_000, "is no JSON"),
        (b"[1, 2]", "holds no plan: it must be a JSON object"),
        (b"{}", "has schema version null, this release reads 2"),
        (_changed(schema_version=1).encode(), "has schema version 1, this release reads 2; make it again"),
        (_changed(schema_version=True).encode(), "has schema version true"),
    ],
)
def test_a_file_that_is_no_plan_is_refused(content, message, tmp_path):
    (tmp_path / "plan.json").write_bytes(content)
    with pytest.raises(PlanError, match=message) as caught:
        Plan.load(tmp_path / "plan.json")

    assert "\n" not in str(caught.value)
    assert str(tmp_path / "plan.json") in str(caught.value)


@pytest.mark.parametrize(("path", "message"), [("", "Is a directory"), ("none.json", "No such file"), ("a\0b", "text")])
def test_a_file_that_cannot_be_read_is_refused(path, message, tmp_path):
    with pytest.raises(PlanError, match=f"cannot read the plan .*{message}"):
        Plan.load(f"{tmp_path}/{path}")


def test_every_error_is_named_at_once_with_its_path():
    data = PLAN.to_dict()
    del data["model"]
    data["global_batch"] = "many"
    data["mesh"]["pp"] = 0
    data["mesh"]["xp"] = 1
    data["stages"][0]["blocks"][1]["zero"] = 4
    data["stages"][1]["blocks"][0]["recompute"] = None
    data["inputs"][0]["shape"] = [-2]
    data["peak_bytes"][1] = float("nan")
    data["parts_seconds"]["compute"] = -1
    data["step_seconds"] = 10**400
    data["author"] = "me"
    with pytest.raises(PlanError) as caught:
        Plan.loads(json.dumps(data), origin="plan.json")
    message = str(caught.value)

    for fault in (
        "plan.json is no valid plan: model is missing",
        'global_batch must be a whole number, is "many"',
        "mesh.pp must be at least 1, is 0",
        "mesh.xp is no key of a plan",
        "stages[0].blocks[1].zero must be one of 0, 1, 2, 3, is 4",
        "stages[1].blocks[0].recompute must be text, is null",
        "inputs[0].shape must hold whole numbers, -1 for the batch, is [-2]",
        "peak_bytes[1] must be a number, at least 0, is NaN",
        "parts_seconds.compute must be a number, at least 0, is -1",
        "step_seconds must be a number, at least 0, is 1000",
        "author is no key of a plan",
    ):
        assert fault in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"devices": 8}, "devices is 8, the mesh has 4"),
        ({"fits": False}, "fits is false, peak_bytes and capacity_bytes say true"),
        ({"global_batch": 33}, "micro_batch x num_microbatches x data-parallel ranks is 32, global_batch is 33"),
        ({"peak_bytes": [1.0]}, "peak_bytes has 1 entries for 2 stages"),
        ({"stages": []}, "mesh.pp is 2 but there are 0 stages"),
        ({"micro_batch": 16, "num_microbatches": 1}, "1f1b needs at least as many micro-batches as stages: 1 < 2"),
        ({"mesh": {**PLAN.to_dict()["mesh"], "tp": 2}, "devices": 8}, "has 0 entries, but mesh.tp is 2: one"),
        ({"mesh": {**PLAN.to_dict()["mesh"], "cp": 2}, "devices": 8}, "has 0 entries, but mesh.cp is 2: one"),
        (
            {"mesh": {**PLAN.to_dict()["mesh"], "cp": 2, "ep": 2}, "devices": 16},
            "mesh.ep is 2 and mesh.cp is 2; this release runs one of the two at a time",
        ),
        ({"mesh": {**PLAN.to_dict()["mesh"], "cp": 2, "tp": 2}, "devices": 16}, "mesh.cp is 2 and mesh.tp is 2: one"),
        (
            {"mesh": {**PLAN.to_dict()["mesh"], "dp_replicate": 2, "dp_shard": 1}},
            "blocks with ZeRO-1, 2 or 3 need dp_shard, the mesh has none",
        ),
        (
            {"stages": [PLAN.to_dict()["stages"][0]] * 2},
            "stages name a block twice",
        ),
        (
            {"stages": [{"blocks": [{"name": "a", "zero": z, "recompute": "none"} for z in (1,)] + [
                {"name": "b", "zero": 3, "recompute": "none"}]}, PLAN.to_dict()["stages"][1]]},
            r"stages\[0\] mixes ZeRO-1 with ZeRO-2 or 3",
        ),
    ],
)  # fmt: skip
def test_an_edit_that_contradicts_itself_is_refused(changes, message):
    with pytest.raises(PlanError, match=message):
        Plan.loads(_changed(**changes))


def _split() -> Plan:
    """PLAN over two tensor-parallel ranks: two kinds of blocks."""
    column = ShardingPlan(
        nodes=("R,S0*3[64]>S2*3[64]", "D,L0*B[128]>-,P", ">R"),
        parameters=("S0*3[64]", "R"),
        buffers=(),
        inputs=("S1[128]",),
        outputs=("R",),
        words=("qkv.weight: output features split 2 ways, each of its 3 parts", "norm.weight: whole on every rank"),
        collectives=(CollectivePlan(collective="all_reduce", phase="forward", count=2, num_bytes=2.0**20),),
    )
    whole = ShardingPlan(nodes=("R>R",), parameters=("Q",))
    blocks = [replace(b, shardings=(int(b.name in ("embed", "head")),)) for b in PLAN.block_plans]
    return replace(
        PLAN,
        mesh=Mesh(pp=2, dp_shard=2, tp=2),
        shardings=(column, whole),
        stages=(StagePlan(blocks=tuple(blocks[:3])), StagePlan(blocks=tuple(blocks[3:]))),
    )


def test_a_plan_with_tensor_parallelism_is_read_back_equal_and_shown():
    plan = _split()

    assert Plan.loads(plan.dumps()) == plan
    assert plan.to_dict()["stages"][0]["blocks"][1]["shardings"] == [0]
    assert describe_layout(plan) == "pp 2 x dp 2 x tp 2"
    assert sharding_text(plan).splitlines()[2:7] == [
        "    forward: no collective",
        "    backward: no collective",
        "  layers.0 .. layers.2, 3 blocks alike",
        "    qkv.weight: output features split 2 ways, each of its 3 parts",
        "    whole on every rank: norm.weight",
    ]
    assert sharding_text(plan).endswith("    forward: 2 x all_reduce of 1.0 MiB\n    backward: no collective")


def test_a_plan_without_tensor_parallelism_is_written_as_before():
    data = PLAN.to_dict()

    assert "shardings" not in data
    assert "shardings" not in data["stages"][0]["blocks"][0]
    assert "no rank has a part of a block" in sharding_text(PLAN)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("shardings", 0, "nodes", 0), "R,S0[64", r"shardings\[0\].nodes\[0\] must be such as R,S0\[64\]>S1\[64\], is"),
        (("shardings", 0, "nodes", 0), "R>X", r"shardings\[0\].nodes\[0\] must be"),
        (("shardings", 0, "parameters", 1), "S", r"shardings\[0\].parameters\[1\] must be R, Q, P, D or such as"),
        (("shardings", 0, "inputs"), "R", r"shardings\[0\].inputs must be a list"),
        (("shardings", 0, "size"), 1, r"shardings\[0\].size is no key of a plan"),
        (("shardings", 0, "collectives", 0, "count"), 0, r"collectives\[0\].count must be at least 1"),
        (("shardings", 0, "collectives", 0, "phase"), "sideways", r"phase must be one of forward, backward"),
        (("shardings", 0, "words"), [1], r"shardings\[0\].words must hold printable text"),
        (("shardings", 0, "axis"), "pp", "axis must be one of cp, ep, tp"),
        (("shardings", 0, "axis"), "cp", r"blocks\[1\].shardings has 0 for tp, which is of cp"),
        (("stages", 0, "blocks", 1, "shardings"), [2], "shardings has 2, there are 2 shardings"),
        (("stages", 0, "blocks", 1, "shardings"), [0, 1], "shardings has 2 entries, but mesh.tp is 2: one for each"),
        (("stages", 0, "blocks", 1, "shardings"), [None], "shardings must hold whole numbers"),
        (("stages", 0, "blocks", 1, "shardings"), None, "shardings must be a list, is null"),
        (("mesh", "tp"), 1, r"blocks\[0\].shardings has 1 entries, but mesh.cp, mesh.ep, mesh.tp are 1"),
    ],
)
def test_a_wrong_sharding_is_refused_with_its_path(path, value, message):
    data = _split().to_dict()
    place = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value

    with pytest.raises(PlanError, match=message):
        Plan.loads(json.dumps(data))


def test_a_sharding_that_no_block_has_is_refused():
    data = _split().to_dict()
    data["shardings"].append(data["shardings"][0])

    with pytest.raises(PlanError, match=r"shardings\[2\] is of no block"):
        Plan.loads(json.dumps(data))


def test_the_difference_of_shardings_does_not_depend_on_their_numbers():
    plan = _split()
    swapped = replace(
        plan,
        shardings=plan.shardings[::-1],
        stages=tuple(
            StagePlan(blocks=tuple(replace(b, shardings=(1 - b.shardings[0],)) for b in s.blocks)) for s in plan.stages
        ),
    )
    other = replace(plan, shardings=(replace(plan.shardings[0], parameters=("R", "R")), plan.shardings[1]))

    assert plan.diff(swapped) == []
    assert [row[0] for row in plan.diff(other)] == ["block layers.0 to layers.1", "block layers.2"]


_VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 10), st.just(10**400), st.floats(), st.text(max_size=5),
    st.just("\ud800"), st.lists(st.integers(-2, 3), max_size=2), st.just({}), st.just({"pp": 1}),
)  # fmt: skip


def _places(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    children = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [path, *(place for key, value in children for place in _places(value, (*path, key)))]


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_random_edit_gives_a_plan_or_a_plan_error(data):
    plan = PLAN.to_dict()
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(_places(plan)[1:]))
        owner = plan
        for key in path[:-1]:
            owner = owner[key]
        if data.draw(st.booleans()):
            owner[path[-1]] = data.draw(_VALUES)
        else:
            del owner[path[-1]]
    try:
        read = Plan.loads(json.dumps(plan))
    except PlanError as error:
        message = str(error)
    else:
        message = ""
        assert Plan.loads(read.dumps()) == read
        plan_text(read).encode()

    assert message.isascii()
    assert "\n" not in message


@settings(max_examples=100, deadline=None)
@given(start=st.integers(0, len(PLAN.dumps())), length=st.integers(0, 40), text=st.binary(max_size=5))
def test_random_bytes_in_a_plan_give_a_plan_or_a_plan_error(start, length, text, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "edited.json"
    whole = PLAN.dumps().encode()
    path.write_bytes(whole[:start] + text + whole[start + length :])
    with contextlib.suppress(PlanError):
        Plan.load(path)


def test_a_plan_reads_as_a_text():
    assert plan_text(PLAN) == GOLDEN


def test_a_plan_that_does_not_fit_says_by_how_much():
    prediction = replace(PLAN.prediction, capacity_bytes=2.0 * 2**30)

    assert "  DOES NOT FIT: 1.0 GiB more than a device has\n" in plan_text(replace(PLAN, prediction=prediction))


def test_the_difference_of_a_plan_with_itself_is_nothing():
    assert PLAN.diff(PLAN) == []


def test_a_difference_names_fields_and_runs_of_blocks():
    zero_3 = tuple(replace(block, zero=3, recompute="none") for block in PLAN.block_plans[1:3])
    stages = (StagePlan(blocks=(PLAN.block_plans[0], *zero_3)), PLAN.stages[1])
    other = replace(PLAN, stages=stages, prediction=replace(PLAN.prediction, step_seconds=0.5), optimizer="sgd")

    assert PLAN.diff(other) == [
        ("optimizer", "adamw", "sgd"),
        ("step_seconds", "0.25", "0.5"),
        ("block layers.0 to layers.1", "stage 0, ZeRO-3, recompute full", "stage 0, ZeRO-3, recompute none"),
    ]
