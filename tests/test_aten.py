import operator

import pytest
import torch

from planner.errors import TraceError
from planner.graph import Batch, Node, Ref, Symbol, Tensor
from planner.trace.aten import freeze, materialize, operator_name, run_nodes, torch_operator

CPU = torch.device("cpu")


def act(name="x"):
    return Tensor(name=name, shape=(Batch(1),), dtype="float32", kind="activation")


def thaw(value):
    return materialize(freeze(value, lambda node: None, lambda size: size), {}, 1, CPU)


@pytest.mark.parametrize(
    "value",
    [None, True, 2, 0.5, "none", torch.bfloat16, torch.strided, torch.channels_last, CPU],
)
def test_freeze_and_materialize_are_inverse(value):
    assert thaw([value]) == [value]


def test_a_slice_and_nested_lists_survive():
    assert thaw([slice(0, None, 2), [1, (2, 3)]]) == [slice(0, None, 2), [1, [2, 3]]]


def test_an_argument_of_an_unknown_type_is_named():
    with pytest.raises(TraceError, match=r"torch\._C\.Generator"):
        thaw(torch.Generator())


def test_booleans_are_not_scaled_as_integers():
    def scale(size):
        return Batch(size // 7)

    assert freeze((14, True), lambda node: None, scale) == (Batch(2), True)


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("aten.linear.default", torch.ops.aten.linear.default),
        ("operator.add", operator.add),
    ],
)
def test_operators_have_names_and_back(name, function):
    assert torch_operator(name) is function
    assert operator_name(function) == name


@pytest.mark.parametrize("name", ["aten.nonesuch.default", "aten.add.nonesuch", "os.system", "x"])
def test_an_unknown_operator_is_named(name):
    with pytest.raises(TraceError, match=name):
        torch_operator(name)


def test_a_call_of_any_other_function_is_refused():
    with pytest.raises(TraceError, match="print"):
        operator_name(print)


def test_nodes_run_in_order_with_sizes_of_the_micro_batch_and_lists_unpacked():
    nodes = (
        Node(name="s", op="aten.split.Tensor", args=(Ref(0), Batch(1)), outputs=(1, None),
             returns_list=True),
        Node(name="a", op="aten.add.Tensor", args=(Ref(1), 1.0), kwargs=(("alpha", 2),),
             outputs=(2,)),
        Node(name="z", op="aten.zeros.default", args=((Batch(1), 2),),
             kwargs=(("dtype", Symbol("dtype", "int64")), ("device", Symbol("device", "rank"))),
             outputs=(3,)),
        Node(name="r", op="aten.relu_.default", args=(Ref(2),), outputs=(4,), mutates=(2,)),
    )  # fmt: skip
    env = {0: torch.arange(6.0) - 4.0}

    run_nodes([act()] * 5, nodes, env, micro_batch=3, device=CPU)

    assert env[4].tolist() == [0.0, 0.0, 0.0]
    assert env[4] is env[2]
    assert env[3].shape == (3, 2)
    assert env[3].dtype == torch.int64


def test_an_operator_can_be_replaced():
    node = Node(name="a", op="aten.relu.default", args=(Ref(0),), outputs=(1,))
    env = {0: torch.ones(2)}

    run_nodes([], [node], env, micro_batch=1, device=CPU, replace={"aten.relu.default": torch.neg})

    assert env[1].tolist() == [-1.0, -1.0]


def test_reading_a_tensor_that_nothing_made_names_node_and_tensor():
    node = Node(name="relu_7", op="aten.relu.default", args=(Ref(1),), outputs=(2,))

    with pytest.raises(TraceError, match=r"relu_7.*'hidden'"):
        run_nodes([act(), act("hidden")], [node], {}, micro_batch=1, device=CPU)
