"""What several tests share are modules of their own, found from each."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
pytest.register_assert_rewrite("device_trainings", "masked_twins", "small_trainings")
