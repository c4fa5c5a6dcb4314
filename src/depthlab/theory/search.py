"""Search for inputs that beat the norm bound, at random and by gradient ascent.

A scheme appears only as its combination coefficients (the full schemes are depthlab.residuals). What is searched over
is everything an adversary could choose: the embedding, all updates and every coefficient the scheme allows.
"""

import math

import torch
from torch import Generator, Tensor

from depthlab.theory.norm_bound import carry, interpolate, norm_ratio, unit_roundoff

# "attnres-block-sums" reads as "attnres-block" does, but is measured against the block sums.
SCHEMES = ("mgr", "mgr-per-channel", "prenorm", "hc", "mhc", "attnres", "attnres-block", "attnres-block-sums")
N_BLOCKS = 8  # Block AttnRes attends over the sums of 8 blocks of layers
HC_REACH = 0.3  # HC's mixing entries are free; the search keeps them within +-0.3, row sums of 1.2 for 4 streams


def draw_terms(restarts: int, n_layers: int, width: int, generator: Generator) -> Tensor:
    """[restarts, L + 1, C] float64: x_0 and L updates, from independent to nearly parallel, norms 0.1 to 1."""

    def gauss(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    common = torch.rand(restarts, 1, 1, generator=generator, dtype=torch.float64)
    terms = common * gauss(restarts, 1, width) + (1 - common) * gauss(restarts, n_layers + 1, width)
    scale = 0.1 + 0.9 * torch.rand(restarts, n_layers + 1, 1, generator=generator, dtype=torch.float64)
    return scale * terms / terms.norm(dim=-1, keepdim=True)


def draw_logits(scheme: str, restarts: int, n_layers: int, n_streams: int, width: int, generator: Generator) -> Tensor:
    """Free numbers that `run_scheme` turns into coefficients of the scheme; [restarts, L, ..] float64.

    Raises:
        ValueError: unknown scheme.
    """
    shapes = {
        "mgr": (n_streams,),
        "mgr-per-channel": (n_streams, width),
        "prenorm": (0,),
        "hc": (n_streams, n_streams + 1),
        "mhc": (2 * n_streams,),
        "attnres": (n_layers + 1,),
        "attnres-block": (N_BLOCKS + 1,),
        "attnres-block-sums": (N_BLOCKS + 1,),
    }
    if scheme not in shapes:
        raise ValueError(f"Unknown scheme {scheme!r}; use one of {', '.join(SCHEMES)}.")
    return 2 * torch.randn(restarts, n_layers, *shapes[scheme], generator=generator, dtype=torch.float64)


def run_scheme(scheme: str, terms: Tensor, logits: Tensor, n_streams: int) -> Tensor:
    """All vectors the scheme produces after its last layer: streams [.., n, C], or reads [.., L, C] for AttnRes.

    Args:
        scheme: one of SCHEMES.
        terms: [.., L + 1, C] the embedding and all updates.
        logits: [.., L, ..] from `draw_logits`.
        n_streams: n, ignored by prenorm and AttnRes.
    """
    layers = range(terms.shape[-2] - 1)
    if scheme.startswith("mgr"):
        # Accumulation: the embedding and the first n - 1 updates are the streams. Mixing: the rest.
        streams, gates = terms[..., :n_streams, :], torch.sigmoid(logits)
        for layer in range(n_streams - 1, len(layers)):
            beta = gates[..., layer, :] if scheme == "mgr" else gates[..., layer, :, :]
            beta = beta.unsqueeze(-1) if scheme == "mgr" else beta
            streams = interpolate(streams, terms[..., layer + 1, :].unsqueeze(-2), beta)
        return streams
    if scheme in ("prenorm", "hc", "mhc"):
        n = 1 if scheme == "prenorm" else n_streams
        streams = terms[..., :1, :].expand(*terms.shape[:-2], n, terms.shape[-1])
        for layer in layers:
            mix, write = _coefficients(scheme, logits[..., layer, :] if scheme != "hc" else logits[..., layer, :, :])
            streams = carry(streams, terms[..., layer + 1, :], mix, write)
        return streams
    reads = []
    for layer in layers:  # what is attended over when layer + 1 updates are there
        seen = terms[..., : layer + 2, :]
        sources = seen if scheme == "attnres" else block_sums(seen, len(layers))
        weights = torch.softmax(logits[..., layer, : sources.shape[-2]], dim=-1)
        reads.append((weights.unsqueeze(-1) * sources).sum(-2))
    return torch.stack(reads, dim=-2)


def block_sums(terms: Tensor, n_layers: int) -> Tensor:
    """[.., 1 + blocks, C]: x_0 and the sums of consecutive blocks of ceil(L / 8) updates, the last still running."""
    size = math.ceil(n_layers / N_BLOCKS)
    sums = [updates.sum(-2) for updates in terms[..., 1:, :].split(size, dim=-2)]
    return torch.stack([terms[..., 0, :], *sums], dim=-2)


def search_ratio(scheme: str, terms: Tensor, logits: Tensor, n_streams: int) -> Tensor:
    """[..] `norm_ratio` of what a scheme produces to what its bound names: the terms, or all block sums on the way."""
    reached = run_scheme(scheme, terms, logits, n_streams)
    if scheme != "attnres-block-sums":
        return norm_ratio(reached, terms)
    depth = terms.shape[-2] - 1
    sums = torch.cat([block_sums(terms[..., : layer + 2, :], depth) for layer in range(depth)], dim=-2)
    return norm_ratio(reached, sums)


def _coefficients(scheme: str, raw: Tensor) -> tuple[Tensor, Tensor]:
    """(mix [.., n, n], write [.., n]) of one layer."""
    if scheme == "prenorm":
        one = raw.new_ones(raw.shape[:-1])
        return one[..., None, None], one[..., None]
    if scheme == "hc":
        return HC_REACH * torch.tanh(raw[..., :-1]), 2 * torch.tanh(raw[..., -1])
    # mHC: a doubly stochastic mixer (here a convex combination of the n cyclic shifts) and a write gate in (0, 2).
    n = raw.shape[-1] // 2
    eye = torch.eye(n, dtype=raw.dtype)
    shifts = torch.stack([eye.roll(k, 0) for k in range(n)])
    mix = (torch.softmax(raw[..., :n], dim=-1)[..., None, None] * shifts).sum(-3)
    return mix, 2 * torch.sigmoid(raw[..., n:])


def random_search(scheme: str, tries: int, n_layers: int, n_streams: int, width: int, generator: Generator) -> Tensor:
    """[tries] norm ratios of random inputs and coefficients; the bound says that all are at most 1."""
    terms = draw_terms(tries, n_layers, width, generator)
    logits = draw_logits(scheme, tries, n_layers, n_streams, width, generator)
    return search_ratio(scheme, terms, logits, n_streams)


def gradient_ascent(
    scheme: str, steps: int, restarts: int, n_layers: int, n_streams: int, width: int, generator: Generator
) -> Tensor:
    """[steps + 1, restarts] norm ratios while Adam climbs them, over terms and coefficients together."""
    terms = draw_terms(restarts, n_layers, width, generator).requires_grad_()
    logits = draw_logits(scheme, restarts, n_layers, n_streams, width, generator).requires_grad_()
    climber = torch.optim.Adam([terms, logits], lr=0.1, maximize=True)
    history = []
    for step in range(steps + 1):
        ratio = search_ratio(scheme, terms, logits, n_streams)
        history.append(ratio.detach())
        if step < steps:
            climber.zero_grad()
            ratio.log().sum().backward()
            climber.step()
    return torch.stack(history)


def random_rounding(
    n_layers: int, arithmetic: torch.dtype, storage: torch.dtype, tries: int, width: int, generator: Generator
) -> Tensor:
    """[n_layers] largest norm ratio over `tries` random chains after each layer: equal norms, all updates near x_0.

    Near equality is where the exact bound leaves no room, so where rounding could show.
    """
    first = torch.randn(tries, width, generator=generator, dtype=torch.float64).to(storage)
    stream, largest, ratios = first, first.double().norm(dim=-1), []
    for _ in range(n_layers):
        spacings = 4 * unit_roundoff(storage) * torch.randn(tries, width, generator=generator, dtype=torch.float64)
        update = (first.double() * (1 + spacings)).to(storage)
        beta = torch.rand(tries, 1, generator=generator, dtype=torch.float64).to(arithmetic)
        stream = interpolate(stream.to(arithmetic), update.to(arithmetic), beta).to(storage)
        largest = torch.maximum(largest, update.double().norm(dim=-1))
        ratios.append((stream.double().norm(dim=-1) / largest).amax())
    return torch.stack(ratios)


def rounding_ratchet(
    n_layers: int, arithmetic: torch.dtype, storage: torch.dtype, min_gate: float = 0.0, width: int = 64
) -> list[float]:
    """Norm ratio after each of `n_layers` mixing layers under updates built so that rounding always helps them.

    Some elements are pulled up by 0.52 spacings, which rounds to one; the others down by 0.48, which rounds to none. So
    the stream creeps upwards although no update is longer than x_0. As many elements are pulled up as that length
    allows. Gates of at least `min_gate` tie the updates to the stream: once it is too long, nothing lifts it further.

    Args:
        n_layers: mixing layers.
        arithmetic: dtype of `interpolate`, float32 or float64.
        storage: dtype of streams and updates.
        min_gate: smallest gate the construction may use.
        width: C.

    Returns:
        n_layers ratios norm(s_l) / norm(x_0), each at most 1 + `rounding_term`.
    """
    stream = torch.ones(width, dtype=torch.float64).to(storage)
    limit = stream.double().norm()
    ratios = []
    for _ in range(n_layers):
        move = _ratchet_move(stream, limit, min_gate, unit_roundoff(storage))
        if move is not None:
            update, beta = move[0].to(storage), torch.tensor(move[1], dtype=arithmetic)
            stream = interpolate(stream.to(arithmetic), update.to(arithmetic), beta).to(storage)
        ratios.append(float(stream.double().norm() / limit))
    return ratios


def _ratchet_move(stream: Tensor, limit: Tensor, min_gate: float, u: float) -> tuple[Tensor, float] | None:
    """(update in float64, beta) lifting as many elements of `stream` by one spacing as possible, None if none."""
    s = stream.double()
    spacing = 2 * u * 2 ** torch.floor(torch.log2(s))
    lowest_first = torch.argsort(s, stable=True)
    for lifted in range(len(s) // 2, 0, -1):
        pull = torch.full_like(s, -0.48)
        pull[lowest_first[:lifted]] = 0.52
        step = pull * spacing  # update = s + step / beta: choose the beta that makes its norm least
        beta = max(min_gate, float(-(step @ step) / (s @ step))) if s @ step < 0 else min_gate
        if 0 < beta <= 1:
            update = s + step / beta
            if update.to(stream.dtype).double().norm() <= limit:
                return update, beta
    return None
