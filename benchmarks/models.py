"""Time and memory of a training step of common models: sparse, masked and dense.

    python benchmarks/models.py [--models gpt2-small bert-base] [--memory] [--json FILE]

Models of the package transformers with random weights, on one thread by default. Times are measured
on models with two blocks, part by part; those of the blocks are scaled to the full depth.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from memory import resident
from torch import Tensor, nn

from dynsparse._core.processor import available_memory
from dynsparse.apps.common.training import replace_sparse
from dynsparse.bench.cells import DTYPES, Cell, refusal
from dynsparse.bench.contenders import MaskedLinear, dense_layer
from dynsparse.bench.timing import Effort, run_least_disturbed, run_rounds, timing_of
from dynsparse.nn import SparseLinear, sparsify

DEPTH = 2
"""How many blocks of a model are timed; all blocks are alike."""


@dataclass(frozen=True)
class Model:
    """The architecture of a model.

    cls: a class of transformers; blocks: how many the model has; depth_key: the configuration's
        name for it; settings: further changes of the configuration.
    tokens: of one example; pixels: edge of its image, 0 for text.
    hidden, inner: features of a block; outputs: of the head; table: entries of the embedding.
    """

    cls: str
    depth_key: str
    tokens: int
    outputs: int
    table: int = 0
    pixels: int = 0
    blocks: int = 12
    examples: int = 8
    hidden: int = 768
    inner: int = 3072
    settings: Mapping[str, Any] = field(default_factory=dict)

    def make(self, depth: int) -> nn.Module:
        """The model with `depth` blocks, in training mode."""
        library = _transformers()
        kind = getattr(library, self.cls)
        config = kind.config_class(
            **{self.depth_key: depth, "num_labels": self.outputs}, **self.settings
        )
        return kind(config).train()

    def batch(self, examples: int, generator: torch.Generator) -> tuple[dict[str, Any], Tensor]:
        """Inputs of the model, and labels for its logits."""

        def draw(below: int, *shape: int) -> Tensor:
            return torch.randint(below, shape, generator=generator)

        if self.pixels:
            shape = (examples, 3, self.pixels, self.pixels)
            inputs = {"pixel_values": torch.randn(shape, generator=generator)}
        else:
            inputs = {"input_ids": draw(self.table, examples, self.tokens)}
        # A language model has logits per token, a classifier per example.
        labels = (examples, self.tokens) if self.is_language_model else (examples,)
        return inputs, draw(self.outputs, *labels)

    @property
    def features(self) -> tuple[int, int]:
        """The features of the matrices in its blocks."""
        return self.hidden, self.inner

    def bytes_needed(self, examples: int) -> int:
        """A generous estimate for three contenders in training, `DEPTH` blocks each."""
        tokens = examples * self.tokens
        matrices = DEPTH * (4 * self.hidden**2 + 2 * self.hidden * self.inner)
        state = 4 * 6 * (matrices + (self.table + self.outputs) * self.hidden)
        heads = self.hidden // 64
        activations = DEPTH * (16 * self.hidden + 10 * self.inner + 8 * heads * self.tokens)
        logits = 4 * self.outputs if self.is_language_model else 0
        return 3 * state + 4 * tokens * (activations + logits)

    @property
    def is_language_model(self) -> bool:
        return self.outputs == self.table


_GPT2 = Model(
    "GPT2LMHeadModel",
    "n_layer",
    tokens=128,
    outputs=50257,
    table=50257,
    settings={"use_cache": False},
)
# No dropout, and the activation as one operator; GPT-2's own takes eight for the same function.
_LEAN = {
    "use_cache": False,
    "activation_function": "gelu_pytorch_tanh",
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}

MODELS: dict[str, Model] = {
    "gpt2-small": _GPT2,
    "gpt2-small-long": replace(_GPT2, tokens=1024),
    "gpt2-small-lean": replace(_GPT2, settings=_LEAN),
    "bert-base": Model(
        "BertForSequenceClassification", "num_hidden_layers", tokens=128, outputs=2, table=30522
    ),
    "vit-b": Model(
        "ViTForImageClassification",
        "num_hidden_layers",
        tokens=197,
        outputs=1000,
        pixels=224,
        examples=4,
    ),
}
"""name -> the model. The first three are GPT-2: the original, with sequences of 1024 tokens instead
of 128, and without dropout and with torch's operator for its activation."""


def _transformers() -> ModuleType:
    """Import transformers, without torchvision if that does not match the installed torch: its
    import would fail, and these models do not need it."""
    if "torchvision" not in sys.modules:
        try:
            import torchvision  # noqa: F401
        except (ImportError, RuntimeError):
            sys.modules["torchvision"] = None  # type: ignore[assignment]
    try:
        import transformers
    except ImportError:
        raise ImportError(
            "benchmarks of models need the package transformers: pip install 'transformers[torch]'"
        ) from None
    transformers.logging.set_verbosity_error()
    return transformers


@dataclass(frozen=True)
class ModelCell(Cell):
    """Sizes of one measurement of a model; `features` are those of its blocks' matrices."""

    model: str = ""

    @property
    def layer(self) -> str:
        return self.model


def why_refused(cell: ModelCell, available: int | None) -> str | None:
    """As `dynsparse.bench.cells.refusal`, with the memory of the model."""
    need = MODELS[cell.model].bytes_needed(cell.batch)
    if available is not None and need > available:
        return f"needs about {need / 1e9:.1f} GB of memory, {available / 1e9:.1f} GB are free"
    return refusal(cell, None)


BLOCK_PARTS = (
    "matrices of attention",
    "attention between them",
    "matrices of the MLPs",
    "activation",
    "norms",
    "dropout",
    "residuals and other",
    "optimizer of the blocks",
)
PARTS = (*BLOCK_PARTS, "embedding", "head", "loss", "optimizer of the rest", "other")


class Clock:
    """Seconds of every part since `start`. A nested part does not count for the outer one."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._open: list[str] = ["other"]
        self._last = 0.0

    def start(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._open = ["other"]
        self._last = time.perf_counter()

    def stop(self) -> dict[str, float]:
        """The seconds, by part."""
        self._charge()
        return self.seconds

    def enter(self, part: str) -> None:
        self._charge()
        self._open.append(part)

    def leave(self, part: str) -> None:
        """Leave the part, and all parts still open inside it."""
        self._charge()
        if part in self._open:
            while self._open.pop() != part:
                pass

    def enter_on_gradient(self, part: str, x: Tensor) -> Tensor:
        """Return x; the part is entered when its gradient arrives in backward."""
        return _on_gradient(x, lambda: self.enter(part))

    def leave_on_gradient(self, part: str, x: Tensor) -> Tensor:
        """Return x; the part is left when its gradient arrives in backward."""
        return _on_gradient(x, lambda: self.leave(part))

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        self.enter(name)
        try:
            yield
        finally:
            self.leave(name)

    def _charge(self) -> None:
        now = time.perf_counter()
        self.seconds[self._open[-1]] += now - self._last
        self._last = now


def _on_gradient(x: Tensor, callback: Callable[[], None]) -> Tensor:
    if not x.requires_grad:
        return x
    x = x.view_as(x)  # a separate node: the original tensor may have other users
    x.register_hook(lambda _: callback())
    return x


def find_blocks(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """The name of the transformer's blocks in the model, and the blocks."""
    lists = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.ModuleList)]
    return lists[0]


def watch(model: nn.Module, clock: Clock) -> None:
    """Register timing hooks, permanently, on the modules that are parts."""
    blocks, _ = find_blocks(model)
    for name, module in model.named_modules():
        part = _part(name, module, blocks)
        if part is not None:
            _watch(module, clock, part)


def _part(name: str, module: nn.Module, blocks: str) -> str | None:
    """The part that a module is; None if it belongs to the enclosing part."""
    if not name.startswith(blocks + "."):
        if next(module.children(), None) is not None or not name:
            return None
        is_input = re.search(r"embed|\.w[tp]e$|\.drop$", name) is not None
        return "embedding" if is_input else "head"
    inside = name[len(blocks) + 1 :]
    if "." not in inside:
        return "residuals and other"
    in_attention = "att" in inside
    kind = type(module).__name__
    if isinstance(module, (nn.Linear, SparseLinear)):
        return "matrices of attention" if in_attention else "matrices of the MLPs"
    if isinstance(module, nn.LayerNorm):
        return "norms"
    if isinstance(module, nn.Dropout):
        return "dropout"
    if "activation" in kind.lower() or isinstance(module, nn.GELU):
        return "activation"
    # The module that multiplies queries by keys contains their projections.
    holds = any(isinstance(m, (nn.Linear, SparseLinear)) for m in module.children())
    return "attention between them" if kind.endswith("Attention") and holds else None


def _watch(module: nn.Module, clock: Clock, part: str) -> None:
    def before(_: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
        clock.enter(part)
        if args and isinstance(args[0], Tensor):
            args = (clock.leave_on_gradient(part, args[0]), *args[1:])
        elif isinstance(given.get("hidden_states"), Tensor):
            x = clock.leave_on_gradient(part, given["hidden_states"])
            given = {**given, "hidden_states": x}
        return args, given

    def after(_: nn.Module, args: Any, output: Any) -> Any:
        clock.leave(part)
        if isinstance(output, Tensor):
            return clock.enter_on_gradient(part, output)
        if isinstance(output, tuple) and isinstance(output[0], Tensor):
            return (clock.enter_on_gradient(part, output[0]), *output[1:])
        return output

    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(after)


def build_model(cell: ModelCell, who: str, depth: int) -> nn.Module:
    """The cell's model, as "dynsparse", "masked" or "dense", with the same weights and patterns.

    The matrices in the blocks are sparse, with ERK densities.
    """
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = MODELS[cell.model].make(depth)
        blocks, _ = find_blocks(model)
        sparsify(model, cell.density, cell.block, include=[blocks], verbose=False)
    if who != "dynsparse":
        replace_sparse(model, MaskedLinear if who == "masked" else dense_layer)
    return model


def training_step(cell: ModelCell, model: nn.Module) -> Callable[[], dict[str, float]]:
    """zero_grad, forward, cross entropy, backward, AdamW; returns the seconds of every part.

    The parameters are float32; bfloat16 uses autocast.
    """
    inputs, labels = MODELS[cell.model].batch(cell.batch, torch.Generator().manual_seed(0))
    _, blocks = find_blocks(model)
    inside = {id(p) for p in blocks.parameters()}
    groups = {
        "optimizer of the blocks": list(blocks.parameters()),
        "optimizer of the rest": [p for p in model.parameters() if id(p) not in inside],
    }
    optimizers = {
        part: torch.optim.AdamW(parameters, lr=1e-5, fused=True)
        for part, parameters in groups.items()
    }
    clock = Clock()
    watch(model, clock)
    low = cell.torch_dtype is torch.bfloat16

    def step() -> dict[str, float]:
        clock.start()
        for part, optimizer in optimizers.items():
            with clock.part(part):
                optimizer.zero_grad()
        with torch.autocast("cpu", enabled=low):
            logits = model(**inputs).logits
        clock.enter("loss")
        logits = clock.leave_on_gradient("loss", logits)
        F.cross_entropy(logits.float().flatten(0, -2), labels.flatten()).backward()
        clock.enter("other")
        for part, optimizer in optimizers.items():
            with clock.part(part):
                optimizer.step()
        return clock.stop()

    return step


def measure_model(cell: ModelCell, names: Iterable[str], effort: Effort) -> dict[str, Any]:
    """Measure a cell; the result has plain types, as `results` describes them."""
    contenders = ["dynsparse", *names]
    models = {who: build_model(cell, who, DEPTH) for who in contenders}
    steps = {who: training_step(cell, model) for who, model in models.items()}
    for step in steps.values():
        step()  # warm-up: allocations, choice of kernels, threads

    def attempt() -> dict[str, list[dict[str, float]]]:
        samples_of: dict[str, list[dict[str, float]]] = {who: [] for who in contenders}
        run_rounds(contenders, lambda who: samples_of[who].append(steps[who]()), effort)
        return samples_of

    rounds, foreign = run_least_disturbed(attempt, effort)
    count = MODELS[cell.model].blocks
    for samples in rounds.values():
        for sample in samples:
            for part in BLOCK_PARTS:
                sample[part] *= count / DEPTH
    of_blocks, whole = (
        timing_of(
            {who: [sum(s[p] for p in parts) for s in taken] for who, taken in rounds.items()},
            "dynsparse",
            foreign,
            effort,
        )
        for parts in (BLOCK_PARTS, PARTS)
    )
    return {
        **asdict(of_blocks),
        "whole": {"times": asdict(whole)["times"], "ratios": asdict(whole)["ratios"]},
        "parts": {
            who: {part: statistics.median(sample[part] for sample in taken) for part in PARTS}
            for who, taken in rounds.items()
        },
        "depth": DEPTH,
        "blocks": count,
        "kernel": _kernels(models["dynsparse"], cell),
    }


def _kernels(model: nn.Module, cell: ModelCell) -> str:
    """The kernels that computed the sparse layers' passes."""
    batch = cell.batch * MODELS[cell.model].tokens
    layers = [m for m in model.modules() if isinstance(m, SparseLinear)]
    kernels = [
        layer.kernel(batch, backward=backward, dtype=cell.torch_dtype)
        for layer in layers
        for backward in (False, True)
    ]
    return ", ".join(dict.fromkeys(kernels))


def measure_memory(cell: ModelCell, names: Iterable[str]) -> dict[str, Any]:
    """Bytes of every contender, the model with all its blocks, in plain types.

    - peak: how far the resident memory in two training steps rises above that of a process after
      all imports, temporary memory of building the model excluded;
    - state: parameters, gradients, both of AdamW's moments, and indices or masks;
    - blocks: the blocks' part of the state.

    Raises:
        RuntimeError: a training failed; with the last line of its error output.
    """
    memory = {"dynsparse": _measure_apart(cell, "dynsparse")}
    for who in names:
        # Dense tensors take the same memory at every density.
        memory[who] = _measure_apart(replace(cell, density=0.1, block=1), who)
    return {"memory": memory}


@lru_cache(maxsize=64)
def _measure_apart(cell: ModelCell, who: str) -> dict[str, int]:
    words = [sys.executable, __file__, "--alone", json.dumps(asdict(cell)), who]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip() or "no message").splitlines()[-1]
        raise RuntimeError(f"{cell}, {who}: the training failed: {last}")
    return json.loads(done.stdout.splitlines()[-1])


def _train(cell: ModelCell, who: str) -> dict[str, int]:
    torch.set_num_threads(cell.threads)
    MODELS[cell.model].make(1)  # imports
    before = resident("VmRSS")
    model = build_model(cell, who, MODELS[cell.model].blocks)
    # Reset the peak: building the model starts from a dense one.
    Path("/proc/self/clear_refs").write_text("5")
    step = training_step(cell, model)
    for _ in range(2):
        step()
    return {
        "peak": resident("VmHWM") - before,
        "state": _state(model),
        "blocks": _state(find_blocks(model)[1]),
    }


def _state(model: nn.Module) -> int:
    """Bytes of every parameter, its gradient and two moments, and of masks or indices."""
    total = sum(4 * p.nbytes for p in model.parameters()) + sum(b.nbytes for b in model.buffers())
    for layer in model.modules():
        if isinstance(layer, SparseLinear):
            total += sum(tensor.nbytes for tensor in layer.index)
    return total


def cells_of(asked: argparse.Namespace) -> list[ModelCell]:
    """Every model, density and block in the first dtype; the first density in the others."""
    return [
        ModelCell(
            features=MODELS[name].features,
            batch=asked.batch or MODELS[name].examples,
            density=density,
            block=block,
            threads=asked.threads,
            dtype=dtype,
            model=name,
        )
        for dtype in asked.dtypes
        for block in asked.blocks
        for density in (asked.densities if dtype == asked.dtypes[0] else asked.densities[:1])
        for name in asked.models
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Time and memory of training whole models.")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["gpt2-small", "bert-base"])
    parser.add_argument("--batch", type=int, help="defaults to 8 texts or 4 images")
    parser.add_argument("--densities", nargs="+", type=float, default=[0.1, 0.05])
    parser.add_argument("--blocks", nargs="+", type=int, default=[1, 16])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--memory", action="store_true", help="measure peak memory instead of time")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--alone", nargs=2, help=argparse.SUPPRESS)  # of `_measure_apart`
    asked = parser.parse_args()
    if asked.alone is not None:
        sizes = json.loads(asked.alone[0])
        cell = ModelCell(**sizes | {"features": tuple(sizes["features"])})
        print(json.dumps(_train(cell, asked.alone[1])))
        return
    torch.set_num_threads(asked.threads)
    found: dict[str, list[dict[str, Any]]] = {"cells": [], "refused": []}
    for cell in cells_of(asked):
        why = why_refused(cell, available_memory())
        if why is not None:
            found["refused"].append({"cell": str(cell), "why": why})
            print(f"{cell}: refused, {why}", flush=True)
            continue
        if asked.memory:
            figures = measure_memory(cell, ["masked", "dense"])
            peaks = ((who, one["peak"]) for who, one in figures["memory"].items())
            line = ", ".join(f"{who} {peak / 1e9:.2f} GB" for who, peak in peaks)
        else:
            figures = measure_model(cell, ["masked", "dense"], Effort(0, 3, 0.05, 1))
            ratios = figures["whole"]["ratios"].items()
            line = ", ".join(f"{who} {ratio['median']:.2f}x" for who, ratio in ratios)
        print(f"{cell}: {line}", flush=True)
        sizes = asdict(cell) | {"features": list(cell.features)}
        found["cells"].append({"layer": cell.layer, **sizes, **figures})
        if asked.json is not None:  # after each cell: an interrupted run keeps its results
            asked.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
