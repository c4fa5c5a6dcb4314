"""Shape of a looped transformer."""

from dataclasses import dataclass
from typing import Any, ClassVar

from depthlab.lm.layers import check_heads
from depthlab.lm.settings import check_choice, check_count, check_counts, check_positive
from depthlab.looped.wiring import VARIANTS

OBJECTIVES = ("END", "STEP", "FEW")
PRESETS: dict[str, dict[str, Any]] = {
    "toy": {"vocab_size": 256, "seq_len": 64, "n_layers": 2, "n_loops": 6, "n_heads": 2, "d_model": 64},
    "small": {"vocab_size": 256, "seq_len": 512, "n_layers": 6, "n_loops": 12, "n_heads": 3, "d_model": 384},
}


@dataclass(frozen=True)
class LoopedConfig:
    """Shape of a looped transformer.

    Args:
        variant: one of `wiring.VARIANTS`.
        n_layers: L, blocks of one attention and one MLP. n_loops: K, how often they are applied unless `forward` says
            otherwise. d_model: C. vocab_size: V. seq_len: the most tokens it reads, the length of its rotary table.
        rope_base: of the rotary angles. soft_cap: logits are c tanh(logits / c).
        objective: what `loss` averages in training: the last loop's loss ("END"), that of all loops ("STEP"), or of
            the last third ("FEW").
        backprop_loops: only the last so many loops are differentiated; None: all.
        tied: False gives each loop blocks of its own, the control that has no shared weights.
        checkpoint_loops: keep only what passes from loop to loop, and compute the rest again in backward.

    Raises:
        TypeError, ValueError: naming the field, its value and what is allowed.
    """

    kind: ClassVar[str] = "looped"
    # What `depthlab train` takes where nothing is given: the published setting, each optimizer at its own rate.
    training: ClassVar[dict[str, Any]] = {"optimizer": "flt", "schedule": "trapezoid", "warmup_steps": 0, "lr": None}

    variant: str
    n_layers: int
    n_loops: int
    d_model: int
    n_heads: int
    vocab_size: int
    seq_len: int
    rope_base: float = 10_000.0
    soft_cap: float = 15.0
    objective: str = "END"
    backprop_loops: int | None = None
    tied: bool = True
    checkpoint_loops: bool = False

    def __post_init__(self) -> None:
        check_choice("variant", self.variant, VARIANTS)
        check_counts(self, "n_layers", "n_loops", "d_model", "n_heads", "vocab_size", "seq_len")
        check_heads(self.d_model, self.n_heads, self.n_heads, rotary=True)
        check_positive("rope_base", self.rope_base)
        check_positive("soft_cap", self.soft_cap)
        check_choice("objective", self.objective, OBJECTIVES)
        for name in ("tied", "checkpoint_loops"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name}={getattr(self, name)!r} is not allowed; use True or False.")
        if self.backprop_loops is not None:
            check_count("backprop_loops", self.backprop_loops)
            need_differentiated(self.backprop_loops, self.objective, self.n_loops)

    @classmethod
    def preset(cls, name: str, *, variant: str = "flt", **changes: Any) -> "LoopedConfig":
        """A named shape: "toy" trains on a CPU, "small" on a GPU (both on bytes).

        `changes` replace fields. Raises ValueError for an unknown name.
        """
        check_choice("preset", name, PRESETS)
        return cls(**{"variant": variant, **PRESETS[name], **changes})

    @property
    def head_dim(self) -> int:
        """D, the width of a head."""
        return self.d_model // self.n_heads

    @property
    def matmul_parameters(self) -> int:
        """Entries of the weight matrices that a token is multiplied with: 12 C^2 a block and loop, and the head."""
        return 12 * self.n_layers * self.n_loops * self.d_model**2 + self.vocab_size * self.d_model

    @property
    def n_attentions(self) -> int:
        """Attentions that a token passes."""
        return self.n_layers * self.n_loops


def loops_of(objective: str, n_loops: int) -> range:
    """The loops (from 1) whose losses `objective` averages; the last third is rounded up."""
    count = {"END": 1, "STEP": n_loops, "FEW": -(-n_loops // 3)}[objective]
    return range(n_loops - count + 1, n_loops + 1)


def need_differentiated(backprop_loops: int, objective: str, n_loops: int) -> None:
    """ValueError where a loop that has a loss would get no gradient."""
    if backprop_loops < (need := len(loops_of(objective, n_loops))):
        raise ValueError(
            f"backprop_loops={backprop_loops} is below the {need} loops whose loss objective={objective!r} takes at "
            f"n_loops={n_loops}; use at least {need}, or objective='END'."
        )
