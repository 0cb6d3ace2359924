"""What the tests share is a module of its own, found from each."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
pytest.register_assert_rewrite("machine_pages")
