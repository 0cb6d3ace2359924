"""Plots of a record: numbers, files, no side effects."""

from __future__ import annotations

import matplotlib as mpl
import numpy as np
import pytest
import torch
from PIL import Image

from dynsparse.pattern import Rewiring, SparsePattern
from dynsparse.report.training import connectivity
from dynsparse.report.training.connectivity import count_inputs, visualise
from dynsparse.training.records import Recorder, RecordError, Records


def record(path, shape=(6, 16), block=1, updates=3, metadata=None):
    generator = torch.Generator().manual_seed(0)
    patterns = {
        "fc1": SparsePattern.random(shape, 0.25, block_size=block, generator=generator),
        "fc2": SparsePattern.random((4, 6), 0.5, generator=generator),
    }
    recorder = Recorder(path, metadata)
    recorder.start(patterns, overwrite=True)
    masks = [patterns["fc1"].to_mask().numpy()]
    for step in range(1, updates + 1):
        pattern = patterns["fc1"]
        free = (~pattern.contains(torch.arange(pattern.total))).nonzero().flatten()
        pick = torch.randint(len(free), (1,), generator=generator)
        drop = torch.randint(pattern.nnz, (1,), generator=generator)
        rewiring = Rewiring.make(pattern, drop, free[pick])
        recorder.update(1000 * step, {"fc1": rewiring})
        patterns["fc1"] = rewiring.after
        masks.append(rewiring.after.to_mask().numpy())
    return masks


@pytest.mark.parametrize("block", [1, 2])
def test_connections_per_input_are_the_column_sums_of_the_masks(tmp_path, block):
    masks = record(tmp_path, block=block)
    found = list(count_inputs(Records.load(tmp_path), "fc1"))
    assert [step for step, _ in found] == [0, 1000, 2000, 3000]
    for (_, counts), mask in zip(found, masks, strict=True):
        np.testing.assert_array_equal(counts, mask.sum(0))


@pytest.mark.parametrize("shape", [(6, 16), (6, 18)], ids=["image", "strip"])
def test_plots_and_animation(tmp_path, shape):
    record(tmp_path / "r", shape=shape)
    files = visualise(tmp_path / "r", tmp_path / "out", animate=True)
    assert [f.name for f in files] == ["connectivity.png", "curves.png", "connectivity.gif"]
    assert {f.name for f in (tmp_path / "out").iterdir()} == {f.name for f in files}
    for file in files[:2]:
        with Image.open(file) as plot:
            assert min(plot.size) > 400
            assert np.asarray(plot.convert("L")).std() > 10
    with Image.open(files[2]) as animation:
        assert animation.n_frames == 4
        assert animation.info["loop"] == 0


def test_plots_inside_the_record_folder(tmp_path):
    record(tmp_path)
    files = visualise(tmp_path)
    assert [f.relative_to(tmp_path).as_posix() for f in files] == [
        "plots/connectivity.png",
        "plots/curves.png",
    ]
    assert len(Records.load(tmp_path)) == 4
    record(tmp_path)  # a new training may record into the same folder


def test_record_without_updates(tmp_path):
    record(tmp_path, updates=0)
    files = visualise(tmp_path, animate=True)
    assert all(file.stat().st_size > 1000 for file in files)


def test_pixel_permutation_is_inverted(tmp_path, monkeypatch):
    # Only input 3 is connected, and it reads pixel 8: the bottom right one of 3 x 3.
    permutation = [4, 0, 6, 8, 1, 2, 3, 5, 7]
    recorder = Recorder(tmp_path, {"pixel_permutation": torch.tensor(permutation)})
    recorder.start({"fc1": SparsePattern([0, 1], [3, 3], shape=(2, 9))})
    shown = []
    draw = connectivity._draw_before_and_after
    monkeypatch.setattr(
        connectivity,
        "_draw_before_and_after",
        lambda records, layer, frames, *rest: (
            shown.extend(frames) or draw(records, layer, frames, *rest)
        ),
    )
    visualise(tmp_path)
    assert shown[0][1].tolist() == [0, 0, 0, 0, 0, 0, 0, 0, 2]


def test_colour_scale_is_equal_in_every_frame(tmp_path):
    # Input 0 keeps its two connections while others come and go: its colour never changes.
    pattern = SparsePattern([0, 1, 2], [0, 0, 1], shape=(4, 4))
    recorder = Recorder(tmp_path)
    recorder.start({"fc1": pattern})
    for step, place in ((1, 6), (2, 3), (3, 14)):
        moving = (pattern.cols != 0).nonzero().flatten()
        rewiring = Rewiring.make(pattern, moving, torch.tensor([place]))
        recorder.update(step, {"fc1": rewiring})
        pattern = rewiring.after
    *_, gif = visualise(tmp_path, animate=True)
    colours, palettes = set(), set()
    with Image.open(gif) as animation:
        for frame in range(animation.n_frames):
            animation.seek(frame)
            rgb = animation.convert("RGB")
            colours.add(rgb.getpixel((100, 200)))
            palettes.add(rgb.getpixel((2, 2)))
    assert colours == {tuple(round(255 * c) for c in mpl.colormaps["magma"](1.0)[:3])}
    assert palettes == {(255, 255, 255)}


@pytest.mark.slow
def test_long_trainings_are_subsampled(tmp_path, monkeypatch):
    monkeypatch.setattr(connectivity, "_MOST_FRAMES", 3)
    record(tmp_path, updates=6)
    *_, gif = visualise(tmp_path, animate=True)
    with Image.open(gif) as animation:
        assert animation.n_frames == 3


def test_global_state_is_unchanged(tmp_path):
    import matplotlib.pyplot as plt

    record(tmp_path)
    before = dict(mpl.rcParams)
    visualise(tmp_path, animate=True)
    assert dict(mpl.rcParams) == before
    assert plt.get_fignums() == []


def test_bad_input(tmp_path):
    with pytest.raises(RecordError, match=r"found no record\.json"):
        visualise(tmp_path)
    record(tmp_path / "r")
    with pytest.raises(ValueError, match="unknown colour map 'grue': expected one of matplotlib's"):
        visualise(tmp_path / "r", cmap="grue")
    for wrong in ([0, 1], [0] * 16, "none", [[1], [2, 3]], [float(i) for i in range(16)]):
        record(tmp_path / "r", metadata={"pixel_permutation": wrong})
        with pytest.raises(RecordError, match=r"pixel_permutation must hold each of 0\.\.15 once"):
            visualise(tmp_path / "r")


def test_missing_matplotlib_raises_one_line(tmp_path, monkeypatch):
    record(tmp_path)
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        visualise(tmp_path)
