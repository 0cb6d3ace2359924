"""Simulated kernel times of a machine with given cost constants."""

from dynsparse.ops.linear import cost_table
from dynsparse.ops.linear.cost_table import Layer, evaluate, family
from dynsparse.ops.linear.tuning import MANY, Timing

AMX, AVX512, AVX2, ZEN_3, ZEN_4, ZEN_5, ARM = cost_table.TABLES


def timings(costs, cells=MANY, speed=1.0, spoil=None):
    """Return the times that a machine with these constants would take."""
    found = []
    for out, in_, block, density, batch in cells:
        layer = Layer(out, in_, round(density * out * in_ / block**2), block)
        kinds = {*cost_table.candidate_kinds(layer, batch), "dense"}
        for backward in (False, True):
            times = {}
            for kind in sorted(kinds):
                name = family(kind, block)
                time = speed * evaluate(costs[name][backward], name, layer, batch)
                times[kind] = time if spoil is None else time * spoil()
            found.append(Timing(layer, batch, backward, times))
    return found
