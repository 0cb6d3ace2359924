"""`dynsparse matmul`: a sparse or dense product on the tile machine."""

from dynsparse.cli.matmul.command import matmul

__all__ = ["matmul"]
