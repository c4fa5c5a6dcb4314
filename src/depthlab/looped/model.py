"""A looped transformer: one stack of blocks applied K times, in five variants."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from depthlab.kernels.mgr import rms_normalize
from depthlab.lm.head import check_tokens, head_logits, next_token_loss
from depthlab.lm.layers import CausalSelfAttention, Embedding, Linear, Mlp, Rotary, attend, rotary_tables
from depthlab.lm.settings import check_choice, check_count, check_positive
from depthlab.looped.cache import KeyValue, LoopCache, joined
from depthlab.looped.config import OBJECTIVES, LoopedConfig, loops_of, need_differentiated
from depthlab.looped.wiring import ENTERS, Wiring, wiring

EMBEDDING_STD, HEAD_STD = 1.0, 0.001


class Held(NamedTuple):
    """Tokens that stopped, [B, T], and the keys and values that they had in the last loop, one pair a block."""

    stopped: Tensor
    kv: list[KeyValue]


class Pass(NamedTuple):
    """What all loops made of tokens [B, T].

    h: the last loop's output [B, T, C]. outputs: those of all loops. states: the same before their norm.
    loops_used: int64 [B, T], below K only for tokens that stopped early.
    """

    h: Tensor
    states: list[Tensor]
    outputs: list[Tensor]
    loops_used: Tensor


class LoopedBlock(nn.Module):
    """Attention and ReLU^2 MLP, each added to z after a norm of its own; queries may be read from elsewhere."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__()
        self.attention = CausalSelfAttention(d_model, n_heads, qk_norm=True)
        self.mlp = Mlp(d_model, activation="relu2")

    def forward(
        self,
        z: Tensor,
        rotary: Rotary,
        query_from: Tensor | None = None,
        past: KeyValue | None = None,
        held: tuple[Tensor, KeyValue] | None = None,
    ) -> tuple[Tensor, KeyValue]:
        """z [B, T, C] -> (z [B, T, C], keys and values of its tokens).

        Args:
            query_from: normed [B, T, C]; None reads queries from z, as keys and values.
            past: keys and values of earlier tokens. held: (stopped [B, T], pair): those tokens show the pair's.
        """
        q, k, v = self.attention.project(rms_normalize(z), rotary, query_from)
        if held is not None:
            stopped = held[0][:, None, :, None]  # [B, 1, T, 1]
            k, v = torch.where(stopped, held[1][0], k), torch.where(stopped, held[1][1], v)
        seen = (k, v) if past is None else (joined(past[0], k), joined(past[1], v))
        z = z + self.attention.merge(attend(q, *seen))
        return z + self.mlp(rms_normalize(z)), (k, v)


def one_loop(
    blocks: Sequence[LoopedBlock],
    plan: Sequence[Wiring],
    e: Tensor,
    h: Tensor | None,
    rotary: Rotary,
    past: list[KeyValue] | None = None,
    held: Held | None = None,
    keep: bool = False,
) -> tuple[Tensor, Tensor, list[KeyValue]]:
    """One application of the stack: (its state z before the norm, the output norm(z), keys and values if `keep`)."""
    z, kept = rms_normalize(e), []  # z = x
    query = None if h is None else rms_normalize(h)
    for i, (block, wire) in enumerate(zip(blocks, plan, strict=True)):
        z = ENTERS[wire.enters](z, h, e)
        z, kv = block(
            z,
            rotary,
            query if wire.query == "h" else None,
            None if past is None else past[i],
            None if held is None else (held.stopped, held.kv[i]),
        )
        if keep:  # else nothing may hold them: they would outlive a checkpointed loop
            kept.append(kv)
    return z, rms_normalize(z), kept


class LoopedTransformer(nn.Module):
    """L blocks applied K times in one of five variants, in the published setting.

    Rotary positions and then QK-norm, ReLU^2 MLP, no biases, RMSNorm without weights, untied head, soft-capped logits.
    All variants have the same parameters. Weights are float32; run it in bfloat16 by autocast, which leaves the state
    in float32.

    With torch.compile around `loss` or the model, one loop is compiled and called K times: what compiling costs does
    not grow with K. Checkpointed loops are not compiled.

    Args:
        config: its shape.
        generator: draws the start values; torch's global generator by default.

    Attributes:
        loop_norms: [K], the L2 norm of the state at the end of each loop before its norm, mean over tokens, of the
            latest pass; None before the first.

    Source: arXiv 2605.18797 and its code, after nanochat.
    """

    def __init__(self, config: LoopedConfig, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.config = config
        width, copies = config.d_model, 1 if config.tied else config.n_loops
        self.embed_tokens = Embedding(config.vocab_size, width)
        self.blocks = nn.ModuleList(LoopedBlock(width, config.n_heads) for _ in range(copies * config.n_layers))
        self.lm_head = Linear(width, config.vocab_size)
        self.loop_norms: Tensor | None = None
        self.reset_parameters(generator)

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw all start values anew, also after ``to_empty``: uniform inner matrices, output matrices at zero."""
        nn.init.normal_(self.embed_tokens.weight, std=EMBEDDING_STD, generator=generator)
        nn.init.normal_(self.lm_head.weight, std=HEAD_STD, generator=generator)
        bound = (3 / self.config.d_model) ** 0.5  # a uniform distribution of std C^-0.5
        for block in self.blocks:
            attention, mlp = block.attention, block.mlp
            for inner in (attention.q_proj, attention.k_proj, attention.v_proj, mlp.up_proj):
                nn.init.uniform_(inner.weight, -bound, bound, generator=generator)
            for output in (attention.o_proj, mlp.down_proj):
                nn.init.zeros_(output.weight)

    def forward(
        self,
        tokens: Tensor,
        n_loops: int | None = None,
        cache: LoopCache | None = None,
        return_loops: bool = False,
        stop_below: float | None = None,
    ) -> Tensor | tuple[Tensor, list[Tensor]]:
        """Logits [B, T, V] of the token after each of tokens [B, T]; float32 or wider.

        Args:
            n_loops: K of this call, from 1 on; the config's by default.
            cache: holds the tokens before these, and takes these.
            return_loops: also return the states at the end of each loop, before its norm, K of [B, T, C].
            stop_below: see `run`.

        Raises:
            TypeError, ValueError: K below 1, or above the config's where not tied; tokens that are no [B, T] of
                integers in the vocabulary, or beyond seq_len; a cache of another K, variant, batch, model, weights,
                dtype or stop_below, or full.
        """
        found = self.run(tokens, n_loops, cache, stop_below)
        logits = head_logits(found.h, self.lm_head.weight, self.config.soft_cap)
        return (logits, found.states) if return_loops else logits

    def loss(self, tokens: Tensor, targets: Tensor, n_loops: int | None = None, objective: str | None = None) -> Tensor:
        """Mean cross-entropy in nats (float32) of targets [B, T], each the token after that of tokens [B, T].

        `objective`: the loops it averages; by default the config's in training, and in eval mode "END", what the model
        would say. Raises as `forward`, and ValueError for an unknown objective or one that `backprop_loops` cuts off.
        """
        objective = objective or (self.config.objective if self.training else "END")
        check_choice("objective", objective, OBJECTIVES)
        n_loops = self._loops(n_loops)
        if self.config.backprop_loops is not None:
            need_differentiated(self.config.backprop_loops, objective, n_loops)
        return self._mean_loss(self._outputs(tokens, n_loops, objective), targets)

    def log_fields(self) -> dict[str, list[float]]:
        """`loop_norms` for a line of the training log."""
        return {} if self.loop_norms is None else {"loop_norms": [round(x, 4) for x in self.loop_norms.tolist()]}

    # These frames are left out of torch.compile, so that `one_loop` and `next_token_loss`, which they call for every
    # loop, are compiled by themselves.
    @torch.compiler.disable(recursive=False)
    def run(
        self,
        tokens: Tensor,
        n_loops: int | None = None,
        cache: LoopCache | None = None,
        stop_below: float | None = None,
    ) -> Pass:
        """All loops on tokens [B, T].

        Args:
            n_loops, cache: as `forward` takes them.
            stop_below: a token stops after the first loop that changed its output by less than this share,
                |h_t - h_(t-1)| / |h_t|. Its state, keys and values then stay what they are, for later loops and tokens.
        """
        n_loops, config = self._loops(n_loops), self.config
        check_tokens("tokens", tokens, config.vocab_size, config.seq_len)
        if stop_below is not None:
            check_positive("stop_below", stop_below)
        start = 0
        if cache is not None:
            if not isinstance(cache, LoopCache):
                raise TypeError(f"cache is {type(cache).__name__}; give a depthlab.looped.LoopCache, or None.")
            cache.check(self, n_loops, tokens, stop_below)
            start = cache.length
        e = self.embed_tokens(tokens)  # [B, T, C]
        rotary = rotary_tables(
            config.head_dim, tokens.shape[1], start=start, base=config.rope_base, device=tokens.device
        )  # two of [T, D / 2]
        keep = cache is not None or stop_below is not None
        h, held, states, outputs, sets = None, None, [], [], []
        used = torch.full(tokens.shape, n_loops, device=tokens.device)  # [B, T]
        for loop in range(1, n_loops + 1):
            past = None if cache is None else cache.past(loop, n_loops)
            z, new, kv = self._one_loop(loop, e, h, rotary, past, held, keep)
            if held is not None:
                z = torch.where(held.stopped[..., None], states[-1], z)
                new = torch.where(held.stopped[..., None], h, new)
            if self._is_cut(loop, n_loops):
                z, new = z.detach(), new.detach()
            states, outputs, sets = [*states, z], [*outputs, new], [*sets, kv]
            if stop_below is not None and loop > 1:
                held = _stop(held, new, h, kv, stop_below)
                used = torch.where(held.stopped, used.clamp_max(loop), used)
            h = new
            if held is not None and bool(held.stopped.all()):
                missing = n_loops - loop  # loops that would change nothing
                states, outputs, sets = (x + x[-1:] * missing for x in (states, outputs, sets))
                break
        self.loop_norms = torch.stack([z.detach().float().norm(dim=-1).mean() for z in states])
        if cache is not None:
            cache.extend(self, tokens, sets, stop_below)
        return Pass(outputs[-1], states, outputs, used)

    @torch.compiler.disable(recursive=False)
    def _outputs(self, tokens: Tensor, n_loops: int, objective: str) -> list[Tensor]:
        found = self.run(tokens, n_loops)
        return [found.outputs[loop - 1] for loop in loops_of(objective, n_loops)]

    @torch.compiler.disable(recursive=False)
    def _mean_loss(self, outputs: list[Tensor], targets: Tensor) -> Tensor:
        losses = [next_token_loss(h, self.lm_head.weight, targets, self.config.soft_cap) for h in outputs]
        return sum(losses) / len(losses)

    @torch.compiler.disable(recursive=False)
    def _one_loop(
        self,
        loop: int,
        e: Tensor,
        h: Tensor | None,
        rotary: Rotary,
        past: list[KeyValue] | None,
        held: Held | None,
        keep: bool,
    ) -> tuple[Tensor, Tensor, list[KeyValue]]:
        config = self.config
        first = 0 if config.tied else (loop - 1) * config.n_layers
        blocks = list(self.blocks)[first : first + config.n_layers]
        plan = [wiring(config.variant, loop, block) for block in range(1, config.n_layers + 1)]
        if config.checkpoint_loops and torch.is_grad_enabled() and not keep:
            return checkpoint(one_loop, blocks, plan, e, h, rotary, use_reentrant=False, preserve_rng_state=False)
        return one_loop(blocks, plan, e, h, rotary, past, held, keep)

    def _loops(self, n_loops: int | None) -> int:
        if n_loops is None:
            return self.config.n_loops
        check_count("n_loops", n_loops)
        if not self.config.tied and n_loops > self.config.n_loops:
            raise ValueError(
                f"n_loops={n_loops} is above the {self.config.n_loops} loops that have blocks; an untied model "
                "(tied=False) cannot be applied more often."
            )
        return n_loops

    def _is_cut(self, loop: int, n_loops: int) -> bool:
        """Whether no gradient may pass through the end of this loop."""
        backprop = self.config.backprop_loops
        return backprop is not None and loop <= n_loops - backprop


def _stop(held: Held | None, new: Tensor, h: Tensor, kv: list[KeyValue], stop_below: float) -> Held:
    """Who has stopped after a loop that moved h to `new`, each [B, T, C]."""
    moved = (new - h).norm(dim=-1) / new.norm(dim=-1)
    stopped = moved < stop_below
    return Held(stopped if held is None else stopped | held.stopped, kv)
