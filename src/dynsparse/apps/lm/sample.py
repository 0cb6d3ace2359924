"""Text from a trained model, token by token."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dynsparse.apps.common.training import precision
from dynsparse.apps.lm.model import LanguageModel


@torch.no_grad()
def sample(
    model: LanguageModel,
    prompt: Tensor,
    count: int,
    generator: torch.Generator,
    *,
    temperature: float = 0.8,
    top_k: int | None = None,
    data_type: str = "float32",
) -> Iterator[int]:
    """`count` ids that go on from `prompt` [tokens]; the model sees the last of them that fit.

    The model is left in evaluation.

    Args:
        generator: on the CPU, where the tokens are drawn.
        temperature: of the softmax; 0 always takes the likeliest.
        top_k: how many of the likeliest are in the draw; all when left out.
    """
    model.eval()
    device = next(model.parameters()).device
    ids = prompt[None, -model.sequence_length :].long()
    for _ in range(count):
        with precision(data_type, device):
            logits = model(ids.to(device))[0, -1]
        chosen = choose(logits.double().cpu(), generator, temperature, top_k)
        yield int(chosen)
        ids = torch.cat([ids, chosen.view(1, 1)], 1)[:, -model.sequence_length :]


def choose(
    logits: Tensor, generator: torch.Generator, temperature: float, top_k: int | None
) -> Tensor:
    """One id drawn from logits [V]."""
    if temperature == 0:
        return logits.argmax()
    if top_k is not None and top_k < len(logits):
        kept = logits.topk(top_k)
        logits = torch.full_like(logits, -torch.inf).scatter(0, kept.indices, kept.values)
    # The largest first comes to 0: a tiny temperature cannot overflow.
    shares = ((logits - logits.max()) / temperature).softmax(0)
    return torch.multinomial(shares, 1, generator=generator)[0]
