"""Four layers of Whisper large's encoder by transformers: 8 windows of 30 seconds, 1500 frames each."""

from __future__ import annotations

from model_parts import Fitted, Made, Output, built, configured, evaluated, library, random, when_asked

LAYERS, WIDTH, HEADS, HIDDEN, BINS, FRAMES = 4, 1280, 20, 5120, 128, 1500
WINDOWS = 8


def _built() -> Output:
    sizes = {
        "encoder_layers": LAYERS,
        "d_model": WIDTH,
        "encoder_attention_heads": HEADS,
        "encoder_ffn_dim": HIDDEN,
        "num_mel_bins": BINS,
        "max_source_positions": FRAMES,
        "dropout": 0.0,
    }
    config = configured("WhisperConfig", sizes)
    encoder = library("transformers.models.whisper.modeling_whisper").WhisperEncoder
    return Output(built(lambda: encoder(config)), "input_features", "last_hidden_state")


def inference() -> Made:
    """The last layer's vectors."""
    return evaluated(_built()), (random(WINDOWS, BINS, 2 * FRAMES),)


def training() -> Made:
    """The same, and the loss against random vectors."""
    return Fitted(_built()).train(), (random(WINDOWS, BINS, 2 * FRAMES), random(WINDOWS, FRAMES, WIDTH))


__getattr__ = when_asked(globals(), inference)
