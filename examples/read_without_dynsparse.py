"""Sparse weights read with NumPy and safetensors alone, by whoever has no dynsparse."""

import json
import tempfile
from pathlib import Path

import numpy as np
from safetensors import safe_open


def read_dense(path: Path) -> dict[str, np.ndarray]:
    """Name -> dense weight [out, in] of every sparse layer in the file."""
    weights = {}
    with safe_open(path, framework="numpy") as file:
        metadata = file.metadata()
        same = json.loads(metadata["aliases"])  # tied tensors are stored once
        for name, layer in json.loads(metadata["layers"]).items():
            keys = (f"{name}.{part}" for part in ("rows", "cols", "values"))
            rows, cols, values = (file.get_tensor(same.get(key, key)) for key in keys)
            b = layer["block_size"]
            weights[name] = np.zeros(layer["shape"], values.dtype)
            for row, col, block in zip(rows, cols, values, strict=True):
                weights[name][row * b : (row + 1) * b, col * b : (col + 1) * b] = block
    return weights


if __name__ == "__main__":
    # The writer's side.
    import torch

    import dynsparse as ds

    model = torch.nn.Sequential(ds.nn.SparseLinear(32, 64, 0.1, block_size=4), torch.nn.ReLU())
    path = Path(tempfile.mkdtemp()) / "model.safetensors"
    ds.save_safetensors(model, path)

    (name, weight), *_ = read_dense(path).items()
    assert np.array_equal(weight, model[0].to_dense().detach().numpy())
    print(f"layer {name}: {weight.shape}, {np.count_nonzero(weight)} non-zeros")
