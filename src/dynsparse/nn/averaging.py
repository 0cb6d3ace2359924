"""Averages of weights whose pattern changes.

`torch.optim.swa_utils.AveragedModel` and its like copy a model and then average slot by slot. What
is in a slot changes with the pattern, so a copy that averages has to follow the pattern of the
original: averages of survivors stay, those of what left are forgotten, and what was grown starts
at zero. That is what averaging a masked dense model comes to whose average is masked, too.
"""

from __future__ import annotations

from torch import nn

from dynsparse.nn.linear import SparseLinear
from dynsparse.typed import typed


@typed
def follow_patterns(copy: nn.Module, model: nn.Module) -> None:
    """From now on, the sparse layers of `copy` take every pattern that those of `model` take.

    Copies that torch's `AveragedModel` and timm's `ModelEma` make do so by themselves; this is for
    averages of one's own. It lasts as long as both models live, and is not kept in files.

    Args:
        copy: an average of `model`, or another copy of it. Its weights stay its own.
        model: the one that is trained.

    Raises:
        ValueError: layers that differ in name, shape, block size or pattern.
    """
    own = {n: m for n, m in copy.named_modules() if isinstance(m, SparseLinear)}
    theirs = {n: m for n, m in model.named_modules() if isinstance(m, SparseLinear)}
    if own.keys() != theirs.keys():
        odd = sorted(own.keys() ^ theirs.keys())[0]
        raise ValueError(f"the models must have the same sparse layers, {odd!r} is only in one")
    for name, layer in own.items():
        if layer.pattern != theirs[name].pattern:
            raise ValueError(f"the layers {name!r} must begin with the same pattern")
    for name, layer in own.items():
        theirs[name].lead(layer)
