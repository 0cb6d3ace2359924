"""Options of trainings that take a fraction of a second and write every kind of file."""

from typing import Any

OPTIONS: dict[str, dict[str, Any]] = {
    "mnist": {
        "batch_size": 512, "hidden_sizes": [8], "steps_per_epoch": 1, "epochs": 3, "seed": 7,
    },
    "lm": {
        "layers": 1, "hidden_size": 8, "ff_size": 8, "heads": 2, "sequence_length": 8,
        "batch_size": 2, "steps": 6, "warmup_steps": 1, "valid_interval": 2, "update_interval": 2,
        "checkpoint_freq": 2, "sparsity": 0.5, "seed": 7,
    },
}  # fmt: skip
TEXT = "the cat sat on the mat, the dog sat on the log.\n" * 12
