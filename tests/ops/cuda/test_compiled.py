"""The code of every configuration that is chosen, compiled for chips that are not there."""

import pytest

pytest.importorskip("triton", reason="needs Triton (x86-64 Linux): make test-gpu-kernels")

import compiled

pytestmark = pytest.mark.slow  # a second each


@pytest.mark.parametrize(
    "job",
    [job for chip in (80, 90, 100) for job in compiled.chosen(chip)]
    + [*compiled.lying_otherwise()],
    ids=lambda job: job.name.replace(" ", "-"),
)
def test_it_compiles_cleanly(job):
    code = compiled.compiled(job)
    assert compiled.faults(code, job) == []
