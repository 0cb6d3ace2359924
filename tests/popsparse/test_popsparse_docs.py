"""The code of the page on sparse products runs, in order."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "popsparse.md"


@pytest.mark.skipif(not PAGE.exists(), reason="the documentation is not part of a wheel")
def test_the_page_runs(capsys):
    space: dict = {}
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    assert len(blocks) == 3
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), space)
    assert space["y"].shape == (32, 256)
    assert space["dw"].shape == tuple(space["values"].shape)
    assert space["profile"].cycles > 0
    assert "Cycles" in capsys.readouterr().out
