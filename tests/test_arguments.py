"""Every parameter of every function is read: no argument is accepted and ignored.

Exceptions are interfaces with another implementation that reads the parameter, and functions that
another library calls; the latter are listed with their caller.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parent.parent / "src"

Function = ast.FunctionDef | ast.AsyncFunctionDef

CALLED_BY_OTHERS = {
    "dynsparse/apps/common/run.py": {"handle_interrupt"},  # signal
    "dynsparse/cli/app.py": {"_show_warning"},  # warnings
    "dynsparse/nn/hf_quantizer.py": {
        "convert",
        "postprocess_model",
        "validate_environment",
    },  # transformers
    "dynsparse/integrations/huggingface.py": {
        "on_init_end",
        "on_train_begin",
        "on_log",
        "on_train_end",
    },  # Trainer
    "dynsparse/integrations/keras/callbacks.py": {
        "on_train_begin",
        "on_epoch_begin",
        "on_epoch_end",
        "on_train_end",
    },  # Keras
    "dynsparse/integrations/lightning.py": {"setup", "on_fit_end", "on_exception"},  # Lightning
    "dynsparse/integrations/onnx/importing.py": {"_"},  # onnx2torch
    "dynsparse/_core/logs.py": {"stream"},  # logging.StreamHandler
    "dynsparse/ops/conv/autograd.py": {"_flops"},  # torch's FLOP counter
    "popsparse/machine/lowering.py": {"_WriteUndef", "run"},  # one of several, by class
    "dynsparse/nn/attend.py": {"load_pattern"},  # torch's hooks before a state is loaded
    "dynsparse/nn/linear.py": {"__torch_dispatch__", "weight"},  # torch; a setter that raises
    # Hooks of torch.
    "dynsparse/tracing/models.py": {"_begin_forward", "_end_forward", "_begin_backward"},
    "dynsparse/training/layer_shards.py": {
        "_note_wrapper"
    },  # torch's hooks on the registration of modules
    "dynsparse/training/telemetry.py": {"_update"},  # SparseTrainer.on_update
}
"""File -> functions that are called by others, or through a table, with more than they need."""


def functions(file: Path) -> Iterator[tuple[Function, bool]]:
    """Yield every function and whether it is a method."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield child, isinstance(node, ast.ClassDef)


def parameters(function: Function) -> set[str]:
    given = function.args
    every = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
    names = {one.arg for one in every if one is not None}
    return {name for name in names - {"self", "cls"} if not name.startswith("_")}


def read(function: Function) -> set[str]:
    found = [node for part in function.body for node in ast.walk(part)]
    names = {n.id for n in found if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Store)}
    return parameters(function) if "locals" in names else names


def is_declared_only(function: Function) -> bool:
    """Return whether the body of an abstract function has only a docstring or raises an error."""
    said = [n for n in function.body if not (isinstance(n, ast.Expr)
            and isinstance(n.value, ast.Constant))]  # fmt: skip
    return not said or all(
        isinstance(n, ast.Pass) or (isinstance(n, ast.Raise) and "NotImpl" in ast.unparse(n))
        for n in said
    )


def is_torchs(function: Function) -> bool:
    """Return whether torch or Python determines the arguments: functions registered with
    torch.library, methods of autograd functions, special methods."""
    by_torch = ("register_kernel", "register_autograd", "overload")
    said = " ".join(ast.unparse(one) for one in function.decorator_list)
    names = ("_setup_context", "setup_context", "_setup_double", "_no_double_backward",
             "_forward_shapes", "_backward_shapes")  # fmt: skip
    return (
        any(word in said for word in by_torch)
        or function.name in names
        or function.name in ("__exit__", "__deepcopy__", "forward", "backward")
    )


def unread(root: Path) -> set[tuple[str, str, str]]:
    """Return (file, function, parameter) of all unread parameters that no interface requires.

    A method may leave out a parameter that another method of its name reads.
    """
    files = {
        file.relative_to(root).as_posix(): list(functions(file)) for file in root.rglob("*.py")
    }
    asked: set[tuple[str, str]] = set()
    for function in (one for found in files.values() for one, is_method in found if is_method):
        taken = read(function) if not is_declared_only(function) else parameters(function)
        asked |= {(function.name, name) for name in parameters(function) & taken}
    return {
        (file, function.name, name)
        for file, found in files.items()
        for function, is_method in found
        if not is_declared_only(function) and not is_torchs(function)
        for name in parameters(function) - read(function)
        if not is_method or (function.name, name) not in asked
    }


@pytest.mark.slow
def test_every_parameter_is_read():
    found = unread(SOURCE)
    listed = {(file, name) for file, names in CALLED_BY_OTHERS.items() for name in names}
    assert {one for one in found if one[:2] not in listed} == set()
    # An entry that is no longer needed would hide what comes after it.
    assert listed - {one[:2] for one in found} == set()
