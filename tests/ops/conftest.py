"""What the tests share is a module of its own, found from each."""

import sys
from pathlib import Path

import pytest

from dynsparse.ops.linear import in_force

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def tables_as_before(monkeypatch):
    """No table is in force before, and none that a test put there stays."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    in_force._in_force = None
    yield
    in_force._in_force = None
