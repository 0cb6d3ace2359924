"""Checkpoints from strangers: small files that would fill the memory, parts of the wrong type."""

import copy
import hashlib
import io
import resource
import struct
import subprocess
import sys
import zipfile

import pytest
import torch

from dynsparse.files.torch_archive import check_archive, check_content
from dynsparse.nn import SparseLinear
from dynsparse.training.checkpoint import (
    CheckpointError,
    load_checkpoint,
    read_extra,
    save_checkpoint,
)


def parts():
    layer = SparseLinear(6, 4, density=0.5)
    return layer, torch.optim.Adam(layer.parameters(), lr=0.1)


def with_digest(payload: bytes) -> bytes:
    digest = hashlib.sha256(payload).digest()
    return struct.pack("<16sIQ32s", b"dynsparse\0state\n", 1, len(payload), digest) + payload


def saved(value: object) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


@pytest.fixture
def payload(tmp_path):
    layer, optimizer = parts()
    layer(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    save_checkpoint(tmp_path / "good", model=layer, optimizer=optimizer, extra={"seed": 0})
    return torch.load(io.BytesIO((tmp_path / "good").read_bytes()[60:]), weights_only=True)


@pytest.fixture
def refused(tmp_path):
    def check(payload: bytes, match: str) -> None:
        file = tmp_path / "bad"
        file.write_bytes(with_digest(payload))
        layer, optimizer = parts()
        model = copy.deepcopy(layer.state_dict())
        state = torch.get_rng_state()
        with pytest.raises(CheckpointError, match=match) as error:
            load_checkpoint(file, model=layer, optimizer=optimizer)
        assert "\n" not in str(error.value)
        assert len(str(error.value)) < 1000
        assert all(
            a.equal(b) for a, b in zip(model.values(), layer.state_dict().values(), strict=True)
        )
        assert not optimizer.state
        assert state.equal(torch.get_rng_state())

    return check


def repacked(content: bytes, kind: int) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(stream, "w", kind) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    return stream.getvalue()


def test_packed_members(refused, payload):
    assert check_archive(repacked(saved(payload), zipfile.ZIP_STORED)) is None
    refused(repacked(saved(payload), zipfile.ZIP_DEFLATED), "expected members that are not packed")
    refused(repacked(saved(payload), zipfile.ZIP_LZMA), "expected members that are not packed")


def test_archives_that_two_readers_may_see_differently(refused, payload):
    content = saved(payload)
    refused(content + b"x", "something before or after|not a zip")
    refused(b"x" * 100 + content, "something before or after")
    refused(b"\x80\x02}q\x00.", "not a zip")


def data_of(pickled: bytes) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/version", "3\n")
        archive.writestr("archive/byteorder", "little")
    return stream.getvalue()


CALL = b"\x80\x02c%b\nJ\xff\xff\xff\x7f\x85R."


@pytest.mark.parametrize(
    "name",
    [
        b"builtins\nbytearray",
        b"__builtin__\nbytearray",
        b"torch\nTensor",
        b"torch\nFloatTensor",
        b"torch.storage\nUntypedStorage",
        b"torch.storage\nTypedStorage",
        b"torch._utils\n_rebuild_qtensor",
        b"torch\nstorage.UntypedStorage",
        b"torch\nstorage.TypedStorage",
        b"torch\n_utils._rebuild_qtensor",
    ],
)
def test_names_that_make_memory_from_a_number(refused, name):
    refused(data_of(CALL % name), "expected tensors, got")


@pytest.mark.slow
@pytest.mark.parametrize("name", [b"builtins\nbytearray", b"__builtin__\nbytearray"])
def test_that_the_memory_would_be_taken_otherwise(name):
    """What the test before refuses is let through by torch.load itself."""
    code = (
        "import io, sys, torch\n"
        "found = torch.load(io.BytesIO(sys.stdin.buffer.read()), weights_only=True)\n"
        "print(len(found))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=data_of(CALL % name),
        capture_output=True,
        check=False,
    )
    assert done.stdout.strip() == b"2147483647"


def test_bytes_in_a_slow_encoding(refused):
    pickled = b"\x80\x02c_codecs\nencode\nX\x01\x00\x00\x00aX\x08\x00\x00\x00punycode\x86R."
    refused(data_of(pickled), "expected bytes as torch.save writes them")
    assert check_archive(saved({"a": b"abc", "b": bytes(1)})) is None


def test_what_torch_save_writes_is_let_through():
    value = {
        "tensors": [torch.zeros(3, dtype=kind) for kind in (torch.float32, torch.uint16)],
        "more": torch.nn.Parameter(torch.ones(2)), "dtype": torch.float32, "set": {1, 2},
        "device": torch.device("cpu"), "size": torch.Size([2]), "complex": 1j, "text": "punycode",
        "sparse": torch.eye(2).to_sparse(),
    }  # fmt: skip
    content = saved(value)
    check_archive(content)
    check_content(torch.load(io.BytesIO(content), weights_only=True), len(content))


def test_containers_that_stand_for_more_than_memory_holds(refused, payload):
    doubled: list = [1]
    for _ in range(60):
        doubled = [doubled, doubled]
    refused(saved({**payload, "extra": {"a": doubled}}), "expected at most 16,777,216 values")
    deep: list = []
    for _ in range(120):
        deep = [deep]
    refused(saved({**payload, "extra": {"a": deep}}), "nested at most 100 deep")
    around: list = []
    around.append(around)
    refused(saved({**payload, "extra": {"a": around}}), "one that holds itself")
    wide = torch.zeros(1).expand(1 << 40)
    refused(saved({**payload, "extra": {"a": wide}}), "expected tensors of at most")


def test_parts_of_the_wrong_type(refused, payload):
    refused(saved(torch.zeros(3)), "expected its parts, got 'Tensor'")
    for part in payload:
        refused(saved({**payload, part: [1]}), f"expected a dict as its {part}, got list")
        refused(
            saved({name: value for name, value in payload.items() if name != part}),
            f"expected a dict as its {part}, got nothing",
        )
    refused(
        saved({**payload, "optimizer": {"kind": "Adam"}}), "expected a kind and a state as its o"
    )
    refused(
        saved({**payload, "optimizer": {"kind": "Adam", "state": {"param_groups": [1]}}}),
        "expected the optimizer's groups",
    )
    refused(saved({**payload, "generators": {"a": 1}}), "expected a kind and a state")


def test_what_is_inside_the_parts_changes_nothing_either(refused, payload):
    for key in ("torch", "numpy", "python"):
        refused(
            saved({**payload, "random": {**payload["random"], key: 1}}), "the random state is dam"
        )
        rest = {name: value for name, value in payload["random"].items() if name != key}
        refused(saved({**payload, "random": rest}), "the random state is damaged")
    state = copy.deepcopy(payload["optimizer"])
    state["state"]["state"] = [1]
    refused(saved({**payload, "optimizer": state}), "the state of the optimizer is damaged")
    rows = payload["model"]["rows"]
    for wrong in (rows.flip(0), rows + 100, rows - 100, rows[:-1], rows.double()):
        refused(
            saved({**payload, "model": {**payload["model"], "rows": wrong}}), "damaged|was saved as"
        )
    refused(
        saved({**payload, "model": {**payload["model"], "bias": 3}}), "was saved as int, not as a"
    )
    refused(saved({**payload, "patterns": {"": 3}}), "layer '' was saved with")


def test_a_length_far_beyond_the_file(tmp_path):
    header = struct.pack("<16sIQ32s", b"dynsparse\0state\n", 1, 1 << 62, bytes(32))
    (tmp_path / "bad").write_bytes(header + b"x")
    with pytest.raises(CheckpointError, match="truncated: expected 4611686018427387904 bytes"):
        read_extra(tmp_path / "bad")


def test_reading_takes_no_more_than_the_file_and_its_content(tmp_path):
    """The whole checkpoint path under a bound on memory."""
    layer = SparseLinear(1000, 1000, density=0.5)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    save_checkpoint(tmp_path / "good", model=layer, optimizer=optimizer)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert read_extra(tmp_path / "good") == {}
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert (after - before) << 10 < 64 << 20
