"""Records round-trip, and damaged ones raise a one-line error."""

from __future__ import annotations

import json
import shutil
import zipfile
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dynsparse.pattern import Rewiring, SparsePattern
from dynsparse.training.records import RecordedLayer, Recorder, RecordError, Records


def rewire(pattern: SparsePattern, count: int, generator: torch.Generator) -> Rewiring:
    drop = torch.randperm(pattern.nnz, generator=generator)[:count]
    free = torch.ones(pattern.total, dtype=torch.bool)
    free[pattern.flat] = False
    places = free.nonzero().flatten()
    grow = places[torch.randperm(len(places), generator=generator)[: len(drop)]]
    return Rewiring.make(pattern, drop[: len(grow)], grow)


def write(path: Path, updates: int = 4, seed: int = 0, overwrite: bool = False, **metadata):
    """Write a record of two layers; return the patterns expected at each index."""
    generator = torch.Generator().manual_seed(seed)
    now = {
        "fc1": SparsePattern.random((12, 20), 0.2, generator=generator),
        "body.fc2": SparsePattern.random((8, 16), 0.5, block_size=4, generator=generator),
    }
    recorder = Recorder(path, metadata)
    recorder.start(now, overwrite=overwrite)
    history = [dict(now)]
    for update in range(1, updates + 1):
        rewirings = {"fc1": rewire(now["fc1"], 7, generator)}
        if update % 2:
            rewirings["body.fc2"] = rewire(now["body.fc2"], 1, generator)
        recorder.update(10 * update, rewirings)
        recorder.log(10 * update, {"loss": 1.0 / update})
        now |= {name: r.after for name, r in rewirings.items()}
        history.append(dict(now))
    return recorder, history


def test_round_trip(tmp_path):
    _, history = write(tmp_path / "r", seed=3, dataset="digits", permutation=torch.arange(3))
    records = Records.load(tmp_path / "r")
    assert records.layers == {
        "fc1": RecordedLayer((12, 20), 1),
        "body.fc2": RecordedLayer((8, 16), 4),
    }
    assert records.steps == [0, 10, 20, 30, 40]
    assert len(records) == 5
    assert records.metadata == {"dataset": "digits", "permutation": [0, 1, 2]}
    assert records.telemetry[1] == {"step": 20, "loss": 0.5}
    for name in records.layers:
        assert [step for step, _ in records.patterns(name)] == records.steps
        for index, (_, pattern) in enumerate(records.patterns(name)):
            assert pattern == history[index][name]
            assert pattern == records.pattern(name, index)
        assert records.pattern(name, -1) == history[-1][name]


def test_measures_by_hand(tmp_path):
    # 2 x 3 positions:  0 1 2 / 3 4 5
    first = SparsePattern.from_flat(torch.tensor([0, 1, 3]), shape=(2, 3))
    second = Rewiring.make(first, torch.tensor([0]), torch.tensor([5]))  # 5 1 3
    third = Rewiring.make(second.after, torch.tensor([0, 2]), torch.tensor([0, 2]))  # 0 1 2
    # Position 1 leaves and comes back in one update: nothing was replaced.
    fourth = Rewiring.make(third.after, torch.tensor([1]), torch.tensor([1]))
    recorder = Recorder(tmp_path)
    recorder.start({"w": first}, step=5)
    for step, rewiring in ((6, second), (8, third), (9, fourth)):
        recorder.update(step, {"w": rewiring})
    records = Records.load(tmp_path)
    assert records.steps == [5, 6, 8, 9]
    np.testing.assert_allclose(records.churn("w"), [1 / 3, 2 / 3, 0])
    np.testing.assert_allclose(records.exploration("w"), [3 / 6, 4 / 6, 5 / 6, 5 / 6])
    dead = records.dead_units("w")
    assert dead.inputs.tolist() == [1, 0, 0, 0]
    assert dead.outputs.tolist() == [0, 0, 1, 1]
    assert records.pattern("w", 3).flat.tolist() == [0, 1, 2]


@settings(deadline=None, max_examples=25)
@given(
    height=st.integers(1, 5),
    width=st.integers(1, 5),
    block=st.sampled_from([1, 2, 4]),
    density=st.floats(0, 1),
    updates=st.integers(0, 4),
    seed=st.integers(0, 1000),
)
def test_measures_equal_those_of_masks(
    tmp_path_factory, height, width, block, density, updates, seed
):
    generator = torch.Generator().manual_seed(seed)
    shape = (height * block, width * block)
    pattern = SparsePattern.random(shape, density, block_size=block, generator=generator)
    path = tmp_path_factory.mktemp("record")
    recorder = Recorder(path)
    recorder.start({"w": pattern})
    masks = [pattern.to_mask().numpy()]
    for step in range(1, updates + 1):
        rewiring = rewire(pattern, int(torch.randint(0, 6, (), generator=generator)), generator)
        recorder.update(step, {"w": rewiring})
        pattern = rewiring.after
        masks.append(pattern.to_mask().numpy())
    records = Records.load(path)
    for mask, (_, found) in zip(masks, records.patterns("w"), strict=True):
        np.testing.assert_array_equal(found.to_mask().numpy(), mask)
    churn = [(a & ~b).sum() / a.sum() if a.any() else 0.0 for a, b in pairwise(masks)]
    np.testing.assert_allclose(records.churn("w"), churn)
    ever = np.logical_or.accumulate(masks)
    np.testing.assert_allclose(records.exploration("w"), ever.mean((1, 2)))
    dead = records.dead_units("w")
    assert dead.inputs.tolist() == [(~m.any(0)).sum() for m in masks]
    assert dead.outputs.tolist() == [(~m.any(1)).sum() for m in masks]


def test_positions_are_int32_where_they_fit(tmp_path):
    small = SparsePattern.from_flat(torch.tensor([3]), shape=(2, 2))
    large = SparsePattern.from_flat(torch.tensor([2**33]), shape=(2**17, 2**17))
    recorder = Recorder(tmp_path)
    recorder.start({"small": small, "large": large})
    with np.load(tmp_path / "update-000000.npz") as archive:
        assert archive["positions/small"].dtype == np.int32
        assert archive["positions/large"].dtype == np.int64
    assert Records.load(tmp_path).pattern("large", 0) == large


def test_restart_replaces_the_record(tmp_path):
    write(tmp_path, updates=4)
    recorder, history = write(tmp_path, updates=1, seed=9, overwrite=True)
    assert recorder.has_record
    records = Records.load(tmp_path)
    assert records.steps == [0, 10]
    assert len(records.telemetry) == 1
    assert records.pattern("fc1", 1) == history[1]["fc1"]


def test_truncating_and_continuing_equals_an_uninterrupted_record(tmp_path):
    write(tmp_path / "whole", updates=4)
    _, history = write(tmp_path / "resumed", updates=4)
    recorder = Recorder(tmp_path / "resumed")
    recorder.truncate(25)  # the checkpoint was taken between the updates at 20 and 30
    assert Records.load(tmp_path / "resumed").steps == [0, 10, 20]
    assert [t["step"] for t in Records.load(tmp_path / "resumed").telemetry] == [10, 20]
    for index in (3, 4):
        rewirings = {
            name: Rewiring.between(history[index - 1][name], history[index][name])
            for name in history[0]
        }
        recorder.update(10 * index, rewirings)
        recorder.log(10 * index, {"loss": 1.0 / index})
    whole, resumed = Records.load(tmp_path / "whole"), Records.load(tmp_path / "resumed")
    assert resumed.steps == whole.steps
    assert resumed.telemetry == whole.telemetry
    for name in whole.layers:
        assert [p for _, p in resumed.patterns(name)] == [p for _, p in whole.patterns(name)]


def test_truncated_line_is_skipped(tmp_path):
    write(tmp_path, updates=2)
    with (tmp_path / "telemetry.jsonl").open("a") as file:
        file.write('{"step": 30, "lo')
    assert [t["step"] for t in Records.load(tmp_path).telemetry] == [10, 20]
    recorder = Recorder(tmp_path)
    recorder.truncate(20)
    recorder.log(21, {"loss": 0.1})
    assert [t["step"] for t in Records.load(tmp_path).telemetry] == [10, 20, 21]


def test_failing_write_changes_nothing(tmp_path, monkeypatch):
    recorder, history = write(tmp_path, updates=2)

    def fail(file, **arrays):
        file.write(b"half")
        raise OSError("no space left")

    rewiring = rewire(history[-1]["fc1"], 2, torch.Generator().manual_seed(1))
    with monkeypatch.context() as patch:
        patch.setattr(np, "savez_compressed", fail)
        with pytest.raises(OSError, match="no space"):
            recorder.update(30, {"fc1": rewiring})
    assert Records.load(tmp_path).steps == [0, 10, 20]
    recorder.update(30, {"fc1": rewiring})
    assert Records.load(tmp_path).pattern("fc1", -1) == rewiring.after


class TestRefusals:
    @pytest.fixture
    def record(self, tmp_path):
        write(tmp_path / "r", updates=3)
        return tmp_path / "r"

    def check(self, path, match):
        def read():
            records = Records.load(path)
            for name in records.layers:
                list(records.patterns(name))

        with pytest.raises(RecordError, match=match) as caught:
            read()
        assert "\n" not in str(caught.value)

    def test_folder_with_other_files(self, tmp_path):
        (tmp_path / "notes.txt").write_text("mine")
        with pytest.raises(RecordError, match="holds other files"):
            Recorder(tmp_path)
        assert (tmp_path / "notes.txt").read_text() == "mine"

    def test_file_instead_of_folder(self, tmp_path):
        (tmp_path / "r").write_text("")
        with pytest.raises(RecordError, match="got the file"):
            Recorder(tmp_path / "r")

    def test_missing_record(self, tmp_path):
        self.check(tmp_path / "none", r"found no record\.json")

    def test_record_not_started(self, record):
        for file in record.glob("update-*"):
            file.unlink()
        self.check(record, "holds no patterns yet")

    def test_foreign_header(self, record):
        (record / "record.json").write_text("[]")
        self.check(record, "is not a record")
        with pytest.raises(RecordError, match="is not a record"):
            Recorder(record)

    def test_truncated_header(self, record):
        (record / "record.json").write_text('{"format": "dynsp')
        self.check(record, "is damaged")

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("layers", []),
            ("layers", {"fc1": {"shape": [12, 20]}}),
            ("layers", {"fc1": {"shape": [12, "x"], "block_size": 1}}),
            ("layers", {"fc1": {"shape": [12, 20], "block_size": 7}}),
            ("metadata", 3),
        ],
    )
    def test_wrong_header(self, record, key, value):
        head = json.loads((record / "record.json").read_text())
        (record / "record.json").write_text(json.dumps(head | {key: value}))
        self.check(record, "is damaged")

    def test_other_version(self, record):
        head = json.loads((record / "record.json").read_text())
        (record / "record.json").write_text(json.dumps(head | {"version": 2}))
        self.check(record, "format version 2, this dynsparse reads 1")

    def test_missing_update(self, record):
        (record / "update-000001.npz").unlink()
        self.check(record, "update-000001.npz is missing")

    @pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
    def test_truncated_update(self, record, share):
        file = record / "update-000002.npz"
        data = file.read_bytes()
        file.write_bytes(data[: int(share * len(data))])
        self.check(record, r"update-000002\.npz is damaged")

    def test_flipped_byte(self, record):
        file = record / "update-000001.npz"
        with np.load(file) as archive:
            arrays = dict(archive)
        np.savez(file, **arrays)  # stored, so that a byte of data can be hit
        data = bytearray(file.read_bytes())
        at = data.find(arrays["dropped/fc1"].tobytes())
        data[at] ^= 0xFF
        file.write_bytes(data)
        self.check(record, r"update-000001\.npz is damaged")

    def test_foreign_array_file(self, record):
        with (record / "update-000001.npz").open("wb") as file:
            np.save(file, np.zeros(3))
        self.check(record, "not part of a record: BadZipFile: File is not a zip file")

    @pytest.mark.parametrize(
        ("changes", "match"),
        [
            ({"step": np.array([1, 2])}, "'step' must be one integer"),
            ({"step": np.float32(3)}, "'step' must be one integer"),
            ({"step": np.int64(-3)}, "'step' must be one integer"),
            ({"step": np.int64(0)}, "expected a step after 0, got 0"),
            ({"dropped/fc1": np.zeros(2)}, "must be int32 or int64"),
            ({"dropped/fc1": np.zeros((1, 2), np.int32)}, "must be int32 or int64"),
            ({"grown/fc1": np.array([3, 2])}, "sorted, distinct"),
            ({"grown/fc1": np.array([240])}, r"within \[0, 240\)"),
            ({"dropped/fc1": np.arange(240)}, "does not fit the pattern before"),
            ({"grown/fc1": np.arange(240)}, "does not fit the pattern before"),
        ],
    )
    def test_wrong_arrays(self, record, changes, match):
        file = record / "update-000001.npz"
        with np.load(file) as archive:
            arrays = dict(archive)
        np.savez(file, **(arrays | changes))
        self.check(record, match)

    def test_array_larger_than_the_limit(self, record, monkeypatch):
        file = record / "update-000001.npz"
        np.savez_compressed(file, step=np.int64(9), **{"dropped/fc1": np.zeros(1 << 17, "i8")})
        monkeypatch.setenv("DYNSPARSE_READ_LIMIT", str(1 << 18))
        self.check(record, "expected at most 262,144 bytes for an array .*DYNSPARSE_READ_LIMIT")

    @pytest.mark.parametrize(
        "header",
        [
            "{'descr': '<i4', 'fortran_order': False, 'shape': (1000000000000,), }",
            "{'descr': '|O', 'fortran_order': False, 'shape': (2,), }",
            "[" * 900,
        ],
    )
    def test_array_header_contradicts_its_data(self, record, header):
        content = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode()
        with zipfile.ZipFile(record / "update-000001.npz", "w") as archive:
            archive.writestr("step.npy", content + bytes(16))
        self.check(record, r"update-000001\.npz is damaged or not part of a record")

    def test_missing_arrays(self, record):
        np.savez(record / "update-000000.npz", step=np.int64(0))
        self.check(record, "expected the array 'positions/fc1'")
        np.savez(record / "update-000000.npz", positions=np.zeros(3))
        self.check(record, "expected the array 'step'")

    def test_damaged_telemetry(self, record):
        (record / "telemetry.jsonl").write_text('{"step": 1}\nnot json\n')
        self.check(record, "line 2 is damaged")
        (record / "telemetry.jsonl").write_text('{"loss": 1}\n')
        self.check(record, "line 1 is damaged")

    def test_truncating_before_the_first_step(self, tmp_path):
        recorder = Recorder(tmp_path)
        with pytest.raises(RecordError, match=r"found no|holds no patterns"):
            recorder.truncate(3)
        recorder.start({"w": SparsePattern.full((2, 2))}, step=5)
        with pytest.raises(RecordError, match="it begins at step 5"):
            recorder.truncate(4)

    def test_updates_that_do_not_match_the_record(self, tmp_path):
        recorder, history = write(tmp_path / "r", updates=1)
        later = rewire(history[1]["fc1"], 2, torch.Generator().manual_seed(0))
        with pytest.raises(RecordError, match="got step 10 after step 10"):
            recorder.update(10, {"fc1": later})
        recorder.update(20, {"fc1": later})
        with pytest.raises(RecordError, match="does not begin at the pattern"):
            recorder.update(30, {"fc1": later})
        with pytest.raises(KeyError, match=r"'fc1', 'body\.fc2'"):
            recorder.update(30, {"fc3": later})
        assert Records.load(tmp_path / "r").steps == [0, 10, 20]

    def test_wrong_arguments(self, tmp_path, record):
        recorder = Recorder(tmp_path / "new")
        assert not recorder.has_record
        with pytest.raises(RecordError, match="call start or truncate before update"):
            recorder.update(1, {})
        with pytest.raises(RecordError, match="call start or truncate before log"):
            recorder.log(1, {})
        with pytest.raises(ValueError, match="at least one layer"):
            recorder.start({})
        recorder.start({"w": SparsePattern.full((2, 2))})
        with pytest.raises(TypeError, match=r"step must be an integer, got 1\.5"):
            recorder.update(1.5, {})
        with pytest.raises(ValueError, match="step must be an integer of at least 0, got -1"):
            recorder.log(-1, {})
        with pytest.raises(ValueError, match='the key "step"'):
            recorder.log(1, {"step": 3})
        with pytest.raises(TypeError, match="figures must hold what JSON can"):
            recorder.log(1, {"f": object()})
        with pytest.raises(TypeError, match="metadata must hold what JSON can"):
            Recorder(tmp_path / "other", {"f": print})
        records = Records.load(record)
        with pytest.raises(KeyError, match="no layer 'x' in the record, which has 'fc1'"):
            records.churn("x")
        with pytest.raises(IndexError, match="has 4 patterns, got the index 4"):
            records.pattern("fc1", 4)
        with pytest.raises(IndexError, match="got the index -5"):
            records.pattern("fc1", -5)

    def test_earlier_record_is_not_overwritten(self, record):
        before = {file.name: file.read_bytes() for file in record.iterdir()}
        patterns = {"w": SparsePattern.full((2, 2))}
        recorder = Recorder(record)
        with pytest.raises(
            RecordError, match="holds the record of an earlier training: continue it"
        ):
            recorder.start(patterns)
        assert {file.name: file.read_bytes() for file in record.iterdir()} == before
        recorder.start(patterns, overwrite=True)
        assert Records.load(record).steps == [0]
        Recorder(record).start(patterns)  # of nothing but first patterns: no loss

    def test_temporary_file_of_a_killed_training_is_ignored(self, tmp_path):
        (tmp_path / ".record.json.0123abcd.tmp").write_text("{")
        Recorder(tmp_path).start({"w": SparsePattern.full((2, 2))})
        assert Records.load(tmp_path).steps == [0]
        shutil.rmtree(tmp_path)
