"""Models people have, from configurations of transformers, with random weights."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

DEPTH = 2
"""How many blocks of a model are timed; the others are like them."""


@dataclass(frozen=True)
class Model:
    """What a model is made of.

    cls: a class of transformers; blocks: how many the model has, which `depth_key` of its
        configuration says; settings: what else there is not as it comes.
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
