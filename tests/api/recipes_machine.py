"""Right calls of the tile machine: targets, graphs, programs, engines."""

from __future__ import annotations

import numpy as np
import torch
from recipes import Recipe
from recipes_core import call, model, of

from dynsparse import machine as m

TILES = np.arange(4)


def target():
    return m.Target.mk2(tiles=4)


def graph():
    return m.Graph(target())


def variable(dtype=m.FLOAT, shape=(4, 2), on=None):
    return (graph() if on is None else on).add_variable(dtype, list(shape), "x", tiles=TILES)


def word(dtype=m.BOOL):
    return graph().add_variable(dtype, [], "flag", tiles=0)


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


def engine():
    made, program, _ = wired()
    return m.Engine(made, program)


def program():
    return m.Sync()


def whole_engine(**named):
    m.Engine(**named).run()


def copied(source, destination):
    return m.Copy(source, destination)


def with_program(kind):
    return lambda **named: kind(**named).parts()


def engine_arguments():
    made, steps, _ = wired()
    return {
        "graph": made,
        "program": steps,
        "target": target(),
        "check_memory": True,
        "max_iterations": 10,
        "numerics": True,
    }


def vertices():
    made, _, a = wired()
    b = made.add_variable(m.FLOAT, [4, 2], "c", tiles=TILES)
    return made, made.add_compute_set("more"), {"a": a, "out": b}


def add_vertices(compute_set, codelet, tiles, values):
    made, own, edges = vertices()
    made.add_vertices(
        own if compute_set == "own" else compute_set,
        codelet,
        tiles,
        edges if values == "own" else values,
    )


def copy_arguments():
    made = graph()
    return {"source": variable(on=made), "destination": made.add_variable("float", [4, 2], "y", 0)}


def if_arguments():
    return {"predicate": word(), "then": program(), "otherwise": program(), "name": "if"}


def while_arguments():
    return {"condition": program(), "predicate": word(), "body": program(), "name": "while"}


def profile():
    return engine().run()


def estimate():
    return m.estimate(torch.nn.Sequential(model()), torch.ones(3, 12), target(), passes="forward")


RECIPES = {
    "dynsparse.machine.Target": call(
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
    "dynsparse.machine.Target.mk2": call(
        m.Target.mk2, tiles=lambda: 8, sync_cycles=lambda: 10, clock_hz=lambda: 1e9
    ),
    "dynsparse.machine.Target.named": call(m.Target.named, name=lambda: "bow"),
    "dynsparse.machine.Target.vector_width": of(target, "vector_width", dtype=lambda: "half"),
    "dynsparse.machine.Target.seconds": of(target, "seconds", cycles=lambda: 10.0),
    "dynsparse.machine.Graph": call(m.Graph, target=target),
    "dynsparse.machine.Graph.set_tile_mapping": Recipe(
        lambda tensor, tiles: (made := graph()).set_tile_mapping(
            variable(on=made) if isinstance(tensor, str) and tensor == "own" else tensor, tiles
        ),
        lambda: {"tensor": "own", "tiles": TILES},
    ),
    "dynsparse.machine.Graph.add_compute_set": of(graph, "add_compute_set", name=lambda: "a"),
    "dynsparse.machine.Graph.add_vertices": Recipe(
        lambda tiles: add_vertices("own", codelet(), tiles, "own"),
        lambda: {"tiles": TILES},
    ),
    "dynsparse.machine.Graph.add_stream": of(
        graph,
        "add_stream",
        name=lambda: "a",
        dtype=lambda: "float",
        numel=lambda: 4,
        to_device=lambda: True,
    ),
    "dynsparse.machine.ComputeSet": call(m.ComputeSet, graph=graph, name=lambda: "a"),
    "dynsparse.machine.Codelet": call(
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
    "dynsparse.machine.In": call(lambda dtype: m.In(dtype), dtype=lambda: "half"),
    "dynsparse.machine.Out": call(lambda dtype: m.Out(dtype), dtype=lambda: "half"),
    "dynsparse.machine.InOut": call(lambda dtype: m.InOut(dtype), dtype=lambda: "half"),
    "dynsparse.machine.DType": call(
        m.DType, name=lambda: "half", numpy=lambda: np.dtype(np.float16)
    ),
    "dynsparse.machine.as_dtype": call(m.as_dtype, value=lambda: "half"),
    "dynsparse.machine.Ragged": call(
        m.Ragged,
        tensor=lambda: graph().add_variable("float", [8], "x", 0),
        offsets=lambda: np.array([0, 3, 8]),
    ),
    "dynsparse.machine.concat": Recipe(
        m.concat,
        lambda: {"tensors": [variable(on=(made := graph())), variable(on=made)], "axis": 0},
    ),
    "dynsparse.machine.rotation": Recipe(
        m.rotation,
        lambda: {
            "source": variable(on=(made := graph())),
            "destination": variable(on=made),
            "shift": 1,
            "axis": 0,
        },
    ),
    "dynsparse.machine.Copy": Recipe(m.Copy, copy_arguments),
    "dynsparse.machine.Execute": call(
        m.Execute, compute_set=lambda: graph().add_compute_set("a"), name=lambda: "b"
    ),
    "dynsparse.machine.Sequence": Recipe(
        lambda first, name: m.Sequence(first, name=name),
        lambda: {"first": program(), "name": "all"},
    ),
    "dynsparse.machine.Sequence.add": Recipe(
        lambda more: m.Sequence().add(more), lambda: {"more": program()}
    ),
    "dynsparse.machine.Call": Recipe(
        with_program(m.Call), lambda: {"function": program(), "name": "a"}
    ),
    "dynsparse.machine.If": Recipe(with_program(m.If), if_arguments),
    "dynsparse.machine.Repeat": call(
        with_program(m.Repeat), count=lambda: 3, body=program, name=lambda: "r"
    ),
    "dynsparse.machine.RepeatWhileFalse": Recipe(with_program(m.RepeatWhileFalse), while_arguments),
    "dynsparse.machine.RepeatWhileTrue": Recipe(with_program(m.RepeatWhileTrue), while_arguments),
    "dynsparse.machine.Switch": call(
        with_program(m.Switch),
        value=lambda: word(m.UNSIGNED_INT),
        cases=lambda: {0: program()},
        default=program,
        name=lambda: "s",
    ),
    "dynsparse.machine.Sync": call(m.Sync, name=lambda: "s"),
    "dynsparse.machine.WriteUndef": call(m.WriteUndef, tensor=variable),
    "dynsparse.machine.Engine": Recipe(whole_engine, engine_arguments),
    "dynsparse.machine.Profile.summary": of(profile, "summary", max_steps=lambda: 3),
    "dynsparse.machine.estimate": Recipe(
        m.estimate,
        lambda: {
            "model": torch.nn.Sequential(model()),
            "example_input": torch.ones(3, 12),
            "target": target(),
            "dtype": "float16",
            "passes": ("forward",),
        },
    ),
}
