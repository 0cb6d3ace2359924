"""Keys that Hugging Face saves under other names than a model has.

`save_pretrained` of transformers 5 gives weights the names, and experts the shapes, that they had
in earlier versions, and `from_pretrained` undoes it. Whoever reads the files past `from_pretrained`
has to undo it, too; what is to be done, transformers says.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn


def as_the_model_has_them(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a file of `save_pretrained` by the names of `model.state_dict()`.

    Raises:
        ValueError: transformers cannot make one of the model's tensors of those of the file.
    """
    library = sys.modules.get("transformers")
    if library is None or not isinstance(model, library.PreTrainedModel):
        return dict(tensors)
    try:
        from transformers import conversion_mapping, core_model_loading
    except ImportError:  # before version 5 there was nothing to undo
        return dict(tensors)
    changes: list[Any] = conversion_mapping.get_model_conversion_mapping(model, add_legacy=False)
    changes = [one for one in changes if not isinstance(one, core_model_loading.PrefixChange)]
    converters = [c for c in changes if isinstance(c, core_model_loading.WeightConverter)]
    renamings = [c for c in changes if not isinstance(c, core_model_loading.WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    found: dict[str, Tensor] = {}
    made: dict[str, Any] = {}
    for name in sorted(tensors, key=core_model_loading.dot_natural_key):
        new, pattern = core_model_loading.rename_source_key(name, renamings, converters)
        if pattern is None:
            found[new] = tensors[name]
            continue
        converter = made.setdefault(new, copy.deepcopy(by_pattern[pattern]))
        converter.add_tensor(new, name, pattern, tensors[name])
    for new, converter in made.items():
        try:
            parts = converter.convert(new, model=model, config=model.config)
        except (RuntimeError, ValueError, IndexError, KeyError, TypeError) as error:
            reason = " ".join(str(error).split())[:200]
            raise ValueError(f"transformers cannot make {new!r} of the file: {reason}") from None
        found |= {key: t[0] if isinstance(t, list) else t for key, t in parts.items()}
    return found
