"""Gated benchmarks of the kernels; each writes a record."""
