"""The Triton kernels, imported as `depthlab.kernels`."""
