"""A training killed at any point resumes bit for bit.

`make faults` runs a thousand kills; this test runs a sample over all file operations.
"""

import pytest
from campaign import campaign

CASES = 50


@pytest.mark.slow
@pytest.mark.parametrize("app", ["mnist", "lm"])
def test_killed_training_resumes_exactly(server, app, tmp_path):
    found = campaign(server, app, tmp_path, CASES)
    assert found.wrong == []
    assert found.landed >= CASES, found.kills
