"""`dynsparse mnist`, `mnist-transformer` and `lm` on several ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import applications
import pytest
from processes import on_ranks

TEXT = "the cat sat on the mat, the dog sat on the log.\n" * 40


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path


def test_trains_as_in_one_process_and_only_the_first_rank_prints(folder):
    alone = {name: applications.run(name, folder)[0] for name in applications.APPS}
    first, second = on_ranks(2, applications.train_applications, list(alone), str(folder))
    for name, figures in alone.items():
        loss, updates, shown = first[name]
        # lm computes in float32.
        assert loss == pytest.approx(figures["loss"], rel=1e-4 if name == "lm" else 1e-9), name
        assert updates == figures["updates"] > 0
        assert second[name] == (loss, updates, 0)
        assert shown > 0
        own = folder / name
        assert json.loads((own / "figures.json").read_text())["loss"] == loss
        assert len(list((own / "records").glob("update-*.npz"))) == updates + 1
        assert list((own / "kept").glob("*.ckpt"))


def test_stopped_training_resumes_exactly(folder):
    for once, again in on_ranks(2, applications.stop_and_resume, str(folder)):
        assert once == again


@pytest.mark.slow
def test_torchrun(tmp_path):
    """The command runs under torchrun and prints once."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
               "2", "-m", "dynsparse.cli", "mnist", "--dataset", "digits", "--epochs", "1",
               "--update-interval", "20", "--seed", "3", "--json", "figures.json"]  # fmt: skip
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("test accuracy") == 1
    assert json.loads((tmp_path / "figures.json").read_text())["updates"] > 0
