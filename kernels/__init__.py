"""The operations that become fused kernels, imported as `depthlab.kernels`."""

from depthlab.kernels import mgr

__all__ = ["mgr"]
