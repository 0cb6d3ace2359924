"""Named spans and counters of a program, in a file for trace viewers.

`trace` writes the Chrome trace format, which https://ui.perfetto.dev and chrome://tracing show.
Trainers, checkpoints, the tile machine and commands have spans; `span` and `counter` add others.
"""

from dynsparse.tracing.chrome_trace import trace
from dynsparse.tracing.spans import counter, span, spanned

__all__ = ["counter", "span", "spanned", "trace"]
