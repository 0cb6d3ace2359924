"""The C++ example equals the layer."""

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import dynsparse as ds
from dynsparse.integrations.onnxruntime import library
from dynsparse.nn import SparseLinear

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "serve_without_python.cpp"
COMPILER = shutil.which("c++")

pytestmark = [
    pytest.mark.skipif(not EXAMPLE.exists(), reason="the examples are not part of a wheel"),
    pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler"),
    pytest.mark.skipif(ds._core.native.load() is None, reason="needs the compiled kernels"),
]


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    file = tmp_path_factory.mktemp("program") / "serve"
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-I", str(ROOT / "csrc")]
    subprocess.run([COMPILER, *flags, str(EXAMPLE), "-ldl", "-o", str(file)], check=True)
    return file


def run(program, file, layer, x):
    command = [str(program), str(library()), str(file), layer]
    return subprocess.run(command, input=x.numpy().tobytes(), capture_output=True)


def test_layers_of_a_file(program, tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(
        SparseLinear(48, 64, 0.3),  # a mask
        SparseLinear(64, 40, 0.02, bias=False),  # gaps
        SparseLinear(40, 24, 0.5, block_size=4),
    )
    nn.init.normal_(model[0].bias)
    ds.save_safetensors(model, tmp_path / "m.safetensors")
    for i, layer in enumerate(model):
        x = torch.randn(33, layer.in_features)
        done = run(program, tmp_path / "m.safetensors", str(i), x)
        assert done.returncode == 0, done.stderr
        y = torch.from_numpy(np.frombuffer(done.stdout, np.float32).copy()).view(33, -1)
        torch.testing.assert_close(y, layer(x).detach(), rtol=1e-5, atol=1e-5)
    done = run(program, tmp_path / "m.safetensors", "3", x)
    assert done.returncode == 1
    assert b"the file has no" in done.stderr
    (tmp_path / "other").write_bytes(b"nothing")
    assert b"cannot read" in run(program, tmp_path / "other", "0", x).stderr
