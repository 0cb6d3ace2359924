"""The machine and the versions that a figure belongs to."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

import torch

from dynsparse import native
from dynsparse.bench.load import read_cpu_times
from dynsparse.bench.precision import products_at_medium


def describe_host() -> dict[str, object]:
    """Plain types, ready for JSON."""
    kernels = native.describe()
    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "kernels": kernels["backend"],
        "isa": kernels["isa"],
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "load_known": read_cpu_times() is not None,
        "mkl": torch.backends.mkl.is_available(),
        "medium": products_at_medium(),
        "versions": {name: _version(name) for name in ("dynsparse", "torch", "numpy", "scipy")},
    }


def _version(name: str) -> str:
    if name == "torch":
        return torch.__version__  # with the build, such as +cpu
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "source tree"


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name as far as the system tells, with family and model where it is vague."""
    fields: dict[str, str] = {}
    try:
        for line in cpuinfo.read_text().splitlines():
            key, _, value = line.partition(":")
            fields.setdefault(key.strip(), value.strip())
    except OSError:
        pass
    name = fields.get("model name")
    if not name:
        return platform.processor() or platform.machine()
    if "cpu family" in fields and "model" in fields:
        return f"{name}, family {fields['cpu family']} model {fields['model']}"
    return name
