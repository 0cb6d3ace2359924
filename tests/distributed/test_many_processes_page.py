"""The program of the page "Many processes" runs on two ranks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

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
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
