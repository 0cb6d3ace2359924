"""Valid calls of the tile machine: targets, graphs, tensors, codelets."""

from __future__ import annotations

import numpy as np
from recipes import Recipe, call, of

from popsparse import machine as m

TILES = np.arange(4)


OWN = "own"


def target():
    return m.Target.mk2(tiles=4)


def graph():
    return m.Graph(target())


def variable(dtype=m.FLOAT, shape=(4, 2), on=None):
    return (graph() if on is None else on).add_variable(dtype, list(shape), "x", tiles=TILES)


def codelet():
    return m.Codelet(
        "twice",
        {"a": m.In(m.FLOAT), "out": m.Out(m.FLOAT)},
        compute=lambda v: np.multiply(v.a, 2, out=v.out),
        cycles=10,
    )


def wired():
    made = graph()
    a, b = (made.add_variable(m.FLOAT, [4, 2], n, tiles=TILES) for n in ("a", "b"))
    steps = made.add_compute_set("steps")
    made.add_vertices(steps, codelet(), TILES, {"a": a, "out": b})
    return made, m.Sequence(m.Copy(a, b), m.Execute(steps)), a


def vertices():
    made, _, a = wired()
    b = made.add_variable(m.FLOAT, [4, 2], "c", tiles=TILES)
    return made, made.add_compute_set("more"), {"a": a, "out": b}


def add_vertices(compute_set, codelet, tiles, values):
    made, own, edges = vertices()
    made.add_vertices(
        own if compute_set is OWN else compute_set,
        codelet,
        tiles,
        edges if values is OWN else values,
    )


def tensor():
    return variable(shape=(4, 6))


def of_tensor(method, also=(), **arguments):
    """Make a recipe of a method of a tensor [4, 6]."""
    return Recipe(
        lambda **named: getattr(tensor(), method)(**named),
        lambda: {name: make() for name, make in arguments.items()},
        also,
    )


def with_first(method, *rest):
    """Make a recipe of a method with sizes or axes, the first of which the tests replace."""

    def run(first):
        return getattr(tensor(), method)(first, *rest)

    return run


def on_graph(method, **arguments):
    """Make a recipe of a graph's method whose `tensor` must belong to it; "own" stands for one."""

    def run(**named):
        made = graph()
        own = made.add_variable("float", [4, 2], "own", tiles=0)
        if named.get("tensor") is OWN:
            named["tensor"] = own
        return getattr(made, method)(**named)

    return Recipe(run, lambda: {name: make() for name, make in arguments.items()})


def add_one_vertex(tile):
    made = graph()
    a, b = (made.add_variable(m.FLOAT, [2], name, tiles=0) for name in ("a", "b"))
    made.add_vertex(made.add_compute_set("one"), codelet(), tile, {"a": a, "out": b})


RECIPES = {
    "popsparse.machine.Target": call(
        m.Target,
        name=lambda: "mine",
        tiles=lambda: 8,
        bytes_per_tile=lambda: 1024,
        workers=lambda: 6,
        data_path_bits=lambda: 64,
        clock_hz=lambda: 1e9,
        exchange_bytes_per_cycle=lambda: 4,
        exchange_bus_tiles=lambda: 2,
    ),
    "popsparse.machine.Target.mk2": call(
        m.Target.mk2, tiles=lambda: 8, sync_cycles=lambda: 10, clock_hz=lambda: 1e9
    ),
    "popsparse.machine.Target.named": call(m.Target.named, name=lambda: "bow"),
    "popsparse.machine.Target.vector_width": of(target, "vector_width", dtype=lambda: "half"),
    "popsparse.machine.Target.seconds": of(target, "seconds", cycles=lambda: 10.0),
    "popsparse.machine.Target.pod": call(
        m.Target.pod,
        processors=lambda: 2,
        processor=lambda: "mk2",
        tiles=lambda: 8,
        link_sync_cycles=lambda: 500,
    ),
    "popsparse.machine.Target.share": call(
        lambda replicas: m.Target.pod(4, tiles=2).share(replicas), replicas=lambda: 2
    ),
    "popsparse.machine.Graph": call(m.Graph, target=target, replicas=lambda: 1),
    "popsparse.machine.Graph.virtual": call(
        lambda tiles: graph().virtual(tiles=tiles), tiles=lambda: [0, 1]
    ),
    "popsparse.machine.Graph.virtual, processor": call(
        lambda processor: m.Graph(m.Target.pod(2, tiles=2)).virtual(processor=processor),
        processor=lambda: 1,
    ),
    "popsparse.machine.Graph.add_remote_buffer": of(
        graph,
        "add_remote_buffer",
        name=lambda: "a",
        dtype=lambda: "float",
        numel=lambda: 4,
        rows=lambda: 2,
    ),
    "popsparse.machine.Graph.set_tile_mapping": Recipe(
        lambda tensor, tiles: (made := graph()).set_tile_mapping(
            variable(on=made) if isinstance(tensor, str) and tensor == "own" else tensor, tiles
        ),
        lambda: {"tensor": "own", "tiles": TILES},
    ),
    "popsparse.machine.Graph.add_compute_set": of(graph, "add_compute_set", name=lambda: "a"),
    "popsparse.machine.Graph.add_vertices": Recipe(
        lambda tiles: add_vertices(OWN, codelet(), tiles, OWN),
        lambda: {"tiles": TILES},
    ),
    "popsparse.machine.Graph.add_stream": of(
        graph,
        "add_stream",
        name=lambda: "a",
        dtype=lambda: "float",
        numel=lambda: 4,
        to_device=lambda: True,
    ),
    "popsparse.machine.ComputeSet": call(m.ComputeSet, graph=graph, name=lambda: "a"),
    "popsparse.machine.Codelet": call(
        m.Codelet,
        name=lambda: "a",
        fields=lambda: {"a": m.In(m.FLOAT)},
        compute=lambda: print,
        cycles=lambda: 10,
        runs_on=lambda: "worker",
        scalars=lambda: ["n"],
        data_dependent=lambda: False,
        code_bytes=lambda: 8,
    ),
    "popsparse.machine.In": call(lambda dtype: m.In(dtype), dtype=lambda: "half"),
    "popsparse.machine.Out": call(lambda dtype: m.Out(dtype), dtype=lambda: "half"),
    "popsparse.machine.InOut": call(lambda dtype: m.InOut(dtype), dtype=lambda: "half"),
    "popsparse.machine.DType": call(m.DType, numpy=lambda: np.dtype(np.float16)),
    "popsparse.machine.as_dtype": call(m.as_dtype, value=lambda: "half"),
    "popsparse.machine.Ragged": call(
        m.Ragged,
        tensor=lambda: graph().add_variable("float", [8], "x", 0),
        offsets=lambda: np.array([0, 3, 8]),
    ),
    "popsparse.machine.concat": Recipe(
        m.concat,
        lambda: {"tensors": [variable(on=(made := graph())), variable(on=made)], "axis": 0},
    ),
    "popsparse.machine.rotation": Recipe(
        m.rotation,
        lambda: {
            "source": variable(on=(made := graph())),
            "destination": variable(on=made),
            "shift": 1,
            "axis": 0,
        },
    ),
    "popsparse.machine.Tensor.slice": of_tensor(
        "slice", (IndexError,), start=lambda: 1, stop=lambda: 3, axis=lambda: 1
    ),
    "popsparse.machine.Tensor.[]": Recipe(
        lambda key: tensor()[key], lambda: {"key": 1}, (IndexError,)
    ),
    "popsparse.machine.Tensor.reshape": call(with_first("reshape", 3), first=lambda: 8),
    "popsparse.machine.Tensor.reshape, list": call(with_first("reshape"), first=lambda: [8, 3]),
    "popsparse.machine.Tensor.transpose": call(with_first("transpose", 0), first=lambda: 1),
    "popsparse.machine.Tensor.broadcast_to": call(
        with_first("broadcast_to", 4, 6), first=lambda: 3
    ),
    "popsparse.machine.Tensor.expand_dims": of_tensor("expand_dims", axis=lambda: 1),
    "popsparse.machine.Tensor.squeeze": Recipe(
        lambda axis: tensor().expand_dims(1).squeeze(axis), lambda: {"axis": 1}
    ),
    "popsparse.machine.Graph.add_variable": on_graph(
        "add_variable",
        dtype=lambda: "float",
        shape=lambda: [4, 2],
        name=lambda: "x",
        tiles=lambda: TILES,
    ),
    "popsparse.machine.Graph.add_constant": on_graph(
        "add_constant",
        dtype=lambda: "float",
        shape=lambda: [4, 2],
        values=lambda: 1.0,
        name=lambda: "x",
        tiles=lambda: TILES,
    ),
    "popsparse.machine.Graph.set_initial_value": on_graph(
        "set_initial_value", tensor=lambda: OWN, values=lambda: 2.0
    ),
    "popsparse.machine.Graph.map_stretches": on_graph(
        "map_stretches", tensor=lambda: OWN, tiles=lambda: [0, 1], lengths=lambda: [3, 5]
    ),
    "popsparse.machine.Graph.map_linearly": on_graph(
        "map_linearly", tensor=lambda: OWN, grain=lambda: 1, min_per_tile=lambda: 1
    ),
    "popsparse.machine.Graph.tiles_of": on_graph("tiles_of", tensor=lambda: OWN),
    "popsparse.machine.Graph.add_handle": on_graph(
        "add_handle", name=lambda: "h", tensor=lambda: OWN
    ),
    "popsparse.machine.Graph.add_vertices, all": Recipe(
        add_vertices,
        lambda: {"compute_set": OWN, "codelet": codelet(), "tiles": TILES, "values": OWN},
    ),
    "popsparse.machine.Graph.add_vertex": call(add_one_vertex, tile=lambda: 0),
}
