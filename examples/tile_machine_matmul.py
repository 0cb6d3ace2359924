"""A dense product on the tile machine, its profile, and one that does not fit.

The sizes are those of Poplar's tutorial on profiling: 900 x 600 times 600 x 300 runs; with
9,000 x 7,500 the tiles run out of memory. The machine reports this before anything runs, with the
step, the tile and the variables.
"""

from popsparse.machine import FLOAT, Engine, Graph, OutOfMemoryError, Sequence, Target
from popsparse.tensor_ops import matmul


def build(m: int, k: int, n: int, target: Target) -> tuple[Graph, Sequence]:
    """Operands are spread over the tiles in order; the product moves them where it needs them."""
    graph, program = Graph(target), Sequence()
    a = graph.add_variable(FLOAT, [m, k], "a")
    b = graph.add_variable(FLOAT, [k, n], "b")
    for operand in (a, b):
        graph.map_linearly(operand)
    graph.add_handle("c", matmul(graph, a, b, program))
    return graph, program


def main() -> None:
    target = Target.mk2()
    profile = Engine(*build(900, 600, 300, target), numerics=False).run()
    print(profile.summary())
    print(f"{2 * 900 * 600 * 300 / profile.seconds / 1e12:.1f} TFLOP/s\n")

    # With this option the engine reports on a program that does not fit; running it is an error.
    options = {"debug.allowOutOfMemory": "true"}
    engine = Engine(*build(9000, 7500, 300, target), numerics=False, options=options)
    print(engine.report().summary())
    try:
        engine.run()
    except OutOfMemoryError as error:
        print(error)


if __name__ == "__main__":
    main()
