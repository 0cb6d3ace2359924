"""Puts this folder on the import path."""

import sys
from pathlib import Path

import pytest

from dynsparse.ops.linear import cost_table

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def restore_cost_table(monkeypatch):
    """Start without an active cost table, and restore that afterwards."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    cost_table._active = None
    yield
    cost_table._active = None
