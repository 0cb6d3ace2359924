"""Complete settings by name: tiny, small and large."""

from __future__ import annotations

from typing import Any

from dynsparse.apps.lm.options import Options

PRESETS: dict[str, dict[str, Any]] = {
    # Characters, minutes on one core: the defaults of Options.
    "tiny": {},
    # The sizes of GPT-2's smallest model (Radford et al. 2019, table 2, as released).
    "small": {
        "tokens": "bpe", "layers": 12, "hidden_size": 768, "ff_size": 3072, "heads": 12,
        "sequence_length": 1024, "droprate": 0.1, "block_size": 16, "pooling_type": "AVG",
        "steps": 100_000, "batch_size": 1, "gradient_accumulation_count": 60,
        "peak_learning_rate": 6e-4, "min_learning_rate": 6e-5, "warmup_steps": 2000,
        "valid_interval": 1000, "checkpoint_freq": 1000,
    },
    # The largest that the README of Graphcore's application trains, on sixteen IPUs; its program's
    # least rate, decay and vocabulary belong to it.
    "large": {
        "tokens": "bpe", "layers": 45, "hidden_size": 1600, "ff_size": 6400, "heads": 16,
        "qkv_size": 32, "embedding_size": 128, "sequence_length": 256, "droprate": 0.1,
        "block_size": 16, "pooling_type": "AVG", "prune_ratio": 0.5, "prune_end": 1.0,
        "steps": 12_000, "batch_size": 1, "gradient_accumulation_count": 376,
        "peak_learning_rate": 2.5e-4, "min_learning_rate": 8e-6, "warmup_steps": 2000,
        "cooldown_steps": 10_000, "decay_power": 0.8, "autoregression_offset": 16,
        "repetition_weighting": True, "valid_interval": 1000, "checkpoint_freq": 1000,
    },
}  # fmt: skip
"""What each preset changes in the defaults of `Options`."""


def preset(name: str, **changes: Any) -> Options:
    """The options of a preset, with `changes`.

    Raises:
        ValueError: an unknown name.
    """
    if name not in PRESETS:
        raise ValueError(f"--preset: expected one of {', '.join(PRESETS)}, got {name!r}")
    return Options(**{**PRESETS[name], **changes})
