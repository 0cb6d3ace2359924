"""docs/gpu.md says what the formula says, and does not call predictions measurements."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from dynsparse.ops.linear.cuda.rates import RATES

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "gpu.md"


def tables():
    path = ROOT / "benchmarks" / "gpu_parts" / "tables.py"
    spec = importlib.util.spec_from_file_location("gpu_tables", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tables_of_the_page_are_the_formulas():
    text = PAGE.read_text()
    assert tables().filled(text) == text, "run python benchmarks/gpu_parts/tables.py"
    assert text.count("<!-- /gpu -->") == len(tables().TABLES)


def test_predictions_are_called_predictions():
    """Whoever puts measured rates into the table changes what the page says of them."""
    assert not any(rates.measured for rates in RATES.values())
    assert "**Nothing on this page was measured on a GPU.**" in PAGE.read_text()
    assert "predicted there, not measured" in (ROOT / "README.md").read_text()


def test_results_of_a_run_become_tables():
    results = {
        "about": {"device": "NVIDIA H200"},
        "sections": {"blocks": {}, "graphs": {}},
        "rows": [
            {"section": "blocks", "what": "64 forward", "us": 90.0, "dense_us": 351.0,
             "ratio": 3.9, "bound_us": 54.0, "share": 0.6, "expected": 97},
            {"section": "graphs", "what": "after an update", "right": "yes"},
        ],
    }  # fmt: skip
    text = tables().measured(results)
    assert "| 64 forward | 90.0 | 54.0 | 60 % | 351.0 | 3.90x | 97 |  |" in text
    assert "NVIDIA H200" in text
    assert "| after an update |  |  |  |  |  |  |  | right yes |" in text
