from dataclasses import asdict, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.cluster import CheckpointSeconds, Cluster, Slowdown
from planner.collectives import (
    all_reduce_seconds,
    axis_group,
    overlapped_seconds,
    reduce_scatter_seconds,
    send_recv_seconds,
)
from planner.costs import Strategy, exposed_seconds, least_seconds, price, strategies_of
from planner.errors import ClusterError, PlanError, PlannerError
from planner.graph import (
    DTYPE_BYTES,
    Affine,
    Batch,
    Block,
    BlockClass,
    Communicated,
    Fallback,
    Graph,
    Kernel,
    Tensor,
    total,
)
from planner.memory import MOST_COALESCED_BYTES
from planner.operators import kernel_seconds, phase_seconds
from planner.plan import Mesh
from planner.shard.chain import AxisSplit
from planner.shard.placement import Q, R, Sharding
from planner.simulate import peak_bytes

CLUSTER = Cluster.load("2x8xA100-80GB")


def per_sample(amount):
    return Affine(0.0, float(amount))


def gpt_graph(num_layers=4, width=1024, sequence=512, vocabulary=8000, dtype="bfloat16", tied=False):
    """A graph with the blocks and prices of a small GPT, and no nodes: what costs are made of."""
    tensors: list[Tensor] = []
    size = DTYPE_BYTES[dtype]
    hidden = size * sequence * width

    def tensor(**fields):
        tensors.append(Tensor(**{"dtype": dtype, **fields}))
        return len(tensors) - 1

    def parameter(name, *shape):
        return tensor(name=name, shape=shape, kind="parameter", requires_grad=True)

    def activation(name):
        return tensor(name=name, shape=(Batch(1), sequence, width), kind="activation", requires_grad=True)

    def matmuls(columns, rows):
        moved = Affine(size * columns * rows, size * sequence * (columns + rows))
        one = Kernel(
            op="aten.mm.default", phase="forward", kind="matmul", dtype=dtype, num_bytes=moved,
            flop=per_sample(2 * sequence * columns * rows),
        )  # fmt: skip
        return [one, *[replace(one, phase="backward")] * 2]

    def memory(forward, backward, num_bytes):
        one = Kernel(
            op="aten.add.Tensor", phase="forward", kind="memory", dtype=dtype, flop=Affine(),
            num_bytes=per_sample(3 * num_bytes),
        )  # fmt: skip
        return [*[one] * forward, *[replace(one, phase="backward")] * backward]

    def block_class(kernels, saved, peaks, saves_input):
        return BlockClass(
            kernels=tuple(kernels), saved=per_sample(saved), saves_input=saves_input, saves_output=(False,),
            forward_peak=per_sample(peaks[0]), backward_peak=per_sample(peaks[1]),
        )  # fmt: skip

    layer = [
        *matmuls(3 * width, width), *matmuls(width, width), *matmuls(4 * width, width), *matmuls(width, 4 * width),
        *memory(10, 12, 2 * hidden),
    ]  # fmt: skip
    logits = size * sequence * vocabulary
    classes = (
        block_class(memory(1, 1, hidden), 0, (hidden, hidden), ()),
        block_class(layer, 16 * hidden, (5 * hidden, 9 * hidden), (True,)),
        block_class([*matmuls(vocabulary, width), *memory(3, 3, logits)], 2 * logits, (logits, 2 * logits), (True,)),
    )
    blocks: list[Block] = []

    def block(name, class_index, inputs, outputs, parameters):
        blocks.append(
            Block(
                name=name, kind="block" if class_index == 1 else "glue", class_index=class_index, nodes=(),
                inputs=inputs, shared=(), outputs=outputs, parameters=parameters, buffers=(),
                input_bytes=total(tensors[t].num_bytes for t in inputs),
            )
        )  # fmt: skip

    ids = tensor(name="ids", shape=(Batch(1), sequence), dtype="int64", kind="input")
    table, stream = parameter("wte", vocabulary, width), activation("h")
    block("wte", 0, (), (stream,), (table,))
    for layer_index in range(num_layers):
        shapes = {"qkv": (3 * width, width), "o": (width, width), "up": (4 * width, width), "down": (width, 4 * width)}
        own = tuple(parameter(f"{layer_index}.{name}", *shape) for name, shape in shapes.items())
        own += tuple(parameter(f"{layer_index}.{name}", width) for name in ("ln1", "ln2"))
        following = activation(f"h{layer_index}")
        block(f"layer{layer_index}", 1, (stream,), (following,), own)
        stream = following
    loss = tensor(name="loss", shape=(), dtype="float32", kind="activation")
    block("head", 2, (stream,), (loss,), (table if tied else parameter("head", vocabulary, width),))
    return Graph(
        name="gpt", dtype=dtype, tensors=tuple(tensors), nodes=(), inputs=(ids,), loss=loss, blocks=tuple(blocks),
        classes=classes,
    )  # fmt: skip


GPT = gpt_graph()


def priced(graph=GPT, cluster=CLUSTER, **changes):
    configuration = {
        "mesh": Mesh(dp_shard=8), "micro_batch": 2, "num_microbatches": 4, "schedule": "1f1b", "precision": "bf16",
        "optimizer": "adamw",
    }  # fmt: skip
    return price(graph, cluster, **{**configuration, **changes})


def test_strategies_follow_the_mesh():
    assert [s.zero for s in strategies_of(Mesh(dp_replicate=4))] == [0, 0]
    assert [(s.zero, s.recompute) for s in strategies_of(Mesh(dp_shard=4))] == [
        (1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (3, 1),
    ]  # fmt: skip
    assert strategies_of(Mesh(pp=4)) == (Strategy(0, 0), Strategy(0, 1))


def test_one_device_computes_and_nothing_else():
    graph, cluster = gpt_graph(dtype="float32"), Cluster.load("1x1xA100-80GB")
    costs = priced(graph, cluster, mesh=Mesh(), precision="fp32", num_microbatches=1)
    kernels = kernel_seconds(cluster.device, graph.classes[1].kernels, 2)
    forward = [k.phase == "forward" for k in graph.classes[1].kernels]
    launched = sum(forward) * cluster.device.dispatch_seconds

    expected = phase_seconds(cluster.device, kernels[forward].sum(), sum(forward), num_blocks=1)
    assert costs.forward_seconds[1, 0] == pytest.approx(float(expected))
    assert costs.forward_seconds[1, 0] == pytest.approx(max(kernels[forward].sum(), launched), rel=0.19)
    assert costs.exposed_seconds.tolist() == np.zeros((6, 2)).tolist()
    assert (costs.gather_seconds + costs.reduce_seconds).sum() == costs.norm_seconds == 0.0


def test_recomputation_is_one_more_forward_pass():
    costs = priced(gpt_graph(width=4096), mesh=Mesh(), micro_batch=8)
    forward, backward = costs.forward_seconds[1], costs.backward_seconds[1]

    assert forward[0] == forward[1]
    assert backward[1] - backward[0] == pytest.approx(forward[0], rel=1e-6)


def test_recomputation_costs_the_processor_what_checkpoints_take_where_that_is_known():
    plain = priced(mesh=Mesh())
    seconds = CheckpointSeconds(block=1e-3, kernel=1e-5)
    cluster = replace(CLUSTER, device=replace(CLUSTER.device, checkpoint_seconds=seconds))
    dear = priced(cluster=cluster, mesh=Mesh())

    recomputed = [s.recompute for s in plain.strategies].index(1)
    added = dear.backward_seconds - plain.backward_seconds
    kernels = [sum(k.phase == "forward" for k in GPT.classes[b.class_index].kernels) for b in GPT.blocks]
    assert added[:, recomputed] == pytest.approx([1e-3 + 1e-5 * number for number in kernels])
    assert np.all(added[:, 1 - recomputed] == 0.0)
    assert np.all(dear.forward_seconds == plain.forward_seconds)


def test_ranks_agree_on_a_batch_before_they_train_on_it():
    costs = priced(mesh=Mesh(dp_shard=8))

    assert costs.norm_seconds > 0
    assert costs.agreement_seconds == pytest.approx(2 * costs.norm_seconds)
    assert costs.fixed_seconds == costs.norm_seconds + costs.agreement_seconds
    assert priced(mesh=Mesh()).fixed_seconds == 0.0


def test_zero_1_in_a_pipeline_reduces_once_and_in_the_open():
    costs = priced(mesh=Mesh(pp=2, dp_shard=8))
    group = axis_group(CLUSTER, {"pp": 2, "dp_shard": 8}, "dp_shard")
    layer = sum(GPT.tensors[p].num_elements.fixed for p in GPT.blocks[1].parameters)
    alone = reduce_scatter_seconds(4.0 * layer, group)

    assert alone <= costs.reduce_seconds[1, 0] <= 1.5 * alone
    assert costs.reduce_seconds[:, 2:].sum() == 0.0


def test_hybrid_sharding_moves_what_its_two_axes_say():
    """Shards within a node, replicas across two: the state of 8 ranks, and once a step one shard over the network."""
    hybrid, inside = priced(mesh=Mesh(dp_replicate=2, dp_shard=8)), priced(mesh=Mesh(dp_shard=8))
    pure = priced(mesh=Mesh(dp_shard=16))
    layer = sum(GPT.tensors[p].num_elements.fixed for p in GPT.blocks[1].parameters)
    across = axis_group(CLUSTER, {"dp_replicate": 2, "dp_shard": 8}, "dp_replicate")

    assert hybrid.state_bytes.tolist() == inside.state_bytes.tolist()
    assert hybrid.transient_bytes.tolist() == inside.transient_bytes.tolist()
    assert hybrid.seconds.tolist() == inside.seconds.tolist()  # every micro-batch stays in the node
    assert (hybrid.seconds[:, 4:] < pure.seconds[:, 4:]).any()
    assert hybrid.gather_seconds.tolist() == inside.gather_seconds.tolist()
    added = (hybrid.reduce_seconds - inside.reduce_seconds).sum(0)
    alone = all_reduce_seconds(4.0 * layer / 8, across)
    assert (added > 0).all()
    assert (added <= 10 * alone).all()  # six blocks, the head and the embedding larger than a layer


def test_replicas_on_the_links_of_the_shards_wait_for_them():
    """Shards over two nodes, replicas over two more: both leave the node, so nothing is hidden behind the other."""
    cluster = Cluster.load("4x8xA100-80GB")
    mesh = {"pp": 2, "dp_replicate": 2, "dp_shard": 8}
    layer = sum(GPT.tensors[p].num_elements.fixed for p in GPT.blocks[1].parameters)
    inside, outside = (
        priced(cluster=cluster, mesh=Mesh(**mesh)),
        priced(cluster=Cluster.load("32x1xA100-80GB"), mesh=Mesh(**mesh)),
    )
    groups = [axis_group(Cluster.load("32x1xA100-80GB"), mesh, axis) for axis in ("dp_shard", "dp_replicate")]
    one, other = reduce_scatter_seconds(4.0 * layer, groups[0]), all_reduce_seconds(4.0 * layer / 8, groups[1])

    assert outside.reduce_seconds[1, 0] >= one + other
    near = [axis_group(cluster, mesh, axis) for axis in ("dp_shard", "dp_replicate")]
    one, other = reduce_scatter_seconds(4.0 * layer, near[0]), all_reduce_seconds(4.0 * layer / 8, near[1])
    assert max(one, other) <= inside.reduce_seconds[1, 0] < one + other + inside.reduce_seconds[1, 0] / 2


def test_without_a_graph_replicas_are_summed_at_every_micro_batch():
    fallback = replace(GPT, fallbacks=(Fallback(source="m.py:1", reason="a hook", cure="none"),))
    once, always = (
        priced(mesh=Mesh(dp_replicate=2, dp_shard=8)),
        priced(fallback, mesh=Mesh(dp_replicate=2, dp_shard=8)),
    )

    assert always.reduce_seconds[:, 4].sum() == pytest.approx(4 * once.reduce_seconds[:, 4].sum())
    assert always.reduce_seconds[:, 0].sum() == pytest.approx(once.reduce_seconds[:, 0].sum())


def test_zero_3_gathers_twice_per_micro_batch_and_zero_2_once_per_step():
    costs = priced(mesh=Mesh(pp=2, dp_shard=8))

    assert costs.gather_seconds[1, 4] == 0.0
    assert costs.gather_seconds[1, 2] == costs.gather_seconds[1, 0] > 0.0
    assert costs.exposed_seconds[1, 4] > costs.exposed_seconds[1, 2] > costs.exposed_seconds[1, 0]


@given(st.floats(0, 10), st.floats(0, 10), st.builds(Slowdown, st.floats(1, 4), st.floats(1, 4)))
def test_what_overlap_adds_is_the_definition_of_collectives(compute, link, slowdown):
    added = float(exposed_seconds(np.array([compute]), np.array([link]), slowdown)[0])

    assert compute + added == pytest.approx(overlapped_seconds(compute, link, slowdown))
    assert exposed_seconds(np.array([compute]), np.array([link]), slowdown, overlaps=False)[0] == link


def test_nothing_overlaps_where_the_processor_computes():
    slow = replace(CLUSTER, device=replace(CLUSTER.device, synchronous_dispatch=True))
    hidden, open_ = priced(mesh=Mesh(dp_replicate=8)), priced(cluster=slow, mesh=Mesh(dp_replicate=8))

    assert hidden.reduce_seconds.sum() < open_.reduce_seconds.sum()


def _split_graph(graph, *collectives):
    """The graph with these collectives in every layer."""
    return replace(
        graph,
        classes=tuple(
            replace(kind, collectives=collectives if index == 1 else ()) for index, kind in enumerate(graph.classes)
        ),
    )


def _splits(mesh, graph, placement):
    shardings = tuple(
        Sharding(options=(), parameters=(placement,) * len(b.parameters), buffers=(), inputs=(), outputs=())
        for b in graph.blocks
    )  # fmt: skip
    return [AxisSplit(axis=axis, degree=degree, shardings=shardings) for axis, degree in mesh.splits]


FORWARD = Communicated(collective="all_reduce", axis="tp", phase="forward", num_bytes=per_sample(2**24))
BACKWARD = Communicated(collective="reduce_scatter", axis="tp", phase="backward", num_bytes=per_sample(2**24))


def test_collectives_inside_of_blocks_are_waited_for_and_repeated_by_recomputation():
    """On a device that is busy with kernels: what they take is added to the pass, and is communication."""
    device = replace(CLUSTER.device, dispatch_seconds=0.0, wrapper_seconds=0.0, block_seconds=0.0)
    cluster = replace(CLUSTER, device=device)
    mesh = Mesh(dp_replicate=2, tp=8)
    plain, split = GPT, _split_graph(GPT, FORWARD, FORWARD, BACKWARD)
    options = {"mesh": mesh, "cluster": cluster, "splits": _splits(mesh, GPT, R)}
    before, after = priced(plain, **options), priced(split, **options)
    group = axis_group(cluster, {"dp_replicate": 2, "tp": 8}, "tp")
    forward = 2 * all_reduce_seconds(2 * 2**24, group)
    backward = reduce_scatter_seconds(2 * 2**24, group)

    added = (after.forward_seconds - before.forward_seconds)[1]
    assert added == pytest.approx([forward, forward])
    added = (after.backward_seconds - before.backward_seconds)[1]
    assert added == pytest.approx([backward, forward + backward])
    added = (after.exposed_seconds - before.exposed_seconds)[1]
    assert added == pytest.approx([forward + backward, 2 * forward + backward])
    assert (after.forward_seconds - before.forward_seconds)[0].tolist() == [0.0, 0.0]


def test_collectives_of_each_axis_are_priced_on_its_own_group():
    """Of 16 ranks tp has neighbours in a node, cp those 8 apart: what is sent over cp passes between nodes."""
    device = replace(CLUSTER.device, dispatch_seconds=0.0, wrapper_seconds=0.0, block_seconds=0.0)
    cluster, mesh = replace(CLUSTER, device=device), Mesh(cp=2, tp=8)
    over_cp = replace(FORWARD, axis="cp")
    options = {"mesh": mesh, "cluster": cluster, "splits": _splits(mesh, GPT, R)}

    def added(*made):
        before, after = (priced(_split_graph(GPT, *each), **options).forward_seconds for each in ((), made))
        return float((after - before)[1, 0])

    both, one, other = added(FORWARD, over_cp), added(FORWARD), added(over_cp)
    sizes = {"cp": 2, "tp": 8}
    for axis, seconds in (("tp", one), ("cp", other)):
        assert seconds == pytest.approx(all_reduce_seconds(2 * 2**24, axis_group(cluster, sizes, axis)))
    assert both == pytest.approx(one + other)
    assert abs(one - other) > 0.2 * one


def test_gathers_hide_behind_tensor_parallel_collectives_only_on_other_links():
    """Eight tensor-parallel ranks fill a node, so shards gather between nodes; of four a node has two, which share."""
    split = _split_graph(GPT, *[FORWARD] * 200)

    def gathered(mesh, graph):
        costs = priced(graph, mesh=mesh, splits=_splits(mesh, GPT, R), num_microbatches=1)
        inside = 200 * all_reduce_seconds(2 * 2**24, axis_group(CLUSTER, asdict(mesh), "tp")) if graph is split else 0
        return float(costs.exposed_seconds[2, -2] - inside)  # ZeRO-3 without recomputation

    apart, together = Mesh(dp_shard=2, tp=8), Mesh(dp_shard=4, tp=4)
    assert gathered(apart, split) < gathered(apart, GPT) * 0.9
    assert gathered(together, split) == pytest.approx(gathered(together, GPT), rel=0.05)


def test_partial_gradients_are_summed_once_a_step_over_the_shards():
    mesh = Mesh(dp_shard=2, tp=8)
    whole, partial = (priced(mesh=mesh, splits=_splits(mesh, GPT, p)) for p in (R, Q))
    group = axis_group(CLUSTER, {"dp_shard": 2, "tp": 8}, "tp")
    shards = sum(GPT.tensors[p].num_elements.fixed for b in GPT.blocks for p in b.parameters) / 2

    added = (partial.reduce_seconds - whole.reduce_seconds).sum(0)
    assert added == pytest.approx([all_reduce_seconds(4 * shards, group)] * len(whole.strategies), rel=1e-6)
    assert (partial.forward_seconds == whole.forward_seconds).all()


def test_a_sum_over_tensor_parallel_ranks_has_a_buffer():
    """The gradients lie in it once more, as many as are summed together, when nothing is saved any more."""
    tiny, mesh = gpt_graph(width=64), Mesh(tp=2)
    whole, partial = (priced(tiny, mesh=mesh, micro_batch=1, splits=_splits(mesh, tiny, p)) for p in (R, Q))
    gradients = 4 * sum(tiny.tensors[p].num_elements.fixed for b in tiny.blocks for p in b.parameters)
    assert gradients < MOST_COALESCED_BYTES
    stage = [[(block, 1) for block in range(len(tiny.blocks))]]
    held = float(partial.state_bytes[:, 1].sum()) + partial.boundary_bytes(0, 0, len(tiny.blocks))
    assert peak_bytes(partial, stage)[0] == pytest.approx(max(held + gradients, peak_bytes(whole, stage)[0]))
    assert (partial.transient_bytes >= gradients).all()

    mesh = Mesh(tp=8)
    large = priced(mesh=mesh, splits=_splits(mesh, GPT, Q))
    assert large.working.summed.min() == MOST_COALESCED_BYTES
    assert priced(mesh=mesh, splits=_splits(mesh, GPT, R)).working.summed.max() == 0
    # Beside what is saved there is none of it.
    long = [priced(tiny, mesh=Mesh(tp=2), micro_batch=64, splits=_splits(Mesh(tp=2), tiny, p)) for p in (R, Q)]
    assert peak_bytes(long[0], stage) == peak_bytes(long[1], stage)


def test_least_seconds_are_a_bound_of_every_strategy():
    graph = _split_graph(GPT, FORWARD, BACKWARD)
    for mesh in (Mesh(tp=2), Mesh(dp_shard=4, tp=2), Mesh(pp=2, dp_replicate=2, tp=4)):
        costs = priced(graph, mesh=mesh, splits=_splits(mesh, GPT, Q))
        least = least_seconds(graph, CLUSTER, mesh=mesh, micro_batch=2)

        assert 0 < least <= costs.seconds.min(1).sum() + costs.num_stages * costs.stage_seconds + 1e-12


def test_a_cut_is_one_message_forward_and_one_back():
    costs = priced(mesh=Mesh(pp=2, dp_shard=8))
    num_bytes = 2 * 2 * 512 * 1024  # micro-batch 2, bf16
    pipe = axis_group(CLUSTER, {"pp": 2, "dp_shard": 8}, "pp")

    assert costs.cut_seconds == pytest.approx([2 * send_recv_seconds(num_bytes, pipe)] * 5)
    # Buffers of four micro-batches, one of which the last stage's first block has among its activations.
    assert costs.cut_bytes == pytest.approx([3 * num_bytes] * 5)
    assert priced(mesh=Mesh(pp=2, dp_shard=8), schedule="gpipe").cut_bytes == pytest.approx([0.0] * 5)
    # Behind stage 0: receive buffers of four gradients and the outputs of two micro-batches in flight.
    assert costs.capacity_bytes == pytest.approx(
        [CLUSTER.capacity_bytes - costs.input_bytes - 6 * num_bytes, CLUSTER.capacity_bytes - costs.input_bytes]
    )


def test_activations_between_blocks_are_counted_once():
    costs = priced(micro_batch=1)
    hidden = 2 * 512 * 1024

    assert costs.activation_bytes[0].tolist() == [0.0, 0.0] * 3
    assert costs.activation_bytes[1].tolist() == [17.0 * hidden, hidden] * 3


def test_what_several_blocks_read_and_save_is_recomputed_from_once():
    memory = GPT.blocks[1].outputs[0]  # as an encoder's output, which every layer of a decoder reads
    classes = [replace(kind, saves_input=(*kind.saves_input, True)) for kind in GPT.classes]
    blocks = [replace(b, inputs=(*b.inputs, memory)) if i in (3, 4) else b for i, b in enumerate(GPT.blocks)]
    wide = priced(replace(GPT, classes=tuple(classes), blocks=tuple(blocks)), micro_batch=1)
    narrow = priced(micro_batch=1)

    # Layer 2 keeps it, as its only input; 3 and 4 have it from there.
    assert wide.activation_bytes.tolist() == narrow.activation_bytes.tolist()


def test_a_tied_parameter_counts_once_on_one_stage_and_on_each_of_two():
    tied = gpt_graph(tied=True)
    one, two = priced(tied), priced(tied, mesh=Mesh(pp=2, dp_shard=8))

    assert one.state_bytes[5].sum() == 0.0
    assert two.state_bytes[5] == pytest.approx(two.state_bytes[0])
    assert one.tie_groups == two.tie_groups == ((0, 5),)
    assert one.tie_seconds.sum() == 0.0 < two.tie_seconds[0].min()
    assert two.tie_seconds[1:5].sum() == 0.0


def test_parameters_that_nothing_reads_are_held_whole_by_every_rank():
    spare = Tensor(name="spare", shape=(1000, 3), dtype="bfloat16", kind="parameter", requires_grad=True)
    graph = replace(GPT, tensors=(*GPT.tensors, spare), unused_parameters=("spare",))
    mesh = Mesh(pp=2, dp_shard=8)

    assert priced(graph, mesh=mesh).boundary_bytes(0, 0, 3) == priced(mesh=mesh).boundary_bytes(0, 0, 3) + 4 * 3000
    assert (priced(graph, mesh=mesh).capacity_bytes == priced(mesh=mesh).capacity_bytes - 4 * 3000).all()


def test_frozen_parameters_need_no_gradient():
    frozen = replace(GPT, tensors=tuple(replace(t, requires_grad=False) for t in GPT.tensors))
    costs = priced(frozen)
    layer = sum(GPT.tensors[p].num_elements.fixed for p in GPT.blocks[1].parameters)

    assert costs.state_bytes[1, 4] == pytest.approx(4 * layer / 8)
    assert costs.optimizer_seconds.sum() == costs.reduce_seconds.sum() == 0.0


@given(
    st.floats(1.0, 4.0),
    st.sampled_from(
        [
            Mesh(dp_shard=16),
            Mesh(dp_replicate=16),
            Mesh(pp=2, dp_shard=8),
            Mesh(pp=2, dp_replicate=2, dp_shard=4),
        ]
    ),
)
def test_more_bandwidth_is_never_slower(factor, mesh):
    fast = replace(
        CLUSTER,
        **{
            name: replace(link, bytes_per_second=factor * link.bytes_per_second)
            for name in ("intra_node_link", "inter_node_link")
            for link in [getattr(CLUSTER, name)]
        },
    )
    slow_costs, fast_costs = priced(mesh=mesh), priced(cluster=fast, mesh=mesh)
    tolerance = 1 + 1e-9

    assert (fast_costs.seconds <= slow_costs.seconds * tolerance).all()
    assert (fast_costs.gather_seconds <= slow_costs.gather_seconds * tolerance).all()
    assert fast_costs.reduce_seconds.sum() <= slow_costs.reduce_seconds.sum() * tolerance
    assert (fast_costs.cut_seconds <= slow_costs.cut_seconds * tolerance).all()


@given(st.integers(1, 8), st.integers(1, 16), st.sampled_from(["gpipe", "1f1b"]))
def test_recomputation_never_holds_more_activations(micro_batch, num_microbatches, schedule):
    costs = priced(micro_batch=micro_batch, num_microbatches=num_microbatches, schedule=schedule)

    assert (costs.activation_bytes[:, 1::2] <= costs.activation_bytes[:, ::2]).all()
    assert (costs.seconds[:, 1::2] >= costs.seconds[:, ::2]).all()
    assert (costs.state_bytes[:, 1::2] == costs.state_bytes[:, ::2]).all()


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"mesh": Mesh(ep=2, cp=2)}, PlanError, "ep and cp together cannot be planned yet"),
        ({"mesh": Mesh(cp=2, tp=2)}, PlanError, "cp=2 needs the sharding of"),
        ({"mesh": Mesh(cp=2)}, PlanError, "cp=2 needs the sharding of"),
        ({"mesh": Mesh(tp=2)}, PlanError, "tp=2 needs the sharding of"),
        ({"precision": "fp4"}, PlannerError, "'fp4' is none of"),
        ({"optimizer": "lion"}, PlannerError, "'lion' is none of"),
        ({"cluster": Cluster.load("1x8xV100-32GB")}, ClusterError, "does not compute in bfloat16"),
    ],
    ids=["experts", "both", "context parallel", "tensor parallel", "precision", "optimizer", "device"],
)
def test_what_cannot_be_priced_is_refused(changes, error, words):
    with pytest.raises(error, match=words):
        priced(**changes)


def test_the_same_inputs_give_the_same_costs_to_the_bit():
    first, second = priced(gpt_graph()), priced(gpt_graph())

    assert first.seconds.tobytes() == second.seconds.tobytes()
    assert first.transient_bytes.tobytes() == second.transient_bytes.tobytes()


def test_a_wide_layer_in_bf16_holds_the_state_of_its_zero_stage():
    graph = gpt_graph(num_layers=8, width=8192, vocabulary=32000)
    costs = priced(graph, mesh=Mesh(dp_shard=16))
    per_element = costs.state_bytes[1] / sum(graph.tensors[p].num_elements.fixed for p in graph.blocks[1].parameters)

    assert per_element[::2] == pytest.approx([4 / 16 + 2 + 4 + 8 / 16, 2 + 16 / 16, 16 / 16])
