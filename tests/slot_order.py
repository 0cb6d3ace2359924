"""Sort states into row-major order, to compare them independently of their slot order."""

from collections.abc import Mapping

from torch import Tensor


def row_major(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a state dict with `rows`, `cols` and `values` sorted by row and column."""
    found = dict(state)
    for key in state:
        if key.endswith("rows"):
            names = [key.removesuffix("rows") + name for name in ("rows", "cols", "values")]
            rows, cols = (state[name].long() for name in names[:2])
            order = (rows * 2**31 + cols).argsort()
            found |= {name: state[name][order.to(state[name].device)] for name in names}
    return found
