"""Private helpers of the library: kernels, argument checks, files, interrupts, logging."""
