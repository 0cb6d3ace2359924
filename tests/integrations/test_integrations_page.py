"""The examples of docs/integrations.md that need other libraries."""

import contextlib
import re
import warnings
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "integrations.md"

pytestmark = pytest.mark.filterwarnings("default")


@pytest.mark.skipif(not PAGE.exists(), reason="the documentation is not part of a wheel")
@pytest.mark.parametrize(
    ("library", "index"), [("lightning", 0), ("accelerate", 1)], ids=["lightning", "huggingface"]
)
def test_the_example_runs(library, index, capsys, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its own imports
        pytest.importorskip(library)
    code = re.findall(r"```py\n(.*?)```", PAGE.read_text(), re.S)[index]
    with contextlib.chdir(tmp_path) if hasattr(contextlib, "chdir") else contextlib.nullcontext():
        exec(compile(code, str(PAGE), "exec"), {"__name__": "__page__"})
    printed = re.search(r"(\d+) pattern updates", capsys.readouterr().out)
    assert int(printed[1]) >= 2
