"""A sparse product sharded over two processors, each with half of the rows.

Both halves of the weights take the same input, which crosses the links once to each processor that
lacks it; their outputs are joined on the first.
"""

import numpy as np

import popsparse
from dynsparse import SparsePattern
from popsparse.machine import HALF, Copy, Engine, Graph, Sequence, Target, concat

ROWS, COLUMNS, BATCH, DENSITY = 512, 256, 64, 0.1


def build(target: Target) -> tuple[Graph, Sequence, list[popsparse.SparseTensor]]:
    processors = target.processors
    graph, program = Graph(target), Sequence()
    params = popsparse.FullyConnectedParams(
        popsparse.SparsityParams(1), DENSITY, BATCH, 1, COLUMNS, ROWS // processors
    )
    x = popsparse.create_fully_connected_input(graph.virtual(processor=0), "float16", params)
    halves, weights = [], []
    for processor in range(processors):
        # A view of the graph with only this processor's tiles.
        part = graph.virtual(processor=processor)
        mine = popsparse.create_fully_connected_weights(
            part, "float16", params, name=f"weights {processor}"
        )
        halves.append(popsparse.fully_connected_forward(part, mine, x, params, program))
        weights.append(mine)
        graph.add_handle(f"meta-info {processor}", mine.meta_info)
        graph.add_handle(f"values {processor}", mine.nz_values)
    first = graph.virtual(processor=0)
    y = first.add_variable(HALF, [BATCH, ROWS], "y")
    first.map_linearly(y)
    program.add(Copy(concat(halves, axis=1), y, name="join"))
    graph.add_handle("x", x)
    return graph, program, weights


def main() -> None:
    graph, program, weights = build(Target.pod(2, tiles=64))
    engine = Engine(graph, program)
    generator = np.random.default_rng(0)
    dense = []
    for processor, mine in enumerate(weights):
        pattern = SparsePattern.random((ROWS // len(weights), COLUMNS), DENSITY)
        values = generator.normal(size=pattern.nnz).astype(np.float16)
        encoded = popsparse.Partitioner(mine.plan).encode(pattern, values)
        engine.write(f"meta-info {processor}", encoded.meta_info)
        engine.write(f"values {processor}", encoded.nz_values)
        dense.append(pattern.to_scipy(values.astype(np.float64)).toarray())
    x = generator.normal(size=(BATCH, COLUMNS)).astype(np.float16)
    engine.write("x", x)
    profile = engine.run()
    wanted = x.astype(np.float64) @ np.concatenate(dense).T
    error = np.abs(engine.read("y") - wanted).max() / np.abs(wanted).max()
    print(profile.summary(12))
    print(f"largest error, of the largest element: {error:.1e}")


if __name__ == "__main__":
    main()
