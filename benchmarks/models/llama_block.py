"""Four layers of a Llama-like decoder (the sizes of the 8B model) in plain torch: RMSNorm, rotary positions, grouped
queries, SwiGLU. `model` and `inputs` are a prefill of 2048 tokens; `llama_block.py:decode` is one token of each of 16
sequences behind 2047 cached ones. `llama_block.py:training` is a training step on the tokens of the prefill.

Weights are random. Without a GPU the model lies on the meta device, where it can be explained but not run.
"""

from __future__ import annotations

import torch
from model_parts import DEVICE, PLACE, Fitted, Made, evaluated, random, when_asked
from torch import Tensor, nn
from torch.nn import functional

LAYERS, WIDTH, HEADS, KV_HEADS, HEAD, HIDDEN = 4, 4096, 32, 8, 128, 14336
TOKENS, SEQUENCES = 2048, 16
THETA = 500_000.0


class RMSNorm(nn.Module):
    """x over its root mean square, in fp32, times a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH, **PLACE))

    def forward(self, x: Tensor) -> Tensor:
        """x [.., WIDTH]."""
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)).to(x.dtype) * self.weight


def rotated(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """x [B, H, S, HEAD] turned by its positions' angles [S, HEAD]."""
    left, right = x.chunk(2, -1)
    return (x * cosine + torch.cat((-right, left), -1) * sine).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention with one projection for queries, keys and values each."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(WIDTH, HEADS * HEAD, bias=False, **PLACE)
        self.k = nn.Linear(WIDTH, KV_HEADS * HEAD, bias=False, **PLACE)
        self.v = nn.Linear(WIDTH, KV_HEADS * HEAD, bias=False, **PLACE)
        self.o = nn.Linear(HEADS * HEAD, WIDTH, bias=False, **PLACE)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor], cache: tuple[Tensor, Tensor] | None) -> Tensor:
        """x [B, S, WIDTH]; cache: keys and values [B, KV_HEADS, T, HEAD] of what came before."""
        q, k, v = (layer(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        q, k = rotated(q, *angles), rotated(k, *angles)
        if cache is not None:
            k, v = torch.cat((cache[0], k), 2), torch.cat((cache[1], v), 2)
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=cache is None, enable_gqa=True)
        return self.o(out.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and SwiGLU, each behind a norm and around a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.before, self.between = Attention(), RMSNorm(), RMSNorm()
        self.gate = nn.Linear(WIDTH, HIDDEN, bias=False, **PLACE)
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False, **PLACE)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False, **PLACE)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor], cache: tuple[Tensor, Tensor] | None) -> Tensor:
        """x [B, S, WIDTH]."""
        x = x + self.attention(self.before(x), angles, cache)
        y = self.between(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """The layers and a last norm. first: position of the first token."""

    def __init__(self, first: int = 0, tokens: int = TOKENS) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = RMSNorm()
        steps = torch.arange(0, HEAD, 2, dtype=torch.float32, device=DEVICE) / HEAD
        places = torch.arange(first, first + tokens, dtype=torch.float32, device=DEVICE)
        angles = torch.outer(places, THETA**-steps).repeat(1, 2)
        # no buffers: they must stay fp32 when the weights change their type
        self.angles = (angles.cos(), angles.sin())

    def forward(self, x: Tensor, *caches: Tensor) -> Tensor:
        """x [B, S, WIDTH]; caches: keys, then values, of each layer."""
        for place, layer in enumerate(self.layers):
            x = layer(x, self.angles, caches[2 * place : 2 * place + 2] or None)
        return self.norm(x)


def _built(first: int, tokens: int) -> Llama:
    torch.manual_seed(0)
    return evaluated(Llama(first, tokens))


def decode() -> Made:
    """One token of each of SEQUENCES sequences behind TOKENS - 1 cached ones."""
    caches = (random(SEQUENCES, KV_HEADS, TOKENS - 1, HEAD) for _ in range(2 * LAYERS))
    return _built(TOKENS - 1, 1), (random(SEQUENCES, 1, WIDTH), *caches)


def prefill() -> Made:
    """TOKENS tokens of one sequence."""
    return _built(0, TOKENS), (random(1, TOKENS, WIDTH),)


def training() -> Made:
    """The same tokens, and the loss against random vectors."""
    torch.manual_seed(0)
    return Fitted(Llama()).train(), (random(1, TOKENS, WIDTH), random(1, TOKENS, WIDTH))


__getattr__ = when_asked(globals(), prefill)
