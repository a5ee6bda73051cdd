"""Small networks in the idioms people write CNNs in, for tests of capture and lowering."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Lambda(nn.Module):
    """A stem convolution, then any function of it."""

    def __init__(self, function: Callable[[Tensor], Tensor], ndim: int = 2, channels: int = 8):
        super().__init__()
        conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[ndim - 1]
        self.stem = conv(3, channels, 3, padding=1)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.stem(x))


class SqueezeExcite(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.down, self.up = nn.Conv2d(8, 4, 1), nn.Conv2d(4, 8, 1)
        self.out = nn.Conv2d(8, 6, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        s = F.adaptive_avg_pool2d(x, 1)
        s = torch.sigmoid(self.up(F.relu(self.down(s), inplace=True)))
        return self.out(x * s)


class SqueezeExciteMean(nn.Module):
    """Squeeze by mean over dims, excite by linear layers and a view."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.fc1, self.fc2 = nn.Linear(8, 4), nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        n, c, _, _ = x.shape
        s = self.fc2(F.silu(self.fc1(x.mean((2, 3))))).view(n, c, 1, 1)
        return x * F.hardsigmoid(s).expand_as(x)


class ChannelShuffle(nn.Module):
    def __init__(self, groups: int = 2) -> None:
        super().__init__()
        self.groups = groups
        self.a = nn.Conv2d(3, 8, 3, padding=1, stride=2)
        self.b = nn.Conv2d(8, 8, 3, padding=1, groups=groups)
        self.c = nn.Conv2d(8, 8, 3, padding=1, groups=8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.b(self.a(x))
        n, c, h, w = x.size()
        x = x.view(n, self.groups, c // self.groups, h, w).transpose(1, 2).contiguous()
        return self.c(x.view(n, -1, h, w))


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(3 + 4 * i, 4, 3, padding=1) for i in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(3 + 4 * i) for i in range(3))

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for norm, layer in zip(self.norms, self.layers):
            features.append(layer(F.relu(norm(torch.cat(features, 1)))))
        return torch.cat(features, 1)


class AttentionGate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Conv3d(3, 4, 3, padding=1)
        self.g = nn.Conv3d(3, 4, 2, stride=2)
        self.wx, self.wg, self.psi = nn.Conv3d(4, 2, 1), nn.Conv3d(4, 2, 1), nn.Conv3d(2, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip, gate = self.x(x), self.g(x)
        gate = F.interpolate(self.wg(gate), size=skip.shape[2:], mode="trilinear")
        attention = torch.sigmoid(self.psi(F.relu(self.wx(skip) + gate)))
        return skip * attention


class ConvNeXt(nn.Module):
    """Depthwise convolution, permute, layer norm, linear, gelu, linear, scale, residual."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 2, stride=2)
        self.depthwise = nn.Conv2d(8, 8, 7, padding=3, groups=8)
        self.norm = nn.LayerNorm(8)
        self.grow, self.shrink = nn.Linear(8, 16), nn.Linear(16, 8)
        self.scale = nn.Parameter(torch.full((8,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.depthwise(x).permute(0, 2, 3, 1)
        y = self.shrink(F.gelu(self.grow(self.norm(y)))) * self.scale
        return x + y.permute(0, 3, 1, 2)


class StochasticDepth(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        y = self.b(x)
        if self.training:
            keep = y.new_empty((y.shape[0], 1, 1, 1)).bernoulli_(0.6).div_(0.6)
            y = y * keep
        return x + y


class Dropouts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.drop = nn.Dropout(0.3)
        self.features = nn.Dropout2d(0.4)
        self.alpha = nn.AlphaDropout(0.2)
        self.fc = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.features(F.relu(self.conv(x)))
        x = F.dropout(x, 0.2, self.training, inplace=True)
        return self.fc(self.alpha(self.drop(x.amax((2, 3)))))


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, padding=1)
        self.group, self.instance = nn.GroupNorm(3, 6), nn.InstanceNorm2d(6, affine=True)
        self.tracked = nn.InstanceNorm2d(6, track_running_stats=True)
        self.batch = nn.BatchNorm2d(6, momentum=None)
        self.plain = nn.BatchNorm2d(6, affine=False, track_running_stats=False)
        self.layer = nn.LayerNorm([6, 9, 7])

    def forward(self, x: Tensor) -> Tensor:
        x = self.instance(self.group(self.conv(x)))
        return self.layer(self.plain(self.batch(self.tracked(x))))


class Weights(nn.Module):
    """Weights that forward computes: weight norm, spectral norm, standardised convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 4, 3, padding=1))
        self.b = nn.utils.parametrizations.spectral_norm(nn.Conv2d(4, 6, 3, padding=1))
        self.c = nn.Conv2d(6, 5, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.b(self.a(x)))
        w = self.c.weight
        w = (w - w.mean((1, 2, 3), keepdim=True)) / (w.std((1, 2, 3), keepdim=True) + 1e-5)
        return F.conv2d(x, w, self.c.bias, padding=1)


class Shared(nn.Module):
    """One module used twice, and one parameter under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.twice = nn.Conv2d(4, 4, 3, padding=1)
        self.tied = nn.Conv2d(4, 4, 3, padding=1)
        self.tied.weight = self.twice.weight
        self.register_buffer("gain", torch.linspace(0.5, 1.5, 4).view(4, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.twice(F.leaky_relu(self.twice(self.stem(x)), 0.1))
        return self.tied(x * self.gain)


class Heads(NamedTuple):
    main: Tensor
    auxiliary: Tensor


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Conv2d(3, 6, 3, padding=1)
        self.main, self.side = nn.Linear(6, 4), nn.Conv2d(6, 2, 1)

    def forward(self, x: Tensor) -> Heads:
        x = F.elu(self.body(x), inplace=True)
        return Heads(self.main(torch.flatten(F.adaptive_max_pool2d(x, 1), 1)), self.side(x))


class InPlace(nn.Module):
    """In-place operators on tensors that are read again, and on views of them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        F.relu_(y)
        z = self.b(y)
        z += y
        z.mul_(0.5)
        part = z.narrow(1, 0, 3)
        part.mul_(2.0)
        return z + z.flatten(2).sum(-1).view(z.shape[0], 6, 1, 1)


class Aliases(nn.Module):
    """Copies that look like views, views that look like copies, and writes into a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.register_buffer("seen", torch.zeros(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(x) * 1.0
        copied = h[:, :2].flatten(1)  # torch copies here: h stays as it is
        copied.mul_(3)
        turned = h.permute(0, 2, 3, 1)
        dense = turned.contiguous()  # and here
        dense.mul_(2)
        same = h.contiguous()  # but not here
        same.add_(0.5)
        self.seen[0] = h.detach().mean()
        spread = h.var(1, keepdim=True) + h.std(dim=(2, 3), unbiased=False, keepdim=True)
        mask = (h.mean(1, keepdim=True) > 0).type_as(h)
        moved = h.movedim(1, -1).to(torch.float32).to(h.dtype)
        return (turned + dense + moved) * mask.mean() / (1 + spread.movedim(1, 3)) + copied.mean()


class Pieces(nn.Module):
    """chunk, split, stack, slice, select, repeat, roll, flip."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.conv(x).chunk(2, 1)
        c, d = torch.split(a * torch.sigmoid(b), [1, 3], 1)
        d = torch.cat([d, c.repeat(1, 2, 1, 1)], 1)
        e = torch.stack([d, d.roll(2, 3)], 1).mean(1)
        e = e[:, :, 1:, ::2] + e[:, :, :-1, ::2].flip(2)
        return e - e[:, 0].unsqueeze(1) + e.transpose(2, 3).transpose(2, 3)


class SelfAttention(nn.Module):
    """Non-local attention over positions, with matrix products of two activations."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Conv2d(3, 4, 1) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).flatten(2) for layer in (self.q, self.k, self.v))
        weights = torch.softmax(q.transpose(1, 2) @ k / 2.0, -1)
        return (v @ weights.transpose(1, 2)).view(x.shape[0], 4, *x.shape[2:])


class MatrixHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3)
        self.matrix = nn.Parameter(torch.linspace(-1, 1, 24).view(6, 4))
        self.slope = nn.PReLU(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.slope(self.conv(x)).mean((2, 3)) @ self.matrix


ACTIVATIONS = (
    F.relu, F.relu6, F.leaky_relu, F.elu, F.gelu, F.silu, F.hardswish, F.hardsigmoid,
    torch.sigmoid, torch.tanh, F.softplus, F.mish, F.selu, F.celu, F.logsigmoid, F.hardtanh,
    F.softsign,
)  # fmt: skip


def every_activation(x: Tensor) -> Tensor:
    total = x
    for function in ACTIVATIONS:
        total = total + function(x * 1.5)
    return torch.clamp(total, -4, 4) / 2 - 1.0 / (2 + x.abs()) + x.exp().log1p().sqrt()


def softmaxes(x: Tensor) -> Tensor:
    return torch.softmax(x, 1) + F.log_softmax(x, 2) * 0.1 + F.softmax(x.flatten(1), 1).view_as(x)


def pools(x: Tensor) -> Tensor:
    x = F.max_pool2d(x, 3, 2, 1, ceil_mode=True) + F.avg_pool2d(x, 2, ceil_mode=True)[:, :, :, :]
    return F.adaptive_avg_pool2d(x, (3, 2)) + F.adaptive_max_pool2d(x, (3, 2))


def resizes(x: Tensor) -> Tensor:
    a = F.interpolate(x, scale_factor=2, mode="nearest")
    b = F.interpolate(x, size=a.shape[2:], mode="bilinear", align_corners=True)
    c = F.interpolate(x, scale_factor=2, mode="bicubic")
    return F.pixel_shuffle(F.interpolate(a + b + c, size=(5, 6), mode="bilinear"), 2)


def pads(x: Tensor) -> Tensor:
    x = F.pad(x, (1, 2, 0, 1)) + F.pad(x, (2, 1, 1, 0), value=0.5)
    x = F.pad(x, (1, 1, 2, 1), mode="reflect")
    return F.pad(F.pad(x, (2, 1, 1, 3), mode="circular"), (1, 0, 2, 1), mode="replicate")


class PaddingModes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular")
        self.b = nn.Conv2d(4, 4, (3, 5), padding="same", padding_mode="reflect")
        self.c = nn.Conv2d(4, 4, 2, padding="same")
        self.d = nn.ConvTranspose2d(4, 4, 3, stride=2, padding=1, output_padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.c(self.b(self.a(x))))


class OneD(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.n = nn.Conv1d(3, 6, 5, padding=2, stride=2), nn.BatchNorm1d(6)
        self.up, self.fc = nn.ConvTranspose1d(6, 4, 4, stride=2), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool1d(F.silu(self.n(self.a(x)), inplace=True), 2)
        x = F.interpolate(self.up(x), scale_factor=1.5, mode="linear")
        return self.fc(F.adaptive_avg_pool1d(x, 1).squeeze(-1))


IMAGE = (4, 3, 9, 7)
IDIOMS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "squeeze_excite": (SqueezeExcite, IMAGE),
    "squeeze_excite_mean": (SqueezeExciteMean, IMAGE),
    "channel_shuffle": (ChannelShuffle, (2, 3, 11, 9)),
    "dense": (Dense, IMAGE),
    "attention_gate": (AttentionGate, (2, 3, 6, 8, 4)),
    "convnext": (ConvNeXt, (2, 3, 12, 10)),
    "stochastic_depth": (StochasticDepth, IMAGE),
    "dropouts": (Dropouts, IMAGE),
    "norms": (Norms, IMAGE),
    "weights": (Weights, IMAGE),
    "shared": (Shared, IMAGE),
    "two_heads": (TwoHeads, IMAGE),
    "in_place": (InPlace, IMAGE),
    "aliases": (Aliases, IMAGE),
    "pieces": (Pieces, (2, 3, 8, 9)),
    "self_attention": (SelfAttention, (2, 3, 5, 4)),
    "matrix_head": (MatrixHead, IMAGE),
    "activations": (lambda: Lambda(every_activation), IMAGE),
    "softmaxes": (lambda: Lambda(softmaxes), IMAGE),
    "pools": (lambda: Lambda(pools), IMAGE),
    "resizes": (lambda: Lambda(resizes), (2, 3, 5, 4)),
    "pads": (lambda: Lambda(pads), IMAGE),
    "padding_modes": (PaddingModes, IMAGE),
    "one_d": (OneD, (3, 3, 17)),
}
