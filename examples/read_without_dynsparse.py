"""Read sparse weights with NumPy and safetensors alone, without dynsparse."""

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
            values = file.get_tensor(same.get(f"{name}.values", f"{name}.values"))
            b = layer["block_size"]
            weights[name] = np.zeros(layer["shape"], values.dtype)
            form = "mask" if f"{name}.mask" in file.keys() else "gaps"  # noqa: SIM118
            packed = file.get_tensor(f"{name}.{form}")
            for number, block in zip(READERS[form](packed), values, strict=True):
                row, col = divmod(number, layer["shape"][1] // b)
                weights[name][row * b : (row + 1) * b, col * b : (col + 1) * b] = block
    return weights


def read_mask(mask: np.ndarray) -> np.ndarray:
    """Numbers of the present blocks: one bit for each block of the matrix."""
    return np.flatnonzero(np.unpackbits(mask, bitorder="little"))


def read_gaps(gaps: np.ndarray) -> np.ndarray:
    """Numbers of the present blocks: each byte counts absent blocks, 255 continues the count."""
    blocks = gaps != 255
    return np.cumsum(gaps, dtype=np.int64)[blocks] + np.arange(np.count_nonzero(blocks))


READERS = {"mask": read_mask, "gaps": read_gaps}


if __name__ == "__main__":
    # Write a file.
    import torch

    import dynsparse as ds

    model = torch.nn.Sequential(ds.nn.SparseLinear(32, 64, 0.1, block_size=4), torch.nn.ReLU())
    path = Path(tempfile.mkdtemp()) / "model.safetensors"
    ds.save_safetensors(model, path)

    (name, weight), *_ = read_dense(path).items()
    assert np.array_equal(weight, model[0].to_dense().detach().numpy())
    print(f"layer {name}: {weight.shape}, {np.count_nonzero(weight)} non-zeros")
