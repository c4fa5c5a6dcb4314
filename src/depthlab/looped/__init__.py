"""Looped transformers: one stack of blocks applied K times, in five variants, with exact caches."""

from depthlab.looped.cache import LoopCache
from depthlab.looped.config import LoopedConfig
from depthlab.looped.model import LoopedTransformer
from depthlab.looped.wiring import VARIANTS, wiring

__all__ = ["VARIANTS", "LoopCache", "LoopedConfig", "LoopedTransformer", "wiring"]
