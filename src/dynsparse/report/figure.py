"""What the pictures share: a figure that leaves no global state behind, and its looks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynsparse.files.atomic_write import atomic_write

if TYPE_CHECKING:
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure

_LOOK: dict[Any, Any] = {
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
    """Raises ImportError, saying what to install, where matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ImportError(
            "pictures need the package matplotlib: pip install 'dynsparse[apps]'"
        ) from None


@contextmanager
def figure(width: float, height: float) -> Iterator[Figure]:
    """A figure of that size in inches, not known to pyplot, drawn by Agg whatever the display.

    What is drawn and saved inside the context has this file's looks; the settings of the caller's
    matplotlib come back afterwards.
    """
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    with mpl.rc_context(_LOOK):
        layout = ConstrainedLayoutEngine(w_pad=0.14, h_pad=0.12)
        made = Figure(figsize=(width, height), layout=layout)
        FigureCanvasAgg(made)
        yield made


def save(page: Figure, path: Path) -> None:
    """Write the file `path`, of the kind that its ending says, whole or not at all.

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
