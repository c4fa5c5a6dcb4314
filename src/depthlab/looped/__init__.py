"""Looped transformers: one stack of blocks applied K times, in five variants, with exact caches.

`wiring` is the table of variants, `LoopedTransformer` the model, `LoopCache` what decoding keeps; `follow` trains with
every step's norms kept, `oscillation` says how much a series of them jumps; `toy` is the linear recurrence.
"""

from depthlab.looped.cache import LoopCache
from depthlab.looped.config import LoopedConfig
from depthlab.looped.decoding import cached_loss, early_stop, generate
from depthlab.looped.following import follow
from depthlab.looped.measures import oscillation
from depthlab.looped.model import LoopedTransformer
from depthlab.looped.wiring import VARIANTS, wiring

__all__ = [
    "VARIANTS",
    "LoopCache",
    "LoopedConfig",
    "LoopedTransformer",
    "cached_loss",
    "early_stop",
    "follow",
    "generate",
    "oscillation",
    "wiring",
]
