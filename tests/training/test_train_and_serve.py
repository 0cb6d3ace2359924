"""One thread trains and changes patterns, another evaluates the same model all the time."""

import sys
import threading

import pytest
import torch
from torch import nn

import dynsparse as ds
from dynsparse.nn import SparseLinear


@pytest.fixture(autouse=True)
def often():
    """Threads take turns a thousand times as often as usual."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-6)
    yield
    sys.setswitchinterval(before)


def run(method, serve, steps=60):
    torch.manual_seed(0)
    model = nn.Sequential(SparseLinear(64, 96, 0.3), nn.ReLU(), SparseLinear(96, 8, 0.4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    options = {"final_density": 0.1} if method is ds.GMP else {}
    trainer = method(model, optimizer, total_steps=2 * steps, update_interval=1, **options)
    done, errors, answers = threading.Event(), [], []
    inputs = [torch.randn(batch, 64) for batch in (1, 40, 300)]

    def evaluate():
        try:
            while not done.is_set():
                for x in inputs:
                    with torch.no_grad():
                        answers.append(bool(model(x).isfinite().all()))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=evaluate)
    if serve:
        thread.start()
    try:
        generator = torch.Generator().manual_seed(1)
        for _ in range(steps):
            x = torch.randn(32, 64, generator=generator)
            model(x).square().mean().backward()
            trainer.step()
            optimizer.zero_grad()
    finally:
        done.set()
        if serve:
            thread.join()
    assert not errors, errors
    assert all(answers)
    assert trainer.updates >= steps // 2
    return [p.detach().clone() for p in model.parameters()], [
        m.pattern for m in (model[0], model[2])
    ]


@pytest.mark.parametrize("method", [ds.RigL, ds.SNFS, ds.GMP])
def test_the_training_is_the_same_and_every_answer_finite(method):
    weights, patterns = run(method, serve=False)
    again, theirs = run(method, serve=True)
    assert patterns == theirs
    assert all(torch.equal(one, other) for one, other in zip(weights, again, strict=True))
