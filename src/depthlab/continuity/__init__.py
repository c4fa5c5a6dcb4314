"""Geometric continuity: how much the weights of neighbouring layers share, and small networks to watch it arise."""

from depthlab.continuity.metrics import (
    alignment,
    chance_level,
    index_matched_alignment,
    leading_directions,
    spectral_alignment,
    spectral_gap,
    subspace_overlap,
    summary,
    update_ratio,
)

__all__ = [
    "alignment",
    "chance_level",
    "index_matched_alignment",
    "leading_directions",
    "spectral_alignment",
    "spectral_gap",
    "subspace_overlap",
    "summary",
    "update_ratio",
]
