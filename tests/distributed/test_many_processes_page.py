"""The page "Many processes": its program runs on two ranks, its tables are the formulas'."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dynsparse.apps.rank_tables import fill, main

PAGE = Path(__file__).parents[2] / "docs" / "many-processes.md"

pytestmark = pytest.mark.skipif(
    not PAGE.exists(), reason="the documentation is not part of a wheel"
)


def test_the_program_runs_on_two_ranks(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("\n".join(re.findall(r"```py\n(.*?)```", PAGE.read_text(), re.S)))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*torchrun, str(program)],
        capture_output=True,
        text=True,
        timeout=150,
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("2 ranks, 4,096 samples a step: ") == 1


def test_the_tables_are_up_to_date():
    """If not: python -m dynsparse.apps.rank_tables docs/many-processes.md"""
    text = PAGE.read_text()
    assert text.count("<!-- ranks: ") == text.count("<!-- /ranks -->") == 2
    assert fill(text) == text


def test_a_page_is_filled_in(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- ranks: memory -->\nold\n<!-- /ranks -->\nb\n")
    main([str(page)])
    text = page.read_text()
    assert "old" not in text
    assert text.startswith("a\n<!-- ranks: memory -->\n\n| ranks | dense")
    assert text.endswith("|\n\n<!-- /ranks -->\nb\n")
    with pytest.raises(ValueError, match="expected one of traffic, memory, got 'other'"):
        fill("<!-- ranks: other -->\n<!-- /ranks -->")
