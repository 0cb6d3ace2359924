"""LoRA of PEFT for sparse layers: an update at the pattern, so that merging keeps all zeros."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any, cast

import torch
from torch import Tensor, nn

from dynsparse.integrations import require_package
from dynsparse.nn import SparseConv1d, SparseConv2d, SparseLinear
from dynsparse.ops import grad_weight

with require_package("peft", f"{__name__} needs"):
    from peft import LoraConfig
    from peft.tuners import lora
    from peft.tuners.tuners_utils import check_adapters_to_merge

__all__ = ["SparseLora", "sparse_lora"]


def sparse_lora(config: LoraConfig) -> LoraConfig:
    """Let the adapters of `config` work with sparse layers, through `SparseLora`.

        tuned = peft.get_peft_model(model, sparse_lora(peft.LoraConfig(r=8, target_modules=[...])))

    PEFT does not store this with adapters: to load them, pass
    `config=sparse_lora(LoraConfig.from_pretrained(folder))` to `PeftModel.from_pretrained`.

    Returns:
        The config, changed.

    Raises:
        ValueError: a config for a variant of LoRA, such as DoRA, with `lora_bias`, or with an
            initialisation that reads the weight; `target_modules="all-linear"`, for which PEFT
            finds dense layers only.
    """
    targets = config.target_modules
    if isinstance(targets, str) and targets.lower() == "all-linear":
        raise ValueError(
            "target_modules='all-linear' finds dense layers only: name the layers, such as "
            "target_modules=['q_proj', 'v_proj']"
        )
    variants = [
        field.name
        for field in dataclasses.fields(config)
        if (field.metadata.get("is_lora_variant") or field.name in ("use_dora", "lora_bias"))
        and getattr(config, field.name)
    ]
    if variants:
        raise ValueError(f"sparse layers take plain LoRA: leave {variants[0]} out")
    if config.init_lora_weights not in (True, False, "gaussian"):
        raise ValueError(
            "for sparse layers init_lora_weights must be True, False or 'gaussian', got "
            f"{config.init_lora_weights!r}"
        )
    config._register_custom_module({SparseLinear: SparseLora})
    return config


class SparseLora(lora.Linear):
    """LoRA beside a `SparseLinear`: its weight becomes W + scaling * (B A) at the pattern.

    B A is computed at the positions of the pattern only, at a cost proportional to their number,
    and added to the values, so that one sparse product serves both and merging gives the same
    layer: the MaskLoRA of Zimmer et al. 2023, "PERP: Rethinking the Prune-Retrain Paradigm in the
    Era of LLMs". `get_peft_model` makes these layers for a config of `sparse_lora`.

    Raises:
        ValueError: a sparse convolution, a layer on a target.
    """

    def __init__(self, base_layer: nn.Module, *args: Any, **kwargs: Any) -> None:
        layer: Any = getattr(base_layer, "base_layer", base_layer)
        if isinstance(layer, (SparseConv1d, SparseConv2d)) or layer.executor is not None:
            raise ValueError(
                f"adapters need a sparse linear layer, got {layer}: leave it out of target_modules"
            )
        with warnings.catch_warnings():
            # PEFT warns that this class is not its own.
            warnings.filterwarnings("ignore", "Unsupported layer type")
            super().__init__(base_layer, *args, **kwargs)

    def get_base_layer(self) -> SparseLinear:
        """The sparse layer."""
        return cast(SparseLinear, super().get_base_layer())

    def delta_values(self, adapter: str) -> Tensor:
        """scaling * (B A) at the pattern, like the values of the layer; differentiable."""
        layer = self.get_base_layer()
        a = cast(Tensor, self.lora_A[adapter].weight)
        b = cast(Tensor, self.lora_B[adapter].weight)
        with torch.autocast(a.device.type, enabled=False):
            delta = grad_weight(b.t(), a, layer.values.detach().to(a.dtype), layer.index)
        return (delta * self.scaling[adapter]).to(layer.values.dtype)

    def get_delta_weight(self, adapter: str) -> Tensor:
        """The update as a dense matrix [out, in], with zeros outside the pattern."""
        return self.get_base_layer().pattern.to_dense(self.delta_values(adapter))

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """x [..., in] -> [..., out]."""
        if kwargs.get("adapter_names") is not None:
            raise ValueError("sparse layers take one set of adapters per batch, not adapter_names")
        if self.disable_adapters or self.merged:
            return super().forward(x, *args, **kwargs)
        layer = self.get_base_layer()
        values: Tensor = layer.values
        y: Tensor | None = None
        for adapter in self.active_adapters:
            if adapter not in self.lora_A:
                continue
            delta, dropout = self.delta_values(adapter), self.lora_dropout[adapter]
            if self.training and isinstance(dropout, nn.Dropout):
                part = layer.forward_with(dropout(x), delta, layer.index, None)
                y = part if y is None else y + part
            else:
                values = values + delta
        base = layer.forward_with(x, values, layer.index, layer.bias)
        return base if y is None else base + y

    @torch.no_grad()
    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Add the updates of the adapters, by default the active ones, to the values.

        Args:
            safe_merge: whether to raise ValueError instead of merging an update with NaN or
                infinite entries.
        """
        values = self.get_base_layer().values
        for adapter in check_adapters_to_merge(self, adapter_names):
            if adapter not in self.lora_A:
                continue
            merged = values + self.delta_values(adapter)
            if safe_merge and not bool(merged.isfinite().all()):
                raise ValueError(f"the adapter {adapter!r} has entries that are NaN or infinite")
            values.copy_(merged)
            self.merged_adapters.append(adapter)

    @torch.no_grad()
    def unmerge(self) -> None:
        """Subtract the updates of the merged adapters again."""
        values = self.get_base_layer().values
        while self.merged_adapters:
            adapter = self.merged_adapters.pop()
            if adapter in self.lora_A:
                values.sub_(self.delta_values(adapter))
