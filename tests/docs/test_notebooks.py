"""The notebooks of the documentation run, and are stored without outputs."""

from __future__ import annotations

import json
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
NOTEBOOKS = sorted(DOCS.rglob("*.ipynb"))


@pytest.fixture(scope="module")
def pages():
    """Import the tool that converts notebooks to pages."""
    for package in ("mkdocs", "nbclient", "nbformat", "ipykernel"):
        pytest.importorskip(package)
    spec = spec_from_file_location("pages", DOCS / "making" / "pages.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_number_of_tutorials():
    assert len(list((DOCS / "tutorials").glob("*.ipynb"))) == 3


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.stem)
def test_notebook_is_stored_without_outputs(notebook):
    for cell in json.loads(notebook.read_text())["cells"]:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.stem)
def test_notebook_runs(notebook, pages):
    done = pages.executed(notebook)
    outputs = [output for cell in done.cells for output in cell.get("outputs", ())]
    # A warning would stand on the page.
    assert [output.text for output in outputs if output.get("name") == "stderr"] == []
    shown = pages.notebook_as_markdown(done)
    for output in outputs:
        if "image/png" in output.get("data", {}):
            assert "data:image/png;base64," in shown
        elif "text" in output:
            assert output.text.rstrip() in shown
