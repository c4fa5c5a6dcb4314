"""Benchmarks of the kernels; empty until there are kernels to measure."""
