"""Every `--method` trains a language model to the given density and resumes exactly."""

import dataclasses
from pathlib import Path

import pytest
import torch
from rich.console import Console
from saved_states import state

from dynsparse.apps.common.options import METHODS
from dynsparse.apps.lm import Options, run
from dynsparse.apps.lm.corpus import load_corpus
from dynsparse.apps.lm.model import count_parameters, state_bytes
from dynsparse.apps.lm.training import Training
from dynsparse.nn import SparseLinear
from dynsparse.training.records import Records

QUIET = Console(quiet=True)
TEXT = "the cat sat on the mat, the dog sat on the log.\n" * 40
TINY = {
    "layers": 1, "hidden_size": 16, "ff_size": 32, "heads": 2, "sequence_length": 8,
    "batch_size": 4, "steps": 40, "warmup_steps": 2, "valid_interval": 20, "update_interval": 3,
    "sparsity": 0.75, "seed": 7, "prune_end": 1.0,
}  # fmt: skip
WEIGHTS = 4 * 16 * 16 + 2 * 16 * 32


@pytest.fixture
def text(tmp_path) -> Path:
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path / "text.txt"


@pytest.mark.sampled(3)
@pytest.mark.parametrize("method", METHODS)
def test_method_trains_and_resumes_exactly(method, text, tmp_path):
    options = Options(**TINY, method=method, data=text, checkpoint_path=tmp_path / "whole")
    record = tmp_path / "record" if method != "dense" else None
    whole = run(dataclasses.replace(options, records_path=record), QUIET)
    assert whole["method"] == method
    assert whole["history"][1]["valid_loss"] < whole["history"][0]["valid_loss"]
    assert (whole["updates"] > 0) == (method not in ("static", "dense"))
    assert whole["density"] == (1.0 if method == "dense" else pytest.approx(0.25, abs=0.001))
    if record is not None:
        first = sum(len(Records.load(record).initial(n)) for n in Records.load(record).layers)
        assert first == {"gmp": WEIGHTS, "granet": WEIGHTS // 2}.get(method, WEIGHTS // 4)

    half = tmp_path / "half"
    run(dataclasses.replace(options, checkpoint_path=half, stop_after=20), QUIET)
    torch.manual_seed(99)
    got = run(Options(restore=half, checkpoint_path=half), QUIET)
    for key in ("loss", "valid_loss", "updates", "replaced", "steps", "parameters"):
        assert got[key] == whole[key]
    name = "step-0000040.ckpt"
    expected, resumed = state(tmp_path / "whole" / name), state(half / name)
    for part in ("model", "patterns"):
        assert expected[part].keys() == resumed[part].keys()
    for name, tensor in expected["model"].items():
        assert torch.equal(tensor, resumed["model"][name]), name


@pytest.mark.sampled(3)
@pytest.mark.parametrize("method", ["snfs", "topkast", "gmp"])
def test_trained_model_is_tested_and_samples(method, text, tmp_path):
    changes = {"method": method, "sample": 30, "prompt": "the", "temperature": 0.0}
    trained = run(Options(**TINY, **changes, data=text, checkpoint_path=tmp_path / "c"), QUIET)
    restored = {"restore": tmp_path / "c", "sample": 30, "prompt": "the", "temperature": 0.0}
    assert run(Options(**restored, mode="test"), QUIET)["loss"] == pytest.approx(trained["loss"])
    text.unlink()  # text is written without a look at the data
    assert run(Options(**restored, mode="sample"), QUIET) == {"sample": trained["sample"]}


@pytest.mark.parametrize("method", ["gmp", "granet"])
def test_higher_initial_density_is_scaled_and_counted(method, text):
    options = Options(
        **TINY, method=method, data=text, initial_scale=0.5, embedding_size=8,
        sparse_embeddings=True,
    )  # fmt: skip
    corpus = load_corpus(options)
    halved = Training(options, corpus, 7).model
    whole = Training(dataclasses.replace(options, initial_scale=1.0), corpus, 7).model
    for name, layer in halved.named_modules():
        if isinstance(layer, SparseLinear):
            scale = 1.0 if layer is halved.embedding.table else 0.5
            assert torch.equal(layer.values, scale * whole.get_submodule(name).values), name
    count, blocks = count_parameters(options, corpus.size, first=True)
    assert count == sum(p.numel() for p in halved.parameters())
    layers = [m for m in halved.modules() if isinstance(m, SparseLinear)]
    assert blocks == sum(layer.pattern.nnz for layer in layers)
    sparse = state_bytes(dataclasses.replace(options, method="static"), corpus.size)
    assert state_bytes(options, corpus.size) > sparse


def test_replaced_counts_what_updates_dropped(text, tmp_path):
    """In both applications, and equal to the churn of a record; gmp grows nothing."""
    figures = run(Options(**TINY, method="gmp", data=text, records_path=tmp_path / "r"), QUIET)
    records = Records.load(tmp_path / "r")
    changes = [change for name in records.layers for change in records.changes(name)]
    assert figures["replaced"] == sum(len(dropped) for dropped, _ in changes) > 0
    assert sum(len(grown) for _, grown in changes) == 0
