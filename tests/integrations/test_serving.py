"""The server of examples/serving returns the outputs of the model over HTTP."""

import os
import runpy
from pathlib import Path

import pytest
import torch
from torch import nn

import dynsparse as ds

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
pytest.importorskip("fastapi")
pytest.importorskip("httpx")
from fastapi.testclient import TestClient

from dynsparse.integrations import onnxruntime
from dynsparse.integrations.onnx import export

SERVER = Path(__file__).parents[2] / "examples" / "serving" / "serve.py"


def test_server_equals_the_model(tmp_path, monkeypatch):
    model = nn.Sequential(nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 8))
    ds.freeze(ds.sparsify(model, 0.2, verbose=False))
    x = torch.randn(3, 24)
    export(model, (x,), tmp_path / "m.onnx", weights="operator", dynamic_shapes=({0: "batch"},))
    monkeypatch.setenv("MODEL", str(tmp_path / "m.onnx"))
    monkeypatch.setenv("LIBRARY", os.fspath(onnxruntime.library()))
    client = TestClient(runpy.run_path(str(SERVER))["app"])
    for batch in (x, x[:1]):
        answer = client.post("/predict", json={"x": batch.tolist()})
        assert answer.status_code == 200
        torch.testing.assert_close(
            torch.tensor(answer.json()["y"]), model(batch), rtol=1e-4, atol=1e-5
        )
    for wrong in ([], [[1.0]], [[1.0] * 24, [1.0]]):
        answer = client.post("/predict", json={"x": wrong})
        assert answer.status_code == 422
        assert answer.json()["detail"] == "x must be [batch, 24]"
