"""Killed anywhere, a training resumes to the same bits.

`make faults` does a thousand; here a part of them, spread over all operations on files.
"""

import pytest
from campaign import campaign

CASES = 100


@pytest.mark.slow
@pytest.mark.parametrize("app", ["mnist", "lm"])
def test_a_killed_training_resumes_to_the_same_bits(server, app, tmp_path):
    found = campaign(server, app, tmp_path, CASES)
    assert found.wrong == []
    assert found.landed >= CASES, found.kills
