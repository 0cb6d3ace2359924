"""Where a program's time goes: named spans and counters, in a file that trace viewers open.

`trace` writes what happens inside it in the Chrome trace format, which https://ui.perfetto.dev and
chrome://tracing show. The trainers, the checkpoints, the tile machine and the commands have their
spans already; `span` and `counter` add a program's own.
"""

from dynsparse.tracing.spans import counter, span, spanned
from dynsparse.tracing.writing import trace

__all__ = ["counter", "span", "spanned", "trace"]
