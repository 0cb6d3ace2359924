"""A matrix-vector product on the tile machine, written by hand and profiled.

The rows of the matrix are spread over groups of tiles, and its columns are cut into `PARTS`: one
vertex per row and part computes a dot product, then the parts of each row are added. The sizes are
those of Poplar's tutorial on splitting a product, whose profile counts 3,696 + 143 + 49 + 108
cycles on a machine without synchronization costs. Here workers also copy the few bytes that stay on
their tile, which that count leaves out.
"""

import numpy as np

from popsparse.machine import (
    FLOAT,
    Codelet,
    Copy,
    Engine,
    Execute,
    Graph,
    In,
    Out,
    Sequence,
    Target,
    codelets,
)

ROWS, COLUMNS, PARTS = 10_000, 1_000, 7

# A codelet: its edges, a kernel for all its vertices at once, and one vertex's cycles.
SUM = Codelet(
    "sum of parts",
    {"parts": In(FLOAT), "out": Out(FLOAT)},
    compute=lambda v: np.sum(v.parts, axis=-1, out=v.out),
    cycles=lambda v: 2 + v.parts.shape[-1],
)


def build(target: Target, parts: int = PARTS) -> tuple[Graph, Sequence]:
    graph = Graph(target)
    width = -(-COLUMNS // parts)  # columns per part, the last part padded with zeros
    group = target.tiles // parts  # tiles that share the rows of one part
    height = -(-ROWS // group)  # rows per tile
    tiles = np.arange(parts * group).reshape(parts, group)

    # Variables, each with the tile of every part. `matrix[p, g]` lives on tile p * group + g.
    matrix = graph.add_variable(FLOAT, [parts, group, height, width], "matrix", tiles=tiles)
    vector = graph.add_variable(FLOAT, [parts, width], "vector", tiles=np.roll(tiles[:, 0], 1))
    local = graph.add_variable(FLOAT, [parts, group, width], "local vector", tiles=tiles)
    partials = graph.add_variable(FLOAT, [parts, group, height], "partials", tiles=tiles)

    # Every tile of a part receives that part of the vector.
    spread = Copy(vector.expand_dims(1).broadcast_to(parts, group, width), local, name="spread")

    # One vertex per row and part, all added at once: a grid of vertices, each given by its tile.
    # Entry [p, g, r] of every field belongs to vertex [p, g, r]; rows of a tile share `local`.
    grid = (parts, group, height)
    products = graph.add_compute_set("products")
    graph.add_vertices(
        products,
        codelets.DOT,
        np.broadcast_to(tiles[:, :, None], grid),
        {"a": matrix, "b": local.expand_dims(2).broadcast_to(*grid, width), "out": partials},
    )

    # The parts of a row are added on one tile, a few rows per tile.
    rows = group * height
    share = next(n for n in range(-(-rows // target.tiles), rows + 1) if rows % n == 0)
    owners = np.arange(rows // share)
    gathered = graph.add_variable(FLOAT, [len(owners), parts, share], "gathered", tiles=owners)
    result = graph.add_variable(FLOAT, [len(owners), share], "result", tiles=owners)
    gather = Copy(partials.reshape(parts, -1, share).transpose(1, 0, 2), gathered, name="gather")
    sums = graph.add_compute_set("sums")
    graph.add_vertices(
        sums,
        SUM,
        np.broadcast_to(owners[:, None], result.shape),
        {"parts": gathered.transpose(0, 2, 1), "out": result},
    )

    return graph, Sequence(spread, Execute(products), gather, Execute(sums))


def main() -> None:
    target = Target.mk2(sync_cycles=0, exchange_bus_tiles=1)
    graph, program = build(target)
    engine = Engine(graph, program)

    rng = np.random.default_rng(0)
    matrix, vector = rng.normal(size=(ROWS, COLUMNS)), rng.normal(size=COLUMNS)
    _, group, height, width = shape = engine.read("matrix").shape
    padded = np.zeros((group * height, PARTS * width))
    padded[:ROWS, :COLUMNS] = matrix
    engine.write("matrix", padded.reshape(group, height, PARTS, width).transpose(2, 0, 1, 3))
    engine.write("vector", np.resize(np.append(vector, np.zeros(PARTS)), (PARTS, width)))

    profile = engine.run()
    error = np.abs(engine.read("result").flatten()[:ROWS] - matrix @ vector).max()
    print(f"matrix on the tiles: {list(shape)}; largest error {error:.1e}\n")
    print(profile.summary())

    print("\ncuts of the columns: cycles of the product, and of all")
    for parts in (1, 2, 4, PARTS, 16, 64):
        found = Engine(*build(target, parts), numerics=False).run()
        print(f"{parts:>3}: {found.step('products').compute:>7,.0f} {found.cycles:>7,.0f}")


if __name__ == "__main__":
    main()
