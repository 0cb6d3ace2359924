"""Models of other libraries are sparsified, trained, saved and loaded."""

import re
import sys
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch

import dynsparse as ds
from dynsparse._core import native
from dynsparse.nn import SparseLinear

sys.path.insert(0, str(Path(__file__).parent))
from architectures import MODELS

PAGE = Path(__file__).parents[2] / "docs" / "make-your-model-sparse.md"

pytestmark = pytest.mark.filterwarnings("ignore")


def tensors(output):
    """Return the tensors of a model's output that require a gradient."""
    if isinstance(output, torch.Tensor):
        return [output] if output.is_floating_point() else []
    if isinstance(output, dict):
        output = list(output.values())
    if isinstance(output, (list, tuple)):
        return [tensor for part in output for tensor in tensors(part)]
    return []


def loss_of(model, batch):
    """Return the distance of the outputs from fixed random targets."""
    chance = torch.Generator().manual_seed(0)
    found = tensors(model(**batch))
    return sum((t - torch.randn(t.shape, generator=chance)).square().mean() for t in found)


def made(name):
    package, make = MODELS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of their own imports
        pytest.importorskip(package)
        return make()


def test_number_of_architectures():
    assert len(MODELS) >= 30
    assert {package for package, _ in MODELS.values()} == {
        "transformers", "timm", "torchvision", "open_clip", "torch_geometric"
    }  # fmt: skip


@pytest.mark.skipif(not PAGE.exists(), reason="the documentation is not part of a wheel")
def test_page_lists_architectures():
    table = PAGE.read_text().split("<!-- models -->")[1].split("<!-- /models -->")[0]
    named = dict(re.findall(r"^\| (\w+) \| (`.*) \|$", table, re.M))
    found = {
        (library, name) for library in named for name in re.findall(r"`(\w+)`", named[library])
    }
    assert found == {(package, name.split()[-1]) for name, (package, _) in MODELS.items()}
    assert f"[{len(MODELS)} models](" in (PAGE.parents[1] / "README.md").read_text()


@pytest.mark.parametrize("name", MODELS)
def test_sparsify_train_save_and_load(name, tmp_path):
    model, batch = made(name)
    ds.sparsify(model, 0.3, verbose=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    trainer = ds.RigL(model, optimizer, total_steps=40, update_interval=5)
    before = {name: layer.pattern for name, layer in trainer.layers.items()}
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        trainer.step()
        losses.append(loss.item())
    assert trainer.updates == 4
    assert losses[-1] < losses[0]
    moved = [name for name, layer in trainer.layers.items() if layer.pattern != before[name]]
    assert len(moved) >= len(before) - 1  # one may be outside of what the loss sees
    # Whoever reads a weight gets what it asks for without a dense matrix.
    assert not any(m._has_warned for m in model.modules() if isinstance(m, SparseLinear))

    if hasattr(model, "save_pretrained"):
        model.save_pretrained(tmp_path)
    else:
        ds.save_safetensors(model, tmp_path / "model.safetensors")
    loaded = [ds.load_pretrained(made(name)[0], tmp_path)]
    if hasattr(model, "save_pretrained"):
        again, report = type(model).from_pretrained(tmp_path, output_loading_info=True)
        assert not any(report.values())
        loaded.append(again)
    with torch.no_grad():
        mine, *others = (tensors(m.eval()(**batch)) for m in (model, *loaded))
    assert len(mine) > 0
    # Without the kernels sums run in the order of slots, which a file does not keep.
    same = partial(torch.allclose, atol=1e-5) if native.load() is None else torch.equal
    for theirs in others:
        assert all(same(a, b) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("option", ["checkpoint_path", "pretrained_cfg"])
def test_timm_checkpoint_options_raise_for_sparse_files(option, tmp_path):
    timm = pytest.importorskip("timm")
    sizes = {"depth": 1, "embed_dim": 32, "num_heads": 2}
    model = timm.create_model("vit_tiny_patch16_224", **sizes).eval()
    file = str(tmp_path / "model.safetensors")
    ds.save_safetensors(ds.sparsify(model, 0.3, verbose=False), file)
    given = (
        {"checkpoint_path": file}
        if option == "checkpoint_path"
        else {"pretrained": True, "pretrained_cfg_overlay": {"file": file}}
    )
    with pytest.raises(RuntimeError, match=r"blocks\.0\.attn\.qkv\.values"):
        timm.create_model("vit_tiny_patch16_224", **sizes, **given)
    loaded = ds.load_pretrained(timm.create_model("vit_tiny_patch16_224", **sizes), file).eval()
    x = torch.randn(1, 3, 224, 224)
    assert torch.equal(loaded(x), model(x))


def test_fused_experts_are_reported():
    lines = describe_of("MixtralForCausalLM")
    assert (
        "2 MixtralExperts: 24,576 parameters stay dense: dynsparse.nn.split_experts makes them "
        "linear layers"
    ) in lines
    assert lines[-1].startswith("warning: ")
    assert not any(line.startswith("warning: ") for line in describe_of("LlamaForCausalLM"))


def describe_of(name):
    return ds.nn.describe(made(name)[0]).splitlines()


@pytest.mark.parametrize(
    "name",
    [
        "torch_geometric GraphSAGE",
        "GPT2LMHeadModel",
        "BertForMaskedLM",
        "T5ForConditionalGeneration",
        "timm convnext_atto",
    ],
)
def test_densify_restores_module_classes(name):
    model, batch = made(name)
    kinds = [type(module) for module in model.modules()]
    ds.sparsify(model, 0.3, verbose=False).eval()
    assert [type(module) for module in model.modules()] != kinds
    with torch.no_grad():
        before = tensors(model(**batch))
        ds.densify(model)
        assert [type(module) for module in model.modules()] == kinds
        for mine, theirs in zip(tensors(model(**batch)), before, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["MixtralForCausalLM", "ViTForImageClassification"])
@pytest.mark.parametrize("way", ["ours", "its own names"])
def test_files_with_renamed_or_reshaped_weights(name, way, tmp_path):
    """transformers saves these two models under other names or in other shapes by default."""
    model, batch = made(name)
    ds.sparsify(model, 0.3, verbose=False)
    if way == "ours":
        ds.save_safetensors(model, tmp_path / "model.safetensors")
    else:
        model.save_pretrained(tmp_path, save_original_format=False)
    loaded, _ = made(name)
    ds.load_pretrained(loaded, tmp_path)
    with torch.no_grad():
        mine, theirs = (tensors(m.eval()(**batch)) for m in (model, loaded))
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_missing_experts_raise(tmp_path):
    from safetensors.torch import load_file, save_file

    model, _ = made("MixtralForCausalLM")
    ds.sparsify(model, 0.3, verbose=False)
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    held = load_file(file)
    gone = next(name for name in held if "experts.1.w1" in name)
    del held[gone]
    save_file(held, file, {"format": "pt"})
    loaded, _ = made("MixtralForCausalLM")
    before = list(map(id, loaded.modules()))
    with pytest.raises(ValueError, match="does not fit the model") as error:
        ds.load_pretrained(loaded, tmp_path)
    assert "\n" not in str(error.value)
    assert list(map(id, loaded.modules())) == before
