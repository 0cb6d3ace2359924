"""The static program with what its runs cost: every program once, with those inside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from popsparse.machine import program as programs


@dataclass(frozen=True)
class ProgramNode:
    """One program of the tree.

    Attributes:
        kind: the name of its class: "Sequence", "Repeat", "Execute", ...
        name: its own, or "".
        step: its row in `Profile.steps`; None where it costs nothing itself.
        runs: how often it ran, from all places that it is called from.
        cycles: of all these runs, with the programs inside. A program that other places call too
            counts here by its share of the runs.
        parts: what is inside: (label, number of the node, runs from here). Labels are "then" and
            "otherwise", "case 3" and "default", "condition" and "body"; "" elsewhere.
    """

    kind: str
    name: str
    step: int | None
    runs: int
    cycles: float
    parts: list[tuple[str, int, int]]


def program_tree(
    root: programs.Program,
    rows: Mapping[programs.Program, int],
    cycles: Sequence[float],
    choices: Mapping[int, Mapping[int, int]],
    runs: int = 1,
) -> list[ProgramNode]:
    """The nodes, the root first and each before those inside it.

    Args:
        rows: the step of each program that has one.
        cycles: of each step, all runs together.
        choices: by step of a control value: how often it had which value.
        runs: of the root.
    """
    order: list[programs.Program] = []
    seen: set[programs.Program] = set()

    def visit(program: programs.Program) -> None:
        if program not in seen:
            seen.add(program)
            for part in program.parts():
                visit(part)
            order.append(program)

    visit(root)
    order.reverse()
    number = {program: i for i, program in enumerate(order)}
    counts = [0] * len(order)
    counts[0] = runs
    parts: list[list[tuple[str, int, int]]] = []
    for i, program in enumerate(order):
        chosen = choices.get(rows.get(program, -1), {})
        inside = [(label, number[p], n) for label, p, n in _parts(program, counts[i], chosen)]
        for _, part, n in inside:
            counts[part] += n
        parts.append(inside)
    spent = [0.0] * len(order)
    for i in reversed(range(len(order))):
        row = rows.get(order[i])
        spent[i] = 0.0 if row is None else cycles[row]
        spent[i] += sum(spent[part] * n / counts[part] for _, part, n in parts[i] if n)
    return [
        ProgramNode(type(p).__name__, p.name or "", rows.get(p), counts[i], spent[i], parts[i])
        for i, p in enumerate(order)
    ]


def _parts(
    program: programs.Program, runs: int, chosen: Mapping[int, int]
) -> list[tuple[str, programs.Program, int]]:
    """What is inside a program, and how often each of it ran."""
    tests = sum(chosen.values())
    true = sum(count for value, count in chosen.items() if value)
    if isinstance(program, programs.Repeat):
        return [("", program.body, runs * program.count)]
    if isinstance(program, (programs.RepeatWhileTrue, programs.RepeatWhileFalse)):
        turns = true if program.runs_while else tests - true
        return [("condition", program.condition, tests), ("body", program.body, turns)]
    if isinstance(program, programs.If):
        return [("then", program.then, true), ("otherwise", program.otherwise, tests - true)]
    if isinstance(program, programs.Switch):
        cases = [(f"case {key}", p, chosen.get(key, 0)) for key, p in program.cases.items()]
        rest = tests - sum(count for _, _, count in cases)
        return [*cases, ("default", program.default, rest)]
    return [("", part, runs) for part in program.parts()]
