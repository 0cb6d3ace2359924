"""The tests of this folder share one process that forks itself for every training."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def server():
    from trainings import Server

    with Server() as started:
        yield started
