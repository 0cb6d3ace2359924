"""Pattern updates of single patterns as on a device."""

from dynsparse.pattern.stack import PatternStack


def rewire(pattern, drop, grow, **options):
    """Return what `Rewiring.make` makes, made on the device of `drop`."""
    stack = PatternStack.of([pattern], drop.device)
    ((rewiring,), _) = stack.rewire([pattern], drop.unsqueeze(0), grow.unsqueeze(0), **options)
    return rewiring
