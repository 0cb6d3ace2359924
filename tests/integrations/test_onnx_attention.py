"""Attention with a pattern is exported to ONNX as masked attention in standard operators."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dynsparse as ds
from dynsparse.nn import attention_patterns

pytest.importorskip("onnx", reason="needs onnx: pip install onnx onnxscript")
pytest.importorskip("onnxscript", reason="needs onnxscript: pip install onnx onnxscript")
onnxruntime = pytest.importorskip("onnxruntime", reason="needs onnxruntime")


class Attention(nn.Module):
    def __init__(self, causal):
        super().__init__()
        pattern = attention_patterns.sliding_window(32, 5, block_size=4)
        rows, cols = pattern.rows[3:], pattern.cols[3:]  # the first tokens see nothing
        pattern = ds.SparsePattern(rows, cols, shape=(32, 32), block_size=4)
        self.attention = ds.nn.SparseMultiheadAttention(
            16, 2, batch_first=True, density=0.5, attention_pattern=pattern
        )
        self.causal = causal

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False, is_causal=self.causal)[0]


@pytest.mark.parametrize("weights", ["dense", "sparse"])
@pytest.mark.parametrize("causal", [False, True])
def test_onnxruntime_equals_the_layer(causal, weights, tmp_path):
    torch.manual_seed(0)
    model, x = Attention(causal).eval(), torch.randn(2, 32, 16)
    file = tmp_path / "model.onnx"
    ds.integrations.onnx.export(model, (x,), file, weights=weights)
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    (name,) = (given.name for given in session.get_inputs())
    (y,) = session.run(None, {name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(y), model(x), rtol=1e-5, atol=1e-5)
    assert model.attention.exported_mask is None
