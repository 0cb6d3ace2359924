"""Models of other libraries are equal in onnxruntime, or export raises a one-line error."""

import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import dynsparse as ds

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of their own imports
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
from dynsparse.integrations.onnx import export

sys.path.insert(0, str(Path(__file__).parents[1] / "nn"))
from architectures import MODELS

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

# One of each kind of layer that sparsify replaces, and of each way to lay them out.
CHOSEN = [
    "GPT2LMHeadModel", "LlamaForCausalLM", "GPTNeoXForCausalLM", "Phi3ForCausalLM",
    "MixtralForCausalLM", "MambaForCausalLM", "T5ForConditionalGeneration",
    "WhisperForConditionalGeneration", "Wav2Vec2ForCTC", "BertForMaskedLM", "DebertaV2ForMaskedLM",
    "CLIPModel", "SwinForImageClassification", "torchvision VisionTransformer",
    "torchvision ConvNeXt", "timm cait_xxs24_224", "open_clip CLIP", "torch_geometric GAT",
    "torch_geometric GraphSAGE",
]  # fmt: skip
REFUSED = {"MixtralForCausalLM": "grouped_mm"}
"""Of which torch's exporter exports no dense model either."""


def tensors(output):
    if isinstance(output, torch.Tensor):
        return [output] if output.is_floating_point() else []
    parts = output.values() if isinstance(output, dict) else output
    return [tensor for part in parts for tensor in tensors(part)] if parts else []


class Positional(nn.Module):
    """Calls the model with positional arguments and returns a list of tensors."""

    def __init__(self, model, names):
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *given):
        output = self.model(**dict(zip(self.names, given, strict=True)))
        return tensors(output)


@pytest.mark.parametrize("name", CHOSEN)
def test_onnxruntime_equals_the_model(name, tmp_path):
    package, make = MODELS[name]
    pytest.importorskip(package)
    model, batch = make()
    if hasattr(getattr(model, "config", None), "use_cache"):
        model.config.use_cache = False
    ds.sparsify(model, 0.3, verbose=False)
    whole, given, file = (
        Positional(model, list(batch)).eval(),
        tuple(batch.values()),
        tmp_path / "a",
    )
    if name in REFUSED:
        with pytest.raises(ValueError, match=REFUSED[name]) as error:
            export(whole, given, file)
        assert "\n" not in str(error.value)
        assert not file.exists()
        return
    export(whole, given, file)
    session = onnxruntime.InferenceSession(str(file))
    names = [entry.name for entry in session.get_inputs()]
    computed = session.run(None, {n: x.numpy() for n, x in zip(names, given, strict=True)})
    with torch.no_grad():
        expected = whole(*given)
    assert len(computed) == len(expected) > 0
    for mine, theirs in zip(computed, expected, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5)
