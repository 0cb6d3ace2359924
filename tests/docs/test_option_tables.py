"""The tables of options in the docs are up to date."""

from pathlib import Path

import pytest
from option_tables import COMMANDS, fill, main, option_table

from dynsparse.options import flag, options_of

DOCS = Path(__file__).parents[2] / "docs"


def test_docs_are_up_to_date():
    """To update: python docs/tools/option_tables.py docs/*.md"""
    marked = {page.name: page.read_text() for page in DOCS.glob("*.md")}
    marked = {name: text for name, text in marked.items() if "<!-- options:" in text}
    assert marked.keys() == {
        "mnist.md", "mnist-transformer.md", "cifar.md", "language-model.md", "checkpoints.md",
    }  # fmt: skip
    for name, text in marked.items():
        assert fill(text) == text, name
        assert text.count("<!-- options:") == text.count("<!-- /options -->"), name


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_has_a_row(command):
    table = option_table(command)
    for name in options_of(COMMANDS[command]):
        assert table.count(f"`--{flag(name)}`") == 1
    assert {line.count("|") for line in table.splitlines()} == {4}


def test_page_is_filled_in(tmp_path):
    page = tmp_path / "page.md"
    begin = "a\n<!-- options: mnist-transformer beside mnist -->\n"
    page.write_text(f"{begin}old\n<!-- /options -->\nb\n")
    main([str(page)])
    text = page.read_text()
    assert text.startswith(f"{begin}\n| flag |")
    assert text.endswith("|\n\n<!-- /options -->\nb\n")
    assert "old" not in text
    assert "| `--epochs` | 12 of digits, 1 of the others |" in text
    assert "`--dataset`" not in text
    assert fill(text) == text
    with pytest.raises(
        ValueError,
        match="expected one of mnist, mnist-transformer, cifar, lm, got 'mn'",
    ):
        fill("<!-- options: mn -->\n<!-- /options -->")
