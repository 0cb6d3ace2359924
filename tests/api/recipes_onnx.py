"""Valid calls of the ONNX integration, if its packages are installed."""

from __future__ import annotations

import warnings
from functools import cache
from importlib.util import find_spec

import torch
from recipes import Recipe
from recipes_parts import folder, layer

import dynsparse as ds


def exported(**named):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the packages warn of themselves
        ds.integrations.onnx.export(**named)


def imported(file):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ds.integrations.onnx.import_(file)


def arguments():
    return {
        "model": layer().eval(),
        "args": (torch.ones(2, 12),),
        "file": folder() / "model.onnx",
        "weights": "dense",
    }


@cache  # an export takes seconds
def onnx_bytes():
    made = arguments()
    exported(**made)
    return made["file"].read_bytes()


def onnx_file():
    path = folder() / "model.onnx"
    path.write_bytes(onnx_bytes())
    return path


RECIPES = {
    "dynsparse.integrations.onnx.export": Recipe(exported, arguments, (OSError,)),
    "dynsparse.integrations.onnx.import_": Recipe(
        imported, lambda: {"file": onnx_file()}, (OSError,)
    ),
}
NOT_INSTALLED: set[str] = set()
if not all(find_spec(name) for name in ("onnx", "onnxscript", "onnx2torch")):
    NOT_INSTALLED, RECIPES = set(RECIPES), {}
