"""Two Mixtral-like layers' experts in plain torch: 2048 tokens, each to the best two of eight SwiGLU experts (the sizes
of 8x7B). Experts take as many tokens as their capacity; what comes behind is dropped, so that all sizes are known and
the products are batched ones. `moe.py:training` is a training step."""

from __future__ import annotations

import torch
from model_parts import Fitted, Made, built, evaluated, random, when_asked
from torch import Tensor, nn
from torch.nn import functional

LAYERS, TOKENS, WIDTH, HIDDEN, EXPERTS, CHOSEN = 2, 2048, 4096, 14336, 8, 2
CAPACITY = TOKENS * CHOSEN // EXPERTS * 5 // 4


class Experts(nn.Module):
    """A norm, a router and the experts around a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, bias=False)
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.gate, self.up = (nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) * WIDTH**-0.5) for _ in range(2))
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) * HIDDEN**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """x [T, WIDTH]."""
        y = self.norm(x)
        weights, chosen = self.router(y).float().softmax(-1).topk(CHOSEN, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        hits = functional.one_hot(chosen.flatten(), EXPERTS)
        # how many came to the same expert before
        place = ((hits.cumsum(0) - 1) * hits).sum(-1)
        seat = torch.where(place < CAPACITY, chosen.flatten() * CAPACITY + place, EXPERTS * CAPACITY)
        # one seat more, for all that are dropped
        copies = y.unsqueeze(1).expand(-1, CHOSEN, -1).flatten(0, 1)
        seats = y.new_zeros(EXPERTS * CAPACITY + 1, WIDTH).index_copy(0, seat, copies)
        given = seats[:-1].unflatten(0, (EXPERTS, CAPACITY))
        found = torch.bmm(functional.silu(torch.bmm(given, self.gate)) * torch.bmm(given, self.up), self.down)
        back = functional.pad(found.flatten(0, 1), (0, 0, 0, 1))[seat].unflatten(0, (-1, CHOSEN))
        return x + (back * weights.unsqueeze(-1).to(x.dtype)).sum(1)


def _built() -> nn.Module:
    return built(lambda: nn.Sequential(*(Experts() for _ in range(LAYERS))))


def inference() -> Made:
    """What the layers give for every token."""
    return evaluated(_built()), (random(TOKENS, WIDTH),)


def training() -> Made:
    """The same, and the loss against random vectors."""
    return Fitted(_built()).train(), (random(TOKENS, WIDTH), random(TOKENS, WIDTH))


__getattr__ = when_asked(globals(), inference)
