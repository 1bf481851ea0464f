"""Six layers of GPT-2 (the sizes of the smallest one) with its language head, by transformers: 8 prompts of 1024
tokens. `gpt2.py:training` is a training step."""

from __future__ import annotations

from model_parts import Classified, Made, Output, built, configured, evaluated, labels, library, tokens, when_asked

LAYERS, WIDTH, HEADS, WORDS = 6, 768, 12, 50257
PROMPTS, LENGTH = 8, 1024


def _built() -> Output:
    sizes = {"n_layer": LAYERS, "n_embd": WIDTH, "n_head": HEADS, "vocab_size": WORDS, "n_positions": LENGTH}
    config = configured("GPT2Config", sizes | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0))
    return Output(
        built(lambda: library("transformers").GPT2LMHeadModel(config)), "input_ids", "logits", use_cache=False
    )


def inference() -> Made:
    """Scores of the next word behind every token."""
    return evaluated(_built()), (tokens(PROMPTS, LENGTH, WORDS),)


def training() -> Made:
    """The loss over all tokens."""
    return Classified(_built()).train(), (tokens(PROMPTS, LENGTH, WORDS), labels(PROMPTS * LENGTH, WORDS))


__getattr__ = when_asked(globals(), inference)
