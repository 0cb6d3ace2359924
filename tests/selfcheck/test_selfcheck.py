"""`dynsparse check`: what is right matches, and what is wrong is found and named."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from dynsparse import native
from dynsparse.cli.app import run as command
from dynsparse.machine import Engine, Target
from dynsparse.ops.linear.kernels import sparse
from dynsparse.selfcheck import Check, Result, gpu, kernels, run, run_checks, speeds, threads
from dynsparse.selfcheck.result import checked, distance
from dynsparse.selfcheck.tiles import check_tiles

AVAILABLE = native.describe()["available"]


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def small(monkeypatch):
    """Fewer kinds of blocks, fewer tiles, and speeds of little."""
    monkeypatch.setattr(kernels, "BLOCKS", (1, 16))
    monkeypatch.setattr(run.Target, "mk2", lambda: Target(tiles=6))
    monkeypatch.setattr(speeds, "_BYTES", 1 << 16)
    monkeypatch.setattr(speeds, "_SIZES", {"cpu": 16})
    best = speeds._best
    monkeypatch.setattr(speeds, "_best", lambda run, device: best(run, device, 0.0))


def test_all_that_computes_here_matches():
    result = run_checks(3, speeds=False)
    assert result.matches, result.differing
    places = {check.where for check in result.checks if check.part == "kernels"}
    assert places == {*AVAILABLE, "none"}
    assert {check.part for check in result.checks} >= {"kernels", "threads", "tile machine"}
    names = {check.name for check in result.checks if check.where == "none"}
    for block in ("elements", *(f"blocks of {b}" for b in (4, 8, 16, 32, 64, 128))):
        assert {f"{block}: sparse", f"{block}: float64", f"{block}: bfloat16"} <= names
    assert {"convolution", "attention", "growth", "pattern update"} <= names


def test_a_seed_says_all(small):
    first, second, other = (run_checks(seed, speeds=False) for seed in (1, 1, 2))
    assert first == second
    assert first.checks != other.checks
    assert run_checks(speeds=False).seed != run_checks(speeds=False).seed


def test_the_command_ends_with_results_match(small, capsys):
    assert command(["check", "--seed", "5"]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[-1].strip() == "Results match."
    assert "seed 5" in out
    for name in (*AVAILABLE, "plain torch", "convolution", "GB/s", "GFLOP/s", "exchange"):
        assert name in out
    assert not err


def test_the_command_prints_json(small, capsys):
    assert command(["check", "--seed", "5", "--json", "--no-speeds"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["match"], found["seed"], found["speeds"]) == (True, 5, [])
    assert all(check["match"] and check["error"] <= check["tolerance"] for check in found["checks"])
    assert found["host"]["versions"]["torch"] == torch.__version__


@pytest.mark.skipif(not AVAILABLE, reason="the compiled kernels are not built")
def test_a_wrong_kernel_is_found(small, capsys, monkeypatch):
    forward = sparse.forward

    def wrong(x, values, p, bias):
        y = forward(x, values, p, bias)
        if p.block_size == 16:
            y.view(-1)[-1] += 0.1 * y.abs().max() + 0.1
        return y

    monkeypatch.setattr(sparse, "forward", wrong)
    assert command(["check", "--seed", "5", "--no-speeds"]) == 1
    out = capsys.readouterr().out
    assert "Results match." not in out
    assert f"{AVAILABLE[0]}, blocks of 16: sparse: differs by" in out
    assert "elements: sparse: differs" not in out
    assert "dynsparse check --seed 5" in out


@pytest.mark.skipif(not AVAILABLE, reason="the compiled kernels are not built")
def test_a_kernel_that_raises_is_found(small, capsys, monkeypatch):
    def broken(*_):
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(sparse, "backward", broken)
    assert command(["check", "--seed", "5", "--no-speeds", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["match"]
    said = {check["said"] for check in found["checks"] if not check["match"]}
    assert said == {"RuntimeError: no such instruction"}
    assert all(check["error"] is None for check in found["checks"] if check["said"])


def test_a_library_that_does_not_load_is_found(small, capsys, monkeypatch):
    def broken(isa):
        raise AttributeError("undefined symbol: dynsparse_linear_forward")

    monkeypatch.setattr(native, "load_isa", broken)
    status = command(["check", "--seed", "5", "--no-speeds"])
    out = " ".join(capsys.readouterr().out.split())
    assert status == bool(AVAILABLE)
    for isa in AVAILABLE:
        assert f"{isa}, library: AttributeError: undefined symbol: dynsparse_linear_forward" in out


@pytest.mark.parametrize("program", ["on tile", "neighbours", "far"])
def test_a_word_that_is_lost_on_the_tile_machine_is_found(monkeypatch, program):
    ran = Engine.run

    def losing(engine, name=None):
        profile = ran(engine, name)
        if name == program:
            there = engine.read("there")
            there[-1, 3] ^= 1
            engine.write("there", there)
        return profile

    monkeypatch.setattr(Engine, "run", losing)
    found = list(check_tiles(Target(tiles=5), "five", 0))
    what = {"on tile": "memory", "neighbours": "exchange: neighbours", "far": "exchange: far"}
    for one in found:
        assert one.matches == (not one.name.startswith(what[program])), one
        assert one.error in (0, 1)


def test_results_that_depend_on_threads_are_found(monkeypatch):
    monkeypatch.setattr(threads, "thread_counts", lambda: [1, 2])
    linear = threads.linear

    def depending(x, values, pattern):
        return linear(x, values, pattern) * (1 + (torch.get_num_threads() == 2) * 1e-3)

    assert all(one.matches for one in threads.check_threads(generator()))
    monkeypatch.setattr(threads, "linear", depending)
    assert {one.where for one in threads.check_threads(generator()) if not one.matches} == {"2"}


def test_numbers_of_threads(monkeypatch):
    for most, counts in {1: [1], 2: [1, 2], 6: [1, 2, 4, 6], 8: [1, 2, 4, 8]}.items():
        monkeypatch.setattr(torch, "get_num_threads", lambda most=most: most)
        assert threads.thread_counts() == counts


def test_the_checks_of_a_gpu_on_another_device():
    found = list(gpu.check_gpu(torch.device("cpu"), generator()))
    assert all(one.matches for one in found), found
    assert {one.name for one in found} >= {
        "elements: dense, float32",
        "blocks of 64: dense, bfloat16",
    }


def test_errors_by_hand():
    expected = torch.tensor([1.0, 2.0], dtype=torch.float64)
    size = torch.tensor([4.0, 8.0])
    assert distance(torch.tensor([1.0, 2.5]), expected, size) == 0.5 / 8
    assert distance(torch.tensor([1.0]), expected, size) == float("inf")
    assert np.isnan(distance(torch.tensor([1.0, torch.nan]), expected, size))
    # What is no number matches nothing.
    nan = checked("kernels", "v4", "a", 1.0, lambda: float("nan"))
    assert not nan.matches
    assert Check("kernels", "v4", "a", 0.5, 0.5).matches
    assert not Check("kernels", "v4", "a", 0.6, 0.5).matches
    assert not Check("kernels", "v4", "a", 0.0, 0.5, "an error").matches
    assert Result(0, [nan]).differing == [nan]


@pytest.mark.parametrize("seed", [-1, 2**63, "1", 1.5, None])
def test_seeds(small, seed, capsys):
    if seed is None:
        assert command(["check", "--seed", "x"]) == 2
        assert command(["check", "--seed", "-1"]) == 2
        return
    with pytest.raises((ValueError, TypeError), match="seed"):
        run_checks(seed, speeds=False)


def test_another_instruction_set_computes_inside_the_block_alone():
    before = native.load
    with native.use_isa("none"):
        assert native.load() is None
        assert native.bfloat16_unit() == "float32"
    assert native.load is before
    with pytest.raises(ValueError, match="DYNSPARSE_ISA"), native.use_isa("v9"):
        pass
    assert native.load is before
