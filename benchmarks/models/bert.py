"""Four layers of BERT-large by transformers: 16 texts of 512 tokens. `bert.py:training` is a training step."""

from __future__ import annotations

from model_parts import Fitted, Made, Output, built, configured, evaluated, library, random, tokens, when_asked

LAYERS, WIDTH, HEADS, HIDDEN, WORDS = 4, 1024, 16, 4096, 30522
TEXTS, LENGTH = 16, 512


def _built() -> Output:
    sizes = {
        "num_hidden_layers": LAYERS,
        "hidden_size": WIDTH,
        "num_attention_heads": HEADS,
        "intermediate_size": HIDDEN,
        "vocab_size": WORDS,
    }
    config = configured(
        "BertConfig", sizes | dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    )
    make = library("transformers").BertModel
    return Output(built(lambda: make(config, add_pooling_layer=False)), "input_ids", "last_hidden_state")


def inference() -> Made:
    """The last layer's vectors."""
    return evaluated(_built()), (tokens(TEXTS, LENGTH, WORDS),)


def training() -> Made:
    """The same, and the loss against random vectors."""
    return Fitted(_built()).train(), (tokens(TEXTS, LENGTH, WORDS), random(TEXTS, LENGTH, WIDTH))


__getattr__ = when_asked(globals(), inference)
