"""The sparse vocabulary benchmark, at small sizes."""

import sys
import types
from pathlib import Path

import pytest

import dynsparse as ds
from dynsparse.bench.contenders import MaskedLinear

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import sparse_vocabulary
from sparse_vocabulary import CONTENDERS, Case, build, measure_times, training_step

transformers = pytest.importorskip("transformers")

CASE = Case(density=0.2, batch=2, tokens=6, lean=True)
SIZES = {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 40, "n_positions": 8,
         "bos_token_id": 0, "eos_token_id": 0}  # fmt: skip


@pytest.fixture(autouse=True)
def small(monkeypatch):
    library = types.SimpleNamespace(
        GPT2Config=lambda **options: transformers.GPT2Config(**SIZES, **options),
        GPT2LMHeadModel=transformers.GPT2LMHeadModel,
    )
    monkeypatch.setattr(sparse_vocabulary, "_transformers", lambda: library)


def test_contenders():
    models = {who: build(CASE, who) for who in CONTENDERS}
    assert isinstance(models["sparse vocabulary"].lm_head, ds.nn.TiedHead)
    assert any(isinstance(m, MaskedLinear) for m in models["masked"].modules())
    losses = {who: training_step(CASE, model)() for who, model in models.items()}
    assert losses["masked"] == pytest.approx(losses["sparse"], rel=1e-5)


def test_times():
    found = measure_times(CASE, rounds=2)
    assert all(len(found[who]) == 3 for who in CONTENDERS)
    assert all(found[f"dense / {who}"][0] > 0 for who in CONTENDERS[:2])
