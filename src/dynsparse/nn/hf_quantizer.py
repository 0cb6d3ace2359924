"""`save_pretrained` and `from_pretrained` of Hugging Face transformers for sparse models.

transformers lets a library load layers of its own as a "quantization method". The config.json of a
sparse model names the method "dynsparse", and `SparseQuantizer` collects the values and patterns of
sparse layers while transformers loads, renames and casts the tensors; then it replaces the layers.

Without this library, transformers would ignore the method and initialise the layers again. So each
sparse layer also has an empty `name.weight` in the file, which makes `from_pretrained` fail.

This module needs transformers 5 or later; `dynsparse.nn.transformers_import` imports it when
transformers is imported.
"""

from __future__ import annotations

import sys
from typing import Any

import safetensors
import torch
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.modeling_utils import PreTrainedModel
from transformers.quantizers.auto import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    AUTO_QUANTIZER_MAPPING,
)
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from dynsparse.nn import experts
from dynsparse.nn.active_set import warn_of_active_sets
from dynsparse.nn.attention import PROJECTIONS
from dynsparse.nn.linear import SparseLinear
from dynsparse.nn.quantized import QuantizedSparseLinear
from dynsparse.nn.weights_file import load_sparse_layers, pack_layers

METHOD = "dynsparse"

_PARTS = ("cols", "gaps", "mask", "rows", "values")


class SparseConfig(QuantizationConfigMixin):
    """The `quantization_config` in config.json. Everything about the layers is in the weights.

    Args:
        split_experts: whether the file has the tensors of `dynsparse.nn.split_experts`.
    """

    def __init__(self, quant_method: str = METHOD, split_experts: bool = False) -> None:
        self.quant_method: Any = quant_method
        self.split_experts = split_experts


class _Collect(ConversionOps):
    """Collects the parts of a sparse layer in place of the weight that transformers expects."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def __deepcopy__(self, memo: dict[int, Any]) -> _Collect:
        return self  # transformers copies the operation for every weight

    @torch.no_grad()
    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        **options: Any,
    ) -> dict[str, Any]:
        full_layer_name = options["full_layer_name"]
        name = full_layer_name.removesuffix(".weight")
        for part in _PARTS:
            if _source(part) in input_dict:
                self.tensors[f"{name}.{part}"] = input_dict[_source(part)][0]
        if _source("values") in input_dict:  # otherwise the layer is tied to another one
            # The weight stays on the meta device, and is neither missing nor initialised.
            options["missing_keys"].discard(full_layer_name)
            weight = options["model"].get_parameter(full_layer_name)
            weight._is_hf_initialized = True
        return {}


def _source(part: str) -> str:
    return rf"\.{part}$"


class SparseQuantizer(HfQuantizer):
    """Loads the sparse layers of a file, and saves those of a model.

    Args:
        quantization_config: that of the model's config.json.

    Attributes:
        packs: False. Whether files hold patterns packed, and values in row-major order.
    """

    packs = False

    def __init__(self, quantization_config: SparseConfig, **options: Any) -> None:
        super().__init__(quantization_config, **options)
        if not self.pre_quantized:
            raise ValueError(
                "quantization_config cannot make a model sparse: load the dense model, then call "
                "dynsparse.sparsify(model, density, start='magnitude')"
            )
        self.quantization_config: SparseConfig = quantization_config
        self._tensors: dict[str, Tensor] = {}

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True

    @property
    def is_compileable(self) -> bool:
        return True

    def validate_environment(self, *_: Any, device_map: Any = None, **options: Any) -> None:
        devices = set(device_map.values()) if isinstance(device_map, dict) else set()
        if len(devices) > 1 or "disk" in devices:
            raise ValueError(
                "device_map must place all of a sparse model on one device, such as 'cpu', got "
                f"{', '.join(sorted(map(str, devices)))}"
            )

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: list[str] | None = None, **_: Any
    ) -> None:
        if self.quantization_config.split_experts:
            experts.split_experts(model)
        # Their projections have other names than the weights of the dense attention.
        projections = tuple(
            f"{name}.{part}.values"
            for name, module in model.named_modules()
            if isinstance(module, nn.MultiheadAttention)
            for part in PROJECTIONS
        )
        for file in (checkpoint_files or ()) if projections else ():
            with safetensors.safe_open(file, framework="pt") as opened:
                for key in opened.keys():  # noqa: SIM118
                    if key.endswith(projections):
                        raise ValueError(
                            f"{key!r} is of a torch.nn.MultiheadAttention, which from_pretrained "
                            "cannot make sparse: use dynsparse.load_pretrained(model, folder) with "
                            f"a {type(model).__name__} made from its config"
                        )

    def get_weight_conversions(self) -> list[WeightConverter]:
        collect = _Collect(self._tensors)
        return [WeightConverter([_source(part) for part in _PARTS], ".weight", [collect])]

    def postprocess_model(self, model: Any, **options: Any) -> None:
        tensors, self._tensors = self._tensors, {}
        model._weight_conversions = [
            conversion
            for conversion in model._weight_conversions
            if not any(isinstance(op, _Collect) for op in getattr(conversion, "operations", ()))
        ]
        # An ordinary model from here on: Trainer refuses to train quantized ones.
        self.remove_quantization_config(model)
        load_sparse_layers(model, tensors)
        set_quantizers(model)

    def get_state_dict_and_metadata(
        self, model: PreTrainedModel
    ) -> tuple[dict[str, Tensor], dict[str, str]]:
        if any(isinstance(layer, QuantizedSparseLinear) for layer in model.modules()):
            raise ValueError(
                "save_pretrained cannot write int8 weights: use dynsparse.save_safetensors, and "
                "dynsparse.load_pretrained with a model made from its config"
            )
        # save_pretrained overwrites its argument state_dict by what this returns.
        given = sys._getframe(1).f_locals.get("state_dict")
        state = dict(model.state_dict() if given is None else given)
        self.quantization_config.split_experts = bool(experts.find_experts(model, split=True))
        if self.quantization_config.split_experts and not _is_sparse(model):
            raise ValueError(
                "save_pretrained cannot write experts that are split in a model without sparse "
                "layers: call dynsparse.nn.merge_experts first"
            )
        warn_of_active_sets(model)
        model.config.quantization_config = self.quantization_config
        if self.packs:
            state = pack_layers(model, state)
        saved = set()
        for name, layer in model.named_modules(remove_duplicate=False):
            if not isinstance(layer, SparseLinear) or f"{name}.values" not in state:
                continue
            state[f"{name}.weight"] = layer.values.new_empty((0,) * len(layer.weight_shape))
            if layer in saved:
                del state[f"{name}.values"]  # under the name of a layer it is tied to
            saved.add(layer)
        return state, {}


def _is_sparse(model: nn.Module) -> bool:
    kinds = SparseLinear, QuantizedSparseLinear
    return any(isinstance(layer, kinds) for layer in model.modules())


def set_quantizers(model: nn.Module) -> None:
    """Let `save_pretrained` save sparse layers and split experts of the transformers models in a
    model."""
    module: Any
    for module in model.modules():
        if not isinstance(module, PreTrainedModel):
            continue
        is_set = isinstance(getattr(module, "hf_quantizer", None), SparseQuantizer)
        if _is_sparse(module) or experts.find_experts(module, split=True):
            if getattr(module, "hf_quantizer", None) is None:
                quantizer: Any = SparseQuantizer(SparseConfig())
                module.hf_quantizer = quantizer
        elif is_set:
            del module.hf_quantizer
            vars(module.config).pop("quantization_config", None)


AUTO_QUANTIZATION_CONFIG_MAPPING[METHOD] = SparseConfig
AUTO_QUANTIZER_MAPPING[METHOD] = SparseQuantizer
ALL_EXPERTS_FUNCTIONS.register(experts.IMPLEMENTATION, experts.forward)
