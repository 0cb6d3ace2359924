"""A server process, shared by the tests of this folder, that forks for every training."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def server():
    from trainings import Server

    with Server() as started:
        yield started
