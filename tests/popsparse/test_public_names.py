"""A public name of popsparse means one thing."""

import pkgutil
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

import popsparse

ROOT = Path(popsparse.__file__).parent


@pytest.mark.parametrize(
    "room", ["", *(f".{one.name}" for one in pkgutil.iter_modules([str(ROOT)]) if one.ispkg)]
)
def test_no_public_name_hides_a_module(room):
    package = import_module(f"popsparse{room}")
    for one in pkgutil.iter_modules(package.__path__):
        import_module(f"{package.__name__}.{one.name}")
        assert isinstance(getattr(package, one.name), ModuleType), f"{package.__name__}.{one.name}"
