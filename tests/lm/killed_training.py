"""Training runs that are killed, for test_kill_training.py; executed as a script in a process of its own.

killed_training.py storm WORK SEED    fork runs and SIGKILL them, at planted and at random moments, until one ends
killed_training.py train OUT PAUSE    one run that goes on where it was; so many seconds a step longer
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch._dynamo  # optimizers import it at their first step: here once, and not in every fork

from depthlab.lm import checkpoint, training
from depthlab.lm.gpt import GPT, GPTConfig
from depthlab.lm.tokens import TokenStream, as_tokens
from depthlab.lm.training import TrainConfig, train

STEPS, EVERY = 24, 3
PLANTED = [("before fsync", 2), ("after fsync", 4), ("before rename", 1), ("after rename", 1), ("after rename", 2)]


def run(out: Path, optimizer: str = "muon", pause: float = 0.0) -> None:
    """A tiny run with everything that has a state: dropout, two optimizers, accumulation, evaluation, a schedule."""
    torch.set_num_threads(1)
    shape = {"vocab_size": 64, "seq_len": 16, "n_layers": 2, "n_heads": 2, "d_model": 16, "n_streams": 2}
    model = GPT(GPTConfig(**shape, dropout=0.2), torch.Generator().manual_seed(5))
    ids = np.random.default_rng(0).integers(0, 64, 700)  # 43 windows: batches run over the ends of epochs
    stream = TokenStream(as_tokens(ids, 64), batch_size=3, seq_len=16, seed=2)
    config = TrainConfig(
        steps=STEPS, optimizer=optimizer, accumulate=2, log_every=2, evaluate_every=6, checkpoint_every=EVERY, keep=2
    )
    if pause:
        whole = training._step

        def slowly(*arguments):
            time.sleep(pause)
            return whole(*arguments)

        training._step = slowly
    train(model, stream, config, out, as_tokens(ids[:100], 64), resume=True, quiet=True)


def die_at(step: str, count: int) -> None:
    """SIGKILL this process at the count-th call of os.fsync or os.rename in a checkpoint, before or after it."""
    when, name = step.split()
    real, calls = getattr(os, name), 0

    def bomb(*arguments: object) -> None:
        nonlocal calls
        calls += 1
        if calls == count and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        real(*arguments)
        if calls == count and when == "after":
            os.kill(os.getpid(), signal.SIGKILL)

    setattr(checkpoint.os, name, bomb)


def attempt(out: Path, bomb: tuple[str, int] | None = None, kill_after: float | None = None) -> bool:
    """Fork one run in `out`; True when it was killed, False when it finished."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            if bomb:
                die_at(*bomb)
            run(out)
            code = 0
        finally:
            os._exit(code)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    if os.WIFEXITED(status) and os.WEXITSTATUS(status):
        sys.exit("a run failed by itself")
    return os.WIFSIGNALED(status)


def storm(folder: Path, seed: int) -> None:
    start = time.monotonic()
    attempt(folder / "calm")
    whole = time.monotonic() - start
    draw = random.Random(seed)
    kills = {"planted": 0, "random": 0}
    for bomb in draw.sample(PLANTED, len(PLANTED)):
        kills["planted"] += attempt(folder / "stormy", bomb=bomb)
        kills["random"] += attempt(folder / "stormy", kill_after=draw.uniform(0, 0.3 * whole))
    for _ in range(4):
        kills["random"] += attempt(folder / "stormy", kill_after=draw.uniform(0.2, 0.8) * whole)
    attempt(folder / "stormy")
    print(kills["planted"], kills["random"])


if __name__ == "__main__":
    if sys.argv[1] == "storm":
        storm(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        run(Path(sys.argv[2]), pause=float(sys.argv[3]))
