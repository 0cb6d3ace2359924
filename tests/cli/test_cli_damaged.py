"""Commands given a damaged file end with one line and status 2."""

import json
import struct

import numpy as np
import pytest
import torch

from dynsparse.cli.app import run
from dynsparse.pattern import SparsePattern
from dynsparse.training.checkpoint import save_checkpoint
from dynsparse.training.records import Recorder

DEEP = b"[" * 100_000
VOCABULARY = {"kind": "char", "characters": "ab", "size": 2, "identity": "char:x"}
HEAD = {"dtype": "uint16", "count": 360, "vocabulary": VOCABULARY, "source": "s"}


@pytest.fixture
def refused(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def check(match: str, *arguments: object) -> None:
        capsys.readouterr()
        assert run([str(argument) for argument in arguments]) == 2
        told = capsys.readouterr().err
        assert told.count("\n") == 1
        assert len(told) < 1000
        assert match in told

    return check


def tokens(path, head: object) -> None:
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    start = b"dynsparse\0token\n" + struct.pack("<II", 1, len(text))
    path.write_bytes(start + text + bytes(720))


@pytest.mark.parametrize(
    ("head", "match"),
    [
        ({**HEAD, "count": None}, "the head of the token file is damaged"),
        ({**HEAD, "vocabulary": {**VOCABULARY, "size": [1]}}, "the head of the token file is dam"),
        ({**HEAD, "vocabulary": {**VOCABULARY, "identity": 3}}, "the head of the token file is d"),
        (DEEP, "nested at most 100 deep"),
    ],
)
def test_token_files(tmp_path, refused, head, match):
    tokens(tmp_path / "a.tokens", head)
    refused(match, "lm", "--data", tmp_path / "a.tokens")
    (tmp_path / "t.txt").write_text("hello")
    refused(match, "encode", "--data", tmp_path / "t.txt", "--vocabulary", tmp_path / "a.tokens",
            "--output", tmp_path / "o")  # fmt: skip


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("record.json", DEEP),
        ("record.json", b'{"format": "dynsparse-record", "version": 1, "layers": {}, '
                        b'"metadata": {}}'),
        ("record.json", b'{"format": "dynsparse-record", "version": 1, "layers": {"a": {"shape": '
                        b'[2147483647, 2147483647], "block_size": 1}}, "metadata": {}}'),
        ("telemetry.jsonl", b"\xff\n"),
        ("telemetry.jsonl", b"[1]\n"),
        ("update-000000.npz", b"PK\x05\x06" + bytes(18)),
    ],
)  # fmt: skip
def test_records(tmp_path, refused, name, content):
    pytest.importorskip("matplotlib")
    recorder = Recorder(tmp_path / "record")
    recorder.start({"a": SparsePattern.random((8, 8), 0.5)})
    (tmp_path / "record" / name).write_bytes(content)
    refused(str(tmp_path / "record"), "visualise", "--records-path", tmp_path / "record")


def test_benchmark_files(tmp_path, refused):
    for content in (b"[" * 20_000, b"benchmarks: {a: {about: x, measure: [step]}}\n", b"\xff"):
        (tmp_path / "b.yml").write_bytes(content)
        refused("b.yml", "bench", "--list", "--spec", tmp_path / "b.yml")


def test_figures_of_benchmarks(tmp_path, refused):
    head = {"format": "dynsparse-bench", "version": 1, "spec": "x", "laws": {}}
    head |= {"popsparse_law": {}, "break_even": {}, "machine": {}}
    for content in (
        DEEP,
        json.dumps({**head, "benchmarks": {"a": {}}}).encode(),
        json.dumps({**head, "benchmarks": {"a": {"measure": "step", "cells": [1]}}}).encode(),
        json.dumps({**head, "benchmarks": [], "version": "x" * 10_000}).encode(),
    ):
        (tmp_path / "b.json").write_bytes(content)
        refused("b.json", "bench", "--from", tmp_path / "b.json", "--markdown", tmp_path / "o.md")


def test_pictures(tmp_path, refused):
    for name in ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte",
                 "t10k-labels-idx1-ubyte"):  # fmt: skip
        (tmp_path / name).write_bytes(np.zeros(20, np.uint8).tobytes())
    refused("expected an IDX file", "mnist", "--dataset", "mnist", "--data-dir", tmp_path)


def test_json_in_flags(refused):
    refused("expected name=json", "mnist", "--optimizer-arg", "x=" + DEEP.decode())

    refused("expected a JSON object", "matmul", "--rows", 8, "--cols", 8, "--batch", 2,
            "--density", 0.5, "--options", DEEP.decode())  # fmt: skip


@pytest.mark.parametrize(
    "extra",
    [
        {"app": "mnist", "seed": 1},
        {"app": "mnist", "seed": 1, "options": [1]},
        {"app": "mnist", "options": {}},
        {"app": [1]},
        {},
    ],
)
def test_checkpoints(tmp_path, refused, extra):
    file = tmp_path / "a.ckpt"
    torch.save(torch.zeros(3), file)
    refused("is truncated or not a checkpoint", "mnist", "--restore", file)
    layer = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    save_checkpoint(file, model=layer, optimizer=optimizer, extra=extra)
    for command in ("mnist", "lm", "mnist-transformer"):
        refused("a.ckpt", command, "--restore", file)


def test_figures_are_written_whole(tmp_path, monkeypatch):
    """A kill while they are written leaves the figures of before."""
    (tmp_path / "f.json").write_text("before")

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    arguments = ["mnist", "--epochs", "1", "--densities", "0.1", "--threads", "1", "--json"]
    assert run([*arguments, str(tmp_path / "f.json")]) == 2
    assert (tmp_path / "f.json").read_text() == "before"
    assert [file.name for file in tmp_path.iterdir()] == ["f.json"]
