"""--synthetic-data: training on random data that is generated once."""

from __future__ import annotations

import io
import json

import pytest
import torch
from rich.console import Console

from dynsparse import data
from dynsparse.apps import lm
from dynsparse.apps.common.training import random_ids, random_shares
from dynsparse.apps.image_classification import Training, cifar, mnist
from dynsparse.apps.image_classification.cifar import CifarTraining
from dynsparse.apps.lm.corpus import Corpus

TEXT = "the cat sat on the mat, and the dog ran after it.\n" * 400


def run(app, tmp_path, **more):
    out = io.StringIO()
    file = tmp_path / "figures.json"
    if app is lm:
        (tmp_path / "text").write_text(TEXT)
        more = {"data": tmp_path / "text", "steps": 12, "valid_interval": 6, "hidden_size": 32,
                "ff_size": 64, "evaluation_tokens": 640} | more  # fmt: skip
    else:
        more = {"epochs": 1} | more
    app.run(app.Options(seed=1, json=file, **more), Console(file=out, width=200))
    return json.loads(file.read_text()), out.getvalue()


@pytest.mark.parametrize("app", [mnist, lm])
def test_display_and_figures_report_synthetic_data(app, tmp_path):
    figures, shown = run(app, tmp_path, synthetic_data=True)
    assert figures["synthetic_data"] is True
    assert "synthetic data, made once on cpu" in shown
    real, shown = run(app, tmp_path)
    assert real["synthetic_data"] is False
    assert "synthetic" not in shown
    for name in ("steps", "updates", "density", "parameters", "replaced"):
        assert figures[name] == real[name], name


def test_images_are_not_read_or_sampled(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "load", None)
    seen = set()
    forward = Training._forward

    def watched(training, images, labels):
        if training.model.training:
            seen.add((images.data_ptr(), labels.data_ptr()))
        return forward(training, images, labels)

    monkeypatch.setattr(Training, "_forward", watched)
    figures, _ = run(mnist, tmp_path, synthetic_data=True, dataset="digits", batch_size=100)
    assert figures["steps"] == 15
    assert len(seen) == 1


def test_colour_images_are_not_augmented(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "load", None)
    monkeypatch.setattr(CifarTraining, "augment_images", None)
    figures, _ = run(
        cifar,
        tmp_path,
        synthetic_data=True,
        dataset="digits",
        depth=10,
        width=1,
        batch_size=8,
        hold_out=1400,
        test_mode="training",
    )
    assert figures["steps"] == 5


def test_no_text_batches_are_drawn(tmp_path, monkeypatch):
    monkeypatch.setattr(Corpus, "batch", None)
    figures, _ = run(lm, tmp_path, synthetic_data=True)
    # Random ids have nothing to be learned beside the one batch that is always there.
    assert figures["loss"] > 2.0


def test_sizes_of_the_data_sets():
    pytest.importorskip("sklearn")
    digits = data.load("digits")
    assert data.COUNTS["digits"] == (len(digits.train), len(digits.test))
    assert data.COUNTS.keys() == set(data.NAMES)


def test_data_folder_raises(tmp_path):
    with pytest.raises(ValueError, match="synthetic data comes from no folder"):
        mnist.Options(synthetic_data=True, dataset="mnist", data_dir=tmp_path).check()


def test_data_is_equal_in_every_run():
    device = torch.device("cpu")
    assert torch.equal(random_ids(10, (5,), device), random_ids(10, (5,), device))
    assert torch.equal(random_shares((5, 2), device), random_shares((5, 2), device))
