"""Number of times the host waits for the device in an update, counted on fake tensors, which raise
if a number is read other than by `fetch_scalars`."""

import gc
from collections import deque

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import dynsparse as ds
from dynsparse.nn import SparseLinear
from dynsparse.ops.grow import free_positions
from dynsparse.pattern import rewiring, sparse_pattern
from dynsparse.training import (
    Telemetry,
    budgets,
    deferred_checks,
    drop,
    history,
    trainer,
    update_on_device,
)
from dynsparse.training.algorithms import deepr
from dynsparse.training.grow import GradientStep, RandomGrowth
from dynsparse.training.records import Recorder
from dynsparse.training.telemetry import _Layer as telemetry_of

pytestmark = pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")


class PendingHostCopy:
    """A copy to the CPU that never completes."""

    sent = 0
    is_ready = False

    def __init__(self, *tensors):
        PendingHostCopy.sent += 1
        assert all(tensor.is_cuda for tensor in tensors)

    def get(self):
        raise AssertionError("somebody waits for what is still coming")


@pytest.fixture
def count_waits(monkeypatch, without_cuda):
    """Run on fake CUDA tensors; yield the list of host waits, each the number of scalars read."""
    # What this torch cannot do for devices it does not know, though no memory is touched.
    monkeypatch.setattr(torch.Tensor, "copy_", lambda own, new: torch._foreach_copy_([own], [new]))
    monkeypatch.setattr(SparseLinear, "reset_parameters", lambda *_: None)

    def to_device(tensor, device):
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)

    for module in (drop, deepr, update_on_device, free_positions):
        monkeypatch.setattr(module, "to_device", to_device)
    for module in (sparse_pattern, rewiring, deferred_checks):
        monkeypatch.setattr(module, "HostCopy", PendingHostCopy)
    monkeypatch.setattr(
        free_positions,
        "sample_without_replacement",
        lambda n, k, g: torch.empty(k, dtype=torch.int64),
    )
    # These are host tensors, which this fake mode cannot tell from device tensors.
    monkeypatch.setattr(history, "add_rows", lambda *_: None)
    monkeypatch.setattr(RandomGrowth, "load_state_dict", lambda own, state: None)
    monkeypatch.setattr(RandomGrowth, "state_dict", lambda own: {"seed": own.seed})
    monkeypatch.setattr(trainer, "layers_with_gradients", lambda step, layers, _: dict(layers))
    waits = []

    def fetch_scalars(numbers):
        if numbers:
            assert all(number.is_cuda and number.dim() == 0 for number in numbers)
            waits.append(len(numbers))
        return [0.0 if n.dtype is torch.bool else i + 1.0 for i, n in enumerate(numbers)]

    for module in (budgets, update_on_device):
        monkeypatch.setattr(module, "fetch_scalars", fetch_scalars)
    # torch 2.13 crashes at times where the garbage collector frees fake tensors of a device that is
    # not there, which an optimizer and its hooks hold in a circle: they are never collected.
    gc.disable()
    with FakeTensorMode():
        yield waits
    gc.freeze()
    gc.enable()


def model(b):
    layers = []
    for shape in ((64, 128), (128, 64)):
        like = ds.SparsePattern.__new__(ds.SparsePattern)
        like.shape, like.block_size = shape, b
        held = torch.empty(shape[0] * shape[1] // b**2 // 4, dtype=torch.int64, device="cuda")
        pattern = ds.SparsePattern._from_device(held, like)
        layers.append(SparseLinear(shape[1], shape[0], pattern=pattern, device="cuda"))
    return nn.Sequential(*layers)


def step(net, trainer):
    for parameter in net.parameters():
        parameter.grad = torch.empty_like(parameter)
    for layer, pairs in zip(net, trainer._captures.values(), strict=False):
        pairs.append(
            tuple(torch.empty(8, n, device="cuda") for n in (layer.in_features, layer.out_features))
        )
    return trainer.step()


def like_values(layer, rewiring):
    return torch.empty(rewiring.after.values_shape, device="cuda")


TIMES = {"total_steps": 9, "update_interval": 1}
CASES = {
    "rigl": (ds.RigL, TIMES, 0),
    "rigl, regrown": (ds.RigL, TIMES | {"regrow_dropped": True, "drop_fraction": 0.6}, 0),
    "rigl, a step": (ds.RigL, TIMES | {"initial_value": GradientStep()}, 0),
    "rigl, a step, regrown": (
        ds.RigL, TIMES | {"initial_value": GradientStep(), "regrow_dropped": True}, 0,
    ),
    "rigl, a function": (ds.RigL, TIMES | {"initial_value": like_values}, 0),
    "set": (ds.SET, TIMES | {"seed": 0}, 0),
    "topkast": (ds.TopKAST, TIMES | {"seed": 0}, 0),
    "snfs, fixed": (ds.SNFS, TIMES | {"redistribute": False, "window": None}, 0),
    "rigl, global": (ds.RigL, TIMES | {"budget": "global"}, 1),
    "deepr": (ds.DeepR, TIMES | {"temperature": 1e-3, "seed": 0}, 1),
    "mest, soft": (ds.MEST, TIMES | {"soft_memory_bound": True, "seed": 0}, 1),
    "gmp": (ds.GMP, TIMES | {"final_density": 0.05}, 1),
    "snfs": (ds.SNFS, TIMES, 2),
    "snfs, dense": (ds.SNFS, TIMES | {"window": None}, 2),
    "granet": (ds.GraNet, TIMES | {"final_density": 0.05}, 2),
    "gmp, global": (ds.GMP, TIMES | {"final_density": 0.05, "scope": "global"}, 2),
}  # fmt: skip


@pytest.mark.sampled(4)
@pytest.mark.parametrize("b", [1, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CASES)
def test_update_waits_only_where_sizes_are_needed(count_waits, name, b):
    make, options, wanted = CASES[name]
    net = model(b)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2, capturable=True)
    own = make(net, optimizer, **options)
    for _ in range(2):
        count_waits.clear()
        before = [layer.pattern for layer in net]
        assert {*step(net, own)} == {"0", "1"}
        assert len(count_waits) == wanted  # each for both layers
        assert all(layer.pattern is not old for layer, old in zip(net, before, strict=True))
        assert not any({"rows", "cols"} & set(vars(layer.pattern)) for layer in net)
    with pytest.raises(RuntimeError):
        int(net[0].index.row_ptr[0])  # what this test would notice


def test_records_and_telemetry_do_not_wait(count_waits, monkeypatch, tmp_path):
    """Results of an update are copied asynchronously and read once they have arrived."""
    net = model(1)
    trainer = ds.RigL(net, torch.optim.Adam(net.parameters(), capturable=True), **TIMES)
    monkeypatch.setattr(Recorder, "start", lambda *_: None)
    monkeypatch.setattr(Telemetry, "__init__", lambda *_: None)
    recorder, telemetry = Recorder(tmp_path), Telemetry(trainer)
    recorder._patterns, recorder._updates = (
        {n: layer.pattern for n, layer in net.named_children()},
        1,
    )
    layer = telemetry_of.__new__(telemetry_of)
    layer.layer, layer.pending = net[0], deque()
    telemetry._watched = {"0": layer}
    trainer.on_update += [recorder.update, telemetry._update]
    try:
        for number in (1, 2):
            before = PendingHostCopy.sent
            step(net, trainer)
            assert PendingHostCopy.sent > before
            assert len(recorder._pending) == len(layer.pending) == number
        assert not count_waits
    finally:
        recorder._pending.clear()
        recorder.flush()
