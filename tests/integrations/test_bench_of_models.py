"""`dynsparse bench --model`: contenders agree, and bad input raises."""

import json
import warnings

import pytest
import torch
from torch import nn

import dynsparse as ds

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of their own imports
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")

from dynsparse.bench.onnx_model import time_model
from dynsparse.bench.timing import Effort
from dynsparse.cli.app import run
from dynsparse.integrations.onnx import export

pytestmark = [
    pytest.mark.filterwarnings("default"),  # the packages warn of themselves
    pytest.mark.skipif(ds._core.native.load() is None, reason="needs the compiled kernels"),
]

SHORT = Effort(seconds=0, rounds=3, repeats=0)


class Tokens(nn.Module):
    """A model with integer inputs, a dynamic sequence length, and a transposed matrix."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 32)
        self.first = nn.Linear(32, 64)
        self.second = nn.Linear(64, 32)

    def forward(self, ids):
        return self.second(torch.relu(self.first(self.embedding(ids))))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    model = Tokens().eval()
    ids = torch.ones(2, 5, dtype=torch.int64)
    shapes = ({0: "batch", 1: "tokens"},)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            model, (ids,), folder / "dense.onnx", dynamo=True, dynamic_shapes=shapes, verbose=False
        )
    ds.sparsify(model, density=0.2, block_size=8, verbose=False)
    export(model, (ids,), folder / "sparse.onnx", weights="sparse", dynamic_shapes=shapes)
    export(model, (ids,), folder / "operator.onnx", weights="operator", dynamic_shapes=shapes)
    return folder


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("sparse", {}, [8 / 32, 4 / 32]),
        ("dense", {"density": 0.25, "block_size": 4}, None),
        ("dense", {"density": 0.25}, None),
    ],
)
def test_all_are_timed_and_agree(files, name, options, expected):
    lines = []
    file = files / f"{name}.onnx"
    found = time_model(file, batches=(1, 3), sequence=7, effort=SHORT, tell=lines.append, **options)
    assert set(found["batches"]) == {1, 3}
    for figures in found["batches"].values():
        assert set(figures["times"]) == {"sparse", "sparse int8", "dense", "dense int8"}
        assert set(figures["ratios"]) == {"sparse int8", "dense", "dense int8"}
        assert figures["difference"] < 1e-5
    assert len(found["layers"]) == 2
    mean = sum(found["layers"].values()) / 2
    assert mean == pytest.approx(0.2 if expected else 0.25, abs=0.02)
    assert found["bytes"]["sparse int8"] < found["bytes"]["sparse"] < found["bytes"]["dense"]
    assert lines[0].startswith("2 sparse layers of density ")
    assert lines[1].startswith("  batch 1: ")


def test_the_command_prints_and_writes(files, tmp_path, capsys):
    line = ["bench", "--model", str(files / "sparse.onnx"), "--batch", "2", "--sequence", "4"]
    assert run([*line, "--json", str(tmp_path / "figures.json")]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[1].startswith("Ratios: the other's time over the sparse model's")
    assert out[3].startswith("  batch 2: sparse int8 ")
    assert set(json.loads((tmp_path / "figures.json").read_text())["batches"]) == {"2"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--model dense.onnx", "has no sparse linear layers: give a density"),
        ("--model operator.onnx", "has no sparse linear layers: give a density"),
        ("--model dense.onnx --density 0.1 --cell 1024", "--cell has no effect with --model"),
        ("--model dense.onnx --block-size 4", "--block-size is that of the weights that"),
        ("--density 0.1", "--density needs --model FILE"),
        ("--model none.onnx", "none.onnx"),
    ],
)
def test_bad_input_raises(files, monkeypatch, capsys, line, message):
    monkeypatch.chdir(files)
    assert run(["bench", *line.split()]) == 2
    assert message in capsys.readouterr().err


def test_unsupported_input_raises(files, tmp_path):
    model = onnx.load(files / "sparse.onnx")
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 3
    extra = model.graph.input.add(name="name")
    extra.type.tensor_type.elem_type = onnx.TensorProto.STRING
    extra.type.tensor_type.shape.dim.add(dim_value=1)
    onnx.save(model, tmp_path / "string.onnx")
    with pytest.raises(ValueError, match=r"the input 'name' is a tensor\(string\): only"):
        time_model(tmp_path / "string.onnx", effort=SHORT)
