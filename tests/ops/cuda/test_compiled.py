"""Compiled code of every configuration that the tables choose, without a GPU."""

import pytest

pytest.importorskip("triton", reason="needs Triton (x86-64 Linux): make test-gpu-kernels")

import compiled
from compiled import Code, Job

from dynsparse.ops.linear.cuda.configurations import Rows

CLEAN = Code(
    products=8,
    overlapped=True,
    copies=48,
    narrow_copies=0,
    buffers=frozenset({4}),
    loads=("ld.global.b32",) * 2,
    spills=0,
    registers=98,
    shared=98304,
)


@pytest.mark.slow  # a second each
@pytest.mark.parametrize(
    "job",
    [job for chip in (80, 90, 100) for job in compiled.chosen(chip)]
    + [*compiled.lying_otherwise()],
    ids=lambda job: job.name.replace(" ", "-"),
)
def test_compiled_code_has_no_defects(job):
    code = compiled.compiled(job)
    assert compiled.faults(code, job) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"products": 0}, "no wgmma.mma_async"),
        ({"overlapped": False}, "wait for each other"),
        ({"narrow_copies": 3}, "48 wide and 3 narrow"),
        ({"copies": 0}, "no asynchronous copies"),
        ({"buffers": frozenset({3, 4})}, r"tiles with \[3, 4\] buffers"),
        ({"loads": ("ld.global.v4.b32",)}, "1 loads beside the products, ld.global.v4.b32"),
        ({"loads": ("ld.global.b32",) * 64}, "64 loads beside the products"),
        ({"spills": 2}, "2 spilled registers"),
        ({"shared": 228 << 10}, "bytes of shared memory"),
    ],
    ids=lambda given: "" if isinstance(given, str) else next(iter(given)),
)
def test_defects_are_detected(change, words):
    job = Job("some", 90, "16-bit", lambda: None)
    assert compiled.faults(CLEAN, job) == []
    with pytest.raises(AssertionError, match=words):
        assert not compiled.faults(CLEAN._replace(**change), job)


def test_spills_of_layout_kernels_are_detected():
    job = Job("some", 90, "16-bit", lambda: None, multiplies=False)
    code = CLEAN._replace(products=0, copies=0)
    assert compiled.faults(code, job) == []
    assert compiled.faults(code._replace(spills=1), job) == ["1 spilled registers"]
    assert compiled.faults(CLEAN, job) == ["products"]


@pytest.mark.slow
def test_too_large_tile_spills():
    forward, _ = compiled.rows_jobs(Rows(128, 32, 4, 4), 64, "tf32x3", 80)
    code = compiled.compiled(forward)
    assert code.spills > 0
    assert any("spilled" in fault for fault in compiled.faults(code, forward))
