"""The tile machine's memory and exchange: what is written is read again, and arrives as it was."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from dynsparse.machine import UNSIGNED_INT, Copy, Engine, Graph, Target, rotation
from dynsparse.selfcheck.result import Check, checked

__all__ = ["check_tiles"]

_WORDS = 1024
_PATTERNS = {"zeros": 0x0, "ones": 0xFFFFFFFF, "0x5555...": 0x55555555, "0xAAAA...": 0xAAAAAAAA}


def check_tiles(target: Target, name: str, seed: int) -> Iterator[Check]:
    """Patterns through all tiles' memory, and words from every tile to others.

    Errors are numbers of words that are not what they should be.
    """
    tiles = target.tiles
    graph = Graph(target)
    source = graph.add_variable(UNSIGNED_INT, [tiles, _WORDS], "source", tiles=range(tiles))
    there = graph.add_variable(UNSIGNED_INT, [tiles, _WORDS], "there", tiles=range(tiles))
    random = np.random.default_rng(seed)
    shift = int(random.integers(1, max(2, tiles)))
    engine = Engine(
        graph,
        {
            "on tile": Copy(source, there),
            "neighbours": Copy(rotation(source, there, 1)),
            "far": Copy(rotation(source, there, shift)),
        },
    )
    address = np.arange(tiles * _WORDS, dtype=np.uint32).reshape(tiles, _WORDS)
    patterns = {name: np.full_like(address, word) for name, word in _PATTERNS.items()}
    patterns["each word's address"] = address
    patterns["random words"] = random.integers(0, 2**32, address.shape, dtype=np.uint32)

    def through(values: np.ndarray, program: str, moved: int) -> float:
        engine.write(source, values)
        engine.write(there, ~values)
        engine.run(program)
        wrong = (engine.read(there) != np.roll(values, -moved, 0)).sum()
        return float(wrong + (engine.read(source) != values).sum())

    for what, values in patterns.items():
        yield checked(
            "tile machine", name, f"memory: {what}", 0.0,
            lambda values=values: through(values, "on tile", 0),  # type: ignore[misc]
        )  # fmt: skip
    words = patterns["random words"]
    for what, moved in {"neighbours": 1, "far": shift}.items():
        yield checked(
            "tile machine", name, f"exchange: {what}, {moved} away", 0.0,
            lambda what=what, moved=moved: through(words, what, moved),  # type: ignore[misc]
        )  # fmt: skip
