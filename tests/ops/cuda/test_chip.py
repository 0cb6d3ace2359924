"""Detection of devices that run the kernels, and warnings otherwise. Triton is not needed."""

import subprocess
import sys
import types
import warnings

import pytest
import torch

from dynsparse import SparsePattern
from dynsparse.ops.linear import LayerIndex
from dynsparse.ops.linear.cuda import blocks, chip
from dynsparse.ops.linear.cuda.chip import precision_of

CUDA = torch.device("cuda", 0)


@pytest.fixture
def pretend(monkeypatch):
    """Mock a device of some capability; clear cached answers before and after."""

    def forget():
        chip.chip_of.cache_clear()
        chip.runs_triton.cache_clear()

    def device(major, minor, hip=None, triton="3.10.1+git", compiler="gcc"):
        found = types.SimpleNamespace(
            major=major, minor=minor, multi_processor_count=108, L2_cache_size=40 << 20
        )
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(chip, "triton_version", lambda: triton)
        monkeypatch.setattr(chip.shutil, "which", lambda name: compiler)
        monkeypatch.delenv("CC", raising=False)
        forget()

    yield device
    forget()


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_capabilities_from_8_0_run_the_kernels(pretend, capability):
    pretend(*capability)
    assert chip.runs_triton(CUDA)
    assert chip.chip_of(CUDA) == chip.Chip(capability, 108, 40 << 20)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"major": 7, "minor": 5}, "need compute capability 8.0, cuda:0 has 7.5"),
        ({"major": 9, "minor": 0, "triton": None}, "Triton is not installed"),
        ({"major": 9, "minor": 0, "triton": "3.5.1"}, "need Triton 3.6 or later, got 3.5.1"),
        ({"major": 9, "minor": 0, "compiler": None}, r"needs a C compiler and Python\.h"),
        ({"major": 9, "minor": 0, "hip": "6.2"}, "written for NVIDIA GPUs"),
    ],
)
def test_missing_requirements_warn_once(pretend, given, words):
    pretend(**given)
    with pytest.warns(RuntimeWarning, match=words):
        assert not chip.runs_triton(CUDA)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not chip.runs_triton(CUDA)


def test_triton_version(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", types.SimpleNamespace(__version__="3.7.1"))
    assert chip.triton_version() == "3.7.1"
    monkeypatch.setitem(sys.modules, "triton", None)  # as where there is none
    assert chip.triton_version() is None


def test_other_devices_do_not_warn(pretend):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in ("cpu", "meta", "mps"):
            assert not chip.runs_triton(torch.device(name))


def test_supported_block_sizes_and_dtypes(pretend):
    pretend(9, 0)
    for b in (1, 4, 8, 16, 32, 64, 128, 256):
        pattern = SparsePattern.random((b, b), 1.0, block_size=b)
        p = LayerIndex(pattern.index, torch.empty(pattern.values_shape))
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            assert blocks.supports(p, dtype, CUDA) == (b in (16, 32, 64, 128))
        assert not blocks.supports(p, torch.float64, CUDA)
        assert not blocks.supports(p, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize(("current", "switched"), [(0, True), (1, False)])
def test_launch_on_the_device_of_the_tensor(monkeypatch, current, switched):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    calls = []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: calls.append(1))
    tensor = types.SimpleNamespace(is_cuda=True, device=torch.device("cuda", 1))
    found = chip.current_device(tensor)
    assert isinstance(found, torch.cuda.device) == switched
    assert not switched or found.idx == 1
    assert bool(calls) != switched  # one of both gives the thread the device's context
    assert not isinstance(chip.current_device(torch.empty(1)), torch.cuda.device)


@pytest.fixture
def matmul_precision():
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.usefixtures("matmul_precision")
def test_tf32_only_if_torch_allows_it():
    for asked, got in (("highest", "tf32x3"), ("high", "tf32"), ("medium", "tf32")):
        torch.set_float32_matmul_precision(asked)
        assert precision_of(torch.float32) == got
        assert precision_of(torch.bfloat16) == precision_of(torch.float16) == "tf32"


def test_new_precision_setting_overrides_the_old_one():
    if not hasattr(torch.backends.cuda.matmul, "fp32_precision"):
        pytest.skip("this torch has the old setting alone")
    script = (
        "import torch\n"
        "from dynsparse.ops.linear.cuda.chip import precision_of\n"
        "for asked in ('tf32', 'ieee'):\n"
        "    torch.backends.cuda.matmul.fp32_precision = asked\n"
        "    print(precision_of(torch.float32))\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["tf32", "tf32x3"]
