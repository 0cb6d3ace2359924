"""Values as they are shown in error messages: as `repr` where that is short, cut where it is not.

`repr` of what came from a file may be of any length, and of any depth. This one takes time and
memory for what it shows alone.
"""

from __future__ import annotations

from typing import Any

_TEXT = 100
_ITEMS = 12
_DEPTH = 4
_BRACKETS: dict[type, tuple[str, str]] = {
    list: ("[", "]"), tuple: ("(", ")"), set: ("{", "}"), dict: ("{", "}"),
}  # fmt: skip


def shortened(value: Any) -> str:
    """`repr(value)`, with "..." for what is too long or too deep to be read; one line."""
    return _cut(_shown(value, _DEPTH), 2 * _TEXT)


def _shown(value: Any, depth: int) -> str:
    kind = type(value)
    if kind in (str, bytes):
        return repr(value) if len(value) <= _TEXT else f"{value[:_TEXT]!r}..."
    if kind is int and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"  # Python refuses to print long ones
    kind = next((base for base in _BRACKETS if isinstance(value, base)), kind)
    if kind not in _BRACKETS:
        return _cut(repr(value), _TEXT)
    if not value:
        return repr(value)
    opening, closing = _BRACKETS[kind]
    if not depth:
        return f"{opening}...{closing}"
    items: list[str] = []
    for item in value:
        if len(items) == _ITEMS:
            items.append("...")
            break
        shown = _shown(item, depth - 1)
        if kind is dict:
            shown += f": {_shown(value[item], depth - 1)}"
        items.append(shown)
    comma = "," if kind is tuple and len(items) == 1 else ""
    return f"{opening}{', '.join(items)}{comma}{closing}"


def _cut(text: str, most: int) -> str:
    text = " ".join(text.split("\n"))
    return text if len(text) <= most else f"{text[:most]}..."
