"""What the sparse layers of a PyTorch model would cost on a tile machine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

import numpy as np
import torch

from dynsparse._core.checks import check_integer, check_types
from dynsparse.nn import SparseEmbedding, SparseLinear
from dynsparse.nn.embedding import TiedHead
from popsparse.layer import Layer
from popsparse.machine import Profile, Target
from popsparse.measure import plan_figures, sparse_figures
from popsparse.planning.options import Update
from popsparse.planning.plan import PASSES
from popsparse.planning.search import parse_passes
from popsparse.planning.search import plan as make_plan
from popsparse.plans import text_table


@dataclass(frozen=True)
class _Estimate:
    """The cost of a program of one layer.

    Attributes:
        cycles, seconds: time of the simulated program, at the target's clock.
        max_tile_bytes: memory of the fullest tile.
        fits: whether that fits a tile.
    """

    cycles: float
    seconds: float
    max_tile_bytes: int
    fits: bool


@dataclass(frozen=True)
class PassEstimate(_Estimate):
    """One pass of one layer; `tflops` is 2 x non-zeros x batch over the seconds."""

    tflops: float


@dataclass(frozen=True)
class UpdateEstimate(_Estimate):
    """One pattern update of one layer (RigL), on the machine and its host link; the host's own
    computation is not counted.

    Attributes:
        parts: cycles by part: the dense gradient, the pooling, the transfers both ways.
        to_host_bytes, from_host_bytes: bytes over the host link.
        pieces: number of pieces in which the dense gradient is computed.
    """

    parts: dict[str, float]
    to_host_bytes: int
    from_host_bytes: int
    pieces: int

    @classmethod
    def of(cls, layer: Layer, pattern: Any) -> UpdateEstimate:
        """Run a layer's update programs without computing numbers."""
        layer.set_pattern(pattern)
        profiles = [layer.run("scores"), layer.rewire(pattern, np.zeros(pattern.values_shape))]
        parts: dict[str, float] = {}
        pieces = 1
        for step in (step for profile in profiles for step in profile.steps if step.runs):
            name = step.name.split("/")[1]
            what, _, number = name.rpartition(" ")
            if number.isdecimal():  # one of several pieces
                name, pieces = what, max(pieces, int(number) + 1)
            parts[name] = parts.get(name, 0) + step.cycles
        return cls(
            *_cost(*profiles),
            parts,
            sum(profile.to_host_bytes for profile in profiles),
            sum(profile.from_host_bytes for profile in profiles),
            pieces,
        )


def _cost(*profiles: Profile) -> tuple[float, float, int, bool]:
    """Cycles and seconds of a program's runs, the bytes of its fullest tile, and whether they
    fit."""
    use = profiles[0].memory
    cycles, seconds = (sum(getattr(p, name) for p in profiles) for name in ("cycles", "seconds"))
    return cycles, seconds, use.max_tile_bytes, use.max_tile_bytes <= use.limit


@dataclass(frozen=True)
class LayerEstimate:
    """One use of one sparse layer in a forward pass of the model.

    Attributes:
        name: name of the module in the model.
        out, in_, batch, density, block_size: the product; batch counts all leading dimensions of
            the layer's input.
        plan: the partition, {"x", "y", "z", "method"}; one plan serves all passes.
        passes: estimates by name of the pass.
        bucket_fill: mean and largest share of the buckets' values in use.
        propagation_steps: turns of the propagation loop, in each pass.
        spilled: blocks that left the bucket they began in.
        update: the estimate of a pattern update; None if not requested.
    """

    name: str
    out: int
    in_: int
    batch: int
    density: float
    block_size: int
    plan: dict[str, Any]
    passes: dict[str, PassEstimate]
    bucket_fill: tuple[float, float]
    propagation_steps: int
    spilled: int
    update: UpdateEstimate | None = None

    @property
    def cycles(self) -> float:
        """Cycles of one training step."""
        return sum(part.cycles for part in self.passes.values())


@dataclass(frozen=True)
class ModelEstimate:
    """All sparse layers of a model, in the order they ran. Dense layers, biases, look-ups in tables
    and everything between the layers are not counted."""

    target: Target
    dtype: str
    layers: tuple[LayerEstimate, ...]

    @property
    def cycles(self) -> float:
        return sum(layer.cycles for layer in self.layers)

    @property
    def seconds(self) -> float:
        return self.target.seconds(self.cycles)

    @property
    def update_cycles(self) -> float:
        """Cycles of one pattern update of all layers."""
        return sum(layer.update.cycles for layer in self.layers if layer.update is not None)

    @check_types
    def update_share(self, interval: int) -> float:
        """The share of time spent on updates, with one update every `interval` steps."""
        steps = check_integer("interval", interval, 1) * self.cycles
        return self.update_cycles / (self.update_cycles + steps)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "target": self.target.to_dict(),
            "dtype": self.dtype,
            "cycles": self.cycles,
            "seconds": self.seconds,
            "update_cycles": self.update_cycles,
            "layers": [asdict(layer) for layer in self.layers],
        }

    def summary(self) -> str:
        """A readable table."""
        lines = [
            f"Sparse layers on {self.target.name}, {self.dtype}: {self.cycles:,.0f} cycles, "
            f"{self.seconds * 1e6:,.1f} us a step"
        ]
        head = "layer, out x in, batch, density, xyz, pass, cycles, us, TFLOP/s, tile, fill, steps"
        rows = [(*head.split(", "), "")]
        for layer in self.layers:
            sizes = (layer.name, f"{layer.out} x {layer.in_}", f"{layer.batch}")
            cut = (f"{layer.density:.3g}", ",".join(str(layer.plan[dim]) for dim in "xyz"))
            spread = (f"{layer.bucket_fill[1]:.0%}", f"{layer.propagation_steps}")
            rows += [
                (
                    *sizes,
                    *cut,
                    name,
                    *_figures(part),
                    f"{part.tflops:.3g}",
                    *self._memory_cells(part, *spread),
                )
                for name, part in layer.passes.items()
            ]
        lines += text_table(rows, words=(0, 5, 12))
        if self.update_cycles:
            lines += self._update_lines()
        return "\n".join(lines)

    def _update_lines(self) -> list[str]:
        shares = ", ".join(
            f"{self.update_share(n):.2%} of the time every {n:,} steps" for n in (10, 100, 1000)
        )
        head = "layer, cycles, us, bytes down, bytes up, pieces, tile, most of it"
        rows = [(*head.split(", "), "")]
        for layer in self.layers:
            update = layer.update
            if update is None:
                continue
            bytes_ = (
                f"{update.to_host_bytes:,}",
                f"{update.from_host_bytes:,}",
                f"{update.pieces}",
            )
            most = sorted(update.parts, key=lambda name: -update.parts[name])[:3]
            parts = ", ".join(f"{name} {update.parts[name] / update.cycles:.0%}" for name in most)
            rows.append(
                (layer.name, *_figures(update), *bytes_, *self._memory_cells(update, parts))
            )
        return [
            f"A pattern update: {self.update_cycles:,.0f} cycles; {shares}",
            *text_table(rows, words=(0, 7)),
        ]

    def _memory_cells(self, estimate: _Estimate, *between: str) -> tuple[str, ...]:
        """Cells of a table: the part of a tile in use, those of `between`, and whether it fits."""
        share = estimate.max_tile_bytes / self.target.bytes_per_tile
        return (f"{share:.0%}", *between, "" if estimate.fits else "does not fit")

    def __str__(self) -> str:
        return self.summary()


def _figures(part: _Estimate) -> tuple[str, str]:
    return f"{part.cycles:,.0f}", f"{part.seconds * 1e6:,.1f}"


@check_types
def estimate(
    model: Any,
    example_input: Any,
    target: Target | None = None,
    *,
    dtype: str = "float16",
    passes: str | Iterable[str] = PASSES,
    options: Any = None,
    update: Any = None,
) -> ModelEstimate:
    """Estimate what the sparse layers of a model cost on a tile machine.

    The model runs once, in evaluation mode and without gradients, to find the sizes of its layers'
    inputs; it is left unchanged. Then the program of each layer runs on the simulated machine with
    the layer's own pattern, without computing numbers.

    Args:
        model: a module with `SparseLinear` layers.
        example_input: the model's input; a tuple holds several arguments.
        target: a `Target`; defaults to the Mk2.
        dtype: type of the layers on the machine, float16 or float32, whatever the model's own.
        passes: passes to plan and run: names or a comma-separated string. Forward is always
            included.
        options: further options of the plan, see `popsparse.Options`.
        update: also estimate a pattern update of each layer: a `popsparse.Update` or a mapping of
            its fields, {} for its defaults.

    Raises:
        TypeError: not a module, or not a Target.
        ValueError: no sparse layer ran; a layer's pattern overflows its buckets, or it is a
            convolution with groups (the message names the layer).
    """
    target = Target.mk2() if target is None else target
    if not isinstance(target, Target):
        raise TypeError(f"target must be a Target such as Target.bow(), got {target!r}")
    names = parse_passes(passes)
    updating = None if update is None else Update.parse(update)
    cache: dict[Any, Any] = {}
    estimates = []
    for name, layer, shape in _find_uses(model, example_input):
        pattern = layer.pattern
        out, in_ = pattern.shape
        try:
            batch = layer.samples_of(shape)
            key = (out, in_, batch, pattern.density, pattern.block_size)
            if key not in cache:
                sizes = (*key[:4], pattern.block_size, dtype, target)
                cache[key] = Layer(
                    make_plan(*sizes, passes=names, options=options),
                    update=updating,
                    numerics=False,
                    check_memory=False,
                )
            program = cache[key]
            figures = sparse_figures(program, pattern, names, ignore_data=True)
            changed = None if updating is None else UpdateEstimate.of(program, pattern)
        except ValueError as error:
            raise ValueError(f"layer {name!r}: {error}") from error
        rows = {
            pass_name: PassEstimate(
                *_cost(program.profiles[pass_name]), figures["tflops"][pass_name]
            )
            for pass_name in names
        }
        fill = program.encoding.info.nz_fill
        estimates.append(
            LayerEstimate(
                name,
                out,
                in_,
                batch,
                pattern.density,
                pattern.block_size,
                plan_figures(program.plan),
                rows,
                (float(fill.mean()), float(fill.max())),
                figures["propagation_steps"],
                figures["spilled"],
                changed,
            )
        )
    return ModelEstimate(target, program.plan.dtype.name, tuple(estimates))


def _find_uses(model: Any, example_input: Any) -> list[tuple[str, Any, Sequence[int]]]:
    """Run the model once, and list each use of a sparse layer: its name, the layer, and the shape
    of its input, empty ones left out."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch module, got {type(model).__name__}")
    uses: list[tuple[str, Any, Sequence[int]]] = []
    training = {module: module.training for module in model.modules()}
    hooks = []
    tables: dict[Any, str] = {}
    for name, module in model.named_modules():
        if isinstance(module, TiedHead):
            tables[module.table] = name
        elif isinstance(module, SparseEmbedding):
            tables.setdefault(module, name)
        elif isinstance(module, SparseLinear):

            def record_use(layer: Any, inputs: Any, named: Any, name: str = name) -> None:
                shape = (*inputs, *named.values())[0].shape
                uses.append((name or "model", layer, shape))

            hooks.append(module.register_forward_pre_hook(record_use, with_kwargs=True))
    for table, name in tables.items():  # a table's product is its `logits`, which has no hooks

        def compute_logits(x: Any, table: Any = table, name: str = name) -> Any:
            uses.append((name or "model", table, x.shape))
            return type(table).logits(table, x)

        table.logits = compute_logits
    arguments = example_input if isinstance(example_input, tuple) else (example_input,)
    try:
        model.eval()
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            model(*arguments)
    except Exception as error:  # a module may raise anything for an input it cannot take
        raise ValueError(
            f"the model must take example_input, got {type(error).__name__}: {error}"
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
        for table in tables:
            del table.logits
        for module, mode in training.items():
            module.training = mode
    uses = [use for use in uses if prod(use[2])]
    if not uses:
        raise ValueError(
            "no sparse layer ran: make the model sparse first with dynsparse.sparsify(model)"
        )
    return uses
