"""Mixing and pooling of Multi-Gate Residuals: reference, kernels and public functions."""
