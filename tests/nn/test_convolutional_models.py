"""Convolutional networks of torchvision and timm, sparsified without changes."""

import re
import warnings

import pytest
import torch

import dynsparse as ds
from dynsparse.nn import SparseConv2d

pytestmark = pytest.mark.filterwarnings("ignore")

# Name -> how many depthwise convolutions it has.
NETWORKS = {
    "torchvision resnet50": 0,
    "torchvision mobilenet_v3_small": 11,
    "timm mobilenetv3_small_050": 11,
    "timm convnext_atto": 12,
}


def made(name):
    package, kind = name.split()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of their own imports
        library = pytest.importorskip(package)
    torch.manual_seed(0)
    if package == "timm":
        return library.create_model(kind, num_classes=5)
    return getattr(library.models, kind)(num_classes=5)


def is_depthwise(conv):
    return conv.groups > 1 and conv.groups == conv.in_channels


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_rigl_step_and_densify(name):
    model = made(name)
    convolutions = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Conv2d)}
    left = [n for n, m in convolutions.items() if is_depthwise(m)]
    assert len(left) == NETWORKS[name]

    ds.sparsify(model, 0.1, verbose=False)
    sparse = {n for n, m in model.named_modules() if isinstance(m, SparseConv2d)}
    stayed = {n for n in convolutions if n not in sparse}
    assert set(left) <= stayed
    # A layer that ERK fills is the dense one that it was.
    assert all(model.get_submodule(n).weight.numel() < 10_000 for n in stayed - set(left))
    said = re.findall(
        r"^.(\S+). (?:\(and (\d+) more like it\) )?stays dense: it is a depthwise convolution",
        ds.nn.describe(model),
        re.M,
    )
    assert sum(1 + int(more or 0) for _, more in said) == len(left)
    assert {n for n, _ in said} <= {*left}

    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    trainer = ds.RigL(model, optimizer, total_steps=10, update_interval=1)
    before = {n: layer.pattern for n, layer in trainer.layers.items()}
    x = torch.randn(2, 3, 32, 32).contiguous(memory_format=torch.channels_last)
    torch.nn.functional.cross_entropy(model(x), torch.tensor([0, 1])).backward()
    trainer.step()
    moved = sum(layer.pattern != before[n] for n, layer in trainer.layers.items())
    assert moved >= 0.9 * len(before)

    model.eval()
    with torch.no_grad():
        sparse_logits = model(x)
        ds.densify(model)
        torch.testing.assert_close(model(x), sparse_logits, rtol=1e-3, atol=1e-4)
    kinds = {n: type(m) for n, m in model.named_modules() if n in convolutions}
    assert set(kinds.values()) == {type(m) for m in convolutions.values()}
