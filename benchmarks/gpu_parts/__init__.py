"""What `benchmarks/gpu.py` measures, one file per concern."""
