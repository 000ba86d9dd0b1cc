"""The modules of torch.nn, each in a tiny model that ends in a scalar loss: what any of them may do to a plan."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

Build = Callable[[], nn.Module]
BATCH = 4


def _floats(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(BATCH, *shape, dtype=torch.float64)


def _numbers(limit: int, *shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randint(0, limit, (BATCH, *shape))


class Tail(nn.Module):
    """A module on a linear layer's output (so that it has a gradient to hand back), then a mean of squares."""

    def __init__(self, module: nn.Module, width: int | None) -> None:
        super().__init__()
        self.first = nn.Linear(width, width) if width else nn.Identity()
        self.module = module

    def forward(self, x: Tensor, **others: Tensor) -> Tensor:
        made = self.module(self.first(x), *others.values())
        while isinstance(made, tuple):
            made = made[0]
        loss: Tensor = made.pow(2).mean()
        return loss


class Two(nn.Module):
    """A module of two inputs, both with a gradient."""

    def __init__(self, module: nn.Module, width: int) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(width, width), nn.Linear(width, width)
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.module(self.one(x), self.other(x))
        return made.pow(2).mean()


class Called(nn.Module):
    """A loss or another call of a module, as a function says."""

    def __init__(self, width: int, call: Callable[..., Tensor], module: nn.Module, out: int | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(width, out or width)
        self.module = module
        self.call = call

    def forward(self, x: Tensor, **others: Tensor) -> Tensor:
        return self.call(self.module, self.first(x), **others)


class Function(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> Tensor:
        made: Tensor = self.function(*args)
        return made


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, and one batch of it."""

    build: Build
    inputs: Mapping[str, Callable[[], Tensor]] = field(default_factory=dict)

    def model(self) -> nn.Module:
        """The same parameters every time, in double precision."""
        torch.manual_seed(0)
        return self.build().double()

    def batch(self) -> dict[str, Tensor]:
        """The same values every time."""
        torch.manual_seed(1)
        return {name: make() for name, make in self.inputs.items()}


def _tail(width: int | None, module: Callable[[], nn.Module], *shape: int, **others: Callable[[], Tensor]) -> Case:
    return Case(build=lambda: Tail(module(), width), inputs={"x": _floats(*shape), **others})


def _vector(module: Callable[[], nn.Module], width: int = 16) -> Case:
    """Of `[batch, 6, width]`."""
    return _tail(width, module, 6, width)


def _line(module: Callable[[], nn.Module]) -> Case:
    """Of 4 channels with 16 elements."""
    return _tail(16, module, 4, 16)


def _image(module: Callable[[], nn.Module]) -> Case:
    """Of 4 channels with 8 by 8 elements."""
    return _tail(8, module, 4, 8, 8)


def _volume(module: Callable[[], nn.Module]) -> Case:
    """Of 4 channels with 4 by 4 by 4 elements."""
    return _tail(4, module, 4, 4, 4, 4)


def _two(module: Callable[[], nn.Module], *shape: int) -> Case:
    return Case(build=lambda: Two(module(), shape[-1]), inputs={"x": _floats(*shape)})


def _loss(
    module: Callable[[], nn.Module], call: Callable[..., Tensor], out: int | None = None, **inputs: Callable[[], Tensor]
) -> Case:
    return Case(build=lambda: Called(16, call, module(), out), inputs={"x": _floats(16), **inputs})


def _plain_loss(module: Callable[[], nn.Module], target: Callable[[], Tensor], out: int = 6) -> Case:
    return _loss(module, lambda loss, made, y: loss(made, y), out, y=target)


def _ctc(loss: nn.Module, made: Tensor, y: Tensor) -> Tensor:
    steps = made.view(made.shape[0], 8, -1).transpose(0, 1).log_softmax(-1)
    lengths = torch.full((made.shape[0],), 8), torch.full((made.shape[0],), 3)
    found: Tensor = loss(steps, y, *lengths)
    return found


def _encoder_decoder(module: nn.Module, made: Tensor) -> Tensor:
    x = made.view(made.shape[0], 2, -1)
    found: Tensor = module(x, x)
    return found.pow(2).mean()


def _self_attention(module: nn.Module, made: Tensor) -> Tensor:
    x = made.view(made.shape[0], 2, -1)
    found: Tensor = module(x, x, x)[0]
    return found.pow(2).mean()


def _bag(module: nn.Module, made: Tensor, y: Tensor) -> Tensor:
    looked_up: Tensor = module(y)
    return (looked_up * made).pow(2).mean()


def _random_pool(module: nn.Module, made: Tensor) -> Tensor:
    found: Tensor = module(made.view(made.shape[0], 1, 4, 4))
    return found.pow(2).mean()


def _unpooled(module: nn.Module, made: Tensor) -> Tensor:
    x = made.view(made.shape[0], 2, 8)
    values, places = functional.max_pool1d(x, 2, return_indices=True)
    found: Tensor = module(values, places)
    return found.pow(2).mean()


def _encoder(norm_first: bool = False) -> Callable[[], nn.Module]:
    return lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=norm_first),
        2, enable_nested_tensor=False,
    )  # fmt: skip


CASES: dict[str, Case] = {
    "Bilinear": _two(lambda: nn.Bilinear(16, 16, 4), 16),
    "CosineSimilarity": _two(lambda: nn.CosineSimilarity(dim=-1), 6, 16),
    "PairwiseDistance": _two(lambda: nn.PairwiseDistance(), 16),
    "cdist": _two(lambda: Function(torch.cdist), 6, 16),
    "RNN": _vector(lambda: nn.RNN(16, 8, batch_first=True)),
    "RNN of two directions": _vector(lambda: nn.RNN(16, 8, num_layers=2, bidirectional=True, batch_first=True)),
    "LSTM": _vector(lambda: nn.LSTM(16, 8, batch_first=True)),
    "LSTM of time first": _vector(lambda: nn.LSTM(16, 8)),
    "LSTM with projections": _vector(lambda: nn.LSTM(16, 8, proj_size=4, batch_first=True)),
    "GRU": _vector(lambda: nn.GRU(16, 8, num_layers=2, batch_first=True)),
    "RNNCell": _tail(16, lambda: nn.RNNCell(16, 8), 16),
    "LSTMCell": _tail(16, lambda: nn.LSTMCell(16, 8), 16),
    "GRUCell": _tail(16, lambda: nn.GRUCell(16, 8), 16),
    "TransformerEncoder": _vector(_encoder()),
    "TransformerEncoder, norm first": _vector(_encoder(norm_first=True)),
    "Transformer": _loss(
        lambda: nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True), _encoder_decoder),
    "MultiheadAttention": _loss(lambda: nn.MultiheadAttention(8, 2, batch_first=True), _self_attention),
    "Conv1d": _line(lambda: nn.Conv1d(4, 8, 3, padding=1)),
    "Conv2d": _image(lambda: nn.Conv2d(4, 8, 3, padding=1, groups=2)),
    "Conv3d": _volume(lambda: nn.Conv3d(4, 8, 3, padding=1)),
    "Conv2d, circular": _image(lambda: nn.Conv2d(4, 8, 3, padding=1, padding_mode="circular")),
    "ConvTranspose1d": _line(lambda: nn.ConvTranspose1d(4, 8, 3)),
    "ConvTranspose2d": _image(lambda: nn.ConvTranspose2d(4, 8, 3, stride=2)),
    "ConvTranspose3d": _volume(lambda: nn.ConvTranspose3d(4, 8, 3)),
    "Unfold": _image(lambda: nn.Unfold(3)),
    "Fold": _tail(9, lambda: nn.Fold((4, 4), 2), 8, 9),
    "MaxPool1d": _line(lambda: nn.MaxPool1d(2)),
    "MaxPool2d": _image(lambda: nn.MaxPool2d(2)),
    "MaxPool3d": _volume(lambda: nn.MaxPool3d(2)),
    "MaxUnpool1d": _loss(lambda: nn.MaxUnpool1d(2), _unpooled),
    "AvgPool1d": _line(lambda: nn.AvgPool1d(2)),
    "AvgPool2d": _image(lambda: nn.AvgPool2d(2)),
    "AvgPool3d": _volume(lambda: nn.AvgPool3d(2)),
    "FractionalMaxPool2d": _image(lambda: nn.FractionalMaxPool2d(2, output_size=4)),
    "FractionalMaxPool3d": _volume(lambda: nn.FractionalMaxPool3d(2, output_size=2)),
    "LPPool1d": _line(lambda: nn.LPPool1d(2, 2)),
    "LPPool2d": _image(lambda: nn.LPPool2d(2, 2)),
    "LPPool3d": _volume(lambda: nn.LPPool3d(2, 2)),
    "AdaptiveMaxPool1d": _line(lambda: nn.AdaptiveMaxPool1d(4)),
    "AdaptiveMaxPool2d": _image(lambda: nn.AdaptiveMaxPool2d(4)),
    "AdaptiveMaxPool3d": _volume(lambda: nn.AdaptiveMaxPool3d(2)),
    "AdaptiveAvgPool1d": _line(lambda: nn.AdaptiveAvgPool1d(4)),
    "AdaptiveAvgPool2d": _image(lambda: nn.AdaptiveAvgPool2d(4)),
    "AdaptiveAvgPool3d": _volume(lambda: nn.AdaptiveAvgPool3d(2)),
    **{
        f"{kind}Pad{dims}d": of(partial(getattr(nn, f"{kind}Pad{dims}d"), 1))
        for kind in ("Reflection", "Replication", "Zero", "Circular")
        for dims, of in ((1, _line), (2, _image), (3, _volume))
    },
    "ConstantPad2d": _image(lambda: nn.ConstantPad2d(1, 0.5)),
    "BatchNorm1d": _tail(16, lambda: nn.BatchNorm1d(16), 16),
    "BatchNorm2d": _image(lambda: nn.BatchNorm2d(4)),
    "BatchNorm3d": _volume(lambda: nn.BatchNorm3d(4)),
    "SyncBatchNorm": _image(lambda: nn.SyncBatchNorm(4)),
    "InstanceNorm1d": _line(lambda: nn.InstanceNorm1d(4, affine=True)),
    "InstanceNorm2d": _image(lambda: nn.InstanceNorm2d(4, affine=True)),
    "InstanceNorm3d": _volume(lambda: nn.InstanceNorm3d(4)),
    "GroupNorm": _image(lambda: nn.GroupNorm(2, 4)),
    "LayerNorm": _vector(lambda: nn.LayerNorm(16)),
    "RMSNorm": _vector(lambda: nn.RMSNorm(16)),
    "LocalResponseNorm": _image(lambda: nn.LocalResponseNorm(2)),
    "CrossMapLRN2d": _image(lambda: nn.CrossMapLRN2d(2)),
    **{
        name: _vector(getattr(nn, name))
        for name in (
            "ELU", "Hardshrink", "Hardsigmoid", "Hardtanh", "Hardswish", "LeakyReLU", "LogSigmoid", "PReLU", "ReLU",
            "ReLU6", "SELU", "CELU", "GELU", "Sigmoid", "SiLU", "Mish", "Softplus", "Softshrink", "Softsign", "Tanh",
            "Tanhshrink", "GLU", "Identity", "Flatten",
        )
    },
    "PReLU of channels": _image(lambda: nn.PReLU(4)),
    "ReLU in place": _vector(lambda: nn.ReLU(inplace=True)),
    "Threshold": _vector(lambda: nn.Threshold(0.1, 0.2)),
    "Softmax": _vector(lambda: nn.Softmax(-1)),
    "Softmin": _vector(lambda: nn.Softmin(-1)),
    "Softmax2d": _image(nn.Softmax2d),
    "LogSoftmax": _vector(lambda: nn.LogSoftmax(-1)),
    "Dropout": _vector(lambda: nn.Dropout(0.0)),
    "Dropout1d": _line(lambda: nn.Dropout1d(0.0)),
    "Dropout2d": _image(lambda: nn.Dropout2d(0.0)),
    "AlphaDropout": _vector(lambda: nn.AlphaDropout(0.0)),
    "FeatureAlphaDropout": _image(lambda: nn.FeatureAlphaDropout(0.0)),
    "PixelShuffle": _image(lambda: nn.PixelShuffle(2)),
    "PixelUnshuffle": _image(lambda: nn.PixelUnshuffle(2)),
    "ChannelShuffle": _image(lambda: nn.ChannelShuffle(2)),
    "Unflatten": _vector(lambda: nn.Unflatten(-1, (4, 4))),
    **{
        f"Upsample, {mode}": of(partial(nn.Upsample, scale_factor=2, mode=mode))
        for mode, of in (
            ("nearest", _image), ("linear", _line), ("bilinear", _image), ("bicubic", _image), ("trilinear", _volume),
        )
    },
    "Embedding": _loss(lambda: nn.Embedding(32, 16), _bag, y=_numbers(32)),
    "Embedding with padding": _loss(lambda: nn.Embedding(32, 16, padding_idx=1), _bag, y=_numbers(32)),
    "EmbeddingBag, mean": _loss(lambda: nn.EmbeddingBag(32, 16, mode="mean"), _bag, y=_numbers(32, 5)),
    "EmbeddingBag, sum": _loss(lambda: nn.EmbeddingBag(32, 16, mode="sum"), _bag, y=_numbers(32, 5)),
    "EmbeddingBag, max": _loss(lambda: nn.EmbeddingBag(32, 16, mode="max"), _bag, y=_numbers(32, 5)),
    "AdaptiveLogSoftmaxWithLoss": _loss(
        lambda: nn.AdaptiveLogSoftmaxWithLoss(16, 20, cutoffs=[8, 12]),
        lambda module, made, y: module(made, y).loss, y=_numbers(20)),
    "L1Loss": _plain_loss(nn.L1Loss, _floats(6)),
    "MSELoss": _plain_loss(nn.MSELoss, _floats(6)),
    "CrossEntropyLoss": _plain_loss(nn.CrossEntropyLoss, _numbers(6)),
    "CrossEntropyLoss, smoothed": _plain_loss(lambda: nn.CrossEntropyLoss(label_smoothing=0.1), _numbers(6)),
    "CTCLoss": _loss(nn.CTCLoss, _ctc, 48, y=lambda: torch.randint(1, 6, (BATCH, 3))),
    "NLLLoss": _loss(nn.NLLLoss, lambda loss, made, y: loss(made.log_softmax(-1), y), 6, y=_numbers(6)),
    "PoissonNLLLoss": _plain_loss(nn.PoissonNLLLoss, lambda: torch.rand(BATCH, 6, dtype=torch.float64)),
    "GaussianNLLLoss": _loss(
        nn.GaussianNLLLoss, lambda loss, made, y: loss(made, y, made.pow(2) + 0.1), 6, y=_floats(6)),
    "KLDivLoss": _loss(
        lambda: nn.KLDivLoss(reduction="batchmean"),
        lambda loss, made, y: loss(made.log_softmax(-1), y.softmax(-1)), 6, y=_floats(6)),
    "BCELoss": _loss(
        nn.BCELoss, lambda loss, made, y: loss(made.sigmoid(), y.sigmoid()), 6, y=_floats(6)),
    "BCEWithLogitsLoss": _loss(
        nn.BCEWithLogitsLoss, lambda loss, made, y: loss(made, y.sigmoid()), 6, y=_floats(6)),
    "MarginRankingLoss": _loss(
        nn.MarginRankingLoss, lambda loss, made, y: loss(made, made.flip(-1), y.sign()), 6, y=_floats(6)),
    "HingeEmbeddingLoss": _loss(
        nn.HingeEmbeddingLoss, lambda loss, made, y: loss(made, y.sign()), 6, y=_floats(6)),
    "MultiLabelMarginLoss": _plain_loss(nn.MultiLabelMarginLoss, _numbers(6, 6)),
    "HuberLoss": _plain_loss(nn.HuberLoss, _floats(6)),
    "SmoothL1Loss": _plain_loss(nn.SmoothL1Loss, _floats(6)),
    "SoftMarginLoss": _loss(nn.SoftMarginLoss, lambda loss, made, y: loss(made, y.sign()), 6, y=_floats(6)),
    "MultiLabelSoftMarginLoss": _plain_loss(nn.MultiLabelSoftMarginLoss, _floats(6)),
    "CosineEmbeddingLoss": _loss(
        nn.CosineEmbeddingLoss, lambda loss, made, y: loss(made, made.flip(-1), y[:, 0].sign()), 6, y=_floats(6)),
    "MultiMarginLoss": _plain_loss(nn.MultiMarginLoss, _numbers(6)),
    "TripletMarginLoss": _loss(
        nn.TripletMarginLoss, lambda loss, made, y: loss(made, y, made.flip(-1)), 6, y=_floats(6)),
    "TripletMarginWithDistanceLoss": _loss(
        nn.TripletMarginWithDistanceLoss, lambda loss, made, y: loss(made, y, made.flip(-1)), 6, y=_floats(6)),
}  # fmt: skip
