import pytest
import torch
import torch.nn.functional as F
from torch import nn

from planner.trace import trace
from tests import models


class Net(nn.Module):
    """[batch, 4] to [batch, 3]; the loss is given."""

    def __init__(self, loss) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.ones(()))
        self.loss = loss

    def forward(self, x, y):
        return self.loss(self.linear(x), y, self)


def graph_of(loss):
    batch = {"x": torch.randn(4, 4), "y": torch.randint(3, (4,))}
    return trace(Net(loss), batch)


MEANS = {
    "cross entropy": lambda z, y, m: F.cross_entropy(z, y),
    "mean of squares": lambda z, y, m: z.square().mean(),
    "mean by hand": lambda z, y, m: z.square().sum() / z.shape[0],
    "mean over samples, then classes": lambda z, y, m: z.square().mean(0).mean(),
    "two means": lambda z, y, m: F.cross_entropy(z, y) + 0.1 * z.abs().mean() - z.mean() / 3,
    "mean and weight decay": lambda z, y, m: F.cross_entropy(z, y) + 0.1 * m.linear.weight.norm(),
    "scaled mean": lambda z, y, m: F.cross_entropy(z, y) * m.scale,
    "mean of sample norms": lambda z, y, m: (z.norm(dim=1) + z.softmax(1).amax(1)).mean(),
    "stacked": lambda z, y, m: torch.stack([z.mean(), z.abs().mean()]).sum(),
    "binary": lambda z, y, m: F.binary_cross_entropy_with_logits(z[:, 0], (y > 0).to(z.dtype)),
    "by hand": lambda z, y, m: -z.log_softmax(1)[torch.arange(z.shape[0]), y].mean(),
    "gathered": lambda z, y, m: -z.log_softmax(1).gather(1, y[:, None]).mean(),
    "smooth": lambda z, y, m: F.cross_entropy(z, y, label_smoothing=0.1),
    "bags of two": lambda z, y, m: (z * F.embedding_bag(torch.stack([y, y], 1), m.linear.weight)[:, :3]).mean(),
}
SUMS = {
    "sum": lambda z, y, m: z.square().sum(),
    "sum of cross entropy": lambda z, y, m: F.cross_entropy(z, y, reduction="sum"),
    "sum of squares": lambda z, y, m: F.mse_loss(z[:, 0], y.to(z.dtype), reduction="sum"),
    "product over classes only": lambda z, y, m: z.square().sum(0).mean(),
}
MIXES = {
    "product of means": lambda z, y, m: z.mean() * z.abs().mean(),
    "root of a mean": lambda z, y, m: z.square().mean().sqrt(),
    "balance of classes": lambda z, y, m: (z.softmax(1).mean(0) ** 2).sum(),
    "batch statistics": lambda z, y, m: (z - z.mean(0)).square().mean(),
    "flipped": lambda z, y, m: (z * z.flip(0)).mean(),
    "rolled": lambda z, y, m: (z * z.roll(1, 0)).mean(),
    "sorted": lambda z, y, m: (z[:, 0].sort().values * z[:, 1]).mean(),
    "ranked": lambda z, y, m: (z * z.argsort(0)).mean(),
    "picked": lambda z, y, m: (z * z[y]).mean(),
    "the rest in the last bag": lambda z, y, m: (
        z * F.embedding_bag(torch.cat([y, y]), m.linear.weight, torch.arange(z.shape[0]))[:, :3]
    ).mean(),
    "numbered": lambda z, y, m: (z[:, 0] * torch.arange(z.shape[0])).mean(),
    "scaled by the batch": lambda z, y, m: (z / (z.shape[0] * 4)).tanh().mean(),
    "last sample": lambda z, y, m: z[-1].square().mean(),
    "maximum": lambda z, y, m: z.amax(),
    "softmax over samples": lambda z, y, m: z.softmax(0).square().mean(),
    "mean and a batch-free square": lambda z, y, m: (z.mean() + 1.0).square(),
    "sum with weight decay": lambda z, y, m: z.square().sum() + m.linear.weight.square().sum(),
}
ACROSS = {  # z is [batch, 3]; a sample's part of what these make has something of other samples in it
    "batch norm without running statistics": lambda z, m: m.norm(z),
    "functional batch norm": lambda z, m: F.batch_norm(z, None, None, training=True),
    "layer norm over all": lambda z, m: F.layer_norm(z, z.shape),
    "rms norm over all": lambda z, m: F.rms_norm(z, z.shape),
    "group norm of a folded batch": lambda z, m: F.group_norm(z.T[None], 3)[0].T,
    "folded by a view": lambda z, m: F.group_norm(z.reshape(1, 3, -1), 3).view_as(z),
    "convolution over samples": lambda z, m: F.conv1d(z.T[None], m.kernel, padding=1, groups=3)[0].T,
    "transposed convolution over samples": lambda z, m: F.conv_transpose1d(z.T[None], m.kernel, padding=1)[0][:1].T,
    "samples as channels": lambda z, m: F.conv1d(z.reshape(1, 1, -1), m.kernel[:1], padding=1).view_as(z),
    "pool over samples": lambda z, m: F.avg_pool1d(z.T[None], 3, 1, 1)[0].T,
    "maximum over samples": lambda z, m: F.max_pool1d(z.T[None], 3, 1, 1)[0].T,
    "interleaved": lambda z, m: z.reshape(-1).view(3, -1).T.reshape(-1, 3),
}
WITHIN = {  # the same operators, in one sample each
    "sequence first": lambda z, m: z[:, None].transpose(0, 1).reshape(-1, 3).view(1, -1, 3).transpose(0, 1)[:, 0],
    "heads": lambda z, m: z.view(-1, 1, 3, 1).transpose(1, 2).reshape(-1, 1, 1).view(-1, 3, 1, 1).flatten(1),
    "dims in front of the batch": lambda z, m: z.T.reshape(-1).view(3, -1).T,
    "viewed as": lambda z, m: z.T.reshape(-1).view_as(z.T).T,
    "repeated": lambda z, m: z.repeat(2, 1).view(2, -1, 3).mean(0),
    "layer norm": lambda z, m: F.layer_norm(z[:, None], (1, 3))[:, 0],
    "group norm": lambda z, m: F.group_norm(z[:, :, None], 3)[:, :, 0],
    "batch norm of one sample each": lambda z, m: F.batch_norm(z[None], None, None, training=True)[0],
    "convolution": lambda z, m: F.conv1d(z[:, None], m.kernel[:1], padding=1)[:, 0],
    "convolution with one element": lambda z, m: F.conv1d(z.T[None], m.kernel[..., :1], groups=3)[0].T,
    "windows within a sample": lambda z, m: F.avg_pool1d(z.reshape(1, 1, -1), 3).view(-1, 1).expand(-1, 3),
    "attention": lambda z, m: F.scaled_dot_product_attention(z[:, :, None], z[:, :, None], z[:, :, None])[:, :, 0],
}
DIVIDED = {
    "masked mean": lambda z, y, m: (F.cross_entropy(z, y, reduction="none") * (y > 0)).sum() / (y > 0).sum(),
    "masked mean, clamped": lambda z, y, m: (z.square().mean(1) * (y > 0)).sum() / (y > 0).sum().clamp(min=1),
    "normalised weights": lambda z, y, m: (z.square().mean(1) * ((y + 1.0) / (y + 1.0).sum())).sum(),
}


@pytest.mark.parametrize("name", MEANS)
def test_a_mean_over_samples_may_be_split(name):
    graph = graph_of(MEANS[name])

    assert (graph.couples_samples, graph.not_separable) == ("", "")
    assert graph.loss_terms
    assert all(term.power == 1 for term in graph.loss_terms)
    assert not graph.divisors


@pytest.mark.parametrize("name", SUMS)
def test_a_sum_over_samples_may_not(name):
    assert "sum over samples" in graph_of(SUMS[name]).couples_samples


@pytest.mark.parametrize("name", MIXES)
def test_a_nonlinear_loss_is_told_with_its_line(name):
    graph = graph_of(MIXES[name])

    assert "test_separable.py:" in graph.not_separable or "sum over samples" in graph.couples_samples


class Between(Net):
    """What runs over samples, or not, between the linear layer and a loss of each sample."""

    def __init__(self, between) -> None:
        super().__init__(lambda z, y, m: F.cross_entropy(between(z, m), y))
        self.norm = nn.BatchNorm1d(3, track_running_stats=False)
        self.register_buffer("kernel", torch.ones(3, 1, 3))


def between(function):
    return trace(Between(function), {"x": torch.randn(4, 4), "y": torch.randint(3, (4,))})


@pytest.mark.parametrize("name", ACROSS)
def test_an_operator_that_runs_over_samples_is_told_with_its_line(name):
    assert "test_separable.py:" in between(ACROSS[name]).not_separable


@pytest.mark.parametrize("name", WITHIN)
def test_an_operator_that_runs_within_samples_is_not(name):
    graph = between(WITHIN[name])

    assert (graph.couples_samples, graph.not_separable) == ("", "")


@pytest.mark.parametrize("name", DIVIDED)
def test_what_a_mean_is_divided_by_is_known_with_what_it_sums(name):
    graph = graph_of(DIVIDED[name])

    assert (graph.couples_samples, graph.not_separable) == ("", "")
    (divisor,) = graph.divisors
    assert divisor.degree == 1
    assert [degree for _, degree in divisor.sums] == [1]
    assert [term.power for term in graph.loss_terms] == [0]


def test_models_of_the_zoo_and_of_hugging_face_are_means():
    for name in models.MODELS:
        graph = trace(
            models.build(name, dtype=torch.float32), models.batches(name, 4, 1, dtype=torch.float32)[0], name=name
        )
        assert (graph.couples_samples, graph.not_separable) == ("", ""), name
