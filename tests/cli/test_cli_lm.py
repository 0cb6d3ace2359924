"""`dynsparse lm` and `dynsparse encode`: output, and one line for user errors."""

import json
import sys
import warnings

import pytest

from dynsparse.cli.app import run

TEXT = "the cat sat on the mat, the dog sat on the log.\n" * 40
TINY = [
    "lm", "--layers", "1", "--hidden-size", "16", "--ff-size", "32", "--heads", "2",
    "--sequence-length", "8", "--batch-size", "4", "--steps", "8", "--warmup-steps", "2",
    "--valid-interval", "4", "--update-interval", "3", "--seed", "7",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _warnings_stay(monkeypatch):
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    return str(tmp_path / "text.txt")


def call(capsys, *arguments):
    status = run([str(argument) for argument in arguments])
    out = capsys.readouterr()
    return status, out.out, out.err


def test_training_prints_its_cost_and_results(capsys, text, tmp_path):
    status, out, err = call(
        capsys, *TINY, "--data", text, "--json", tmp_path / "a.json", "--sample", "30",
        "--prompt", "the", "--optimizer-arg", "beta2=0.99", "weight_decay=0",
        "--cosine-prune-schedule", '{"period": 0.4}', "--grad-norm-clip", "0",
    )  # fmt: skip
    assert (status, err) == (0, "")
    for words in ("rigl on text.txt", "memory: about", "validation", "pattern updates"):
        assert words in out
    figures = json.loads((tmp_path / "a.json").read_text())
    assert figures["steps"] == 8
    assert figures["density"] == pytest.approx(0.1, abs=0.002)
    assert len(figures["sample"]) == 33


def test_encode_train_and_sample(capsys, text, tmp_path):
    (tmp_path / "valid.txt").write_text(TEXT[:300])
    train, valid, folder = tmp_path / "t.tokens", tmp_path / "v.tokens", tmp_path / "c"
    status, out, _ = call(capsys, "encode", "--data", text, "--output", train)
    assert status == 0
    assert "1,920 char tokens of 1,920 characters (1.00 each), vocabulary of 16" in out
    arguments = ["--data", tmp_path / "valid.txt", "--vocabulary", train, "--output", valid]
    assert call(capsys, "encode", *arguments)[0] == 0
    status, _, err = call(
        capsys, *TINY, "--data", train, "--valid-data", valid, "--checkpoint-path", folder
    )
    assert (status, err) == (0, "")
    status, out, err = call(
        capsys, "lm", "--restore", folder, "--mode", "sample", "--sample", "10", "--prompt", "cat"
    )
    assert (status, err) == (0, "")
    assert out.startswith("cat")


def test_standard_library_as_bytes(capsys):
    status, out, err = call(
        capsys, *TINY, "--tokens", "byte", "--valid-share", "0.0005", "--test-share", "0.0005"
    )
    assert (status, err) == (0, "")
    assert "rigl on stdlib" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--heads", "3"], "--heads: 3 heads do not divide the hidden size 16"),
        (["--block-size", "8", "--ff-size", "36"], "--ff-size: blocks of 8 do not divide the size"),
        (["--sequence-length", "97"], "less than the 96 tokens of the valid part of text.txt"),
        (["--valid-share", "0.0001"], "--valid-share: 0.0001 of the 1,920 tokens"),
        (["--valid-share", "0.6", "--test-share", "0.4"], "expected less than 1 together, got 1"),
        (["--steps", "2"], "--warmup-steps: expected less than the 2 steps"),
        (["--mode", "sample"], "--mode sample: expected a trained model"),
        (["--mode", "test"], "--mode test: expected a trained model"),
        (["--autoregression-offset", "8"], "--autoregression-offset: expected less than"),
        (["--min-learning-rate", "1"], "--min-learning-rate: expected at most the peak of"),
        (["--stop-after", "5"], "a multiple of --valid-interval 4, got 5"),
        (["--sample", "5", "--prompt", ""], "--prompt: expected at least one character"),
        (["--sample", "5", "--prompt", "X"], "--prompt: the character 'X' (U+0058) at position 0"),
        (["--cosine-prune-schedule", '{"zero_steps": 9}'], "--cosine-prune-schedule: zero_steps"),
        (
            ["--tokens", "byte", "--bpe-dir", "."],
            "--bpe-dir: expected --tokens bpe with it, got byte",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_print_one_line(capsys, text, arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, _, err = call(capsys, *TINY, "--data", text, *arguments)
    assert status == 2
    assert message in err
    assert err.count("\n") == 1


def test_validation_text_with_unknown_characters(capsys, text, tmp_path):
    (tmp_path / "v.txt").write_text("the cät sat")
    status, _, err = call(capsys, *TINY, "--data", text, "--valid-data", tmp_path / "v.txt")
    assert status == 2
    assert "v.txt: the character 'ä' (U+00E4) at position 5 is not among the 16" in err


def test_mistakes_of_encode_print_one_line(capsys, text, tmp_path):
    output = ["--output", tmp_path / "o.tokens"]
    assert call(capsys, "encode", "--data", text, *output)[0] == 0
    for arguments, message in (
        (["--tokens", "word", *output], "--tokens: expected one of char, byte, bpe, got 'word'"),
        (["--vocabulary-size", "300", *output], "--vocabulary-size: applies to --tokens bpe"),
        (["--bpe-dir", ".", *output], "--bpe-dir: expected BPE tokens with it, got char"),
        (
            ["--vocabulary", tmp_path / "o.tokens", "--tokens", "char", *output],
            "--tokens: applies to texts without --vocabulary",
        ),
        (["--vocabulary", tmp_path / "o.tokens", "--bpe-dir", ".", *output], "got char tokens"),
        (["--vocabulary", text, *output], "expected a token file made by `dynsparse encode`"),
        (["--output", tmp_path], "--output: expected a file in a folder that can"),
        ([], "Missing option '--output'"),
    ):
        status, _, err = call(capsys, "encode", "--data", text, *arguments)
        assert status == 2
        assert message in err
        assert err.count("\n") == 1
    arguments = ["--data", tmp_path / "o.tokens", "--tokens", "byte"]
    status, _, err = call(capsys, *TINY, *arguments)
    assert status == 2
    assert "o.tokens was encoded with char, got byte: leave --tokens out" in err
    (tmp_path / "o.tokens").write_bytes((tmp_path / "o.tokens").read_bytes()[:-1])
    status, _, err = call(capsys, *TINY, "--data", tmp_path / "o.tokens")
    assert status == 2
    assert "the token file is truncated" in err


def test_too_large_model_raises_before_it_is_created(capsys, text, monkeypatch):
    monkeypatch.setattr(sys.modules["dynsparse.apps.lm.run"], "available_memory", lambda: 1 << 20)
    status, out, err = call(capsys, *TINY, "--data", text, "--hidden-size", "512")
    assert status == 2
    assert "memory: about" in out
    assert "expected a model that fits the 0.0 GiB of memory that are free, got one that" in err


def test_preset_with_checkpoint_raises(capsys, text, tmp_path):
    folder = tmp_path / "c"
    assert call(capsys, *TINY, "--data", text, "--checkpoint-path", folder)[0] == 0
    status, _, err = call(capsys, "lm", "--restore", folder, "--preset", "tiny")
    assert status == 2
    assert "leave --preset out" in err
