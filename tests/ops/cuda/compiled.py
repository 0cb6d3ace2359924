"""Compile the launched kernels for any capability without a GPU, and inspect the code.

A mock driver names the chip; launches compile and stop there. `ptxas` and `cuobjdump` come with
Triton. The tests compile the configurations that the tables choose; as a script, this compiles all,
including candidates of measurements and chips with little shared memory:

    .venv/bin/python tests/ops/cuda/compiled.py [words of the name, such as sm_90 b64 tf32x3]
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget

from dynsparse import SparsePattern
from dynsparse.ops.grow import cuda as growth
from dynsparse.ops.grow.on_device import BLOCKS as SCORED_BLOCKS
from dynsparse.ops.linear import LayerIndex
from dynsparse.ops.linear.cuda import blocks, launch
from dynsparse.ops.linear.cuda.chip import Chip, Numbers
from dynsparse.ops.linear.cuda.configurations import BLOCKS, HOPPER, OTHERS, Gradient, Rows

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))
from gpu_parts.candidates import GRADIENT, ROWS, Compiles

SHARED_MEMORY = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
"""KiB that one program may have: CUDA C++ Programming Guide, technical specifications."""

TENSOR_CORES = {8: "mma.sync", 9: "wgmma.mma_async", 10: "tcgen05.mma", 12: "mma.sync"}

TOOL = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


class Driver:
    """A mock driver of a GPU that does not exist."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # what was compiled for one device is not taken for another

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


class Code(NamedTuple):
    """Properties of compiled code.

    Attributes:
        products: instructions of the tensor cores, in PTX.
        overlapped: whether a product still runs when the next is issued, where it can (Hopper).
        copies: asynchronous ones of 16 bytes, or of tiles by the copy engine, in PTX.
        narrow_copies: asynchronous ones of 4 bytes. (Of 8 where a tile has no 16 for each thread.)
        buffers: how many of each tile the pipeline has.
        loads: from global memory inside loops over products, as PTX names them: only indices.
        spills: reads and writes of local memory, in machine code.
        registers: of a thread.
        shared: bytes of shared memory.
    """

    products: int
    overlapped: bool
    copies: int
    narrow_copies: int
    buffers: frozenset[int]
    loads: tuple[str, ...]
    spills: int
    registers: int
    shared: int


@contextmanager
def pretended(capability: int) -> Iterator[list]:
    """Compile launches for this capability; yield the list of compiled kernels."""
    made: list = []
    chip = Chip(divmod(capability, 10), 132, 60 << 20)

    with ExitStack() as stack:
        for module in (launch, growth):
            for name in [name for name in vars(module) if name.endswith("_kernel")]:
                kernel = Compiles(getattr(module, name), made)
                stack.enter_context(mock.patch.object(module, name, kernel))
        for module in (launch, growth):
            stack.enter_context(mock.patch.object(module, "chip_of", return_value=chip))
        active = mock.patch.object(triton.runtime.driver, "_active", Driver(capability))
        stack.enter_context(active)
        yield made


_BUFFERS = re.compile(r"ttg\.local_alloc : \(\) -> !ttg\.memdesc<(\d+)x\d+x\d+x[bf]")


def read(kernel, capability: int) -> Code:
    """Read the code of a compiled kernel."""
    ptx = kernel.asm["ptx"]
    product = TENSOR_CORES[capability // 10]
    sass = _dump(kernel.asm["cubin"], "-sass")
    usage = _dump(kernel.asm["cubin"], "-res-usage")
    return Code(
        products=ptx.count(product),
        overlapped=re.search(r"pendings = [1-9]", kernel.asm["ttgir"]) is not None
        or product != "wgmma.mma_async",
        copies=len(re.findall(r"cp\.async\.cg\.shared\.global|cp\.async\.bulk\.tensor", ptx)),
        narrow_copies=len(re.findall(r"cp\.async\.ca\.shared\.global[^;]*, 0x4\b", ptx)),
        buffers=frozenset(map(int, _BUFFERS.findall(kernel.asm["ttgir"]))),
        loads=_loads_beside(product, ptx),
        spills=len(re.findall(r"\b(?:LDL|STL)\b", sass)),
        registers=int(re.findall(r"REG:(\d+)", usage)[0]),
        shared=kernel.metadata.shared,
    )


def _dump(cubin: bytes, what: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run(
            [TOOL, what, file.name], capture_output=True, text=True, check=True, timeout=60
        )
    return done.stdout


def _loads_beside(product: str, ptx: str) -> tuple[str, ...]:
    """Return the global loads inside the innermost loops that contain products."""
    lines = ptx.splitlines()
    label = {m[1]: i for i, line in enumerate(lines) if (m := re.match(r"\s*(\$L\w+):", line))}
    loops = []
    for end, line in enumerate(lines):
        jump = re.search(r"\bbra(?:\.uni)?\s+(\$L\w+)", line)
        if jump is not None and label[jump[1]] <= end:
            body = range(label[jump[1]], end)
            if any(product in lines[i] for i in body):
                loops.append(body)
    inner = [
        a for a in loops if not any(b is not a and b[0] >= a[0] and b[-1] <= a[-1] for b in loops)
    ]
    places = {i for body in inner for i in body}
    return tuple(m[0] for i in sorted(places) if (m := re.search(r"ld\.global[\w.:]*", lines[i])))


class Job(NamedTuple):
    """One launch for a chip, with the type that is multiplied, if any."""

    name: str
    capability: int
    numbers: Numbers
    run: Callable[[], object]
    multiplies: bool = True


def _layer(b: int, dtype: torch.dtype) -> LayerIndex:
    # With slots, as a trainer makes it.
    pattern = SparsePattern.random((4 * b, 4 * b), 0.5, block_size=b)._to_explicit_slots()
    return LayerIndex(pattern.index, torch.empty(pattern.values_shape, dtype=dtype))


def _dtype(numbers: Numbers) -> torch.dtype:
    return torch.bfloat16 if numbers == "16-bit" else torch.float32


def _activations(b: int, dtype: torch.dtype, lie: str) -> torch.Tensor:
    x = {
        "transposed": lambda: torch.empty(4 * b, 512, dtype=dtype).t(),
        "expanded": lambda: torch.empty(1, 1, dtype=dtype).expand(512, 4 * b),
        "strided": lambda: torch.empty(512, 4 * b + 1, dtype=dtype)[:, 1:],
        "ragged": lambda: torch.empty(500, 4 * b, dtype=dtype),
        "even": lambda: torch.empty(512, 4 * b, dtype=dtype),
    }[lie]()
    return blocks.ensure_aligned(x)


def rows_jobs(
    c: Rows, b: int, numbers: Numbers, capability: int, lie: str = "even"
) -> Iterator[Job]:
    """Forward with a bias, and the gradient of the input; of a batch that is a multiple of 16 or
    not (`ragged`), or of activations that lie otherwise."""
    dtype = _dtype(numbers)

    def forward() -> None:
        p, x = _layer(b, dtype), _activations(b, dtype, lie)
        launch.forward(x, torch.empty(p.values_shape, dtype=dtype), p, torch.empty(4 * b), c)

    def grad_input() -> None:
        p, dy = _layer(b, dtype), _activations(b, dtype, lie)
        launch.grad_input(dy, torch.empty(p.values_shape, dtype=dtype), p, c)

    how = f"b{b} {numbers} {c.samples}x{c.inputs} w{c.warps} s{c.stages} {lie}" + " tma" * c.tma
    for run in (forward, grad_input):
        yield Job(f"sm_{capability} {run.__name__} {how}", capability, numbers, run)


def gradient_job(
    c: Gradient, b: int, numbers: Numbers, capability: int, lie: str = "even", bias: bool = False
) -> Job:
    """The gradient of the values, likewise; and with it that of a bias."""

    def run() -> None:
        x, dy = (_activations(b, _dtype(numbers), lie) for _ in range(2))
        sums: list[torch.Tensor] | None = [] if bias else None
        launch.grad_weight(dy, x, _layer(b, x.dtype), torch.float32, c, sums)

    how = f"b{b} {numbers} {c.blocks}x{c.samples} w{c.warps} s{c.stages} {lie}"
    how += " tma" * c.tma + " bias" * bias
    return Job(f"sm_{capability} grad_weight {how}", capability, numbers, run)


def scores_job(b: int, pooling: str, many: int, numbers: Numbers, capability: int) -> Job:
    """Growth scores of blocks, from one or several pairs."""

    def run() -> None:
        tensors = [torch.empty(512, 512, dtype=_dtype(numbers)) for _ in range(many)]
        growth.block_scores(tensors, tensors, b, pooling)

    name = f"sm_{capability} scores b{b} {numbers} {pooling} of {many}"
    return Job(name, capability, numbers, run)


def layout_jobs(b: int, capability: int) -> Iterator[Job]:
    """Yield jobs that scatter values into a 16-bit weight and gather a float32 gradient."""

    def lay_out() -> None:
        p = _layer(b, torch.float32)
        launch.lay_out(torch.empty(p.values_shape), p, torch.bfloat16)

    def collect() -> None:
        p = _layer(b, torch.float32)
        launch.collect(torch.empty(2 * b, 4 * b), p, b, torch.empty(p.values_shape))

    for run in (lay_out, collect):
        yield Job(f"sm_{capability} {run.__name__} b{b}", capability, "16-bit", run, False)


def chosen(capability: int) -> Iterator[Job]:
    """Return the jobs that the tables choose for a chip."""
    for numbers, table in (HOPPER if capability == 90 else OTHERS).items():
        for b in BLOCKS:
            for c in table.rows[b]:
                yield from rows_jobs(c, b, numbers, capability)
            yield gradient_job(table.gradient[b], b, numbers, capability)
            if numbers == "16-bit":
                yield gradient_job(table.gradient[b], b, numbers, capability, bias=True)
        yield scores_job(64, "sum", 2, numbers, capability)
    for b in (1, 4, 8, 64):
        yield from layout_jobs(b, capability)


def lying_otherwise() -> Iterator[Job]:
    """Return jobs with odd batches and other memory layouts of 16-bit activations, on Hopper."""
    for b in BLOCKS:
        for lie in ("ragged", "transposed", "expanded", "strided"):
            yield from rows_jobs(HOPPER["16-bit"].rows[b][0], b, "16-bit", 90, lie)
            yield gradient_job(HOPPER["16-bit"].gradient[b], b, "16-bit", 90, lie, True)


def others() -> Iterator[Job]:
    """Return all other jobs: other chips, candidates of measurements, other blocks of growth."""
    for capability in (86, 89, 120):
        yield from chosen(capability)
    for b in BLOCKS:
        for numbers in ROWS:
            for c in ROWS[numbers][b]:
                yield from rows_jobs(c, b, numbers, 90)
            for gradient in dict.fromkeys(c._replace(split=1) for c in GRADIENT[numbers][b]):
                yield gradient_job(gradient, b, numbers, 90)
    for b in SCORED_BLOCKS:
        for pooling in ("avg", "max"):
            yield scores_job(b, pooling, 1, "16-bit", 90)


def compiled(job: Job) -> Code:
    """Return the code that a launch compiles."""
    with ExitStack() as stack:
        made = stack.enter_context(pretended(job.capability))
        if job.numbers != "16-bit":
            for module in (launch, growth):
                asked = mock.patch.object(module, "precision_of", return_value=job.numbers)
                stack.enter_context(asked)
        job.run()
        (kernel,) = made
        return read(kernel, job.capability)


def faults(code: Code, job: Job) -> list[str]:
    """Return a list of defects in the code.

    The three products of tf32x3 wait for each other: their operands are split in registers.
    Hopper's and later tensor cores take tf32 from shared memory along the sum only, so what lies
    across it in memory is copied number by number.
    """
    if not job.multiplies:
        spilled = [f"{code.spills} spilled registers"] if code.spills else []
        return spilled + ["products"] * bool(code.products)
    wrong = []
    across = job.numbers == "tf32" and job.capability in (90, 100)
    if not code.products:
        wrong.append(f"no {TENSOR_CORES[job.capability // 10]}")
    if not code.overlapped and job.numbers != "tf32x3":
        wrong.append("products wait for each other")
    if not across and (not code.copies or code.narrow_copies):
        wrong.append(f"{code.copies} wide and {code.narrow_copies} narrow asynchronous copies")
    if not code.copies + code.narrow_copies:
        wrong.append("no asynchronous copies")
    if len(code.buffers) != 1:  # a tile with fewer is overwritten while products still read it
        wrong.append(f"tiles with {sorted(code.buffers)} buffers")
    if set(code.loads) - {"ld.global.b32", "ld.global.b64"} or len(code.loads) > 16:
        wrong.append(f"{len(code.loads)} loads beside the products, {', '.join(set(code.loads))}")
    if code.spills:
        wrong.append(f"{code.spills} spilled registers")
    if code.shared > SHARED_MEMORY[job.capability] << 10:
        wrong.append(f"{code.shared} bytes of shared memory")
    return wrong


def main(words: list[str]) -> None:
    bad = 0
    for job in [*chosen(80), *chosen(90), *chosen(100), *lying_otherwise(), *others()]:
        if set(words) <= set(job.name.split()):
            code = compiled(job)
            wrong = "; ".join(faults(code, job))
            bad += bool(wrong)
            used = f"{code.registers} registers, {code.shared} bytes"
            print(f"{job.name}: {used}: {wrong or 'clean'}", flush=True)
    sys.exit(bool(bad))


if __name__ == "__main__":
    main(sys.argv[1:])
