"""Plots of the inputs that a network uses, and how they change during training."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dynsparse._core.checks import check_types
from dynsparse._core.files.atomic_write import atomic_write
from dynsparse.report.figure import MUTED, colour_map, figure, need_matplotlib, save
from dynsparse.report.training.curves import draw_curves
from dynsparse.training.records import RecordError, Records

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap

_MOST_FRAMES = 120
_FRAME_MS = 120
_END_FRAMES_MS = 1500
_SPELLING = {
    "rigl": "RigL",
    "set": "SET",
    "mnist": "MNIST",
    "fashion-mnist": "Fashion-MNIST",
}

Frame = tuple[int, np.ndarray]


@check_types
def visualise(
    records_path: str | os.PathLike[str],
    output_dir: str | os.PathLike[str] | None = None,
    cmap: str = "magma",
    animate: bool = False,
) -> list[Path]:
    """Draw what a record says about the connectivity.

    Args:
        records_path: the folder of the record (docs/records.md).
        output_dir: where the plots go, made if needed; by default `plots` in the record.
        cmap: the colour map of the connectivity, by matplotlib's name.
        animate: also write the connectivity of the first layer over all updates as a GIF. Of more
            than 120 updates it shows 120, evenly chosen.

    Returns:
        The files written: `connectivity.png` (connections per input of the first layer, before and
        after; as an image where the inputs make a square, as a strip otherwise), `curves.png` and,
        with `animate`, `connectivity.gif`.

    Raises:
        RecordError: no record there, or a damaged one.
        ValueError: an unknown colour map.
        ImportError: matplotlib is not installed.
    """
    need_matplotlib()
    colours = colour_map(cmap)
    records = Records.load(records_path)
    layer = next(iter(records.layers))
    counts = count_inputs(records, layer)
    frames = [(step, _undo_permutation(inputs, records)) for step, inputs in counts]
    folder = Path(output_dir) if output_dir is not None else records.path / "plots"
    folder.mkdir(parents=True, exist_ok=True)
    files = [
        _draw_before_and_after(records, layer, frames, colours, folder / "connectivity.png"),
        draw_curves(records, folder / "curves.png"),
    ]
    if animate:
        files.append(_animate(records, layer, frames, colours, folder / "connectivity.gif"))
    return files


def count_inputs(records: Records, layer: str) -> Iterator[Frame]:
    """(step, connections of each input) at every index of the record: int64 [in_features]."""
    info = records.layers[layer]
    width, b = info.grid[1], info.block_size
    blocks = np.bincount(records.initial(layer) % width, minlength=width)
    yield records.steps[0], np.repeat(blocks * b, b)
    for step, (dropped, grown) in zip(records.steps[1:], records.changes(layer), strict=True):
        blocks = (
            blocks
            - np.bincount(dropped % width, minlength=width)
            + np.bincount(grown % width, minlength=width)
        )
        yield step, np.repeat(blocks * b, b)


def _undo_permutation(counts: np.ndarray, records: Records) -> np.ndarray:
    """The connections of each pixel, where the record says which pixel each input read."""
    permutation = records.metadata.get("pixel_permutation")
    if permutation is None:
        return counts
    try:
        pixels = np.asarray(permutation)
        valid = pixels.dtype.kind == "i" and np.array_equal(np.sort(pixels), np.arange(len(counts)))
    except (TypeError, ValueError):
        valid = False
    if not valid:
        raise RecordError(
            f"{records.path}: pixel_permutation must hold each of 0..{len(counts) - 1} once"
        )
    image = np.empty_like(counts)
    image[pixels] = counts
    return image


def _as_image(counts: np.ndarray) -> np.ndarray:
    side = math.isqrt(len(counts))
    return counts.reshape(side, side) if side * side == len(counts) else counts[None]


def _describe(records: Records, layer: str) -> str:
    info = records.layers[layer]
    words = [
        f"{info.shape[1]:,} → {info.shape[0]:,}",
        f"density {len(records.initial(layer)) / info.total:.3g}",
    ]
    if info.block_size > 1:
        words.append(f"blocks of {info.block_size}")
    for key in ("method", "dataset"):
        if key in records.metadata:
            word = str(records.metadata[key])
            words.append(_SPELLING.get(word, word))
    return f"Inputs of {layer or 'the model'}:  " + "  ·  ".join(words)


class _Panel:
    """The connections of every input at one step: an image, or a strip where there is no square."""

    def __init__(self, axes: Axes, counts: np.ndarray, colours: Colormap, top: int) -> None:
        image = _as_image(counts)
        self._is_image = len(image) > 1
        self._axes = axes
        self._image = axes.imshow(
            image,
            cmap=colours,
            vmin=0,
            vmax=top,
            # Pixels stay squares; a strip wider than the page is averaged, not sampled.
            interpolation="nearest" if self._is_image else "auto",
            aspect="equal" if self._is_image else "auto",
        )
        axes.grid(False)
        axes.set_yticks([])
        if self._is_image:
            axes.set_xticks([])
        for spine in axes.spines.values():
            spine.set_visible(False)
        self._note = axes.set_title("", loc="right", color=MUTED, fontsize=10)

    def show(self, counts: np.ndarray, title: str) -> None:
        self._image.set_data(_as_image(counts))
        self._axes.set_title(title, fontweight="bold")
        unit = "pixels" if self._is_image else "inputs"
        self._note.set_text(f"{int((counts == 0).sum()):,} of {len(counts):,} {unit} unconnected")

    def add_scale(self, beside: list[Axes] | None = None) -> None:
        """The colour bar: as high as this panel, or beside several."""
        page = self._axes.figure
        if beside is None:
            place = self._axes.inset_axes((1.035, 0, 0.04, 1))
            bar = page.colorbar(self._image, cax=place)
        else:
            bar = page.colorbar(self._image, ax=beside, pad=0.015, fraction=0.02, aspect=26)
        bar.outline.set_visible(False)
        bar.set_label(f"connections per {'pixel' if self._is_image else 'input'}")


def _draw_before_and_after(
    records: Records, layer: str, frames: list[Frame], colours: Colormap, path: Path
) -> Path:
    shown = [frames[0], frames[-1]]
    top = max(1, *(int(counts.max()) for _, counts in shown))
    is_image = len(_as_image(frames[0][1])) > 1
    with figure(*((11.6, 5.7) if is_image else (12.0, 4.4))) as page:
        grid = page.subplots(*((1, 2) if is_image else (2, 1)), sharex=True)
        panels = [
            _Panel(axes, counts, colours, top)
            for axes, (_, counts) in zip(grid, shown, strict=True)
        ]
        for panel, when, (step, counts) in zip(panels, ("Start", "End"), shown, strict=True):
            panel.show(counts, f"{when}: step {step:,}")
        panels[-1].add_scale(None if is_image else list(grid))
        page.suptitle(_describe(records, layer), fontsize=13)
        save(page, path)
    return path


def _animate(
    records: Records, layer: str, frames: list[Frame], colours: Colormap, path: Path
) -> Path:
    top = max(1, *(int(counts.max()) for _, counts in frames), 1)
    chosen = np.unique(np.linspace(0, len(frames) - 1, min(len(frames), _MOST_FRAMES)).round())
    images = []
    with figure(6.6, 6.1) as page:
        panel = _Panel(page.subplots(), frames[0][1], colours, top)
        panel.add_scale()
        panel.show(frames[-1][1], f"Step {frames[-1][0]:,}")
        page.suptitle(_describe(records, layer), fontsize=12)
        # The layout is settled once, with the longest title, and holds for every frame.
        page.draw_without_rendering()
        page.set_layout_engine("none")
        for index in chosen.astype(int):
            step, counts = frames[index]
            panel.show(counts, f"Step {step:,}")
            page.canvas.draw()
            images.append(np.array(page.canvas.buffer_rgba())[..., :3])  # type: ignore[attr-defined]
    _write_gif(images, colours, path)
    return path


def _write_gif(images: list[np.ndarray], colours: Colormap, path: Path) -> None:
    """One palette for all frames, so that a colour means the same number from start to end."""
    from PIL import Image

    scale = (255 * colours(np.linspace(0, 1, 208))[:, :3]).round().astype(np.uint8)
    greys = np.linspace(0, 255, 48).round().astype(np.uint8)[:, None].repeat(3, 1)
    palette = np.concatenate([scale, greys])
    frames = []
    for image in images:
        frames.append(Image.fromarray(_nearest_colours(image, palette)))
        frames[-1].putpalette(palette.tobytes())
    milliseconds = [_FRAME_MS] * len(frames)
    milliseconds[0] = milliseconds[-1] = _END_FRAMES_MS
    more: dict[str, Any] = {"append_images": frames[1:], "duration": milliseconds, "loop": 0}
    atomic_write(path, lambda file: frames[0].save(file, "GIF", save_all=True, **more))


def _nearest_colours(image: np.ndarray, palette: np.ndarray) -> np.ndarray:
    """For each pixel (uint8 [h, w, 3]) the index of the closest of up to 256 colours: uint8 [h, w].

    Pillow's own search is coarser: it turns white into a light grey.
    """
    codes = image.astype(np.int64) @ (65536, 256, 1)
    unique, where = np.unique(codes, return_inverse=True)
    colours = np.stack([unique >> 16, (unique >> 8) & 255, unique & 255], 1)
    distance = ((colours[:, None] - palette[None].astype(np.int64)) ** 2).sum(2)
    return distance.argmin(1).astype(np.uint8)[where].reshape(codes.shape)
