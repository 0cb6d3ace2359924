"""The kernels on the CPU, one file per kind."""
