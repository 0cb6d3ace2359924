"""Puts this folder on the import path; helpers shared by tests are modules here."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
pytest.register_assert_rewrite("device_trainings", "masked_twins", "small_trainings")
