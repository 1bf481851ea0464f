"""The upper half of a Stable-Diffusion-like UNet in plain torch: residual blocks, and transformer blocks over pixels
that also look at a text. 4 latents of 64 x 64, channels last, 77 tokens of text. `unet.py:training` is a training step.
"""

from __future__ import annotations

import torch
from model_parts import Fitted, Made, built, evaluated, random, when_asked
from torch import Tensor, nn
from torch.nn import functional

LATENTS, CHANNELS, SIDE = 4, 4, 64
WIDTHS, HEADS = (320, 640), 8
TOKENS, TEXT, STEP = 77, 768, 1280


class Residual(nn.Module):
    """Two 3x3 convolutions around the vector of the step."""

    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__()
        self.first, self.second = nn.GroupNorm(32, channels_in), nn.GroupNorm(32, channels_out)
        self.before = nn.Conv2d(channels_in, channels_out, 3, padding=1)
        self.behind = nn.Conv2d(channels_out, channels_out, 3, padding=1)
        self.step = nn.Linear(STEP, channels_out)
        self.short = nn.Identity() if channels_in == channels_out else nn.Conv2d(channels_in, channels_out, 1)

    def forward(self, x: Tensor, step: Tensor) -> Tensor:
        """x [N, C, H, W], step [N, STEP]."""
        y = self.before(functional.silu(self.first(x)))
        y = y + self.step(functional.silu(step))[:, :, None, None]
        return self.short(x) + self.behind(functional.silu(self.second(y)))


class Attention(nn.Module):
    """Of pixels to `source` wide vectors."""

    def __init__(self, width: int, source: int) -> None:
        super().__init__()
        self.q = nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(source, width, bias=False) for _ in range(2))
        self.o = nn.Linear(width, width)

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        """x [N, S, width], other [N, T, source]."""
        found = (self.q(x), self.k(other), self.v(other))
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in found)
        return self.o(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Transformer(nn.Module):
    """Pixels look at each other, then at the text; then a gated GELU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(32, width)
        self.into, self.out = nn.Conv2d(width, width, 1), nn.Conv2d(width, width, 1)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.own, self.text = Attention(width, width), Attention(width, TEXT)
        self.wide, self.narrow = nn.Linear(width, 8 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        """x [N, width, H, W], text [N, T, TEXT]."""
        y = self.into(self.norm(x)).flatten(2).transpose(1, 2)
        first = self.norms[0](y)
        y = y + self.own(first, first)
        y = y + self.text(self.norms[1](y), text)
        up, gate = self.wide(self.norms[2](y)).chunk(2, -1)
        y = y + self.narrow(up * functional.gelu(gate))
        return x + self.out(y.transpose(1, 2).unflatten(2, x.shape[2:]))


class UNet(nn.Module):
    """Two levels down, and up again; text and step are constants of the model."""

    def __init__(self) -> None:
        super().__init__()
        high, low = WIDTHS
        self.text = nn.Parameter(torch.randn(LATENTS, TOKENS, TEXT))
        self.step = nn.Parameter(torch.randn(LATENTS, STEP))
        self.first = nn.Conv2d(CHANNELS, high, 3, padding=1)
        self.high, self.high_pixels = Residual(high, high), Transformer(high)
        self.down = nn.Conv2d(high, high, 3, 2, 1)
        self.low, self.low_pixels = Residual(high, low), Transformer(low)
        self.up = nn.Conv2d(low, low, 3, padding=1)
        self.joined, self.joined_pixels = Residual(low + high, high), Transformer(high)
        self.norm, self.last = nn.GroupNorm(32, high), nn.Conv2d(high, CHANNELS, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Latents [N, CHANNELS, SIDE, SIDE]."""
        kept = self.high_pixels(self.high(self.first(x), self.step), self.text)
        y = self.low_pixels(self.low(self.down(kept), self.step), self.text)
        y = self.up(functional.interpolate(y, scale_factor=2.0))
        y = self.joined_pixels(self.joined(torch.cat((y, kept), 1), self.step), self.text)
        return self.last(functional.silu(self.norm(y)))


def _built() -> nn.Module:
    return built(UNet).to(memory_format=torch.channels_last)


def _latents() -> Tensor:
    return random(LATENTS, CHANNELS, SIDE, SIDE).contiguous(memory_format=torch.channels_last)


def inference() -> Made:
    """The noise of each latent."""
    return evaluated(_built()), (_latents(),)


def training() -> Made:
    """The same, and the loss against random noise."""
    return Fitted(_built()).train(), (_latents(), _latents())


__getattr__ = when_asked(globals(), inference)
