"""The code of every configuration that is chosen, compiled for chips that are not there."""

import pytest

pytest.importorskip("triton", reason="needs Triton (x86-64 Linux): make test-gpu-kernels")

import compiled

pytestmark = pytest.mark.slow  # a second each


@pytest.mark.parametrize(
    "job",
    [*compiled.chosen(80), *compiled.chosen(90), *compiled.chosen(100)],
    ids=lambda job: job.name.replace(" ", "-"),
)
def test_it_compiles_cleanly(job):
    code = compiled.compiled(job)
    assert compiled.faults(code, job) == []
