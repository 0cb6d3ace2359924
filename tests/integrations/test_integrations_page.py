"""The examples of docs/integrations.md that need other libraries."""

import contextlib
import os
import re
import warnings
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "integrations.md"

os.environ.setdefault("KERAS_BACKEND", "torch")
pytestmark = pytest.mark.filterwarnings("default")


@pytest.mark.skipif(not PAGE.exists(), reason="the documentation is not part of a wheel")
@pytest.mark.parametrize(
    ("library", "section"),
    [
        ("lightning", "Lightning"),
        ("accelerate", "Hugging Face"),
        ("keras", "Keras"),
        ("stable_baselines3", "Other libraries that load"),
        ("peft", "LoRA with PEFT"),
        ("accelerate", "Other loops"),
        ("onnx2torch", "ONNX"),
        ("lightning", "Fabric"),
        ("optuna", "Optuna"),
    ],
    ids=[
        "lightning",
        "huggingface",
        "keras",
        "sb3",
        "peft",
        "accelerate",
        "onnx",
        "fabric",
        "optuna",
    ],
)
def test_examples_of_a_section_run(library, section, capsys, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its own imports
        pytest.importorskip(library)
    text = PAGE.read_text().partition(f"## {section}\n")[2].partition("\n## ")[0]
    code = "\n".join(re.findall(r"```py\n(.*?)```", text, re.S))
    with contextlib.chdir(tmp_path) if hasattr(contextlib, "chdir") else contextlib.nullcontext():
        exec(compile(code, str(PAGE), "exec"), {"__name__": "__page__"})
    if "pattern updates" in code:
        printed = re.search(r"(\d+) pattern updates", capsys.readouterr().out)
        assert int(printed[1]) >= 2


@pytest.mark.skipif(not PAGE.exists(), reason="the documentation is not part of a wheel")
def test_sparsify_models_of_another_library(capsys, tmp_path, monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its own imports
        pytest.importorskip("transformers")
    text = PAGE.with_name("make-your-model-sparse.md").read_text()
    gpt2, mixtral = re.findall(r"```py\n(.*?)```", text, re.S)
    exec(f"import dynsparse as ds\n{gpt2}", {})
    assert "'lm_head' stays dense" in capsys.readouterr().out
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(f"import dynsparse as ds\n{mixtral}", names)
    experts = names["model"].model.layers[0].mlp.experts
    assert all(type(layer).__name__ == "SparseLinear" for layer in experts.down_layers)
