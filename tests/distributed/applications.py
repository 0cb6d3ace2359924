"""Trainings of the applications; each function runs in every process of a group."""

from __future__ import annotations

import io
from pathlib import Path

import torch
from rich.console import Console

from dynsparse.apps import lm
from dynsparse.apps.image_classification import mnist, transformer

IMAGES = {
    "epochs": 1, "batch_size": 256, "seed": 7, "learning_rate": 0.01, "data_type": "float64",
    "method": "rigl", "update_interval": 2,
}  # fmt: skip
MNIST = {**IMAGES, "hidden_sizes": (32,), "droprate": 0.0}
TRANSFORMER = {**IMAGES, "attention_heads": 4, "qkv_length": 8, "block_size": 4}
LM = {
    "layers": 1, "hidden_size": 16, "ff_size": 32, "heads": 2, "sequence_length": 8,
    "batch_size": 4, "steps": 8, "warmup_steps": 2, "valid_interval": 4, "update_interval": 3,
    "sparsity": 0.5, "seed": 7, "gradient_accumulation_count": 2, "droprate": 0.0,
}  # fmt: skip
APPS = {
    "mnist": (mnist, MNIST),
    "mnist-transformer": (transformer, TRANSFORMER),
    "lm": (lm, LM),
}


def run(name, folder, **changes):
    """Run a training; return its figures and the text it displayed."""
    app, options = APPS[name]
    if name == "lm":
        options = {**options, "data": Path(folder) / "text.txt"}
    shown = io.StringIO()
    console = Console(file=shown, width=100)
    figures = app.run(app.Options(**{**options, **changes}), console)
    return figures, shown.getvalue()


def train_applications(rank, size, names, folder):
    """Train each application; return {name: (loss, updates, length of the displayed text)}."""
    found = {}
    for name in names:
        own = Path(folder) / name
        written = {
            "records_path": own / "records", "checkpoint_path": own / "kept",
            "json": own / "figures.json",
        }  # fmt: skip
        if rank == 0:
            own.mkdir(exist_ok=True)
        torch.distributed.barrier()
        figures, shown = run(name, folder, **written)
        found[name] = figures["loss"], figures["updates"], len(shown)
    return found


def stop_and_resume(rank, size, folder):
    """Train the language model with dropout, once in one go and once stopped and resumed."""
    kept = Path(folder) / "kept"
    once, _ = run("lm", folder, droprate=0.2)
    run("lm", folder, droprate=0.2, stop_after=4, checkpoint_path=kept)
    again, _ = run("lm", folder, droprate=0.2, restore=kept)
    return once["loss"], again["loss"]
