"""Finding, choosing and loading the compiled kernels."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from kernels_of import needs_kernels

from dynsparse._core import native
from dynsparse.nn import SparseLinear

built = pytest.mark.skipif(
    not native.describe()["available"], reason="the compiled kernels are not built"
)


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Reset to the state of a new process: no library selected or loaded."""
    caches = (native.load, native._choose, native.load_isa)
    for cached in caches:
        cached.cache_clear()
    monkeypatch.delenv("DYNSPARSE_ISA", raising=False)
    yield monkeypatch
    for cached in caches:
        cached.cache_clear()


V2 = "fpu cx16 lahf_lm popcnt sse4_1 sse4_2 ssse3"
V3 = V2 + " avx avx2 bmi1 bmi2 f16c fma abm movbe"
V4 = V3 + " avx512f avx512bw avx512cd avx512dq avx512vl"


@pytest.mark.parametrize(
    ("flags", "levels"),
    [
        ("fpu sse2", []),
        (V2, ["v2"]),
        (V3, ["v3", "v2"]),
        (V4, ["v4", "v3", "v2"]),
        (V4.replace("avx512vl", ""), ["v3", "v2"]),
        # A hypervisor may hide what a lower level needs: the higher level is then out too.
        (V4.replace(" fma", ""), ["v2"]),
    ],
)
def test_levels_follow_the_flags(flags: str, levels: list[str]) -> None:
    assert native._x86_levels(set(flags.split())) == levels


@built
def test_best_library_is_selected(fresh: pytest.MonkeyPatch) -> None:
    description = native.describe()
    assert native.load() is not None
    assert description["backend"] == "native"
    assert description["isa"] == description["available"][0]  # type: ignore[index]
    assert description["threads"] == torch.get_num_threads()


@built
def test_every_available_isa_can_be_selected(fresh: pytest.MonkeyPatch) -> None:
    for isa in native.describe()["available"]:  # type: ignore[attr-defined]
        native._choose.cache_clear()
        fresh.setenv("DYNSPARSE_ISA", isa.upper())
        assert native.describe()["isa"] == isa


def _route(dtype: torch.dtype = torch.float32, device: str = "cpu") -> str:
    layer = SparseLinear(8, 8, 0.5, dtype=dtype, device=device)
    return layer.kernel(4)


def test_none_computes_through_torch_without_a_warning(fresh: pytest.MonkeyPatch) -> None:
    fresh.setenv("DYNSPARSE_ISA", "none")
    assert native.load() is None
    assert native.describe()["backend"] == "fallback"
    assert native.describe()["reason"] == "DYNSPARSE_ISA=none"
    assert _route() == "torch"


def test_unknown_isa_raises(fresh: pytest.MonkeyPatch) -> None:
    fresh.setenv("DYNSPARSE_ISA", "avx2")
    with pytest.raises(
        ValueError, match=r"must be one of v2, v3, v4, neon, base or none, got 'avx2'"
    ):
        native.load()


def test_unsupported_isa_raises(fresh: pytest.MonkeyPatch) -> None:
    fresh.setattr(native, "supported_isas", lambda: ("v3", "v2"))
    fresh.setenv("DYNSPARSE_ISA", "v4")
    with pytest.raises(ValueError, match="DYNSPARSE_ISA is v4, but this machine runs v3, v2"):
        native.load()


def test_missing_selected_library_raises(fresh: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fresh.setattr(native, "_FOLDER", tmp_path)
    isa = native.supported_isas()[0]
    fresh.setenv("DYNSPARSE_ISA", isa)
    with pytest.raises(OSError, match=f"kernels for {isa} are not in this installation"):
        native.load()


def test_without_libraries_it_warns_once_and_falls_back(
    fresh: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fresh.setattr(native, "_FOLDER", tmp_path)
    with pytest.warns(RuntimeWarning, match="compiled kernels, .*: they are not in this install"):
        native.warn_if_absent()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert native.load() is None
        native.warn_if_absent()


def test_warning_and_description_give_the_reason(fresh: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "left_out.txt").write_text("they need a better compiler than ö\n", encoding="utf-8")
    fresh.setattr(native, "_FOLDER", tmp_path)
    isa = native.supported_isas()[0]
    fresh.setenv("DYNSPARSE_ISA", isa)
    native.warn_if_absent()  # whoever chooses hears of it when it is used
    with pytest.raises(OSError, match=f"for {isa} are not in .*they need a better compiler than ö"):
        native.load()
    fresh.delenv("DYNSPARSE_ISA")
    with pytest.warns(RuntimeWarning, match="slower: they need a better compiler than ö. To fix"):
        native.warn_if_absent()
    assert native.describe()["reason"] == "they need a better compiler than ö"


def test_kernels_for_other_machines_are_named(fresh: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "libdynsparse_v4.so").write_bytes(b"")
    (tmp_path / "left_out.txt").write_text("of an earlier build")
    fresh.setattr(native, "_FOLDER", tmp_path)
    fresh.setattr(native, "supported_isas", lambda: ())
    native.warn_if_absent()  # they are there; whether they run shows when they are loaded
    with pytest.warns(RuntimeWarning, match="they are for v4, which this machine does not run"):
        assert native.load() is None


@pytest.mark.parametrize(
    ("machine", "isas"),
    [("aarch64", ("neon",)), ("arm64", ("neon",)), ("riscv64", ("base",)), ("ppc64le", ("base",))],
)
def test_other_machines_have_one_instruction_set(
    machine: str, isas: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native.platform, "machine", lambda: machine)
    assert native.supported_isas.__wrapped__() == isas


def test_warning_names_a_broken_library(fresh: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for isa in native.supported_isas():
        (tmp_path / f"libdynsparse_{isa}.so").write_bytes(b"not a library")
    fresh.setattr(native, "_FOLDER", tmp_path)
    with pytest.warns(RuntimeWarning, match=r"libdynsparse_\w+\.so"):
        assert native.load() is None


@needs_kernels
def test_compiled_kernels_support_float32_on_the_cpu_only() -> None:
    assert _route() != "torch"
    assert _route(dtype=torch.float16) != "torch"
    assert _route(dtype=torch.float64) == "torch"
    assert _route(device="meta") == "dense"  # of the ways off the CPU


ONE_RUNTIME = """
import torch
from dynsparse._core import native
from dynsparse.ops.linear import LayerIndex
from dynsparse.ops.linear.cpu import KERNELS
from dynsparse.pattern import SparsePattern

sparse = KERNELS["sparse"]

torch.set_num_threads(2)
pattern = SparsePattern.random((256, 256), 0.2)
values, x = torch.randn(pattern.nnz), torch.randn(128, 256)
for _ in range(3):
    y = torch.relu(sparse.forward(x, values, LayerIndex(pattern.index, values), None))
    sparse.backward(y, x, values, LayerIndex(pattern.index, values), True, True)
    x = (y @ torch.randn(256, 256)).tanh()
with open("/proc/self/maps") as maps:
    files = {line.split(maxsplit=5)[5].strip() for line in maps if line.count("/")}
names = {file.rpartition("/")[2] for file in files}
assert any(name.startswith("libdynsparse_") for name in names), names
print(sorted(file for file in files
             if file.rpartition("/")[2].startswith(("libgomp", "libiomp", "libomp"))))
"""


@pytest.mark.slow
@built
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/maps")
@pytest.mark.parametrize("isa", native.supported_isas())
def test_torch_and_kernels_share_one_openmp_runtime(isa: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ONE_RUNTIME],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "DYNSPARSE_ISA": isa},
    )
    assert done.returncode == 0, done.stderr
    runtimes = eval(done.stdout)
    assert len(runtimes) == 1, runtimes
