"""Reading a layer while another thread changes its pattern returns consistent values and
pattern."""

from __future__ import annotations

import copy
import io
import pickle
import threading

import pytest
import torch

import dynsparse as ds

SIZE = 64


def _set_new_pattern(layer, seed: int) -> None:
    """Set a random pattern with values that encode their position, so inconsistent reads show."""
    generator = torch.Generator().manual_seed(seed)
    pattern = ds.SparsePattern.random((SIZE, SIZE), density=0.25, generator=generator)
    layer.set_pattern(pattern, _expected(pattern.rows, pattern.cols))


def _expected(rows, cols):
    return (rows.long() * SIZE + cols + 1).float()


def _check_layer(layer) -> None:
    assert torch.equal(layer.values.detach(), _expected(layer.rows, layer.cols))
    assert torch.equal(layer(torch.eye(SIZE)).T, layer.to_dense())


def _check_dense(layer) -> None:
    dense = layer.to_dense()
    rows, cols = dense.nonzero().unbind(1)
    assert torch.equal(dense[rows, cols], _expected(rows, cols))


def _check_state(state) -> None:
    assert torch.equal(state["values"], _expected(state["rows"], state["cols"]))


def _save(layer) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return file


def _check_safetensors(layer, folder) -> None:
    path = folder / "weights.safetensors"
    ds.save_safetensors(torch.nn.Sequential(layer), path)
    made = torch.nn.Sequential(ds.nn.SparseLinear(SIZE, SIZE, density=0.25, bias=False))
    ds.load_safetensors(made, path)
    _check_layer(made[0])


READERS = {
    "to_dense": lambda layer, _: _check_dense(layer),
    "state_dict": lambda layer, _: _check_state(layer.state_dict()),
    "deepcopy": lambda layer, _: _check_layer(copy.deepcopy(layer)),
    "pickle": lambda layer, _: _check_layer(pickle.loads(pickle.dumps(layer))),
    "torch.save": lambda layer, _: _check_layer(torch.load(_save(layer), weights_only=False)),
    "safetensors": _check_safetensors,
}


@pytest.mark.sampled(3)
@torch.no_grad()
@pytest.mark.parametrize("reader", READERS)
def test_concurrent_reads_are_consistent(reader, tmp_path):
    layer = ds.nn.SparseLinear(SIZE, SIZE, density=0.25, bias=False)
    _set_new_pattern(layer, 0)
    done = threading.Event()

    def change():
        seed = 1
        while not done.is_set():
            _set_new_pattern(layer, seed)
            seed += 1

    writer = threading.Thread(target=change)
    writer.start()
    try:
        for _ in range(100):
            READERS[reader](layer, tmp_path)
    finally:
        done.set()
        writer.join()


@torch.no_grad()
def test_load_state_dict_is_atomic():
    """Another thread reads while states with other patterns are loaded."""
    layer = ds.nn.SparseLinear(SIZE, SIZE, density=0.25, bias=False)
    states = []
    for seed in range(2):
        _set_new_pattern(layer, seed)
        states.append(copy.deepcopy(layer.state_dict()))
    weights = [copy.deepcopy(layer) for _ in states]
    for made, state in zip(weights, states, strict=True):
        made.load_state_dict(state)
    expected = [made(torch.eye(SIZE)) for made in weights]
    done = threading.Event()

    def load():
        while not done.is_set():
            for state in states:
                layer.load_state_dict(state)

    writer = threading.Thread(target=load)
    writer.start()
    try:
        for _ in range(200):
            _check_dense(layer)
            _check_state(layer.state_dict())
            y = layer(torch.eye(SIZE))
            assert any(torch.equal(y, one) for one in expected)
    finally:
        done.set()
        writer.join()
