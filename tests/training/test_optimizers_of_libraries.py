"""Optimizers of other libraries: kept weights keep their state exactly, grown ones reset."""

import re
from pathlib import Path

import pytest
import torch
from test_optimizer_configurations import OPTIONS

import dynsparse as ds
from dynsparse.nn import SparseLinear
from dynsparse.training import ConstantSchedule
from dynsparse.training.optimizer_state import states_of

N = 128
PAGE = Path(__file__).parents[2] / "docs" / "training.md"

LIBRARIES = {
    "bitsandbytes": lambda: pytest.importorskip("bitsandbytes").optim,
    "pytorch_optimizer": lambda: pytest.importorskip("pytorch_optimizer"),
    "schedulefree": lambda: pytest.importorskip("schedulefree"),
    "torchao": lambda: pytest.importorskip("torchao.optim"),
}
# By library: class name -> arguments. torchao quantizes state of at least 4,096 entries.
OPTIMIZERS = {
    "bitsandbytes": {
        "Adam8bit": {"min_8bit_size": 16},
        "Lion8bit": {"min_8bit_size": 16},
        "AdamW": {},
    },
    "pytorch_optimizer": {
        name: {} for name in ("Lion", "AdaBelief", "Adan", "Prodigy", "ScheduleFreeAdamW")
    },
    "schedulefree": {"AdamWScheduleFree": {}, "SGDScheduleFree": {}, "RAdamScheduleFree": {}},
    "torchao": {"AdamW8bit": {"block_size": 32}, "AdamWFp8": {"block_size": 32}},
}


@pytest.mark.parametrize(
    ("library", "name"), [(lib, name) for lib, names in OPTIMIZERS.items() for name in names]
)
@pytest.mark.parametrize("block_size", [1, 4])
def test_state_follows_updates(library, name, block_size):
    module = LIBRARIES[library]()
    layer = SparseLinear(N, N, 0.5, block_size, bias=False)
    options = {"lr": 0.01} | OPTIMIZERS[library][name]
    optimizer = getattr(module, name)(layer.parameters(), **options)
    getattr(optimizer, "train", lambda: None)()
    trainer = ds.RigL(layer, optimizer, schedule=ConstantSchedule(1000, 3, 0.3))
    before, after_step = {}, trainer._after

    def remember_before_update():
        before.update(tensors_of(optimizer, layer))
        return after_step()

    trainer._after = remember_before_update
    followed = 0

    def check(step, rewirings):
        nonlocal followed
        grown = rewirings[""].grown
        kept = torch.ones(layer.pattern.nnz, dtype=torch.bool)
        kept[grown] = False
        for key, (codes, zero) in tensors_of(optimizer, layer).items():
            assert (codes[grown] == zero).all(), key
            assert torch.equal(codes[kept], before[key][0][kept]), key
            followed += 1

    trainer.on_update.append(check)
    for _ in range(9):
        optimizer.zero_grad()
        x = torch.randn(32, N)
        (layer(x) - x).square().mean().backward()
        trainer.step()
    assert followed >= 3


def tensors_of(optimizer, layer):
    """Return {key: (state per weight, as numbers or codes; state of a fresh weight)}."""
    found = {}
    for _, state in states_of(optimizer, layer.values):
        for key, tensor in state.items():
            if not isinstance(tensor, torch.Tensor) or tensor.shape != layer.values.shape:
                continue
            zero = 0.0
            if key.replace("state", "qmap") in state and key.startswith("state"):
                zero = int(state[key.replace("state", "qmap")].abs().argmin())
            elif hasattr(tensor, "codes"):
                tensor = tensor.dequantize()
            found[key] = tensor.clone(), zero
    return found


@pytest.mark.skipif(not PAGE.exists(), reason="the documentation is not part of a wheel")
def test_page_lists_tested_optimizers():
    table = PAGE.read_text().split("<!-- optimizers tested -->")[1].split("<!--")[0]
    rows = [line.strip("| ").split(" | ") for line in table.strip().splitlines()[2:]]
    listed = {library: re.findall(r"`(\w+)`", names) for library, names in rows}
    tested = {"torch.optim": OPTIONS} | OPTIMIZERS
    assert listed == {library: sorted(names) for library, names in tested.items()}
