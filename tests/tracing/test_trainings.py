"""Traces of complete trainings: contents, and the fraction of time covered by spans.

The clock measures CPU time of the thread, so that other programs have no influence.
"""

from __future__ import annotations

import io
import signal
import time

import pytest
from chrome import counts, inside, names, read, share, spans
from rich.console import Console

from dynsparse.apps import lm
from dynsparse.apps.image_classification import Training, cifar, mnist, transformer

SMALL = {
    "mnist": (mnist, {"epochs": 2, "dataset": "digits"}),
    "transformer": (transformer, {"epochs": 1}),
    "cifar": (cifar, {"epochs": 1, "dataset": "digits", "depth": 10, "width": 1,
                      "batch_size": 80, "update_interval": 2, "hold_out": 1037}),
    "lm": (lm, {"steps": 40, "valid_interval": 20, "evaluation_tokens": 640, "sample": 5,
                "hidden_size": 32, "ff_size": 64, "update_interval": 10}),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _own_clock(monkeypatch):
    monkeypatch.setattr(time, "perf_counter_ns", time.thread_time_ns)


def run(name, tmp_path, **more):
    app, small = SMALL[name]
    if name == "lm":
        text = tmp_path / "text"
        text.write_text("the cat sat on the mat, and the dog ran after it.\n" * 400)
        small = small | {"data": text}
    options = app.Options(seed=1, trace=tmp_path / "run.json", **small | more)
    return app.run(options, Console(file=io.StringIO()))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name == "cifar")) for name in SMALL]
)
def test_spans_cover_nearly_all_of_a_training(tmp_path, name):
    figures = run(name, tmp_path, checkpoint_path=tmp_path / "checkpoints")
    document = read(tmp_path / "run.json")
    assert share(document) >= 0.95
    named = {"data", "build", "forward", "backward", "optimizer", "report", "evaluation"}
    assert named | {"checkpoint", "update", "sample" if name == "lm" else "report"} <= names(
        document
    )
    assert {"drop", "grow", "rewire"} <= inside(document, "update")
    assert {"forward"} <= inside(document, "evaluation")
    assert len(spans(document, "optimizer")) == figures["steps"]
    assert len(spans(document, "update")) == len(counts(document, "churn")) == figures["updates"]
    reports = figures["steps"] // 20 if name == "lm" else 5 * figures["epochs"]
    assert len(counts(document, "loss")) == reports
    assert len(counts(document, "density")) == reports + figures["updates"]
    last = figures["history"][-1]["loss"] if name == "lm" else None
    assert last is None or counts(document, "loss")[-1] == pytest.approx(last)


def test_ctrl_c_leaves_a_trace_until_then(tmp_path, monkeypatch):
    steps = 0
    optimise = Training.optimise

    def interrupted(training, sums):
        nonlocal steps
        optimise(training, sums)
        steps += 1
        if steps == 7:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Training, "optimise", interrupted)
    monkeypatch.chdir(tmp_path)
    # A process in the background may have been started with interrupts ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run("mnist", tmp_path)
    finally:
        signal.signal(signal.SIGINT, before)
    document = read(tmp_path / "run.json")
    assert len(spans(document, "optimizer")) == 7
    assert len(spans(document, "checkpoint")) == 1


def test_dense_network_has_a_trace(tmp_path):
    run("mnist", tmp_path, method="dense", epochs=1)
    document = read(tmp_path / "run.json")
    assert set(counts(document, "density")) == {1.0}
    assert not counts(document, "churn")
    assert len(spans(document, "optimizer")) == 90
