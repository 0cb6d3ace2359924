"""What a layer holds while it is trained with Adam, beside a dense one: counted, and allocated."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dynsparse.nn import SparseLinear
from gpu_parts.predictions import STATE
from gpu_parts.run import Run


def measure(run: Run) -> None:
    n, batch, density = run.sizes
    x = torch.randn(batch, n, device=run.device).bfloat16()
    dense, dense_allocated = _held(run, nn.Linear(n, n, bias=False, device=run.device), x)
    for b in (1, 8, 64):
        layer = SparseLinear(n, n, density, b, bias=False, device=run.device)
        counted, allocated = _held(run, layer, x)
        more: dict[str, object] = {} if run.dry else {"expected_share": STATE[b]}
        run.note("memory", f"training state of blocks of {b}, against dense",
                 share_of_dense=round(counted / dense, 4), megabytes=round(counted / 1e6, 1),
                 allocated=round(allocated / max(1, dense_allocated), 4), **more)  # fmt: skip
        del layer


def _held(run: Run, layer: nn.Module, x: Tensor) -> tuple[int, int]:
    """Bytes of parameters, gradients, states and indexes after a step; and those that torch has
    allocated since before the step beyond the parameters, which are counted in, too."""
    before = 0 if run.dry else torch.cuda.memory_allocated()
    optimizer = torch.optim.Adam(layer.parameters())
    with torch.autocast(run.device.type, torch.bfloat16):
        loss = layer(x).float().square().mean()
    loss.backward()
    optimizer.step()
    del loss
    run.wait()
    tensors = [t for p in layer.parameters() for t in (p, p.grad)]
    tensors += [t for state in optimizer.state.values() for t in state.values() if t.dim()]
    own = sum(t.nbytes for t in layer.parameters())
    if isinstance(layer, SparseLinear):
        index = layer._current().index
        tensors += [*index.index, *(t for t, _ in index._derived.values())]
        own += sum(t.nbytes for t in index.index)
    after = own if run.dry else torch.cuda.memory_allocated() - before + own
    return sum(t.nbytes for t in tensors if t is not None), after
