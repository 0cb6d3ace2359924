"""Words and numbers of the machine report: escaped, with thousands separators and units."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any


def say(text: Any) -> str:
    """Text made safe inside HTML and inside quoted attributes."""
    return escape(str(text), quote=True)


def number(value: float, digits: int = 4) -> str:
    """Whole numbers whole, others with so many significant digits; thousands separated."""
    if value != value or value in (float("inf"), float("-inf")):
        return str(value)
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    if abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    if abs(value) < 1e-4:
        return f"{value:.3g}"
    return f"{value:,.{digits}g}"


def percent(part: float, whole: float = 1.0) -> str:
    """A share of at least 0, such as 6.3 %; empty where the whole is 0."""
    if not whole:
        return ""
    share = 100 * part / whole
    if 0 < share < 0.1:
        return "< 0.1\u00a0%"
    return f"{share:.2g}\u00a0%" if 0 < share < 1 else f"{share:,.1f}\u00a0%"


def words(name: str) -> str:
    """A key of a mapping as words: grad_input -> grad input."""
    return name.replace("_", " ").strip()


def cell(content: str, kind: str = "", title: str = "") -> str:
    """A table cell of ready HTML; kind "n" is a number, "b" a bar."""
    attributes = (f' class="{kind}"' if kind else "") + (f' title="{say(title)}"' if title else "")
    return f"<td{attributes}>{content}</td>"


def table(head: Sequence[tuple[str, str]], rows: Iterable[str], kind: str = "") -> str:
    """A table. Head: (label, kind) of each column; rows: their cells, ready."""
    top = "".join(
        f'<th scope="col"{f" class={chr(34)}{k}{chr(34)}" if k else ""}>{say(label)}</th>'
        for label, k in head
    )
    body = "".join(row if row.startswith("<tr") else f"<tr>{row}</tr>" for row in rows)
    name = f' class="{kind}"' if kind else ""
    return (
        f'<div class="scroll"><table{name}><thead><tr>{top}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def bar(parts: Iterable[tuple[str, float]], whole: float) -> str:
    """A stacked bar, as wide as its parts of the whole. Parts: (colour class, amount)."""
    pieces = "".join(
        f'<i class="{kind}" style="width:{min(100 * amount / whole, 100):.3f}%"></i>'
        for kind, amount in parts
        if whole and amount > 0
    )
    return f'<span class="bar">{pieces}</span>'


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """Colour classes and what they mean."""
    keys = "".join(f'<span><i class="{kind}"></i>{say(text)}</span>' for kind, text in entries)
    return f'<p class="legend">{keys}</p>'
