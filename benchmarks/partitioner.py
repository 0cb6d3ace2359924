"""How fast patterns are encoded as buckets: non-zeros per second on one core.

    python benchmarks/partitioner.py [--repeats 7] [--json FILE]

Each case is planned for a Bow with 1,472 tiles. The time is that of `Partitioner.encode`, from
pattern and values to meta-info and values, divided by the number of passes with their own buckets.
Non-zeros are elements, also for blocks. The first call, which fills caches, is not counted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from dynsparse.pattern import SparsePattern
from popsparse.encoding.partitioner import Partitioner
from popsparse.machine.target import Target
from popsparse.planning.params import FullyConnectedParams, SparsityParams

ALL = {"do_grad_a_pass": True, "do_grad_w_pass": True}
# name: edge, batch, density, block, options, passes with their own buckets
CASES: dict[str, tuple[int, int, float, int, dict[str, Any], int]] = {
    "element, forward": (4096, 64, 0.1, 1, {}, 1),
    "element, shared buckets, three passes": (4096, 64, 0.1, 1, ALL, 1),
    "element, own grad_input buckets": (4096, 64, 0.1, 1, {**ALL, "shared_buckets": False}, 2),
    "element, 1 % dense": (4096, 64, 0.01, 1, {}, 1),
    "element, every bucket spills": (4096, 64, 0.1, 1, {"force_bucket_spills": True}, 1),
    "block 16, density 1/16": (4096, 64, 1 / 16, 16, ALL, 1),
    "block 4, density 1/16": (4096, 64, 1 / 16, 4, ALL, 1),
}


def measure(name: str, repeats: int) -> dict[str, Any]:
    edge, batch, density, block, options, passes = CASES[name]
    params = FullyConnectedParams.create_with_nz_ratio(
        SparsityParams(block), density, batch, 1, edge, edge
    )
    pattern = SparsePattern.random(
        (edge, edge), density, block_size=block, generator=torch.Generator().manual_seed(0)
    )
    values = torch.randn(pattern.values_shape).half()
    partitioner = Partitioner.for_params(Target.bow(), "float16", params, options)
    encoded = partitioner.encode(pattern, values)
    rates, decode_rates = [], []
    for _ in range(repeats):
        start = time.perf_counter()
        encoded = partitioner.encode(pattern, values)
        middle = time.perf_counter()
        partitioner.decode(encoded)
        end = time.perf_counter()
        rates.append(passes * values.numel() / (middle - start))
        decode_rates.append(values.numel() / (end - middle))
    return {
        "case": name,
        "partition": list(partitioner.layout.partition),
        "non_zeros": values.numel(),
        "spilled": encoded.info.spilled,
        "propagation_steps": encoded.info.propagation_steps,
        "encode_per_second": statistics.median(rates),
        "encode_range": [min(rates), max(rates)],
        "decode_per_second": statistics.median(decode_rates),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    figures = []
    print(f"{'case':<40}{'x, y, z':>12}{'non-zeros':>11}  encode M/s (range)   decode M/s")
    for name in CASES:
        row = measure(name, arguments.repeats)
        figures.append(row)
        low, high = (rate / 1e6 for rate in row["encode_range"])
        print(
            f"{name:<40}{','.join(map(str, row['partition'])):>12}{row['non_zeros']:>11}"
            f"  {row['encode_per_second'] / 1e6:6.1f} ({low:.1f} to {high:.1f})"
            f"  {row['decode_per_second'] / 1e6:6.1f}"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
