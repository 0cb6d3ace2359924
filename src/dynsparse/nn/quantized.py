"""Sparse linear layers with weights in int8, for inference on a CPU."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from dynsparse._core.checks import check_choice, check_kind, check_tensor, check_types
from dynsparse.nn.candidates import check_patterns, matches_name
from dynsparse.nn.exclusions import check_no_adapters, check_no_hooks
from dynsparse.nn.linear import SparseLinear
from dynsparse.nn.sharded import is_sharded
from dynsparse.nn.transformers_import import set_quantizers
from dynsparse.ops.linear import int8
from dynsparse.pattern import SparsePattern
from dynsparse.pattern.on_device import flat_positions
from dynsparse.pattern.packed import pack

ACTIVATIONS = ("float32", "int8")

_LARGEST = 127


class QuantizedSparseLinear(nn.Module):
    """Y = X W^T + b for inference, with the present blocks of W in int8.

    `quantize` and `from_float` make them from trained layers. W is scale[r] * values at (r, c).
    Activations and results are float32. It has no Parameters and no gradients.

    Args:
        pattern: the pattern of the present blocks.
        values: int8 [nnz] or [nnz, b, b], the blocks in row-major order.
        scale: float32 [out_features], on the CPU as everything else.
        bias: float32 [out_features] or None.
        activations: "float32" or "int8".

    Attributes:
        values: int8, the blocks in row-major order, as the kernels read them: [nnz], [nnz, b, b],
            or [nnz, b / 4, b, 4] for block sizes that are multiples of 8: of each four neighbouring
            columns, the rows one after the other.
        scale: float32 [out_features].
        row_ptr, cols: the pattern, int32 [out_features / b + 1] and [nnz].
        bias: float32 [out_features] or None.
        activations: "float32", or "int8": products with blocks whose size is a multiple of 8 round
            the features of each sample to multiples of their largest magnitude / 127; other layers
            compute as with "float32". A sample with a feature that is not finite then gives NaN.
        in_features, out_features, block_size: as in `SparseLinear`.

    Raises:
        TypeError, ValueError: arguments that do not fit each other.
        RuntimeError: when called with activations that are not float32 on the CPU, or that require
            a gradient; by `train()`, as it cannot be trained.
    """

    # Operands that were checked, and the versions of the index then.
    _known: tuple[Any, ...] | None = None

    values: Tensor
    scale: Tensor
    row_ptr: Tensor
    cols: Tensor
    bias: Tensor | None

    def __init__(
        self,
        pattern: SparsePattern,
        values: Tensor,
        scale: Tensor,
        bias: Tensor | None,
        activations: str,
    ) -> None:
        super().__init__()
        check_kind("pattern", pattern, SparsePattern, "a SparsePattern")
        check_choice("activations", activations, ACTIVATIONS)
        _check_tensor("values", values, torch.int8, pattern.values_shape)
        _check_tensor("scale", scale, torch.float32, pattern.shape[:1])
        if bias is not None:
            _check_tensor("bias", bias, torch.float32, pattern.shape[:1])
        self.out_features, self.in_features = pattern.shape
        self.block_size = pattern.block_size
        self.activations = activations
        # Outside of inference mode, in which tensors have no version counter.
        with torch.inference_mode(False):
            self.register_buffer("values", int8.to_kernel_order(values.detach()).clone())
            self.register_buffer("scale", scale.detach().clone())
            self.register_buffer("row_ptr", pattern.row_ptr.clone())
            self.register_buffer("cols", pattern.sorted_cols.clone())
            self.register_buffer("bias", None if bias is None else bias.detach().clone())
        super().train(False)

    @classmethod
    @torch.no_grad()
    @check_types
    def from_float(cls, layer: SparseLinear, activations: str = "float32") -> QuantizedSparseLinear:
        """Make a copy of a layer with weights rounded to int8, at most half a step of `scale` off.

        The step of each row of W is its largest magnitude / 127.

        Args:
            layer: a float32 layer on the CPU; it stays as it is.
            activations: "float32" or "int8"; see the class.

        Raises:
            TypeError, ValueError: a layer of another dtype or device, a convolution, values that
                are not finite, a layer that another backend computes.
        """
        _check_layer("layer", layer)
        pattern, b = layer.pattern, layer.block_size
        blocks = pattern.by_rows(layer.values.detach()).reshape(-1, b, b)
        rows = pattern.by_rows(pattern.rows).long()
        largest = blocks.new_zeros(pattern.grid[0], b)
        index = rows[:, None].expand(-1, b)
        largest.scatter_reduce_(0, index, blocks.abs().amax(2), "amax")
        # A row of zeros has any step; subnormal steps would lose precision.
        scale = (largest / _LARGEST).clamp_min(torch.finfo(torch.float32).tiny)
        values = (blocks / scale[rows][:, :, None]).round().clamp(-_LARGEST, _LARGEST)
        values = values.to(torch.int8).view(pattern.values_shape)
        return cls(pattern, values, scale.view(-1), layer.bias, activations)

    @property
    def pattern(self) -> SparsePattern:
        """Which blocks are present."""
        flat = flat_positions(self.row_ptr, self.cols, self.in_features // self.block_size)
        shape = self.out_features, self.in_features
        return SparsePattern.from_flat(flat, shape=shape, block_size=self.block_size)

    @property
    def density(self) -> float:
        """Present blocks / all blocks."""
        all_elements = self.out_features * self.in_features
        return len(self.cols) * self.block_size**2 / all_elements

    @property
    def weight(self) -> Tensor:
        """`to_dense()`, for code that reads the weight of an `nn.Linear`."""
        return self.to_dense()

    def to_dense(self) -> Tensor:
        """Return the weight as a float32 [out, in] tensor."""
        return int8.to_dense(self.values, self.scale, self.row_ptr, self.cols, self.in_features)

    def pack(self) -> dict[str, Tensor]:
        """Return values and pattern as in a file.

        These are "values", [nnz] or [nnz, b, b], and "gaps" or "mask".
        """
        pattern = self.pattern
        form, packed = pack(pattern.sorted_flat, pattern.total)
        return {"values": int8.from_kernel_order(self.values), form: packed}

    def forward(self, x: Tensor) -> Tensor:
        """Return y [..., out_features] for x [..., in_features], float32."""
        if check_tensor("x", x).requires_grad and torch.is_grad_enabled():
            raise RuntimeError(
                "a layer with int8 weights has no gradients: compute under torch.no_grad(), or "
                "train the model before quantize"
            )
        buffers = self._buffers
        values, scale, bias = buffers["values"], buffers["scale"], buffers["bias"]
        row_ptr, cols = buffers["row_ptr"], buffers["cols"]
        operands = values, scale, row_ptr, cols, bias
        options = self.in_features, self.activations == "int8"
        if is_compiling():
            y: Tensor = torch.ops.dynsparse.linear_int8(x, *operands, *options)
            return y
        # Checking the operands takes longer than the product of a small layer.
        known = self._known
        if known is None or not (
            known[0] is values
            and known[1] is scale
            and known[2] is row_ptr
            and known[3] is cols
            and known[4] is bias
            and known[5] == _version(row_ptr)
            and known[6] == _version(cols)
        ):
            y = int8.linear_int8(x, *operands, *options)  # type: ignore[arg-type]
            self._known = *operands, _version(row_ptr), _version(cols)
            return y
        return int8.compute(x, *operands, *options)  # type: ignore[arg-type]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_known"}

    def train(self, mode: bool = True) -> QuantizedSparseLinear:
        """Raise RuntimeError unless `mode` is False: the layer has no training mode."""
        if mode:
            raise RuntimeError(
                "a model with int8 weights cannot be trained: train the float32 model, then "
                "quantize it again"
            )
        return super().train(False)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"density={self.density:.4g}, nnz={len(self.cols)}, block_size={self.block_size}, "
            f"bias={self.bias is not None}, activations={self.activations}"
        )


def _version(tensor: Any) -> float:
    """Return the version of a tensor, which counts writes; NaN for inference tensors, which have
    none."""
    return float("nan") if tensor.is_inference() else tensor._version


def _check_tensor(name: str, value: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = check_tensor(name, value)
    if tensor.dtype is not dtype or tensor.shape != shape or tensor.device.type != "cpu":
        raise ValueError(
            f"{name} must be {dtype} {list(shape)} on the CPU, got {tensor.dtype} "
            f"{list(tensor.shape)} on {tensor.device}"
        )


def _check_layer(name: str, layer: SparseLinear) -> None:
    if type(layer).forward is not SparseLinear.forward:
        raise TypeError(f"{name} must be a linear layer, got a {type(layer).__name__}")
    if is_sharded(layer.values) or layer.values.device.type != "cpu":
        raise ValueError(
            f"{name} must be on the CPU, which int8 weights are for, got {layer.values.device}: "
            "move the model with model.cpu() first"
        )
    if layer.values.dtype is not torch.float32:
        raise TypeError(
            f"{name} must have float32 values, got {layer.values.dtype}: convert the model with "
            "model.float() first"
        )
    if layer.active is not None:
        raise ValueError(
            f"{name} computes with a part of its weights, chosen by Top-KAST: call the trainer's "
            "shrink() first"
        )
    if layer.executor is not None:
        raise ValueError(f"{name} is computed by {layer.kernel(1)}, which has no int8 weights")
    check_no_hooks(name, layer)
    if not bool(layer.values.isfinite().all()):
        raise ValueError(f"the values of {name} have entries that are NaN or infinite")


@check_types
def quantize(
    model: nn.Module, activations: str = "float32", *, exclude: str | Iterable[str] = ()
) -> nn.Module:
    """Round the weights of a trained model's sparse linear layers to int8, in place.

    For inference on a CPU. Each row of a weight has a scale, its largest magnitude / 127, so the
    error of a weight is at most 1/254 of that magnitude. The model is then in evaluation mode, and
    none of its parameters requires a gradient. Convolutions, embeddings and dense layers stay as
    they are.

    Args:
        model: a model with sparse layers in float32, such as `sparsify` makes and a trainer trains.
        activations: "float32": only weights are int8, which saves memory, and time for small
            batches. "int8": in layers with blocks whose size is a multiple of 8, activations are
            rounded as well, by the largest magnitude of each sample, and products are sums of
            integers: faster, and less accurate. Nothing is calibrated.
        exclude: name patterns, as in `sparsify`, of sparse layers that stay float32.

    Returns:
        The model.

    Raises:
        TypeError, ValueError: a model without sparse linear layers, a layer of another dtype or
            device or with values that are not finite, or with adapters of `sparse_lora`, a pattern
            that matches no sparse layer. The model is then unchanged.
    """
    named: dict[str, SparseLinear] = {
        name: module
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, SparseLinear) and type(module).forward is SparseLinear.forward
    }
    patterns = check_patterns("exclude", exclude)
    for pattern in patterns:
        if not any(matches_name(pattern, name) for name in named):
            raise ValueError(f"exclude: the pattern {pattern!r} matches no sparse linear layer")
    named = {n: m for n, m in named.items() if not any(matches_name(p, n) for p in patterns)}
    if not named and any(isinstance(m, QuantizedSparseLinear) for m in model.modules()):
        raise ValueError("the sparse linear layers of the model are int8 already")
    if not named:
        raise ValueError(
            "the model has no sparse linear layers to quantize: call dynsparse.sparsify first, and "
            "train"
        )
    if "" in named:
        raise ValueError(
            "a layer cannot be replaced in itself: use QuantizedSparseLinear.from_float(layer)"
        )
    for name, layer in named.items():
        _check_layer(f"the layer {name!r}", layer)
    check_no_adapters(model, named)
    layers = {
        layer: QuantizedSparseLinear.from_float(layer, activations)
        for layer in dict.fromkeys(named.values())
    }
    replace_by_quantized(model, {name: layers[layer] for name, layer in named.items()})
    return model


def refuse_int8(model: nn.Module) -> None:
    """Raise ValueError if a model has int8 layers, which cannot be trained."""
    if any(isinstance(module, QuantizedSparseLinear) for module in model.modules()):
        raise ValueError(
            "the sparse layers of the model are int8: train the float32 model, then quantize it "
            "again"
        )


def replace_by_quantized(model: nn.Module, layers: dict[str, QuantizedSparseLinear]) -> None:
    """Replace layers by name, and set the model up for inference."""
    replacement: Any
    for name, replacement in layers.items():
        model.set_submodule(name, replacement)
    model.requires_grad_(False)
    model.eval()
    set_quantizers(model)
