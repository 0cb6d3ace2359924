"""Variables, copies and a vertex on the tile machine."""

import numpy as np

from popsparse.machine import (
    FLOAT,
    INT,
    Codelet,
    Copy,
    Engine,
    Execute,
    Graph,
    In,
    Out,
    Sequence,
    Target,
)

graph = Graph(Target.mk2(tiles=4))

# Variables live on tiles: element i of v1 on tile i, the rows of a matrix on one tile each.
v1 = graph.add_variable(FLOAT, [4], "v1", tiles=range(4))
matrix = graph.add_variable(FLOAT, [4, 4], "matrix", tiles=range(4))
v4 = graph.add_variable(INT, [10], "v4")
graph.map_linearly(v4)
start = graph.add_constant(FLOAT, [4], [1.0, 1.5, 2.0, 2.5], "start", tiles=0)

# Slices are views: row 1 of the matrix, without its first element, is the target of a copy.
program = Sequence(
    Copy(start, v1, name="start to v1"),
    Copy(v1[:3], matrix[1, 1:], name="v1 into row 1"),
)

# The host streams ten numbers at a time into v4 and back.
to_device = graph.add_stream("numbers", INT, 10, to_device=True)
to_host = graph.add_stream("echo", INT, 10, to_device=False)
program.add(Copy(to_device, v4), Copy(v4, to_host))

# A vertex accesses only its tile's memory, so its inputs are copied there first. This one sums.
SUM = Codelet(
    "sum",
    {"x": In(FLOAT), "out": Out(FLOAT)},
    compute=lambda v: v.out.__setitem__(..., v.x.sum(-1)),
    cycles=20,
)
suffix_sums = graph.add_variable(FLOAT, [4], "suffix sums", tiles=range(4))
sums = graph.add_compute_set("sums")
inputs = []
for i in range(4):
    here = graph.add_variable(FLOAT, [4 - i], f"input {i}", tiles=i)
    inputs.append((v1[i:], here))
    graph.add_vertex(sums, SUM, i, {"x": here, "out": suffix_sums[i]})
program.add(Copy(inputs, name="inputs"), Execute(sums))

engine = Engine(graph, program)
engine.write("matrix", 0)
engine.connect("numbers", np.arange(20).reshape(2, 10))
engine.connect("echo", lambda values: print("echo", values))
for _ in range(2):
    profile = engine.run()

print("v1", engine.read("v1"))
print(engine.read("matrix"))
print("suffix sums", engine.read("suffix sums"))
print(profile.summary())
