"""`dynsparse check`: correct kernels match, and wrong ones are found and named."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from dynsparse import selfcheck
from dynsparse._core import native
from dynsparse.cli.app import run as command
from dynsparse.ops.linear.cpu import KERNELS
from dynsparse.selfcheck import (
    PASSES,
    Check,
    Result,
    _check_passes,
    _run_check,
    distance,
    run_checks,
)

AVAILABLE = native.describe()["available"]


def test_all_backends_of_this_machine_match():
    result = run_checks(3)
    assert result.matches, result.differing
    assert [(one.where, one.name) for one in result.checks if "cuda" not in one.where] == [
        (isa, name) for isa in (*AVAILABLE, "none") for name in PASSES
    ]


def test_seed_determines_the_checks():
    first, second, other = (run_checks(seed) for seed in (1, 1, 2))
    assert first == second
    assert first.checks != other.checks
    assert run_checks().seed != run_checks().seed


def test_command_prints_each_line_immediately(capsys, monkeypatch):
    shown = []
    checks = selfcheck._check_isa

    def check_isa(isa, generator):
        shown.append(capsys.readouterr().out)
        return checks(isa, generator)

    monkeypatch.setattr(selfcheck, "_check_isa", check_isa)
    assert command(["check", "--seed", "5"]) == 0
    shown.append(capsys.readouterr().out)
    assert "seed 5" in shown[0]
    for name, words in zip((*AVAILABLE, "plain torch"), shown[1:], strict=True):
        assert name in words
    assert "".join(shown).splitlines()[-1] == "Results match."


def test_command_prints_json(capsys):
    assert command(["check", "--seed", "5", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["match"], found["seed"]) == (True, 5)
    assert all(check["match"] and check["error"] <= check["tolerance"] for check in found["checks"])
    assert found["host"]["versions"]["torch"] == torch.__version__


@pytest.mark.skipif(not AVAILABLE, reason="the compiled kernels are not built")
@pytest.mark.parametrize("block_size", [1, 16])
def test_wrong_kernel_is_found(capsys, monkeypatch, block_size):
    sparse = KERNELS["sparse"]

    def wrong(x, values, p, bias):
        y = sparse.forward(x, values, p, bias)
        if p.block_size == block_size:
            y.view(-1)[-1] += 0.1 * y.abs().max() + 0.1
        return y

    monkeypatch.setitem(KERNELS, "sparse", sparse._replace(forward=wrong))
    assert command(["check", "--seed", "5"]) == 1
    out = capsys.readouterr().out
    assert "Results match." not in out
    assert f"{AVAILABLE[0]}, forward: differs by" in out
    assert "gradient of the input: differs" not in out
    assert "dynsparse check --seed 5" in out


@pytest.mark.skipif(not AVAILABLE, reason="the compiled kernels are not built")
def test_raising_kernel_is_found(capsys, monkeypatch):
    def broken(*_):
        raise RuntimeError("no such instruction")

    monkeypatch.setitem(KERNELS, "sparse", KERNELS["sparse"]._replace(backward=broken))
    assert command(["check", "--seed", "5", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["match"]
    messages = {check["message"] for check in found["checks"] if not check["match"]}
    assert messages == {"RuntimeError: no such instruction"}
    assert all(check["error"] is None for check in found["checks"] if check["message"])


def test_broken_library_is_found(capsys, monkeypatch):
    def broken(isa):
        raise AttributeError("undefined symbol: dynsparse_linear_forward")

    monkeypatch.setattr(native, "load_isa", broken)
    status = command(["check", "--seed", "5"])
    out = " ".join(capsys.readouterr().out.split())
    assert status == bool(AVAILABLE)
    for isa in AVAILABLE:
        assert f"{isa}, library: AttributeError: undefined symbol: dynsparse_linear_forward" in out


def test_gpu_checks_on_another_device():
    generator = torch.Generator().manual_seed(0)
    found = list(_check_passes("cpu", torch.device("cpu"), 2e-3, generator))
    assert [one.name for one in found] == list(PASSES)
    assert all(one.matches for one in found), found


def test_errors_by_hand():
    expected = torch.tensor([1.0, 2.0], dtype=torch.float64)
    size = torch.tensor([4.0, 8.0])
    assert distance(torch.tensor([1.0, 2.5]), expected, size) == 0.5 / 8
    assert distance(torch.tensor([1.0]), expected, size) == float("inf")
    assert np.isnan(distance(torch.tensor([1.0, torch.nan]), expected, size))
    # What is no number matches nothing.
    nan = _run_check("v4", "a", 1.0, lambda: float("nan"))
    assert not nan.matches
    assert Check("v4", "a", 0.5, 0.5).matches
    assert not Check("v4", "a", 0.6, 0.5).matches
    assert not Check("v4", "a", 0.0, 0.5, "an error").matches
    assert Result(0, [nan]).differing == [nan]


def test_another_instruction_set_is_used_inside_the_block_only():
    before = native.load
    with native.use_isa("none"):
        assert native.load() is None
        assert native.bfloat16_unit() == "float32"
    assert native.load is before
    with pytest.raises(ValueError, match="DYNSPARSE_ISA"), native.use_isa("v9"):
        pass
    assert native.load is before
