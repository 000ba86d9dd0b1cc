from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from planner.errors import PlanError, TraceError
from planner.shard.placement import P, Placement, Q, R, conversion
from planner.trace.aten import torch_operator
from planner.trace.parallel import Pretended, ProcessGroup, Threads, bound
from tests.ranks import run_ranks
from tests.sharded import apart, step, together

SHAPE = (24, 5, 36)
SPLITS = [Placement.parse(text) for text in ("S0[24]", "S0*2[12]", "S2[24,12]", "S2*3[12]", "S0*2[8,4]")]
PAIRS = [
    (source, target)
    for source in (R, Q, P, *SPLITS)
    for target in (R, Q, P, *SPLITS)
    if conversion(source, target, has_gradient=True) is not None
]
WIDE = Placement.parse("S2*3[12]"), Placement.parse("S0*2[12]")


def _divides(degree, *placements):
    return all(part % degree == 0 for p in placements for part in p.parts)


def _converted(values, gradients, source, target, communicator):
    made = step(source, target)
    x = values[communicator.rank].clone().requires_grad_()
    y = bound({"tp": communicator})[made.op](x, *made.args, axis="tp")
    held = gradients[communicator.rank]
    before = held.clone()
    (gradient,) = torch.autograd.grad(y, x, held)
    assert torch.equal(held, before)  # another branch of the backward pass may still need it
    assert torch.equal(x.detach(), values[communicator.rank])
    return y.detach(), gradient


def _whole_of(source, target, degree, run):
    """(value, its whole, gradient, its whole) of a conversion that `run` calls on every rank."""
    draws = torch.Generator().manual_seed(7)
    value, gradient = (torch.randn(SHAPE, dtype=torch.float64, generator=draws) for _ in range(2))
    call = partial(
        _converted, apart(value, source, degree), apart(gradient, target, degree, is_gradient=True), source, target
    )
    made, back = zip(*run(call), strict=True)
    return value, together(made, target), gradient, together(back, source, is_gradient=True)


def test_a_view_of_what_a_conversion_moved_may_be_written_in_place():
    """Autograd refuses it where a function returns a view, such as the pieces of all ranks put together."""

    def doubled(source, target, communicator):
        made = step(source, target)
        x = apart(torch.ones(SHAPE), source, 2)[communicator.rank].requires_grad_()
        y = bound({"tp": communicator})[made.op](x * 1.0, *made.args, axis="tp")
        if made.op in ("planner.copy.default", "planner.unshare.default"):
            return  # the very tensor: `localize` writes into none
        y[..., :1].mul_(2)
        y.sum().backward()

    for source, target in PAIRS:
        if _divides(2, source, target):
            Threads(2).run(partial(doubled, source, target))


@pytest.mark.parametrize("degree", [2, 3, 4])
def test_every_conversion_is_what_its_placements_say_forward_and_backward(degree):
    done = 0
    for source, target in PAIRS:
        if _divides(degree, source, target):
            value, made, gradient, back = _whole_of(source, target, degree, Threads(degree).run)
            torch.testing.assert_close(made, value, rtol=1e-9, atol=1e-12, msg=f"{source} -> {target}")
            torch.testing.assert_close(back, gradient, rtol=1e-9, atol=1e-12, msg=f"{source} -> {target}")
            done += 1
    assert done >= 30


def _one_way(held, made, communicator):
    return bound({"tp": communicator})[made.op](held[communicator.rank], *made.args, axis="tp")


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_what_has_no_gradient_is_converted_too(dtype):
    whole = torch.arange(24 * 3 * 36).reshape(24, 3, 36).remainder(5).to(dtype)
    for source, target in ((R, WIDE[0]), (WIDE[0], R), WIDE, (R, P), (P, R)):
        if dtype == torch.bool and P in (source, target):
            continue
        made = step(source, target, has_gradient=False)
        held = apart(whole, source, 2)
        results = Threads(2).run(partial(_one_way, held, made))
        assert torch.equal(together(results, target), whole)
        assert made.backward is None


def test_pretended_ranks_give_the_shapes_of_real_ones():
    for source, target in PAIRS:
        if not _divides(4, source, target):
            continue
        values = apart(torch.randn(SHAPE), source, 4)
        gradients = apart(torch.randn(SHAPE), target, 4, is_gradient=True)
        real = Threads(4).run(partial(_converted, values, gradients, source, target))[0]
        with FakeTensorMode():
            x = torch.empty(values[0].shape, requires_grad=True)
            made = step(source, target)
            y = bound({"tp": Pretended(4)})[made.op](x, *made.args, axis="tp")
            (gradient,) = torch.autograd.grad(y, x, torch.empty(gradients[0].shape))
        assert [(t.shape, t.stride()) for t in (y, gradient)] == [(t.shape, t.stride()) for t in real], made


def _on_a_group(cases):
    return [call(ProcessGroup(dist.distributed_c10d._get_default_group())) for call in cases]


@pytest.mark.distributed
def test_process_groups_do_what_threads_do(tmp_path):
    calls, expected = [], []

    def keep(call):
        calls.append(call)
        expected.append(Threads(2).run(call))
        return expected[-1]

    for source, target in PAIRS:
        _whole_of(source, target, 2, keep)
    ranks = run_ranks(2, _on_a_group, calls, tmp_path=tmp_path)
    for position, pair in enumerate(PAIRS):
        for rank in range(2):
            torch.testing.assert_close(
                ranks[rank][position], expected[position][rank], rtol=1e-12, atol=1e-12, msg=str(pair)
            )


def _bools():
    group = ProcessGroup(dist.distributed_c10d._get_default_group())
    x = torch.tensor([[True, False], [False, False]]) ^ bool(group.rank)
    return group.all_gather(x), group.all_to_all(x)


@pytest.mark.distributed
def test_process_groups_move_masks(tmp_path):
    (first, swapped), (second, _) = run_ranks(2, _bools, tmp_path=tmp_path)
    assert torch.equal(first, second)
    assert first.tolist() == [[True, False], [False, False], [False, True], [True, True]]
    assert swapped.tolist() == [[True, False], [False, True]]


def test_an_operator_without_communicator_says_what_it_lacks():
    with pytest.raises(TraceError, match=r"planner\.reduce\.default needs a communicator"):
        torch_operator("planner.reduce.default")(torch.ones(2), axis="tp")
    with pytest.raises(PlanError, match="mesh axis 'ep', which has no communicator"):
        bound({"tp": Pretended(2)})["planner.reduce.default"](torch.ones(2), axis="ep")


def test_a_rank_that_fails_ends_the_others():
    def work(communicator):
        if communicator.rank == 1:
            raise ValueError("no luck")
        return communicator.all_reduce(torch.ones(2))

    ranks = Threads(3)
    with pytest.raises(ValueError, match="no luck"):
        ranks.run(work)
    assert [t.tolist() for t in ranks.run(lambda c: c.all_reduce(torch.ones(1)))] == [[3.0]] * 3
