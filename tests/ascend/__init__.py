"""The compile check and the execution of lowered kernels, on small kernels of their own."""
