"""Figures of matplotlib with one style and without global state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynsparse._core.files.atomic_write import atomic_write

if TYPE_CHECKING:
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure

_STYLE: dict[Any, Any] = {
    "font.size": 11.0,
    "axes.titlesize": 12.0,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e4e4e4",
    "axes.edgecolor": "#666666",
    "xtick.color": "#666666",
    "ytick.color": "#666666",
    "xtick.labelcolor": "#333333",
    "ytick.labelcolor": "#333333",
    "lines.linewidth": 2.0,
    "legend.frameon": False,
}
MUTED = "#666666"


def need_matplotlib() -> None:
    """Raise ImportError with the command that installs matplotlib if it is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ImportError("plots need the package matplotlib: pip install matplotlib") from None


@contextmanager
def figure(width: float, height: float) -> Iterator[Figure]:
    """A figure of this size in inches, independent of pyplot and of the display.

    Inside the context the style of this module applies; the caller's settings are restored.
    """
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    with mpl.rc_context(_STYLE):
        layout = ConstrainedLayoutEngine(w_pad=0.14, h_pad=0.12)
        drawing = Figure(figsize=(width, height), layout=layout)
        FigureCanvasAgg(drawing)
        yield drawing


def save(page: Figure, path: Path) -> None:
    """Write the file `path`, atomically, in the format of its suffix.

    Raises:
        ValueError: an ending that matplotlib does not know.
        OSError: the file cannot be written.
    """
    kind = path.suffix.removeprefix(".") or "png"
    atomic_write(path, lambda file: page.savefig(file, dpi=150, format=kind))


def colour_map(name: str) -> Colormap:
    """A colour map of matplotlib's.

    Raises:
        ValueError: there is no such map.
    """
    import matplotlib as mpl

    if name not in mpl.colormaps:
        raise ValueError(
            f"unknown colour map {name!r}: expected one of matplotlib's, such as magma or viridis"
        )
    return mpl.colormaps[name]
