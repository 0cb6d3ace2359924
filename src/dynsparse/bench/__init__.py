"""The benchmarks behind `dynsparse bench`: dynsparse against other products.

`spec` reads the YAML file; `contenders` does the work that is timed; `timing` and `host` measure it
and how busy the machine is; `results` stores the figures.
"""

from dynsparse.bench.spec import find_spec, read_spec

__all__ = ["find_spec", "read_spec"]
