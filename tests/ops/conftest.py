"""What the tests share is a module of its own, found from each."""

import sys
from pathlib import Path

import pytest

from dynsparse.ops.linear import cost_table

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def restore_cost_table(monkeypatch):
    """No table is active before, and none that a test set stays."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    cost_table._active = None
    yield
    cost_table._active = None
