"""Small tables for notebooks."""

from __future__ import annotations

from collections.abc import Sequence


def html_table(
    rows: Sequence[Sequence[str]], head: Sequence[str] = (), below: Sequence[str] = ()
) -> str:
    """Return an HTML table; all columns but the first are aligned to the right.

    Args:
        rows: the texts of the cells.
        head: the titles of the columns.
        below: lines under the table.
    """
    from html import escape  # also imports all of HTML's character names

    def line(cells: Sequence[str], tag: str) -> str:
        tags = (
            f'<{tag} style="text-align: {"left" if i == 0 else "right"}">{escape(cell)}</{tag}>'
            for i, cell in enumerate(cells)
        )
        return f"<tr>{''.join(tags)}</tr>"

    parts = ["<table>"]
    if head:
        parts.append(f"<thead>{line(head, 'th')}</thead>")
    parts.append(f"<tbody>{''.join(line(row, 'td') for row in rows)}</tbody></table>")
    parts += [f"<div>{escape(text)}</div>" for text in below]
    return "".join(parts)
