import operator

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from planner.errors import TraceError
from planner.graph import Affine, Batch, Node, Ref, Tensor
from planner.runtime.allocated import allocations, rise_bytes
from planner.trace import trace
from planner.trace.aten import freeze, operator_name, run_nodes
from planner.trace.kernels import REPLACEMENTS, scratch_bytes
from planner.trace.pricing import price_forward, price_module, price_nodes

BATCH = 1009


class Block:
    """A module as one block: all its operators as nodes, its arguments as inputs."""

    def __init__(self, module, *shapes, dtype=torch.float32):
        self.tensors, self.nodes = [], []
        example = [torch.empty(BATCH, *s[1:], dtype=s[0] if s[0] else dtype, device="meta") for s in shapes]
        program = torch.export.export(module.to("meta", dtype), tuple(example), strict=False)
        signature = program.graph_signature
        self.inputs = []
        env = {}
        for node in program.graph.nodes:
            value = node.meta.get("val")
            if node.op == "placeholder":
                parameter = signature.inputs_to_parameters.get(node.name)
                buffer = signature.inputs_to_buffers.get(node.name)
                kind = "parameter" if parameter else "buffer" if buffer else "activation"
                grad = bool(parameter) and module.get_parameter(parameter).requires_grad
                env[node] = self.tensor(value, kind, parameter or buffer or node.name, grad)
                if kind == "activation":
                    self.inputs.append(env[node].tensor)
            elif node.op == "call_function" and node.target is operator.getitem:
                env[node] = env[node.args[0]][node.args[1]]
            elif node.op == "call_function":
                self.call(node, value, env)
            elif node.op == "output":
                results = (env[n] for n in node.args[0] if n is not None)
                names = [spec.kind.name for spec in signature.output_specs]
                self.outputs = [ref.tensor for ref, name in zip(results, names, strict=True) if name == "USER_OUTPUT"]

    def call(self, node, value, env):
        is_list = isinstance(value, tuple | list)
        made = [
            self.tensor(v, "activation", node.name) if v is not None else None for v in (value if is_list else [value])
        ]

        def scale(size):
            return Batch(size // BATCH) if size and size % BATCH == 0 else size

        self.nodes.append(
            Node(
                name=node.name,
                op=operator_name(node.target),
                args=tuple(freeze(a, env.__getitem__, scale) for a in node.args),
                kwargs=tuple((k, freeze(a, env.__getitem__, scale)) for k, a in node.kwargs.items()),
                outputs=tuple(m.tensor if m else None for m in made),
                returns_list=is_list,
            )
        )
        env[node] = made if is_list else made[0]

    def tensor(self, value, kind, name, grad=False):
        shape = tuple(Batch(s // BATCH) if s % BATCH == 0 else s for s in value.shape)
        dtype = str(value.dtype).removeprefix("torch.")
        self.tensors.append(Tensor(name=name, shape=shape, dtype=dtype, kind=kind, requires_grad=grad))
        return Ref(len(self.tensors) - 1)

    def price(self, **options):
        return price_nodes(self.tensors, self.nodes, self.inputs, (), self.outputs, **options)


class Function(nn.Module):
    """A module without parameters."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs)


class GPTBlock(nn.Module):
    """The block of Korthikanti et al. 2022: dropout after attention, after each half, no fused mask."""

    def __init__(self, width, heads, rate, attention):
        super().__init__()
        self.heads, self.rate, self.attention = heads, rate, attention
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, sequence, width = x.shape
        parts = self.qkv(self.norm1(x)).chunk(3, -1)
        q, k, v = (p.view(batch, sequence, self.heads, -1).transpose(1, 2) for p in parts)
        if self.attention == "eager":
            scores = (q @ k.transpose(-1, -2)).mul(0.125).softmax(-1)
            y = F.dropout(scores, self.rate, True) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.rate)
        y = self.out(y.transpose(1, 2).reshape(batch, sequence, width))
        x = x + F.dropout(y, self.rate, True)
        y = self.narrow(F.gelu(self.wide(self.norm2(x))))
        return x + F.dropout(y, self.rate, True)


def kernels(price, name, phase):
    return [k for k in price.kernels if k.op.split(".")[1] == name and k.phase == phase]


def flop(price, phase):
    return price.flop(phase).at(1)


# --- saved bytes ---


def test_a_gpt_block_with_flash_attention_saves_34_sbh():
    s, h, heads = 2048, 12288, 96
    with torch.device("meta"):
        module = GPTBlock(h, heads, 0.1, "sdpa")
    block = Block(module, (None, s, h), dtype=torch.float16)

    price = block.price()

    # Korthikanti et al. 2022, "Reducing Activation Recomputation", equation 2 without 5 a s / h:
    # 34 sbh, 2 of which are the block's input. Not in it: flash's logsumexp (fp32, one per head and
    # row), mean and rstd of two norms, two 64-bit numbers and one empty tensor of the random state.
    logsumexp, statistics = 4 * heads * s, 2 * 2 * 4 * s
    assert price.saves_input == (True,)
    assert price.saved.per_sample == 32 * s * h + logsumexp + statistics
    assert price.saved.fixed <= 32


def test_a_gpt_block_with_eager_attention_saves_the_whole_formula():
    s, h, heads = 256, 512, 8
    block = Block(GPTBlock(h, heads, 0.1, "eager"), (None, s, h), dtype=torch.float16)

    price = block.price()

    # 34 sbh + 5 a s^2 b, less the input's 2 sbh; and two norms' statistics.
    assert price.saved == Affine(0.0, 32 * s * h + 5 * heads * s * s + 2 * 2 * 4 * s)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rate", [0.0, 0.1])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_real_tensors_on_a_cpu_save_what_the_price_for_a_cpu_says(attention, rate, dtype):
    block = Block(GPTBlock(64, 4, rate, attention), (None, 32, 64), dtype=dtype)
    given = {
        i: torch.ones([3 if isinstance(n, Batch) else n for n in t.shape], dtype=dtype, requires_grad=True)
        for i, t in enumerate(block.tensors)
        if t.kind == "parameter" or i in block.inputs
    }
    env = dict(given)
    kept: dict[int, torch.Tensor] = {}

    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.setdefault(t.untyped_storage()._cdata, t), lambda t: t
    ):
        # Dropout as the runtime runs it, with a mask of one byte an element (tests.test_runtime_random).
        run_nodes(
            block.tensors, block.nodes, env, micro_batch=3, device=torch.device("cpu"), replace=REPLACEMENTS["cpu"]
        )

    for tensor in given.values():
        kept.pop(tensor.untyped_storage()._cdata, None)
    total = sum(t.untyped_storage().nbytes() for t in kept.values())
    assert block.price(device_kind="cpu").saved.at(3) == total


def test_an_input_that_backward_does_not_need_is_not_flagged():
    block = Block(Function(lambda a, b, c: (a * b + c).exp()), *[(None, 8)] * 3)

    price = block.price()

    assert price.saves_input == (True, True, False)
    assert price.saves_output == (True,)
    assert price.saved == Affine()


def test_a_saved_storage_counts_whole_and_once():
    # relu saves its output, of which the block returns a quarter: three quarters are the block's own.
    block = Block(Function(lambda x: F.relu(x)[:, :4]), (None, 16))

    price = block.price()

    assert price.saves_output == (True,)
    assert price.saved == Affine(0.0, 4 * 12)


def test_parameters_and_shared_tensors_are_not_saved_by_the_block():
    block = Block(Function(lambda x, mask: x * mask), (None, 8), (None, 8))
    x, mask = block.inputs

    price = price_nodes(block.tensors, block.nodes, [x], [mask], block.outputs)

    assert price.saves_input == (False,)
    assert price.saved == Affine()
    assert len(kernels(price, "mul", "backward")) == 1


# --- FLOP ---


def test_linear_layer_by_hand():
    price = Block(nn.Linear(8, 16), (None, 4, 8)).price()

    assert flop(price, "forward") == 2 * 4 * 8 * 16
    assert flop(price, "backward") == 2 * flop(price, "forward")
    (kernel,) = kernels(price, "addmm", "forward")
    assert kernel.kind == "matmul"
    # weight and bias once; inputs and outputs per sample
    assert kernel.num_bytes == Affine(4 * (16 * 8 + 16), 4 * 4 * (8 + 16))


def test_a_frozen_weight_and_a_detached_input_cost_no_backward():
    layer = nn.Linear(8, 16, bias=False)
    block = Block(layer, (None, 8))

    assert flop(block.price(detached=block.inputs), "backward") == 2 * 8 * 16
    assert flop(Block(layer.requires_grad_(False), (None, 8)).price(), "backward") == 2 * 8 * 16
    assert not [k for k in Block(layer, (None, 8)).price(detached=[0, 1]).kernels if k.phase == "backward"]


@pytest.mark.parametrize("groups", [1, 4, 16])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_convolution_counts_groups_in_both_directions(groups, is_transposed):
    kind = nn.ConvTranspose2d if is_transposed else nn.Conv2d
    price = Block(kind(16, 32, 3, padding=1, groups=groups, bias=False), (None, 16, 10, 10)).price()

    assert flop(price, "forward") == 2 * 100 * 32 * 16 * 9 / groups
    assert flop(price, "backward") == 2 * flop(price, "forward")
    assert {k.kind for k in price.kernels} == {"convolution"}


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("dtype", "device_kind", "operator"),
    [
        (torch.bfloat16, "cuda", "_scaled_dot_product_flash_attention"),
        (torch.float16, "cuda", "_scaled_dot_product_flash_attention"),
        (torch.float32, "cuda", "_scaled_dot_product_efficient_attention"),
        (torch.float32, "cpu", "_scaled_dot_product_flash_attention_for_cpu"),
        (torch.bfloat16, "cpu", "_scaled_dot_product_flash_attention_for_cpu"),
    ],
)
def test_fused_attention_halves_a_causal_triangle(dtype, device_kind, operator, is_causal):
    def attention(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)

    block = Block(Function(attention), *[(None, 4, 32, 16)] * 3, dtype=dtype)

    price = block.price(device_kind=device_kind)

    (forward,) = kernels(price, operator, "forward")
    (backward,) = kernels(price, f"{operator}_backward", "backward")
    products = 4 * 32 * 32 * 16 * (1 if is_causal else 2)  # of one matrix product
    assert forward.flop.at(1) == 2 * products
    assert backward.flop.at(1) == 5 * products
    assert forward.kind == backward.kind == "attention"


@pytest.mark.parametrize(
    ("shapes", "options", "dtype", "operator"),
    [
        ([(4, 32, 16)] * 3, {"attn_mask": True}, torch.bfloat16, "_scaled_dot_product_efficient_attention"),
        ([(4, 32, 16), (2, 32, 16), (2, 32, 16)], {"enable_gqa": True}, torch.bfloat16,
         "_scaled_dot_product_flash_attention"),
        ([(4, 32, 16), (2, 32, 16), (2, 32, 16)], {"enable_gqa": True}, torch.float32, "bmm"),
        ([(4, 32, 16)] * 3, {}, torch.float64, "bmm"),
        ([(4, 32, 16)] * 3, {"attn_mask": True}, torch.float64, "bmm"),
        ([(4, 32, 288)] * 3, {}, torch.bfloat16, "_scaled_dot_product_efficient_attention"),
        ([(4, 32, 36)] * 3, {}, torch.bfloat16, "_scaled_dot_product_flash_attention"),
        ([(4, 32, 36)] * 3, {"attn_mask": True}, torch.bfloat16, "bmm"),
        ([(4, 8, 16), (4, 32, 16), (4, 32, 16)], {"is_causal": True}, torch.bfloat16,
         "_scaled_dot_product_efficient_attention"),
    ],
)  # fmt: skip
def test_cuda_picks_the_attention_operator(shapes, options, dtype, operator):
    def attention(q, k, v):
        mask = torch.ones(32, 32, dtype=torch.bool, device=q.device) if options.get("attn_mask") else None
        return F.scaled_dot_product_attention(q, k, v, **(options | {"attn_mask": mask}))

    block = Block(Function(attention), *[(None, *shape) for shape in shapes], dtype=dtype)

    price = block.price()

    assert kernels(price, operator, "forward")
    assert all(k.flop.at(1) for k in kernels(price, operator, "forward"))
    assert price.flop("backward").at(1)


def test_rms_norm_is_cudas_own_on_cuda_and_dropout_keeps_a_byte_an_element_everywhere():
    norm = nn.Sequential(nn.RMSNorm(8), nn.Dropout(0.5))
    block = Block(norm, (None, 8))

    on_cuda = {k.op.split(".")[1] for k in block.price().kernels if k.phase == "forward"}
    on_cpu = {k.op.split(".")[1] for k in block.price(device_kind="cpu").kernels if k.phase == "forward"}
    assert on_cuda == {"_fused_rms_norm", "native_dropout"}
    assert on_cpu & on_cuda == {"native_dropout"}
    # 4 bytes a row, and dropout's mask of one byte an element
    assert block.price().saves_input == (True,)
    assert block.price().saved.per_sample == 4 + 8
    for device_kind in ("cuda", "cpu"):
        for inplace in (False, True):
            dropout = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5, inplace=inplace))
            assert Block(dropout, (None, 8)).price(device_kind=device_kind).saved.per_sample == 8


@pytest.mark.parametrize("device_kind", ["cuda", "cpu"])
def test_grouped_matrix_products_of_experts_count_each_token_once(device_kind):
    def tensor(name, kind, *shape, dtype="bfloat16"):
        return Tensor(name=name, shape=shape, dtype=dtype, kind=kind, requires_grad=kind == "parameter")

    tensors = [
        tensor("tokens", "activation", Batch(6), 32),
        tensor("experts", "parameter", 4, 32, 64),
        tensor("ends", "activation", 4, dtype="int32"),
        tensor("result", "activation", Batch(6), 64),
    ]
    node = Node(name="mm", op="aten._grouped_mm.default", args=(Ref(0), Ref(1), Ref(2)), outputs=(3,))

    price = price_nodes(tensors, [node], [0], [2], [3], device_kind=device_kind)

    (forward,) = kernels(price, "_grouped_mm", "forward")
    assert forward.flop == Affine(0.0, 2 * 6 * 32 * 64)
    assert [k.flop for k in kernels(price, "_grouped_mm", "backward")] == 2 * [forward.flop]


@pytest.mark.parametrize(
    "module",
    [
        nn.Sequential(nn.Linear(16, 48), nn.GELU(), nn.Linear(48, 16)),
        nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, dropout=0.0),
    ],
)
def test_flop_without_attention_operators_and_groups_are_torchs_own(module):
    block = Block(module.train(), (None, 6, 16), dtype=torch.float64)
    module = module.to_empty(device="cpu")
    x = torch.zeros(2, 6, 16, dtype=torch.float64, requires_grad=True)

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        with FlopCounterMode(display=False) as forward:
            y = module(x)
        with FlopCounterMode(display=False) as backward:
            y.sum().backward()

    price = block.price()
    assert price.flop("forward").at(2) == forward.get_total_flops()
    assert price.flop("backward").at(2) == backward.get_total_flops()


@torch.library.custom_op("planner_tests::secret_mm", mutates_args=())
def secret_mm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x @ w


@secret_mm.register_fake
def _(x, w):
    return x @ w


def multiply_back(ctx, grad):
    return grad * 2.0, None


secret_mm.register_autograd(multiply_back)


@torch.library.custom_op("planner_tests::secret", mutates_args=())
def secret(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x @ w


@secret.register_fake
def _(x, w):
    return x @ w


secret.register_autograd(multiply_back)


class Secret(nn.Module):
    def __init__(self, function, *shape):
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.empty(*shape))

    def forward(self, x):
        return self.function(x, self.weight)


def test_an_operator_without_formula_is_priced_by_its_bytes_and_marked_where_it_may_compute(monkeypatch):
    for function in (secret_mm, secret):  # one by its name, one because it reads a matrix of parameters
        price = Block(Secret(function, 8, 8), (None, 8)).price()
        marked = [k for k in price.kernels if not k.has_formula]

        assert {kernel.op.split(".")[1] for kernel in marked} == {str(function._opoverload).split(".")[1]}
        assert all(k.flop == Affine(0.0, 0.0) and k.num_bytes == Affine(8 * 8 * 4, 2 * 8 * 4) for k in marked)
    packet = secret._opoverload.overloadpacket
    monkeypatch.setitem(flop_registry, packet, lambda x, weight, out_val: 2 * x.numel() * 8)

    price = Block(Secret(secret, 8, 8), (None, 8)).price()

    assert price.flop("forward") == Affine(0.0, 2 * 8 * 8)
    assert all(kernel.has_formula for kernel in price.kernels)


def test_a_bilinear_form_is_two_products():
    """`[batch, in1]` with `[out, in1, in2]`, that with `[batch, in2]`."""
    price = Block(nn.Bilinear(8, 4, 5, bias=False), (None, 8), (None, 4)).price()

    assert price.flop("forward") == Affine(0.0, 2 * (5 * 8 * 4 + 5 * 4))
    assert all(kernel.has_formula for kernel in price.kernels)


class Distances(nn.Module):
    """To 16 points, of 10 rows a sample: from 25 rows on torch takes a product for them."""

    def __init__(self):
        super().__init__()
        self.points = nn.Parameter(torch.empty(16, 4))

    def forward(self, x):
        return torch.cdist(x.view(-1, 4), self.points)


def test_a_kernel_that_torch_picks_by_size_is_that_of_the_larger_batch():
    price = Block(Distances(), (None, 10, 4)).price()

    names = [kernel.op.split(".")[1] for kernel in price.kernels if kernel.phase == "forward"]
    assert names == ["_euclidean_dist"]
    assert price.flop("forward") == Affine(0.0, 2 * 10 * 16 * 4)


class Unpriced(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)

    def forward(self, x):
        return nn.functional.fractional_max_pool3d(self.first(x), 2, output_size=2).mean()


def test_what_does_not_run_on_fake_tensors_is_said_with_its_line():
    line = Unpriced.forward.__code__.co_firstlineno + 1
    with pytest.raises(TraceError, match=rf"test_pricing\.py:{line}: the backward of aten\.fractional_max_pool3d"):
        trace(Unpriced(), {"x": torch.zeros(2, 4, 4, 4, 4)}, precision="fp32")


# --- bytes ---


def test_bytes_of_an_elementwise_kernel_by_hand():
    price = Block(Function(lambda a, b: a * b), (None, 6), (None, 6), dtype=torch.bfloat16).price()

    (forward,) = price.kernels[:1]
    assert (forward.op, forward.kind, forward.dtype) == ("aten.mul.Tensor", "memory", "bfloat16")
    assert forward.num_bytes == Affine(0.0, 3 * 6 * 2)
    assert forward.flop == Affine()


def test_views_and_expanded_operands_move_nothing():
    def function(x):
        return x.view(-1, 2, 3).transpose(1, 2)[:, :, :1].expand(-1, -1, 100) * 2.0

    price = Block(Function(function), (None, 6)).price()

    forward = [k for k in price.kernels if k.phase == "forward"]
    assert [k.op for k in forward] == ["aten.mul.Tensor"]
    assert forward[0].num_bytes.per_sample == 4 * (6 + 300)


def test_a_gather_reads_rows_and_its_backward_writes_the_table():
    price = Block(nn.Embedding(1000, 16), (torch.int64, 5)).price()

    (forward,) = kernels(price, "embedding", "forward")
    (backward,) = kernels(price, "embedding_dense_backward", "backward")
    assert forward.num_bytes == Affine(0.0, 5 * 8 + 2 * 5 * 16 * 4)
    assert backward.num_bytes == Affine(1000 * 16 * 4, 5 * 8 + 5 * 16 * 4)


# --- peaks ---


def test_peaks_of_a_chain_by_hand():
    # exp keeps its result, 16 bytes a sample here; `+ 1` and the product keep nothing.
    block = Block(Function(lambda x: ((x.exp() + 1.0) * 2.0).sum(-1)), (None, 4))

    price = block.price()

    # `exp() + 1` and its double are alive together, beyond the saved exp()
    assert price.saved == Affine(0.0, 16)
    assert price.forward_peak == Affine(0.0, 32)
    # the gradients before and after the product with exp(); what came in is used up by then
    assert price.backward_peak == Affine(0.0, 32)


def test_gradients_of_parameters_are_no_part_of_the_peak():
    block = Block(nn.Linear(1000, 1, bias=False), (None, 1000))

    price = block.price()

    assert price.backward_peak == Affine(0.0, 4 * (1000 + 1))  # the gradients of input and output


def test_a_peak_that_parameters_make_at_small_batches_is_a_bound():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.empty(100))

        def forward(self, x):
            return x.sum() + (self.weight.abs() + 1.0).sum() * (x + 1.0).sum()

    price = Block(Scaled(), (None, 10)).price()

    for size in (1, 3, 9, 30, 100):
        assert price.forward_peak.at(size) >= max(400, 40 * size)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="without oneDNN convolutions work otherwise")
@pytest.mark.parametrize(
    ("samples", "channels", "width", "kernel", "stride", "groups"),
    [
        (32, (3, 16), 32, 3, 1, 1),  # few channels are read as they lie
        (32, (16, 16), 32, 3, 1, 1),
        (32, (16, 32), 32, 3, 2, 1),
        (64, (16, 64), 16, 1, 1, 1),
        (64, (64, 16), 16, 1, 1, 1),
        (32, (64, 128), 16, 1, 2, 1),
        (32, (32, 32), 16, 3, 1, 32),
    ],
)
def test_scratch_of_a_convolution_on_a_cpu_is_what_its_allocator_records(
    samples, channels, width, kernel, stride, groups
):
    data = torch.randn(samples, channels[0], width, width)
    weight = torch.randn(channels[1], channels[0] // groups, kernel, kernel)
    options = (None, [stride] * 2, [kernel // 2] * 2, [1, 1], False, [0, 0], groups)
    needs_input = channels[0] >= 16  # the first one of a model does not
    gradient = torch.randn_like(torch.ops.aten.convolution(data, weight, *options))
    calls = (
        (torch.ops.aten.convolution.default, (data, weight, *options)),
        (torch.ops.aten.convolution_backward.default,
         (gradient, data, weight, [0], *options[1:], [needs_input, True, False])),
    )  # fmt: skip
    for operator_, arguments in calls:
        operator_(*arguments)  # what is made once
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
            out = operator_(*arguments)
        records = allocations(profiler)
        if records is None:
            pytest.skip("this torch does not tell what it allocates")
        results = sum(x.nbytes for x in ([out] if isinstance(out, torch.Tensor) else out) if x is not None)

        scratch = scratch_bytes(operator_, arguments, {}, out)

        assert scratch == pytest.approx(rise_bytes(records) - results, rel=0.03)


def test_scratch_counts_at_the_peak_of_a_block():
    module = nn.Conv2d(16, 16, 3, padding=1, bias=False)
    block = Block(module, (None, 16, 8, 8))

    on_cpu, on_cuda = block.price(device_kind="cpu"), block.price(device_kind="cuda")
    sample = 4 * 16 * 8 * 8

    assert on_cuda.forward_peak == Affine(0.0, sample)  # the result
    assert on_cpu.forward_peak.at(9) == 2 * 9 * sample + 4 * 16 * 16 * 9  # and copies of input and weight
    assert on_cpu.backward_peak.at(9) == on_cuda.backward_peak.at(9) + 2 * 9 * sample  # of input and gradient


# --- linearity ---


@pytest.mark.parametrize("device_kind", ["cuda", "cpu"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_two_sizes_predict_a_third(attention, device_kind):
    block = Block(GPTBlock(64, 4, 0.1, attention), (None, 32, 64), dtype=torch.bfloat16)

    price = block.price(device_kind=device_kind)
    larger = block.price(device_kind=device_kind, micro_batches=(8, 16))

    assert price.saved.at(8) == larger.saved.at(8)
    assert price.forward_peak.at(8) == larger.forward_peak.at(8)
    assert price.backward_peak.at(8) == larger.backward_peak.at(8)
    for kernel, other in zip(price.kernels, larger.kernels, strict=True):
        assert kernel.op == other.op
        assert kernel.flop.at(8) == other.flop.at(8)
        assert kernel.num_bytes.at(8) == other.num_bytes.at(8)


def test_a_loss_that_compares_samples_is_not_linear():
    with pytest.raises(TraceError, match="not linear in the micro-batch"):
        Block(Function(lambda x: (x @ x.T).exp().sum()), (None, 8)).price()


# --- blocks of every kind ---


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.convolution = nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x):
        y = F.relu(self.norm(self.convolution(x)), inplace=True)
        y += x
        return F.relu_(y)


def test_a_block_that_writes_in_place_and_updates_statistics():
    price = Block(Residual().train(), (None, 4, 8, 8)).price()

    image = 4 * 4 * 8 * 8
    assert price.saves_input == (True,)
    assert price.saves_output == (False,) or price.saves_output == (True,)
    assert price.saved.per_sample % image == 0
    assert kernels(price, "relu_", "forward")
    assert kernels(price, "convolution_backward", "backward")


def test_an_input_may_be_written_in_place():
    price = Block(Function(lambda x: x.relu_() * 2.0), (None, 8)).price()

    assert price.saves_input == (True,)
    assert kernels(price, "threshold_backward", "backward")


def test_an_output_may_be_a_view_of_an_input_or_the_input():
    price = Block(Function(lambda x: (x.view(-1, 4), x[:, :1] + 1.0)), (None, 8)).price()

    assert price.saves_output == (False, False)
    assert price.saved == Affine()


def test_a_block_without_differentiable_output_has_no_backward():
    price = Block(Function(lambda x: x * 2), (torch.int64, 8)).price()

    assert [k.phase for k in price.kernels] == ["forward"]
    assert price.backward_peak == Affine()


def test_a_block_may_end_in_the_scalar_loss():
    block = Block(Function(lambda x, y: F.cross_entropy(x, y)), (None, 100), (torch.int64,))
    logits, target = block.inputs

    price = price_nodes(block.tensors, block.nodes, [logits], [target], block.outputs)

    assert price.saves_output == (False,)
    # log_softmax's result, and the weight of the mean
    assert price.saved == Affine(4.0, 400.0)
    (pick,) = kernels(price, "nll_loss_forward", "forward")
    assert pick.num_bytes.at(1000) < 20_000  # it does not read all logits


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(50, 8)

    def forward(self, x):
        return F.linear(self.table(x), self.table.weight)


def test_a_parameter_may_be_used_twice():
    price = Block(Tied(), (torch.int64, 3)).price()

    # of the shared weight: from the product, from the lookup, and their sum
    assert [len(kernels(price, n, "backward")) for n in ("mm", "embedding_dense_backward", "add")] == [2, 1, 1]


@pytest.mark.parametrize(
    "module",
    [
        nn.GroupNorm(2, 8),
        nn.LayerNorm((8, 6)),
        nn.Conv1d(8, 8, 3, padding=1),
        nn.Sequential(nn.Flatten(), nn.Linear(48, 4), nn.Softmax(-1)),
        nn.Sequential(nn.AdaptiveAvgPool1d(1), nn.Flatten()),
        nn.PReLU(8),
    ],
)
@pytest.mark.parametrize("device_kind", ["cuda", "cpu"])
def test_common_modules_have_prices(module, device_kind):
    price = Block(module, (None, 8, 6)).price(device_kind=device_kind)

    assert {k.phase for k in price.kernels} == {"forward", "backward"}


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(16, 8, batch_first=True)

    def forward(self, x):
        return self.lstm(x)[0]


@pytest.mark.filterwarnings("ignore:The tensor attributes self.lstm")
@pytest.mark.parametrize("device_kind", ["cuda", "cpu"])
def test_a_recurrent_layer_meets_its_weights_at_every_step(device_kind):
    price = Block(Recurrent(), (None, 5, 16)).price(device_kind=device_kind)

    assert flop(price, "forward") == 2 * 5 * 4 * 8 * (16 + 8)
    assert price.flop("backward").at(1) <= 2 * flop(price, "forward")


def test_a_resized_table_of_positions_is_no_computation():
    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.empty(1, 4, 8, 8))

        def forward(self, x):
            return x + F.interpolate(self.table, (12, 12), mode="bicubic")

    price = Block(Positions(), (None, 4, 12, 12)).price()

    assert price.flop("forward") == Affine()
    assert kernels(price, "upsample_bicubic2d_backward", "backward")


# --- the prelude ---


def test_the_prelude_is_priced_without_gradient():
    block = Block(Function(lambda x: (x.float() * 2.0, x[:, :1], x)), (torch.int64, 8))

    found, num_bytes = price_forward(block.tensors, block.nodes, block.outputs)

    assert [k.op for k in found] == ["aten._to_copy.default", "aten.mul.Tensor"]
    assert num_bytes == Affine(0.0, 8 * 4)


# --- modules without a graph ---


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 2.0 * x * grad


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)

    def forward(self, x):
        return Square.apply(self.linear(x))


class Stack(nn.Module):
    def __init__(self, width=16, depth=3):
        super().__init__()
        self.embed = nn.Linear(8, width, bias=False)
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))
        self.head = nn.Linear(width, 8, bias=False)

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


WRAPPED = [f"layers.{i}" for i in range(3)]


def mean(output, batch):
    return output.mean()


@pytest.mark.parametrize("device_kind", ["cuda", "cpu"])
def test_kernels_of_a_module_without_graph_belong_to_the_wrapped_modules(device_kind):
    model = Stack()

    prices = price_module(
        model, (torch.zeros(3, 8),), mean, wrapped=WRAPPED, dtype=torch.float32, device_kind=device_kind
    )

    assert list(prices) == [*WRAPPED, ""]
    for name in WRAPPED:
        assert prices[name].flop("forward") == Affine(0.0, 2 * 16 * 16)
        assert prices[name].flop("backward") == Affine(0.0, 2 * 2 * 16 * 16)
        # its input, 16 numbers, and the square's: both are kept in the layer
        assert prices[name].saved == Affine(0.0, 4 * 32)
    assert prices[""].flop("forward") == Affine(0.0, 2 * 2 * 8 * 16)
    # the embedding's input needs no gradient
    assert prices[""].flop("backward") == Affine(0.0, 3 * 2 * 8 * 16)
    assert all(p.device.type == "cpu" for p in model.parameters())


def test_a_module_without_graph_gets_the_attention_of_its_device():
    class Attends(nn.Module):
        def __init__(self):
            super().__init__()
            self.proj = nn.Linear(16, 16)

        def forward(self, x):
            q = self.proj(x).unflatten(-1, (2, 8)).transpose(1, 2)
            return F.dropout(F.scaled_dot_product_attention(q, q, q, is_causal=True), 0.1).sum()

    prices = price_module(Attends(), (torch.zeros(2, 4, 16),), None, wrapped=[], dtype=torch.bfloat16)

    found = {k.op.split(".")[1] for k in prices[""].kernels}
    assert {"_scaled_dot_product_flash_attention", "native_dropout"} <= found


def test_a_module_that_reads_values_is_refused_in_one_sentence():
    class Reads(nn.Linear):
        def forward(self, x):
            return super().forward(x).sum() * (1.0 if x.sum().item() > 0 else 2.0)

    with pytest.raises(TraceError, match="the model cannot run on fake tensors") as caught:
        price_module(Reads(8, 8), (torch.zeros(2, 8),), None, wrapped=[], dtype=torch.float32)

    assert "\n" not in str(caught.value)


def test_module_prices_and_graph_prices_agree():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = GPTBlock(64, 4, 0.1, "sdpa")

        def forward(self, x):
            return self.block(x).sum()

    x = (torch.zeros(2, 32, 64),)
    by_module = price_module(Model(), x, None, wrapped=["block"], dtype=torch.bfloat16)["block"]
    block = Block(GPTBlock(64, 4, 0.1, "sdpa"), (None, 32, 64), dtype=torch.bfloat16)
    by_graph = block.price(detached=block.inputs)

    for phase in ("forward", "backward"):
        assert by_module.flop(phase) == by_graph.flop(phase)
    assert by_module.saved.at(4) in (by_graph.saved.at(4), by_graph.saved.at(4) + 2 * 4 * 32 * 64)
    ops = [sorted(k.op for k in price.kernels if k.phase == "forward") for price in (by_module, by_graph)]
    assert ops[0] == ops[1]
