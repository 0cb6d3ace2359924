"""Growth on CUDA devices, in Triton."""
