"""A few seconds of `make sanitize`: guard pages around arrays, and one sanitized build."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dynsparse._core import native

RUN = Path(__file__).with_name("run.py")


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="maps memory as Linux does")
@pytest.mark.skipif(not native._built_isas(), reason="the compiled kernels are not built")
@pytest.mark.parametrize("way", ["guard", "address"])
def test_random_cases_pass_and_controls_are_detected(way: str, tmp_path: Path):
    if shutil.which("c++") is None:
        pytest.skip("needs a C++ compiler")
    done = subprocess.run(
        [
            *(sys.executable, str(RUN), "--quick", "--ways", way, "--seed", "0"),
            *("--seconds", "4", "--folder", str(tmp_path)),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("noticed") >= 5
    cases = re.search(r"^(\d+) cases in all", done.stdout, flags=re.MULTILINE)
    assert cases
    assert int(cases.group(1)) > 0
