"""What is measured: models, and the cells of a grid of sizes."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

CHANNELS, SIDE = 3, 32
PIXELS = CHANNELS * SIDE * SIDE
CLASSES = 10
"""Sizes of an example of the synthetic task that whole trainings learn."""

DEPTH = 2
"""How many blocks of a model are timed; the others are like them."""


@dataclass(frozen=True)
class Model:
    """What a model is made of.

    cls: a class of transformers; blocks: how many the model has, which `depth_key` of its
        configuration sets; settings: further changes of the configuration.
    tokens: of one example; pixels: the edge of its picture, 0 where it is text.
    hidden, inner: features of a block; outputs: of the head; table: entries of the embedding.
    """

    cls: str
    depth_key: str
    tokens: int
    outputs: int
    table: int = 0
    pixels: int = 0
    blocks: int = 12
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
        """What the model is called with, and labels for its logits."""

        def draw(below: int, *shape: int) -> Tensor:
            return torch.randint(below, shape, generator=generator)

        if self.pixels:
            shape = (examples, 3, self.pixels, self.pixels)
            inputs = {"pixel_values": torch.randn(shape, generator=generator)}
        else:
            inputs = {"input_ids": draw(self.table, examples, self.tokens)}
        # A language model has logits for every token, a classifier for every example.
        labels = (examples, self.tokens) if self.is_language_model else (examples,)
        return inputs, draw(self.outputs, *labels)

    @property
    def features(self) -> tuple[int, int]:
        """What the matrices of its blocks have."""
        return self.hidden, self.inner

    def bytes_needed(self, examples: int) -> int:
        """Of three contenders in training, `DEPTH` blocks each; a generous estimate."""
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
# The same functions in one operator, where GPT-2's own activation takes eight; and no dropout.
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
        "ViTForImageClassification", "num_hidden_layers", tokens=197, outputs=1000, pixels=224
    ),
}
"""name -> the model. The first three are one: as it comes, with sequences of 1024 tokens in place
of 128, and without dropout and with torch's own operator for its activation."""


def _transformers() -> ModuleType:
    """The package, also where torchvision was built for another torch: its import breaks theirs,
    and these models need none of it."""
    if "torchvision" not in sys.modules:
        try:
            import torchvision  # noqa: F401
        except (ImportError, RuntimeError):
            sys.modules["torchvision"] = None  # type: ignore[assignment]
    try:
        import transformers
    except ImportError:
        raise ImportError(
            "benchmarks of models need the package transformers: "
            "pip install 'dynsparse[huggingface]'"
        ) from None
    transformers.logging.set_verbosity_error()
    return transformers


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass(frozen=True)
class Cell:
    """Sizes of one measurement.

    `features` are the feature counts, the input's first: two for a layer, more for a network.
    `model` is a name in `MODELS` where a whole model is measured: features are then those
    of its blocks' matrices.
    """

    features: tuple[int, ...]
    batch: int
    density: float
    block: int = 1
    threads: int = 1
    dtype: str = "float32"
    model: str = ""

    @property
    def layer(self) -> str:
        """How the features are written in the YAML file: 1024, 784x300 (in x out), 784-320-10; or
        the name of the model."""
        if self.model:
            return self.model
        if len(self.features) != 2:
            return "-".join(map(str, self.features))
        one, other = self.features
        return str(one) if one == other else f"{one}x{other}"

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    def matches(self, words: str) -> bool:
        """Whether the cell has all properties in `words`: "bert-base, block 16, bfloat16"."""
        properties = {
            self.layer,
            f"batch {self.batch}",
            f"density {self.density:g}",
            f"block {self.block}",
            self.dtype,
        }
        return {word.strip() for word in words.split(",")} <= properties

    def __str__(self) -> str:
        block = f", block {self.block}" if self.block > 1 else ""
        dtype = f", {self.dtype}" if self.dtype != "float32" else ""
        return f"{self.layer}, batch {self.batch}, density {self.density:g}{block}{dtype}"


def refusal(cell: Cell, available: int | None) -> str | None:
    """Why `cell` cannot be measured, in one line; None where it can.

    `available` is the free memory in bytes, None if unknown.
    """
    network = len(cell.features) > 2 and not cell.model
    for features in cell.features[:-1] if network else cell.features:
        if features % cell.block:
            return f"block {cell.block} does not divide {features} features"
    need = _bytes_needed(cell)
    if available is not None and need > available:
        return (
            f"needs about {need / 1e9:.1f} GB of memory, {available / 1e9:.1f} GB are free: "
            "take a smaller layer or batch"
        )
    return None


def _bytes_needed(cell: Cell) -> int:
    """A generous estimate, all contenders together."""
    if cell.model:
        return MODELS[cell.model].bytes_needed(cell.batch)
    elements = sum(a * b for a, b in itertools.pairwise(cell.features))
    # Dense: weight and gradient. Masked: weight, mask, product, both gradients. Growth: one more.
    dense = 4 * 9 * elements
    # Values, gradient, optimizer state, CSR, CSC and MKL's copies of it, 64-bit positions on the
    # way there.
    sparse = int(100 * cell.density * elements)
    # Inputs, outputs and their gradients, and a layout of each.
    activations = 4 * 12 * cell.batch * sum(cell.features)
    return dense + sparse + activations
