"""The C interface: csrc/api.h, the libraries and the table in `native` agree."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from dynsparse._core import native

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
HEADER = "".join((CSRC / name).read_text() for name in ("api.h", "api_update.h"))

SCALARS = {
    "int": ctypes.c_int,
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "uint64_t": ctypes.c_uint64,
    "float": ctypes.c_float,
}


def ctype_of(declared: str) -> type | None:
    """Return the ctypes type of a C type, which a parameter name may follow."""
    if "*" in declared:
        return ctypes.c_void_p
    words = declared.split()
    return None if words[0] == "void" else SCALARS[words[0]]


def declarations() -> dict[str, tuple[type | None, list[type | None]]]:
    text = re.sub(r"/\*.*?\*/", " ", HEADER, flags=re.DOTALL)
    # The macro's own definitions are no declarations.
    text = re.sub(r"^#.*$", " ", text, flags=re.MULTILINE)
    found = re.findall(r"DYNSPARSE_API\s+([^;(]*?)(\w+)\s*\(([^)]*)\)\s*;", text)
    assert len(found) == text.count("DYNSPARSE_API"), "a declaration that this test cannot read"
    return {
        name: (ctype_of(result), [ctype_of(p) for p in arguments.split(",") if p.strip() != "void"])
        for result, name, arguments in found
    }


def test_native_table_equals_the_header():
    declared = declarations()
    assert set(native._SIGNATURES) == set(declared)
    for name, signature in native._SIGNATURES.items():
        assert signature == declared[name], name


@pytest.mark.parametrize("isa", native._built_isas())
def test_library_exports_the_declared_functions(isa: str):
    if shutil.which("nm") is None:
        pytest.skip("needs nm")
    listing = subprocess.run(
        ["nm", "-D", "--defined-only", str(native._library_path(isa))],
        capture_output=True,
        check=True,
        text=True,
    ).stdout
    names = {line.split()[-1].removeprefix("_") for line in listing.splitlines()}
    assert names == set(declarations())


def test_mask_expansion_by_instruction_set():
    for isa in native.describe()["available"]:  # type: ignore[attr-defined]
        assert native.load_isa(isa).dynsparse_masks_expand() == (isa in ("v3", "v4"))


def sources() -> list[Path]:
    return sorted([*CSRC.rglob("*.h"), *CSRC.rglob("*.cpp")])


def test_every_source_is_built_and_below_the_line_limit():
    listed = (CSRC / "CMakeLists.txt").read_text()
    for path in sources():
        text = path.read_text()
        assert text.count("\n") <= 400, path
        assert max(map(len, text.splitlines())) <= 100, path
        if path.suffix == ".cpp":
            assert path.relative_to(CSRC).as_posix() in listed, path


def test_sources_that_define_exported_functions_include_the_header():
    defined = re.compile(r"^[\w ]+\bdynsparse_\w+\(", flags=re.MULTILINE)
    exporting = [p for p in sources() if p.suffix == ".cpp" and defined.search(p.read_text())]
    assert exporting
    for path in exporting:
        assert '#include "api.h"' in path.read_text(), path


def test_header_is_plain_c():
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    flags = ["-x", "c", "-std=c99", "-pedantic", "-Wall", "-Wextra", "-Werror", "-fsyntax-only"]
    subprocess.run([compiler, *flags, str(CSRC / "api.h")], check=True)


def test_referenced_paths_in_csrc_exist():
    named = re.compile(r"\bcsrc/[\w./]*\w")
    texts = [*(ROOT / "src").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]
    texts += [*(ROOT / "docs").glob("*.md"), *ROOT.glob("*.md")]
    for path in texts:
        for place in named.findall(path.read_text()):
            assert (ROOT / place).exists(), f"{path.relative_to(ROOT)} names {place}"
