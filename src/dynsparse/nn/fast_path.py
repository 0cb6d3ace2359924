"""torch's fused path for transformer encoders in evaluation, which takes dense weights only.

`nn.TransformerEncoderLayer` hands the weights of its parts to one fused operator, and
`nn.TransformerEncoder` packs padded batches for it. Both ask flags first; these are set to "no"
where a part is sparse, and set back when it is dense again.
"""

from __future__ import annotations

from torch import nn

from dynsparse.nn.linear import SparseLinear

_FLAGS: tuple[tuple[type[nn.Module], str], ...] = (
    (nn.TransformerEncoderLayer, "activation_relu_or_gelu"),  # read for the fused path alone
    (nn.TransformerEncoder, "use_nested_tensor"),
)
_BEFORE = "_fast_path_before_sparsify"


def forbid_fast_paths(model: nn.Module) -> None:
    """Keep every encoder with a sparse part from the fused path."""
    for module in model.modules():
        for cls, flag in _FLAGS:
            if not isinstance(module, cls) or hasattr(module, _BEFORE):
                continue
            if any(isinstance(part, SparseLinear) for part in module.modules()):
                setattr(module, _BEFORE, getattr(module, flag))
                setattr(module, flag, type(getattr(module, flag))(0))


def allow_fast_paths(model: nn.Module) -> None:
    """Undo `forbid_fast_paths`."""
    for module in model.modules():
        for cls, flag in _FLAGS:
            if isinstance(module, cls) and hasattr(module, _BEFORE):
                setattr(module, flag, getattr(module, _BEFORE))
                delattr(module, _BEFORE)
