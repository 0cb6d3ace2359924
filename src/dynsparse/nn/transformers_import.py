"""Registers the quantizer of `dynsparse.nn.hf_quantizer` with transformers, which has no entry
points for it, and converts names of weights as transformers does."""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from dynsparse._core.checks import describe_error

_WATCHED = "transformers.modeling_utils"
_QUANTIZER = "dynsparse.nn.hf_quantizer"


def _register() -> None:
    try:
        import_module(_QUANTIZER)
    except ImportError:  # before version 5
        return


class _Finder(MetaPathFinder):
    """Registers the quantizer once transformers has loaded the classes that it extends."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != _WATCHED:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                sys.meta_path.remove(self)
                _register()

            spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


def register_on_import() -> None:
    """Register the quantizer now if transformers is loaded, otherwise when it is."""
    if _WATCHED in sys.modules:
        _register()
    else:
        sys.meta_path.insert(0, _Finder())


def set_quantizers(model: nn.Module) -> None:
    """Let `save_pretrained` save the sparse layers and split experts of a model of transformers."""
    quantizer = sys.modules.get(_QUANTIZER)
    if quantizer is not None:
        quantizer.set_quantizers(model)


def convert_names(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename and convert the tensors of a `save_pretrained` file to those of `model.state_dict()`.

    `save_pretrained` of transformers 5 writes weights under the names, and experts in the shapes,
    of earlier versions, and `from_pretrained` converts them back. This does the same, with the
    conversions that transformers lists.

    Raises:
        ValueError: transformers cannot make one of the model's tensors from those of the file.
    """
    library = sys.modules.get("transformers")
    if library is None or not isinstance(model, library.PreTrainedModel):
        return dict(tensors)
    try:
        from transformers import conversion_mapping, core_model_loading
    except ImportError:  # before version 5 there are no conversions
        return dict(tensors)
    changes: list[Any] = conversion_mapping.get_model_conversion_mapping(model, add_legacy=False)
    changes = [c for c in changes if not isinstance(c, core_model_loading.PrefixChange)]
    converters = [c for c in changes if isinstance(c, core_model_loading.WeightConverter)]
    renamings = [c for c in changes if not isinstance(c, core_model_loading.WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    converted: dict[str, Tensor] = {}
    pending: dict[str, Any] = {}
    for name in sorted(tensors, key=core_model_loading.dot_natural_key):
        new, pattern = core_model_loading.rename_source_key(name, renamings, converters)
        if pattern is None:
            converted[new] = tensors[name]
            continue
        converter = pending.setdefault(new, copy.deepcopy(by_pattern[pattern]))
        converter.add_tensor(new, name, pattern, tensors[name])
    for new, converter in pending.items():
        try:
            parts = converter.convert(new, model=model, config=model.config)
        except (RuntimeError, ValueError, IndexError, KeyError, TypeError) as error:
            reason = describe_error(error)
            raise ValueError(f"transformers cannot make {new!r} from the file: {reason}") from None
        converted |= {key: t[0] if isinstance(t, list) else t for key, t in parts.items()}
    return converted
