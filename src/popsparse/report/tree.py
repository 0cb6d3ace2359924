"""The static program as a tree: what ran how often, at what cost, and what did not run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from popsparse.machine import ProgramNode
from popsparse.report.format import bar, number, percent, say
from popsparse.report.plain import amount, listed, need

_MOST_NODES = 600
_MOST_DEPTH = 60
_CLASSES = {"Execute": "compute", "Copy": "exchange", "Sync": "sync"}
"""Kinds that have the colour of what they cost."""


def read_program(nodes: Any, steps: int, what: str) -> list[ProgramNode]:
    """From the "tree" of `Profile.to_dict`, or JSON of it.

    Raises:
        TypeError, ValueError: something else; the message says where.
    """
    rows = listed(nodes, what)
    found = []
    for i, one in enumerate(rows):
        here = f"{what}, node {i}"
        step = need(one, "step", here)
        if step is not None:
            step = int(amount(step, f"{here}, step"))
            if step >= steps:
                raise ValueError(f"{here}: step {step} of {steps}")
        parts = []
        for part in listed(need(one, "parts", here), f"{here}, parts"):
            if not isinstance(part, (list, tuple)) or len(part) != 3:
                raise ValueError(f"{here}, parts must be label, node and runs")
            child = int(amount(part[1], f"{here}, a part"))
            # What is inside comes later, so that no program contains itself.
            if not i < child < len(rows):
                raise ValueError(f"{here}: part {child} of {len(rows)} nodes")
            parts.append((str(part[0]), child, int(amount(part[2], f"{here}, runs of a part"))))
        found.append(
            ProgramNode(
                str(need(one, "kind", here)),
                str(need(one, "name", here)),
                step,
                int(amount(need(one, "runs", here), f"{here}, runs")),
                amount(need(one, "cycles", here), f"{here}, cycles"),
                parts,
            )
        )
    return found


def steps_of(program: Sequence[ProgramNode]) -> list[int]:
    """The steps of a program in its order, those of branches that were not taken included."""
    found: dict[int, None] = {}
    seen: set[int] = set()
    waiting = [0] if program else []
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        one = program[node]
        if one.step is not None:
            found[one.step] = None
        waiting += [child for _, child, _ in reversed(one.parts)]
    return list(found)


def tree_section(program: Sequence[ProgramNode], step_names: Sequence[str], total: float) -> str:
    """Nested lists that fold: what ran is open, what several places call is shown once."""
    shown: set[int] = set()
    lines = 0
    whole = True

    def line(node: int, label: str, runs: int, depth: int) -> str:
        nonlocal lines, whole
        one = program[node]
        if one.kind == "Sequence" and not one.parts:
            return ""
        if lines == _MOST_NODES or depth > _MOST_DEPTH:
            whole = False
            return ""
        lines += 1
        cycles = one.cycles * runs / one.runs if one.runs else 0.0
        colour = _CLASSES.get(one.kind, "")
        name = one.name or ("" if one.step is None else step_names[one.step])
        text = f"<em>{say(label)}:</em> " if label else ""
        text += f'<b class="kind {colour}">{say(one.kind)}</b> {say(name)}'
        if not runs:
            inside = "" if node in shown else _inside(one, depth)
            return _row(text, '<span class="none">not taken</span>', inside, "no")
        figures = f"<span>{runs:,} ×</span><span>{number(cycles)}</span>"
        figures += f"<span>{percent(cycles, total)}</span>" + bar([("compute", cycles)], total)
        if node in shown:
            return _row(text + " <small>as above</small>", figures, "", "")
        shown.add(node)
        return _row(text, figures, _inside(one, depth), "open")

    def _inside(one: ProgramNode, depth: int) -> str:
        return "".join(line(child, label, runs, depth + 1) for label, child, runs in one.parts)

    html = line(0, "", program[0].runs, 0) if program else ""
    if not whole:
        html += f"<p>{lines:,} of {len(program):,} programs are shown.</p>"
    return (
        "<p>How often each program ran and what all its runs cost, with those inside it. "
        "Fold by clicking.</p>"
        '<div class="tree"><p class="head"><span>runs</span><span>cycles</span>'
        f"<span>share</span><span></span></p>{html}</div>"
    )


def _row(text: str, figures: str, inside: str, state: str) -> str:
    line = f'<span class="what">{text}</span><span class="figures">{figures}</span>'
    if not inside:
        return f'<p class="{state}">{line}</p>' if state == "no" else f"<p>{line}</p>"
    opened = " open" if state == "open" else ""
    kind = ' class="no"' if state == "no" else ""
    return f"<details{opened}{kind}><summary>{line}</summary>{inside}</details>"
