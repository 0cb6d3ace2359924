"""`dynsparse plan-ranks`: what it tells, as text and as JSON, measured and refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("typer")

from dynsparse.cli.app import run
from dynsparse.distributed import Cluster, Link

MEASURED = ["plan-ranks", "--features", "64", "256", "64", "--batch-size", "64"]
SMALL = [*MEASURED, "--ranks", "4"]


def test_every_grid_is_told(capsys):
    assert run(SMALL) == 0
    text = capsys.readouterr().out
    for grid in ("1x1x4", "1x2x2", "1x4x1", "2x1x2", "2x2x1", "4x1x1"):
        assert f"{grid} " in text
    assert "linear1" in text
    assert run([*SMALL, "--top", "2"]) == 0
    assert "and 4 more grids" in capsys.readouterr().out


def test_an_attention_goes_before_the_row(capsys):
    assert run([*SMALL, "--heads", "4", "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found["layers"])[:4] == [f"attention.{n}_proj" for n in ("q", "k", "v", "out")]
    assert len(found["candidates"]) == 6


def test_figures_come_from_flags_or_a_file(capsys, tmp_path):
    flags = "--latency 1e-5 --bandwidth 1e9 --outer-latency 1e-4 --ranks-per-node 2 --flops 1e12"
    assert run([*SMALL, *flags.split(), "--json", str(tmp_path / "a.json")]) == 0
    by_flags = json.loads((tmp_path / "a.json").read_text())
    Cluster(Link(1e-5, 1e9), Link(1e-4, 1e9), 2, flops=1e12).save(tmp_path / "cluster.json")
    assert run([*SMALL, "--cluster", str(tmp_path / "cluster.json"), "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == by_flags


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--features 64", "--features: expected two or more, such as 1024 4096 1024, got (64,)"),
        ("--block-size 16 --features 64 40", "expected multiples of --block-size 16, got 40"),
        ("--heads 5", "--heads: expected a divisor of 64 features, got 5"),
        ("--memory 1000", "no grid fits into memory=1,000 bytes"),
        ("--features 1000000 1000000 --density 1", "expected at most 268,435,456 blocks in all"),
        ("--cluster there/is/none", "there/is/none: No such file or directory"),
        ("--cluster a --latency 1", "--cluster: the file has these figures: leave out --latency"),
        ("--measure a", "--measure: expected ranks to measure: start it as torchrun"),
        ("--density 0", "--density: expected more than 0, got 0.0"),
    ],
)
def test_what_makes_no_sense_gets_a_line(capsys, flags, line):
    base = SMALL if "--features" not in flags else SMALL[:1]
    base = MEASURED if "--measure" in flags else base
    assert run([*base, *flags.split()]) == 2
    told = capsys.readouterr().err
    assert line in told
    assert told.count("\n") == 1


def test_ranks_of_torchrun_are_measured(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    measure = ["--measure", str(tmp_path / "cluster.json")]
    command = [*torchrun, "-m", "dynsparse.cli", *MEASURED, *measure]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=120,
        env=env,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("chosen") == 1
    assert done.stdout.startswith("2 ranks, 64 samples a step: ")
    assert Cluster.load(tmp_path / "cluster.json").inner.latency > 0
