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

from depthlab.lm import training
from depthlab.lm.gpt import GPT, GPTConfig
from depthlab.lm.tokens import TokenStream, as_tokens
from depthlab.lm.training import TrainConfig, train

STEPS, EVERY = 36, 2
# fsync: run.json 2 calls, the log 2, then each checkpoint 8. rename: one a checkpoint, one a deletion.
PLANTED = [("before fsync", 2), ("after fsync", 6), ("before fsync", 8), ("after fsync", 10), ("before rename", 1)]
PLANTED += [("after rename", 1), ("after rename", 4), ("after unlink", 2)]


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
    """SIGKILL this process at the count-th call of os.fsync, os.rename or os.unlink, before or after it."""
    when, name = step.split()
    real, calls = getattr(os, name), 0

    def bomb(*arguments: object, **how: object) -> None:
        nonlocal calls
        calls += 1
        if calls == count and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        real(*arguments, **how)
        if calls == count and when == "after":
            os.kill(os.getpid(), signal.SIGKILL)

    setattr(os, name, bomb)


def attempt(out: Path, bomb: tuple[str, int] | None = None, kill_at: tuple[int, float] | None = None) -> bool:
    """Fork one run in `out`; True when it was killed, False when it finished.

    kill_at: kill it (lines of the log, seconds) after the log has grown by so many lines, on any machine.
    """
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
    ended, status = 0, 0
    if kill_at is not None:
        goal = lines(out) + kill_at[0]
        while lines(out) < goal and not ended:
            time.sleep(0.002)
            ended, status = os.waitpid(child, os.WNOHANG)
    if not ended:
        if kill_at is not None:
            time.sleep(kill_at[1])
            os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
    if os.WIFEXITED(status) and os.WEXITSTATUS(status):
        sys.exit("a run failed by itself")
    return os.WIFSIGNALED(status)


def lines(out: Path) -> int:
    log = out / "log.jsonl"
    return log.read_bytes().count(b"\n") if log.exists() else 0


def storm(folder: Path, seed: int) -> None:
    attempt(folder / "calm")
    draw = random.Random(seed)
    planted = sum(attempt(folder / "planted", bomb=bomb) for bomb in draw.sample(PLANTED, len(PLANTED)))
    moments = [(draw.randint(0, 3), draw.uniform(0, 0.1)) for _ in range(8)]
    at_random = sum(attempt(folder / "random", kill_at=moment) for moment in moments)
    attempt(folder / "planted")
    attempt(folder / "random")
    print(planted, at_random)


if __name__ == "__main__":
    if sys.argv[1] == "storm":
        storm(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        run(Path(sys.argv[2]), pause=float(sys.argv[3]))
