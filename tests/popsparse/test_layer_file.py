"""Layers of the tile machine loaded from files give the same bits."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from dynsparse.nn.weights_file import read_tensors
from dynsparse.pattern import SparsePattern
from popsparse import Layer, Update, make_plan, plan
from popsparse.formats import COOMatrix
from popsparse.machine import OutOfMemoryError, Target
from popsparse.planning.params import FullyConnectedParams, SparsityParams

ALL = "forward,grad_input,grad_weight"
BASIC = {"out": 32, "in_": 48, "batch": 8, "density": 0.25, "target": Target(tiles=8)}
KINDS = {
    "elements": {},
    "blocks": {"block_size": 8},
    "float32": {"dtype": "float32", "block_size": 4},
    "dense": {"options": {"plan_constraints": {"use_dense": True}}},
}


def drawn(planned, seed=0):
    generator = torch.Generator().manual_seed(seed)
    block = planned.params.sparsity_params.block_dimensions[0]
    pattern = SparsePattern.random((32, 48), 0.2, block_size=block, generator=generator)
    values = torch.randn(pattern.values_shape, generator=generator)
    return pattern, values.to(getattr(torch, planned.dtype.name))


def results(layer):
    x = np.linspace(-1, 1, 8 * 48).reshape(8, 48)
    dy = np.linspace(1, -2, 8 * 32).reshape(8, 32)
    return layer.forward(x), layer.grad_input(dy), layer.grad_weight(dy, x)


@pytest.mark.parametrize("kind", KINDS)
def test_loaded_layer_gives_the_same_bits(tmp_path, kind):
    layer = Layer(plan(**{**BASIC, **KINDS[kind], "passes": ALL}))
    layer.set_weights(*drawn(layer.plan))
    layer.save(tmp_path / "layer.safetensors")
    found = Layer.load(str(tmp_path / "layer.safetensors"))
    assert found.plan == layer.plan
    for one, other in zip(results(found), results(layer), strict=True):
        np.testing.assert_array_equal(one, other)
    assert {n: p.cycles for n, p in found.profiles.items()} == {
        n: p.cycles for n, p in layer.profiles.items()
    }


def test_file_contains_the_weights_of_the_machine(tmp_path):
    planned = plan(**BASIC, passes=ALL)
    layer = Layer(planned, update=Update(pooling="max", partials_type="float16"))
    layer.set_weights(*drawn(planned))
    layer.rewire(*drawn(planned, seed=1))
    layer.save(tmp_path / "layer")
    found = Layer.load(tmp_path / "layer")
    for one, other in zip(results(found), results(layer), strict=True):
        np.testing.assert_array_equal(one, other)
    scores = [o.scores(np.ones((8, 32)), np.ones((8, 48))) for o in (found, layer)]
    np.testing.assert_array_equal(*scores)


def test_without_a_pattern_and_with_fewer_passes(tmp_path):
    layer = Layer(plan(**BASIC, passes=ALL), passes=["forward"], check_memory=False)
    layer.save(tmp_path / "layer")
    found = Layer.load(tmp_path / "layer")
    assert found.encoding is None
    with pytest.raises(ValueError, match="no program 'grad_input'"):
        found.run("grad_input")


@pytest.mark.parametrize("kind", ["blocks", "dense"])
def test_pattern_is_kept_without_numerics(tmp_path, kind):
    layer = Layer(plan(**{**BASIC, **KINDS[kind]}), numerics=False)
    layer.set_weights(*drawn(layer.plan))
    layer.save(tmp_path / "layer")
    found = Layer.load(tmp_path / "layer")
    assert not found.numerics
    assert found.run("forward").cycles == layer.run("forward").cycles


def test_groups_and_blocks_that_are_not_square(tmp_path):
    params = FullyConnectedParams.create_with_nz_ratio(SparsityParams((4, 8)), 0.3, 8, 2, 48, 32)
    layer = Layer(make_plan(Target(tiles=8), "float16", params))
    rows, cols = np.array([0, 4, 28]), np.array([8, 0, 40])
    weights = [
        COOMatrix(np.arange(96, dtype=np.float16) + g, cols, rows, (32, 48), (4, 8))
        for g in range(2)
    ]
    layer.set_weights(weights, None)
    layer.save(tmp_path / "layer")
    x = np.linspace(-1, 1, 8 * 96).reshape(8, 96)
    np.testing.assert_array_equal(Layer.load(tmp_path / "layer").forward(x), layer.forward(x))


def spoiled(path, about=None, **arrays):
    """Rewrite the file with changed contents."""
    metadata, tensors = read_tensors(path)
    tensors = {name: tensor.clone() for name, tensor in tensors.items()} | arrays
    save_file(tensors, path, metadata | (about or {}))


def edited(path, **changes):
    return {"layer": json.dumps({**json.loads(read_tensors(path)[0]["layer"]), **changes})}


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda p: p.write_bytes(p.read_bytes()[:-1]), "truncated"),
        (lambda p: p.write_bytes(b""), "truncated"),
        (lambda p: spoiled(p, {"format": "dynsparse layer 2"}), "expected a layer as"),
        (lambda p: spoiled(p, {"layer": "[]"}), "expected the plan of a layer"),
        (lambda p: spoiled(p, edited(p, groups=2)), "weights of 1 groups, got 2"),
        (lambda p: spoiled(p, edited(p, groups=-1)), "weights of 1 groups"),
        (lambda p: spoiled(p, edited(p, plan={})), "expected the plan of a layer"),
        (lambda p: spoiled(p, edited(p, built={"size": 1})), "unexpected keyword"),
        (lambda p: spoiled(p, edited(p, built={"passes": ["up"]})), "the plan is for"),
        (lambda p: spoiled(p, **{"rows 0": torch.tensor([10**6] * 77)}), "row_indices"),
        (lambda p: spoiled(p, **{"values 0": torch.zeros(3)}), "nz_values"),
    ],
)
def test_other_files_raise(tmp_path, spoil, words):
    file = tmp_path / "layer"
    layer = Layer(plan(**BASIC, block_size=4))
    layer.set_weights(*drawn(layer.plan))
    layer.save(file)
    spoil(file)
    with pytest.raises(ValueError, match=words) as error:
        Layer.load(file)
    assert str(error.value).startswith(str(file))
    assert "\n" not in str(error.value)


def test_out_of_memory_raises_as_when_built(tmp_path):
    planned = plan(**{**BASIC, "density": 0.9})
    small = replace(planned, target=planned.target.with_(bytes_per_tile=4096))
    Layer(small, check_memory=False).save(tmp_path / "layer")
    metadata, _ = read_tensors(tmp_path / "layer")
    about = edited(tmp_path / "layer", built={})
    save_file({}, tmp_path / "layer", metadata | about)
    with pytest.raises(OutOfMemoryError, match="use a smaller batch, a lower available_memory"):
        Layer.load(tmp_path / "layer")


def test_missing_folders_raise(tmp_path):
    layer = Layer(plan(**BASIC))
    with pytest.raises(FileNotFoundError):
        layer.save(tmp_path / "none" / "layer")
    with pytest.raises(FileNotFoundError):
        Layer.load(tmp_path / "layer")
