"""Untrusted checkpoints: parts of the wrong type, and small files that claim a large content."""

import copy
import json
import resource
import struct

import pytest
import torch
from checkpoint_files import edit_header, read_parts, write_parts

from dynsparse._core.files.limits import VARIABLE
from dynsparse.nn import SparseLinear
from dynsparse.training.checkpoint import (
    CheckpointError,
    load_checkpoint,
    read_extra,
    save_checkpoint,
)


def training():
    layer = SparseLinear(6, 4, density=0.5)
    return layer, torch.optim.Adam(layer.parameters(), lr=0.1)


@pytest.fixture
def good(tmp_path):
    layer, optimizer = training()
    layer(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    save_checkpoint(tmp_path / "good", model=layer, optimizer=optimizer, extra={"seed": 0})
    return tmp_path / "good"


@pytest.fixture
def parts(good):
    return read_parts(good)


def check_file_rejected(file, match):
    layer, optimizer = training()
    model = copy.deepcopy(layer.state_dict())
    state = torch.get_rng_state()
    with pytest.raises(CheckpointError, match=match) as error:
        load_checkpoint(file, model=layer, optimizer=optimizer)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 1000
    assert all(a.equal(b) for a, b in zip(model.values(), layer.state_dict().values(), strict=True))
    assert not optimizer.state
    assert state.equal(torch.get_rng_state())


@pytest.fixture
def refused(tmp_path):
    def check(parts, match):
        write_parts(tmp_path / "bad", parts)
        check_file_rejected(tmp_path / "bad", match)

    return check


def test_parts_of_the_wrong_type(refused, parts):
    refused([1], "expected entries and a state")
    for part in parts.keys() - {"random", "generators", "history", "coordinates"}:
        refused({**parts, part: [1]}, f"expected a dict as its {part}, got list")
        rest = {name: value for name, value in parts.items() if name != part}
        refused(rest, f"expected a dict as its {part}, got nothing")
    refused({**parts, "random": [1]}, "expected random, generators, history of each rank")
    refused({**parts, "coordinates": [1]}, "expected the coordinates of each rank")
    refused({**parts, "optimizer": {"kind": "Adam"}}, "expected a kind and a state as its o")
    refused(
        {**parts, "optimizer": {"kind": "Adam", "state": {"param_groups": [1]}}},
        "expected the optimizer's groups",
    )
    refused({**parts, "generators": {"a": 1}}, "expected a kind and a state")


def test_damaged_parts_change_nothing(refused, parts):
    for key in ("torch", "numpy", "python"):
        refused({**parts, "random": {**parts["random"], key: 1}}, "the random state is dam")
        rest = {name: value for name, value in parts["random"].items() if name != key}
        refused({**parts, "random": rest}, "the random state is damaged")
    state = copy.deepcopy(parts["optimizer"])
    state["state"]["state"] = [1]
    refused({**parts, "optimizer": state}, "the state of the optimizer is damaged")
    rows = parts["model"]["rows"]
    for wrong in (rows.flip(0), rows + 100, rows - 100, rows[:-1], rows.double()):
        refused({**parts, "model": {**parts["model"], "rows": wrong}}, "damaged|was saved as")
    refused({**parts, "model": {**parts["model"], "bias": 3}}, "was saved as int, not as a")
    refused({**parts, "patterns": {"": 3}}, "layer '' was saved with")


def test_deeply_nested_json(good):
    deep: list = []
    for _ in range(120):
        deep = [deep]
    edit_header(good, lambda header: header["state"]["extra"].update(a=deep))
    check_file_rejected(good, "nested at most 100 deep")


def test_json_beyond_the_limit(good, monkeypatch):
    monkeypatch.setenv(VARIABLE, "16000")
    check_file_rejected(good, f"expected at most 1,000 bytes of JSON.*set {VARIABLE}")


def test_tensor_referenced_twice(good):
    def repeat(header):
        header["state"]["extra"] = {k: {"$": ["tensor", "model/values"]} for k in "ab"}

    edit_header(good, repeat)
    check_file_rejected(good, "the tensor 'model/values' is named twice")


def test_length_beyond_the_file(tmp_path):
    (tmp_path / "bad").write_bytes(struct.pack("<Q", 1 << 62) + b"x")
    check_file_rejected(tmp_path / "bad", "truncated or not a checkpoint")
    head = json.dumps({"a": {"dtype": "F32", "shape": [1 << 60], "data_offsets": [0, 1 << 62]}})
    (tmp_path / "bad").write_bytes(struct.pack("<Q", len(head)) + head.encode())
    check_file_rejected(tmp_path / "bad", "truncated or not a checkpoint")


def test_reading_memory_is_bounded(tmp_path):
    """Reading `extra` takes no more memory than the content of the file."""
    layer = SparseLinear(1000, 1000, density=0.5)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    save_checkpoint(tmp_path / "good", model=layer, optimizer=optimizer)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert read_extra(tmp_path / "good") == {}
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert (after - before) << 10 < 64 << 20
