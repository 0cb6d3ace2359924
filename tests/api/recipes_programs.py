"""Valid calls of programs on the tile machine: control, engines, profiles."""

from __future__ import annotations

import numpy as np
import torch
from recipes import Recipe, call, of
from recipes_machine import OWN, graph, target, variable, wired
from recipes_parts import model

import popsparse
from popsparse import machine as m


def word(dtype=m.BOOL):
    return graph().add_variable(dtype, [], "flag", tiles=0)


def engine():
    made, program, _ = wired()
    return m.Engine(made, program)


def program():
    return m.Sync()


def whole_engine(**named):
    m.Engine(**named).run()


def with_program(kind):
    return lambda **named: kind(**named).parts()


def engine_arguments():
    made, steps, _ = wired()
    return {
        "graph": made,
        "program": steps,
        "check_memory": True,
        "max_iterations": 10,
        "numerics": True,
    }


def copy_arguments():
    made = graph()
    return {"source": variable(on=made), "destination": made.add_variable("float", [4, 2], "y", 0)}


def cross_arguments():
    return copy_arguments() | {"to": {0: 1}, "name": "c"}


def with_remote():
    made, program, _ = wired()
    made.add_remote_buffer("beside", "float", 4)
    return m.Engine(made, program)


def if_arguments():
    return {"predicate": word(), "then": program(), "otherwise": program(), "name": "if"}


def while_arguments():
    return {"condition": program(), "predicate": word(), "body": program(), "name": "while"}


def profile():
    return engine().run()


def run_written(what, values):
    made = engine()
    made.write("a" if what is OWN else what, values)


def run_connected(stream, end):
    made = graph()
    into = made.add_variable(m.FLOAT, [4], "x", tiles=0)
    source = made.add_stream("in", "float", 4, to_device=True)
    running = m.Engine(made, m.Copy(source, into))
    running.connect(stream, end)
    running.run()


RECIPES = {
    "popsparse.machine.EngineOptions": call(
        m.EngineOptions.parse, options=lambda: {"debug.allowOutOfMemory": "true"}
    ),
    "popsparse.machine.Engine.remote": call(
        lambda name, replica: with_remote().remote(name, replica),
        (KeyError,),
        name=lambda: "beside",
        replica=lambda: 0,
    ),
    "popsparse.machine.Copy": Recipe(m.Copy, copy_arguments),
    "popsparse.machine.Execute": call(
        m.Execute, compute_set=lambda: graph().add_compute_set("a"), name=lambda: "b"
    ),
    "popsparse.machine.Sequence": Recipe(
        lambda first, name: m.Sequence(first, name=name),
        lambda: {"first": program(), "name": "all"},
    ),
    "popsparse.machine.Sequence.add": Recipe(
        lambda more: m.Sequence().add(more), lambda: {"more": program()}
    ),
    "popsparse.machine.CrossReplicaCopy": Recipe(m.CrossReplicaCopy, cross_arguments),
    "popsparse.machine.Parallel": call(
        m.Parallel, branches=lambda: {0: program()}, name=lambda: "both"
    ),
    "popsparse.machine.PrintTensor": call(
        m.PrintTensor, tensor=variable, title=lambda: "x", name=lambda: "p"
    ),
    "popsparse.machine.ErrorProgram": call(
        m.ErrorProgram, message=lambda: "wrong", tensor=variable, name=lambda: "e"
    ),
    "popsparse.machine.Abort": call(m.Abort, message=lambda: "wrong", name=lambda: "e"),
    "popsparse.machine.AbortOnCondition": call(
        with_program(m.AbortOnCondition),
        predicate=word,
        message=lambda: "wrong",
        name=lambda: "e",
    ),
    "popsparse.machine.Call": Recipe(
        with_program(m.Call), lambda: {"function": program(), "name": "a"}
    ),
    "popsparse.machine.If": Recipe(with_program(m.If), if_arguments),
    "popsparse.machine.Repeat": call(
        with_program(m.Repeat), count=lambda: 3, body=program, name=lambda: "r"
    ),
    "popsparse.machine.RepeatWhileFalse": Recipe(with_program(m.RepeatWhileFalse), while_arguments),
    "popsparse.machine.RepeatWhileTrue": Recipe(with_program(m.RepeatWhileTrue), while_arguments),
    "popsparse.machine.Switch": call(
        with_program(m.Switch),
        value=lambda: word(m.UNSIGNED_INT),
        cases=lambda: {0: program()},
        default=program,
        name=lambda: "s",
    ),
    "popsparse.machine.Sync": call(m.Sync, name=lambda: "s"),
    "popsparse.machine.WriteUndef": call(m.WriteUndef, tensor=variable),
    "popsparse.machine.Engine": Recipe(whole_engine, engine_arguments),
    "popsparse.machine.Profile.summary": of(profile, "summary", max_steps=lambda: 3),
    "popsparse.estimate": Recipe(
        popsparse.estimate,
        lambda: {
            "model": torch.nn.Sequential(model()),
            "example_input": torch.ones(3, 12),
            "target": target(),
            "dtype": "float16",
            "passes": ("forward",),
            "update": {"pooling": "max"},
        },
    ),
    "popsparse.machine.Engine.run": Recipe(
        lambda program: engine().run(program), lambda: {"program": None}
    ),
    "popsparse.machine.Engine.read": Recipe(
        lambda what: engine().read(what), lambda: {"what": "a"}, (KeyError,)
    ),
    "popsparse.machine.Engine.write": Recipe(
        run_written, lambda: {"what": OWN, "values": np.ones((4, 2))}, (KeyError,)
    ),
    "popsparse.machine.Engine.connect": Recipe(
        run_connected, lambda: {"stream": "in", "end": np.ones(4)}, (KeyError,)
    ),
    "popsparse.machine.Profile.step": Recipe(
        lambda name: profile().step(name), lambda: {"name": "steps"}, (KeyError,)
    ),
}
