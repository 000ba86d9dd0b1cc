import pytest
import torch
import torch.distributed as dist

from planner.runtime.allocated import held_bytes, rise_bytes, with_peak
from tests.ranks import RankPool

MIB = 2**20


def test_the_most_that_is_there_at_once_counts():
    kept = torch.ones(MIB // 4)

    def step() -> torch.Tensor:
        one = torch.ones(2 * MIB // 4)
        two = one + 1
        del one
        three = torch.exp(two)
        del two
        return three.sum()

    before = held_bytes() - kept.numel() * 4
    _, peak = with_peak(step, before_bytes=before)

    assert peak == pytest.approx(5 * MIB, rel=0.01)  # what was kept, and two of those at once


def test_what_backward_takes_counts():
    weight = torch.ones(256, 256, requires_grad=True)
    data = torch.ones(4096, 256)

    def step() -> None:
        torch.relu(data @ weight).sum().backward()

    before = held_bytes()
    _, peak = with_peak(step, before_bytes=before)

    # relu's output (saved), its gradient and the gradient of the expanded sum's reading, 4 MiB each
    assert peak is not None
    assert 2 * 4 * MIB <= peak <= 3.2 * 4 * MIB


def test_a_torch_without_records_leaves_the_peak_unknown_and_the_step_whole(monkeypatch):
    monkeypatch.delattr(torch._C._profiler._EventType, "Allocation")

    assert with_peak(lambda: 7) == (7, None)


def test_a_block_whose_end_was_not_recorded_ends_where_another_begins():
    assert rise_bytes([(1, 0, 100), (2, 50, 100), (3, 1000, 10)]) == 110
    assert rise_bytes([(1, 100, 50), (2, 0, 200), (3, 0, -200), (4, 0, 10)]) == 200


def test_a_view_and_a_fake_tensor_hold_nothing():
    before = held_bytes()
    base = torch.ones(MIB // 4)
    views = [base[i:] for i in range(10)]
    meta = torch.ones(MIB, device="meta")

    assert held_bytes() - before == MIB
    assert len(views) + meta.ndim == 11


def test_gradients_that_nobody_asked_for_are_there():
    weight = torch.ones(4 * MIB // 4, requires_grad=True)

    def step() -> None:
        (weight * 2).sum().backward()
        for _ in range(3):
            torch.ones(2 * MIB // 4)

    before = held_bytes()
    _, peak = with_peak(step, before_bytes=before)

    assert peak is not None
    assert peak >= 4 * MIB + 2 * MIB  # the gradient, and one of those behind it
    assert held_bytes() - before == 4 * MIB


def _all_reduced(elements: int) -> int | None:
    tensors = [torch.ones(elements) for _ in range(8)]

    def step() -> None:
        for tensor in tensors:
            dist.all_reduce(tensor)
            dist.all_gather_into_tensor(torch.empty(2 * elements), tensor)

    return with_peak(step, before_bytes=held_bytes())[1]


@pytest.mark.distributed
def test_what_a_collective_took_is_not_held_after_it(tmp_path):
    """Threads of gloo give it back, which is in no record: it does not add up."""
    with RankPool(2, tmp_path) as pool:
        peaks = pool.run(_all_reduced, MIB // 4)

    assert all(peak is not None and peak <= 4.1 * MIB for peak in peaks)  # the gathered one, and gloo's own of both
