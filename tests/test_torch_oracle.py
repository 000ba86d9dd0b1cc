"""What the planner says of a Llama on 8 x 8 ranks against torch's own view of it (`tests.torch_oracle`).

`torch` is the model as `parallelize_module` and `fully_shard` split it; `fp32` and `bf16` are the lowered blocks of a
plan for the same split: all matrices of a layer by columns or rows, embedding and head whole. `found` is the leanest
way that the program finds, in bf16.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.torch_oracle import LAYERS, MICRO_BATCHES, TOKENS, WIDTH

pytestmark = pytest.mark.timeout(300)  # 15 s where nothing else runs

ROOT = Path(__file__).resolve().parent.parent

Found = dict[str, Any]


@pytest.fixture(scope="module")
def found() -> Found:
    run = subprocess.run(
        [sys.executable, "-m", "tests.torch_oracle"],
        cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    result: Found = json.loads(run.stdout)
    return result


def seen(of: Found) -> Counter[tuple[str, str, int]]:
    return Counter((phase, name, num_bytes) for phase, name, num_bytes in of["collectives"])


def layer_of(planned: Found) -> Found:
    layers = [block for block in planned["blocks"] if block["name"].startswith("model.layers.")]
    assert len(layers) == LAYERS
    assert all({**layer, "name": ""} == {**layers[0], "name": ""} for layer in layers)
    result: Found = layers[0]
    return result


def saved_by(of: Found, module: str, before: str) -> int:
    """Bytes of activations that one more layer leaves behind."""
    states = of["modules"][module]["post_fw"], of["modules"][before]["post_fw"]
    after, earlier = (state["act"] + state["temp"] for state in states)
    return int(after - earlier)


# --- torch's own TP x FSDP ---


def test_a_layer_communicates_what_torch_does(found: Found) -> None:
    layer, counts = layer_of(found["fp32"]["planned"]), seen(found["torch"])
    activation = 4 * TOKENS * WIDTH

    assert layer["inside"] == [["forward", "all_reduce", activation]] * 2 + [["backward", "all_reduce", activation]] * 2
    assert counts["forward", "all_reduce", activation] == 2 * LAYERS
    # Torch sums the gradient of a layer's input once for each of q, k, v and each of gate, up: DTensor decides operator
    # by operator. The planner converts once what all of them read.
    assert counts["backward", "all_reduce", activation] == (3 + 2) * LAYERS


def test_a_layer_is_gathered_and_reduced_as_by_torch(found: Found) -> None:
    layer, counts = layer_of(found["fp32"]["planned"]), seen(found["torch"])
    unpadded = 4 * (2 * WIDTH * WIDTH // 8 + 2 * WIDTH * WIDTH // 16 + 3 * WIDTH * 348 + 2 * WIDTH)

    assert layer["gathered"] == layer["reduced"] == unpadded + 4 * 2 * 4 * WIDTH  # four rows of gate and of up
    assert counts["forward", "all_gather", layer["gathered"]] == LAYERS
    assert counts["backward", "all_gather", layer["gathered"]] == LAYERS
    assert counts["backward", "reduce_scatter", layer["reduced"]] == LAYERS


def test_parameters_and_gradients_are_those_of_torch(found: Found) -> None:
    shards = sum(block["shard"] for block in found["fp32"]["planned"]["blocks"])

    for name in ("torch", "fp32", "bf16"):
        assert found[name]["end"]["param"] == found[name]["end"]["grad"] == shards, name


def test_a_layer_saves_what_it_does_in_torch_without_the_mask(found: Found) -> None:
    mask = 4 * TOKENS * TOKENS  # the eager module makes one in each layer; the trace proves that it is causal

    saved = saved_by(found["torch"], "model.layers.2", "model.layers.1")

    assert saved - mask == layer_of(found["fp32"]["planned"])["saved"]


# --- the lowered blocks ---


def test_what_is_found_is_megatrons_way_with_a_split_vocabulary(found: Found) -> None:
    blocks = found["found"]["planned"]["blocks"]
    sums = [Counter(phase for phase, name, _ in block["inside"] if name == "all_reduce") for block in blocks]

    assert sums == [{"forward": 1}, *[{"forward": 2, "backward": 2}] * LAYERS, {"backward": 1}]
    # besides, the loss gathers four numbers of every rank for each token
    assert sum(len(block["inside"]) for block in blocks) == 1 + 4 * LAYERS + 2
    assert blocks[0]["shard"] == found["bf16"]["planned"]["blocks"][0]["shard"] / 8


@pytest.mark.parametrize("name", ["fp32", "bf16", "found"])
def test_lowered_blocks_communicate_what_was_planned(found: Found, name: str) -> None:
    planned: Counter[tuple[str, str, int]] = Counter()
    for block in found[name]["planned"]["blocks"]:
        each = [
            *map(tuple, block["inside"]),
            ("forward", "all_gather", block["gathered"]),
            ("backward", "all_gather", block["gathered"]),
            ("backward", "reduce_scatter", block["reduced"]),
        ]
        planned.update(each * MICRO_BATCHES)

    assert seen(found[name]) == planned


@pytest.mark.parametrize("name", ["fp32", "bf16", "found"])
def test_a_lowered_layer_saves_what_was_planned(found: Found, name: str) -> None:
    saved = saved_by(found[name], "blocks.3", "blocks.2")

    assert saved == layer_of(found[name]["planned"])["saved"]


@pytest.mark.parametrize(("name", "margin"), [("fp32", 0.05), ("bf16", 0.2), ("found", 0.05)])
def test_the_peak_is_not_above_the_planned_one_and_near_it(found: Found, name: str, margin: float) -> None:
    # In bf16 the planner lets the gradient of the head's weight coincide with the gradient of the logits in float32.
    peak, planned = found[name]["peak"], found[name]["planned"]
    shards = sum(block["shard"] for block in planned["blocks"])

    assert peak["param"] == peak["grad"] == shards
    assert peak["total"] <= planned["peak"] <= (1 + margin) * peak["total"]
