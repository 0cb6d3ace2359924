"""YAML files of benchmarks."""

from __future__ import annotations

from dynsparse.bench.spec import find_spec, read_spec
from targets.common import folder, refused_as

_GRID = "grid: {layer: [8, 4x6], batch: 2, density: [0.5, 1], block: 2, dtype: bfloat16}"

SEEDS = [
    find_spec().read_bytes()[1500:4500],
    f"benchmarks:\n  a: {{about: x, measure: step, {_GRID}}}\n".encode(),
    "defaults: {seconds: 2, repeats: 0}\nbenchmarks:\n  a: &b\n    about: x\n"
    f"    measure: forward\n    contenders: [dense]\n    {_GRID}\n  c: *b\n".encode(),
    b"benchmarks:\n  a: {about: x, command: [python, -V]}\n  b: {about: y, runs: [a]}\n",
    b"benchmarks:\n  a:\n    about: >\n      long\n      text\n    measure: network\n"
    b"    seconds: 0.9\n    rounds: 10\n    grid: {layer: 784-320-10, batch: 8, density: 0.1}\n",
]


def run(data: bytes) -> None:
    file = folder() / "spec.yml"
    file.write_bytes(data)
    with refused_as(ValueError):
        spec = read_spec(file)
        for benchmark in spec.select(list(spec.benchmarks)):
            for cell in benchmark.cells[:100]:
                str(cell)
