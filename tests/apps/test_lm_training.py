"""Training of the language model: learning, accumulation, sampling, exact resume."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from saved_states import assert_equal, state

from dynsparse.apps.common.resume import find_checkpoint
from dynsparse.apps.common.training import Scores
from dynsparse.apps.lm import Options, run
from dynsparse.apps.lm.corpus import Corpus, load_corpus
from dynsparse.apps.lm.model import choose, sample
from dynsparse.apps.lm.training import Training, build_optimizer, learning_rate
from dynsparse.data.text import CharTokenizer, write_tokens
from dynsparse.training.records import Records

QUIET = Console(quiet=True)
TEXT = "the cat sat on the mat, the dog sat on the log.\n" * 40
TINY = {
    "layers": 1, "hidden_size": 16, "ff_size": 32, "heads": 2, "sequence_length": 8,
    "batch_size": 4, "steps": 12, "warmup_steps": 2, "valid_interval": 4, "update_interval": 3,
    "sparsity": 0.5, "seed": 7,
}  # fmt: skip


@pytest.fixture
def text(tmp_path) -> Path:
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path / "text.txt"


def tiny(text, **changes):
    return run(Options(**{**TINY, "data": text, **changes}), QUIET)


def training(text, **changes) -> Training:
    options = Options(**{**TINY, "data": text, **changes})
    options.check()
    return Training(options, load_corpus(options), 7)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("method", ["rigl", "dense"])
def test_memorizes_a_small_text(text, method):
    figures = tiny(
        text, method=method, steps=300, valid_interval=100, hidden_size=32, update_interval=20,
        peak_learning_rate=1e-2, sample=60, prompt="the c", temperature=0.0, sequence_length=24,
    )  # fmt: skip
    assert figures["history"][0]["loss"] > 0.5
    # What is left is which of two animals comes after "the".
    assert figures["loss"] < 0.25
    assert figures["accuracy"] > 0.9
    assert figures["perplexity"] == pytest.approx(math.exp(figures["loss"]))
    assert "sat on the" in figures["sample"]
    assert figures["sample"].startswith("the c")
    assert len(figures["sample"]) == 65


def test_text_splits_are_disjoint_and_in_order(text):
    corpus = load_corpus(Options(data=text, valid_share=0.1, test_share=0.2))
    ids = CharTokenizer(TEXT).encode(TEXT)
    assert np.array_equal(np.concatenate([corpus.train, corpus.valid, corpus.test]), ids)
    assert len(corpus.valid) == int(0.1 * len(ids))
    assert len(corpus.test) == int(0.2 * len(ids))
    other = load_corpus(Options(data=text, valid_share=0.3, test_share=0.2))
    assert np.array_equal(other.test, corpus.test)


def test_every_token_but_the_first_is_predicted_once():
    ids = np.arange(23, dtype=np.uint16)
    corpus = Corpus("a", {"size": 23}, ids, ids, ids)
    stretches = corpus.sequences_of("valid", 5)
    assert stretches[:, 1:].flatten().tolist() == list(range(1, 21))
    assert stretches[:, :-1].flatten().tolist() == list(range(20))
    assert torch.equal(corpus.sequences_of("test", 5, 14), stretches[:2])
    assert torch.equal(corpus.sequences_of("test", 5, 1), stretches[:1])
    batch = corpus.batch(50, 5, torch.Generator().manual_seed(0))
    assert batch.shape == (50, 6)
    assert (batch.diff(dim=1) == 1).all()
    assert (batch.min(), batch.max()) == (0, 22)


def test_texts_and_token_files_train_alike(text, tmp_path):
    (tmp_path / "valid.txt").write_text(TEXT[:200])
    tokens = CharTokenizer(TEXT)
    files = {}
    for name, content in {"data": TEXT, "valid_data": TEXT[:200]}.items():
        files[name] = tmp_path / f"{name}.tokens"
        write_tokens(files[name], tokens.encode(content), tokens, name)
    expected = tiny(text, valid_data=tmp_path / "valid.txt")
    got = tiny(text, **files)
    assert got["valid_loss"] == expected["valid_loss"]
    assert got["loss"] == expected["loss"]
    for wrong, message in (
        ({"data": files["data"], "valid_data": text}, "--valid-data: expected a token file"),
        ({"valid_data": files["data"]}, "--valid-data: expected a text, as --data is one"),
    ):
        with pytest.raises(ValueError, match=message):
            tiny(text, **wrong)
    other = CharTokenizer("abc")
    write_tokens(tmp_path / "o", other.encode("abc" * 20), other, "o")
    with pytest.raises(ValueError, match="expected tokens of the vocabulary"):
        tiny(text, data=files["data"], test_data=tmp_path / "o")


@pytest.mark.parametrize("method", ["rigl", "dense"])
@pytest.mark.parametrize("weighted", [False, True])
def test_gradient_accumulation_equals_the_batch(text, method, weighted):
    changes = {"method": method, "repetition_weighting": weighted, "data_type": "float64",
               "autoregression_offset": 3}  # fmt: skip
    whole = training(text, batch_size=12, **changes)
    parts = training(text, batch_size=3, gradient_accumulation_count=4, **changes)
    for one in (whole, parts):
        list(one.run(8))
    assert whole.tokens_per_step == parts.tokens_per_step
    for (name, a), b in zip(
        whole.model.state_dict().items(), parts.model.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11, msg=name)


def test_offset_skips_the_first_tokens(text):
    whole, offset = training(text), training(text, autoregression_offset=5)
    batch = whole.corpus.sequences_of("valid", 8)
    _, losses, right = whole.losses(batch)
    loss, later, right_later = offset.losses(batch)
    torch.testing.assert_close(later, losses[:, 5:])
    assert torch.equal(right_later, right[:, 5:])
    torch.testing.assert_close(loss, losses[:, 5:].mean())


def test_evaluation_uses_no_dropout_or_random_numbers(text):
    model = training(text, droprate=0.5)
    before = torch.get_rng_state()
    first = model.evaluate("valid")
    assert model.evaluate("valid") == first
    assert torch.equal(torch.get_rng_state(), before)
    assert Scores(1000.0, 0.0).perplexity == math.inf


def test_learning_rate_warms_up_and_decays():
    options = Options(
        steps=110, warmup_steps=10, peak_learning_rate=1.0, min_learning_rate=0.1, decay_power=2.0
    )
    rates = [learning_rate(options, step) for step in range(110)]
    assert rates[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert rates[10] == pytest.approx(1.0)
    assert rates[60] == pytest.approx(0.1 + 0.9 * 0.25)
    short = Options(steps=110, warmup_steps=0, cooldown_steps=50, min_learning_rate=1e-4)
    assert learning_rate(short, 50) == learning_rate(short, 109) == 1e-4


def test_only_matrices_decay(text):
    made = training(text)
    decaying, others = made.optimizer.param_groups
    assert decaying["weight_decay"] == 0.1
    assert others["weight_decay"] == 0
    names = {id(p): name for name, p in made.model.named_parameters()}
    assert all("norm" in names[id(p)] or p.dim() != 1 or "bias" in names[id(p)]
               or "positions" in names[id(p)] for p in others["params"])  # fmt: skip
    assert {names[id(p)].rpartition(".")[2] for p in decaying["params"]} == {"values", "weight"}
    count = sum(len(group["params"]) for group in made.optimizer.param_groups)
    assert count == len(list(made.model.parameters()))
    sgd = build_optimizer(Options(optimizer="Momentum", optimizer_arg={"momentum": 0}), made.model)
    assert sgd.param_groups[0]["momentum"] == 0


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "changes",
    [
        {"droprate": 0.2},
        {"method": "set", "optimizer": "Momentum", "gradient_accumulation_count": 2},
        {"method": "snfs", "evaluation_tokens": 20},
        {"method": "mest", "data_type": "bfloat16"},
        {"data_type": "float16", "gradient_accumulation_count": 2},
        {"method": "dense", "match_parameters": True},
        {"block_size": 8, "embedding_size": 8, "sparse_embeddings": True, "tokens": "byte"},
    ],
    ids=str,
)
def test_resume_is_exact(text, tmp_path, changes):
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    expected = tiny(text, checkpoint_path=whole, **changes)
    tiny(text, checkpoint_path=halves, stop_after=4, **changes)
    torch.manual_seed(99)
    # Nothing but the folder is said again: the rest is the checkpoint's.
    got = run(Options(restore=halves, checkpoint_path=halves), QUIET)
    assert find_checkpoint(Training, halves).name == "step-0000012.ckpt"
    assert_equal(state(whole / "step-0000012.ckpt"), state(halves / "step-0000012.ckpt"))
    for key in ("loss", "valid_loss", "updates", "replaced", "steps", "seed", "parameters"):
        assert got[key] == expected[key]


def test_large_blocks_train(text):
    figures = tiny(text, block_size=64, hidden_size=64, ff_size=128, pooling_type="SUM")
    assert figures["updates"] > 0
    assert figures["history"][-1]["valid_loss"] < figures["history"][0]["valid_loss"]


def test_restored_model_is_tested_and_samples(text, tmp_path):
    trained = tiny(text, checkpoint_path=tmp_path / "c", json=tmp_path / "a.json")
    written = json.loads((tmp_path / "a.json").read_text())
    assert written == trained
    assert [entry["step"] for entry in written["history"]] == [4, 8, 12]
    tested = run(Options(restore=tmp_path / "c", mode="test"), QUIET)
    assert tested["loss"] == trained["loss"]
    text.unlink()  # text is written without a look at the data
    options = Options(restore=tmp_path / "c", mode="sample", sample=20, prompt="the", seed=1)
    first = run(options, QUIET)
    assert first == run(options, QUIET)
    assert set(first) == {"sample"}
    assert len(first["sample"]) == 23
    with pytest.raises(ValueError, match="--prompt: the character 'X'"):
        run(Options(restore=tmp_path / "c", mode="sample", sample=1, prompt="X"), QUIET)


def test_checkpoint_of_another_training_raises(text, tmp_path):
    folder = tmp_path / "c"
    tiny(text, checkpoint_path=folder, stop_after=4)
    (tmp_path / "other.txt").write_text(TEXT.replace("log", "gol"))
    for changes, message in (
        ({"method": "set"}, "--method: "),
        ({"layers": 3}, "was trained with 1, got 3: leave --layers out"),
        ({"seed": 8}, "--seed: "),
        (
            {"data": tmp_path / "other.txt"},
            "was trained on 1,728 tokens, got 1,728 others: name the same",
        ),
        ({"records_path": tmp_path / "r"}, "expected the record of the restored training"),
    ):
        with pytest.raises(ValueError, match=r"trained|expected the record") as error:
            tiny(text, restore=folder, **changes)
        assert message in str(error.value)
        assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="--heads: "):
        run(Options(restore=folder, heads=4), QUIET, given={"heads"})
    with pytest.raises(FileNotFoundError, match="which does not exist"):
        run(Options(restore=tmp_path / "none"), QUIET)
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"step-NNNNNNN\.ckpt"):
        run(Options(restore=tmp_path / "empty"), QUIET)


def test_record_follows_the_patterns(text, tmp_path):
    figures = tiny(text, records_path=tmp_path / "rec", checkpoint_path=tmp_path / "c")
    records = Records.load(tmp_path / "rec")
    assert len(records.layers) == 6
    assert records.metadata["app"] == "lm"
    assert [line["step"] for line in records.telemetry] == [4, 8, 12]
    assert len(records) == 1 + figures["updates"]
    with pytest.raises(ValueError, match="--records-path: expected a sparse layer to record"):
        tiny(text, method="dense", records_path=tmp_path / "rec2")


def test_top_k_sampling():
    generator = torch.Generator().manual_seed(0)
    logits = torch.tensor([1.0, 3.0, 2.0, -5.0], dtype=torch.float64)
    assert int(choose(logits, generator, 0.0, None)) == 1
    drawn = {int(choose(logits, generator, 5.0, 2)) for _ in range(200)}
    assert drawn == {1, 2}
    drawn = [int(choose(logits, generator, 1.0, 99)) for _ in range(4000)]
    shares = torch.bincount(torch.tensor(drawn), minlength=4) / 4000
    torch.testing.assert_close(shares.double(), logits.softmax(0), atol=0.03, rtol=0)
    assert int(choose(logits, generator, 1e-300, None)) == 1


def test_long_sample_uses_a_limited_context(text):
    made = training(text)
    prompt = torch.arange(10)
    generator = torch.Generator().manual_seed(0)
    assert len(list(sample(made.model, prompt, 20, generator))) == 20
