"""One trainer for every language model here, on a CPU or one GPU, which loses nothing when it is killed.

A model needs `loss(tokens, targets)`, a dataclass `config` with `kind`, `vocab_size` and `seq_len`, and parameters.
With `log_fields()` it adds what it says of its latest pass, as JSON values by name, to the lines of the log.
"""

import contextlib
import dataclasses
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from depthlab.data.files import gist
from depthlab.lm import checkpoint, runlog, sentry
from depthlab.lm.checkpoint import offer
from depthlab.lm.evaluation import evaluate
from depthlab.lm.interrupts import finish_step_on_ctrl_c
from depthlab.lm.optimizers import OPTIMIZERS, build_optimizers
from depthlab.lm.runlog import Log, TrainingError
from depthlab.lm.schedules import SCHEDULES
from depthlab.lm.settings import check_choice, check_seed
from depthlab.lm.steps import PRECISIONS, Moved, autocast, gradients
from depthlab.lm.tokens import Tokens, TokenStream
from depthlab.runs import in_ci, provenance, seed_everything
from depthlab.runs.runner import only_runner


@dataclass(frozen=True)
class TrainConfig:
    """How a run goes. Every field outside `FREE` decides its numbers, so a resumed run must have the same.

    Attributes:
        steps: updates in all. accumulate: batches a step.
        optimizer: one of `optimizers.OPTIMIZERS`; lr and weight_decay as `build_optimizers` takes them.
        schedule: one of `schedules.SCHEDULES`, after `warmup_steps` of linear warm-up (None: a tenth, at most 100).
        clip: gradients are scaled down to this L2 norm over all parameters; inf never.
        precision: "float32", or "bfloat16" for autocast (weights and optimizer stay float32).
        compile: run `model.loss` through torch.compile.
        seed: of dropout and whatever else draws in a step; start values and data order have their own.
        log_every, evaluate_every, checkpoint_every: in steps; 0 is never before the end. All three happen at the end.
        evaluate_tokens: at most so many of the validation tokens, always the first ones; 0 takes all.
        keep: so many newest checkpoints; 0 keeps all.

    Raises:
        ValueError: naming the field, its value and what is allowed. TypeError: a value of another type.
    """

    steps: int = 200
    optimizer: str = "adamw"
    lr: float | None = None
    schedule: str = "cosine"
    warmup_steps: int | None = None
    weight_decay: float | None = None
    clip: float = 1.0
    accumulate: int = 1
    precision: str = "float32"
    compile: bool = False
    seed: int = 0
    log_every: int = 10
    evaluate_every: int = 0
    evaluate_tokens: int = 0
    checkpoint_every: int = 500
    keep: int = 0

    def __post_init__(self) -> None:
        least = {"steps": 1, "accumulate": 1, "log_every": 1}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is int or (field.name == "warmup_steps" and value is not None):
                if isinstance(value, bool) or not isinstance(value, int):
                    raise TypeError(f"{field.name}={value!r} is {type(value).__name__}; use a whole number.")
                if value < least.get(field.name, 0):
                    raise ValueError(f"{field.name}={value} is not allowed; use {least.get(field.name, 0)} or more.")
        for name, known in (("optimizer", OPTIMIZERS), ("schedule", SCHEDULES), ("precision", PRECISIONS)):
            check_choice(name, getattr(self, name), known)
        check_seed("seed", self.seed)
        if not self.clip > 0:
            raise ValueError(f"clip={self.clip!r} is not allowed; use a number above 0, inf for none.")
        if self.warmup_steps is not None and self.warmup_steps > self.steps:
            raise ValueError(f"warmup_steps={self.warmup_steps} is not allowed; use 0 to steps={self.steps}.")


FREE = ("log_every", "checkpoint_every", "keep")
_SILENT_S = 10.0


class TrainResult(NamedTuple):
    """How a run ended: loss and val_loss in nats (NaN where there is none), its last checkpoint, and its log."""

    step: int
    loss: float
    val_loss: float
    checkpoint: Path
    log: list[dict[str, Any]]


@dataclass
class _Run:
    """What the steps of one run share."""

    model: nn.Module
    stream: TokenStream
    config: TrainConfig
    out: Path
    validation: Tokens | None
    settings: dict[str, Any]
    optimizers: list[torch.optim.Optimizer]
    compute: Callable[[Sequence[Tensor]], Moved]
    watch: sentry.Sentry
    log: Log
    quiet: bool
    spoken: float = 0.0  # when something was last printed
    since: float = 0.0  # when the clock of ms_per_step started, and how many steps it has seen
    timed: int = 0

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def say(self, text: str) -> None:
        self.spoken = time.perf_counter()
        if not self.quiet:
            with contextlib.suppress(BrokenPipeError):  # `depthlab train | head`: a run goes on when nobody reads
                print(text, flush=True)


def train(
    model: nn.Module,
    stream: TokenStream,
    config: TrainConfig,
    out_dir: str | Path,
    validation: Tokens | None = None,
    resume: bool = False,
    *,
    about: dict[str, Any] | None = None,
    quiet: bool = False,
) -> TrainResult:
    """Train `model` in place on batches of `stream`, keeping log, checkpoints and settings in `out_dir`.

    After a kill at any moment, ``resume=True`` with an equally built model goes on from the newest good checkpoint; on
    a CPU weights, optimizers and log (but for its times) end bit for bit as if it had never stopped. Global generators
    are seeded.

    Args:
        validation: tokens whose loss is measured at the end and, with `evaluate_every`, at the start and between.
        resume: go on where the run in `out_dir` stopped; a folder without a run, or without checkpoint, begins anew.
        about: further settings to keep; a resumed run must have the same.
        quiet: print nothing but the progress of long validations. Progress is left out where CI is set.

    Raises:
        ValueError: tokens outside the model's vocabulary or sequences longer than it reads.
        TrainingError: `out_dir` holds a run already, or one with other settings; it cannot be written; a loss or
            gradient is not finite (NonFiniteError). CheckpointError: no checkpoint is good, or the disk is full.
        KeyboardInterrupt: Ctrl-C; the step was finished and saved. A second Ctrl-C does not wait for that.
    """
    out, validation_id = Path(out_dir), validation.sha256 if validation else None
    need_fitting_tokens(model, stream, validation)
    settings = {"model": checkpoint.describe(model), "about": about or {}, "training": dataclasses.asdict(config)}
    settings |= {"data": stream.identity(), "validation": validation_id}
    settings = json.loads(json.dumps(settings))  # as run.json gives them back
    try:
        out.mkdir(parents=True, exist_ok=True)
        with only_runner(out / "lock"):
            checkpoint.clean(out)
            seed_everything(config.seed)
            optimizers = build_optimizers(
                model, optimizer=config.optimizer, lr=config.lr, weight_decay=config.weight_decay
            )
            done, notes = _enter(out, model, optimizers, stream, settings, resume)
            with Log(out, done) as log:
                compute = gradients(model, precision=config.precision, clip=config.clip, compiled=config.compile)
                watch = sentry.Sentry(model)
                run = _Run(model, stream, config, out, validation, settings, optimizers, compute, watch, log, quiet)
                for note in notes:
                    run.say(note)
                return _go(run, done)
    except OSError as error:
        raise cannot_write(out, error) from None


def need_fitting_tokens(model: nn.Module, stream: TokenStream, validation: Tokens | None) -> None:
    """ValueError unless the model knows every token id and reads sequences as long as the stream's."""
    vocab_size, seq_len = model.config.vocab_size, model.config.seq_len
    for tokens in filter(None, (stream.tokens, validation)):
        if tokens.vocab_size > vocab_size:
            raise ValueError(
                f"vocab_size={vocab_size} of the model is below the {tokens.vocab_size} of {tokens.source}; use a "
                "model with at least that, or another tokenizer."
            )
    if stream.seq_len > seq_len:
        raise ValueError(f"seq_len={stream.seq_len} of the data is above the model's {seq_len}; use at most that.")


def holds_run(out_dir: str | Path) -> bool:
    """Whether a run was begun in this folder."""
    return (Path(out_dir) / runlog.RUN).exists() or bool(checkpoint.checkpoints(Path(out_dir)))


def need_new(out_dir: str | Path) -> None:
    """TrainingError if the folder holds a run."""
    if holds_run(out_dir):
        raise TrainingError(
            f"{out_dir} holds a run already; go on with it by --resume (resume=True), or give another folder."
        )


def _enter(
    out: Path,
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    stream: TokenStream,
    settings: dict[str, Any],
    resume: bool,
) -> tuple[int, list[str]]:
    """The step to go on from, and what there is to say about it; begins a run where there is none."""
    if not resume:
        need_new(out)
    if holds_run(out):
        if found := _difference(runlog.read_run(out)["settings"], settings):
            raise runlog.changed(out, *found)
    else:
        parameters = sum(p.numel() for p in model.parameters())
        runlog.write_run(out, {"settings": settings, "parameters": parameters, "made_by": provenance()})

    def foreign(state: dict[str, Any]) -> str:
        found = _difference(state["settings"], settings)
        return f"{found[0]}={found[1]!r}, here {found[2]!r}" if found else ""

    good, state, refused = checkpoint.latest_good(out, foreign)
    if good is None and refused:
        raise checkpoint.CheckpointError(
            f"{' '.join(refused)} No other is there; move {out} away to begin anew, or put a good copy back."
        )
    if good is None:
        return 0, [f"{out} has no checkpoint yet; beginning at step 0."] if resume else []
    checkpoint.load(good, model, optimizers, state)
    stream.load_state_dict(state["stream"])
    return state["step"], [*refused, f"Going on from {good}."]


def _difference(before: dict[str, Any], now: dict[str, Any]) -> tuple[str, Any, Any] | None:
    """The first setting that decides numbers and is not the same, in words, and both values."""

    def relevant(settings: dict[str, Any]) -> dict[str, Any]:
        training = {name: value for name, value in settings["training"].items() if name not in FREE}
        return {**settings, "training": training}

    if found := runlog.first_difference(relevant(before), relevant(now)):
        name, old, new = found
        label = {"data.sha256": "SHA-256 of the tokens", "validation": "SHA-256 of the validation tokens"}.get(name)
        return label or name.split(".")[-1], old, new
    return None


def cannot_write(out_dir: str | Path, error: OSError) -> TrainingError:
    """What to raise where the folder of a run cannot be written."""
    return TrainingError(
        f"{out_dir} cannot be written ({gist(error)}); make room there, or give another folder. {offer(Path(out_dir))}"
    )


def _go(run: _Run, done: int) -> TrainResult:
    """Steps done + 1 .. steps, with all that is due after each."""
    config, saved = run.config, checkpoint.path_of(run.out, done) if done else None
    run.model.train()
    step = done
    with finish_step_on_ctrl_c() as interrupted:
        try:
            if done == 0 and config.evaluate_every and run.validation:
                run.log.write({"step": 0, "tokens": 0, "val_loss": _validate(run, 0)})
            run.since = run.spoken = time.perf_counter()
            for step in range(done + 1, config.steps + 1):
                moved = _step(run, step)
                last = step == config.steps
                if last or _due(step, config.log_every) or _due(step, config.evaluate_every):
                    _write_line(run, step, moved)
                elif time.perf_counter() - run.spoken > _SILENT_S and not in_ci():
                    run.say(f"step {step} of {config.steps}")
                stop = interrupted()
                if last or _due(step, config.checkpoint_every) or stop:
                    saved = _save(run, step)
                if stop:
                    raise KeyboardInterrupt
        except KeyboardInterrupt:
            run.say(f"Interrupted at step {step} of {config.steps}. {offer(run.out)} Go on with --resume.")
            raise
    log = runlog.read_log(run.out)
    values = [line["val_loss"] for line in log if "val_loss" in line]
    loss = next((line["loss"] for line in reversed(log) if "loss" in line), math.nan)
    return TrainResult(config.steps, loss, values[-1] if values else math.nan, saved, log)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _step(run: _Run, step: int) -> Moved:
    """One update. On a CPU a bad gradient stops the run before it is applied; on a GPU that would wait every step."""
    config = run.config
    warmup_steps = min(config.steps // 10, 100) if config.warmup_steps is None else config.warmup_steps
    factor = SCHEDULES[config.schedule](step - 1, config.steps, warmup_steps)
    for optimizer in run.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor
    batches = [run.stream.next_batch() for _ in range(config.accumulate)]
    moved = run.compute(batches)
    run.watch.watch(step, moved.loss, moved.norms)
    if _checks_every_step(run.device):
        _need_finite(run, batches)
    for optimizer in run.optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    run.timed += 1
    return moved


def _checks_every_step(device: torch.device) -> bool:
    return device.type == "cpu"


def _need_finite(run: _Run, batches: Sequence[Tensor] = ()) -> None:
    """NonFiniteError if any step so far was not finite. With the batches of that step the signals of one are recorded
    too: of the first that is not finite, or else of the last."""
    if not run.watch.alarm():
        return
    report = run.watch.report()
    with autocast(run.device, run.config.precision):
        report["signals"] = sentry.first_bad_signals(run.model, batches)
    report |= getattr(run.model, "log_fields", dict)()
    path = sentry.write_report(run.out, report)
    raise sentry.NonFiniteError(
        f"Step {report['step']} is not finite: its loss is {report['loss']:g}, {sentry.describe(report)} (all norms "
        f"are in {path}). Begin a run with a lower rate. {offer(run.out)}"
    )


def _write_line(run: _Run, step: int, moved: Moved) -> None:
    """One line of the log. Reading the loss waits for the device, so the time since the line before is complete."""
    loss, grad_norm = float(moved.loss), float(moved.grad_norm)
    seconds = max(time.perf_counter() - run.since, 1e-9)
    _need_finite(run)
    tokens = run.config.accumulate * run.stream.batch_size * run.stream.seq_len
    line = {"step": step, "loss": loss, "lr": run.optimizers[0].param_groups[0]["lr"], "grad_norm": grad_norm}
    line |= {"tokens": step * tokens, "tokens_per_s": round(run.timed * tokens / seconds, 1)}
    line |= {"ms_per_step": round(1000 * seconds / run.timed, 3)}
    line |= getattr(run.model, "log_fields", dict)()
    last = step == run.config.steps
    if run.validation and (last or _due(step, run.config.evaluate_every)):
        line["val_loss"] = _validate(run, step)
    run.log.write(line)
    if not in_ci():
        validated = f", validation loss {line['val_loss']:.4f}" if "val_loss" in line else ""
        run.say(
            f"step {step} of {run.config.steps}: loss {loss:.4f}{validated}, {line['tokens_per_s']:,.0f} tokens/s, "
            f"{(run.config.steps - step) * line['ms_per_step'] / 1000:,.0f} s left"
        )
    run.since, run.timed = time.perf_counter(), 0


def _validate(run: _Run, step: int) -> float:
    """Loss of the validation tokens in nats. NonFiniteError when it is not finite."""
    try:
        with autocast(run.device, run.config.precision):
            return evaluate(
                run.model,
                run.validation.ids,
                batch_size=run.stream.batch_size,
                max_tokens=run.config.evaluate_tokens or None,
            ).loss_nats
    except FloatingPointError as error:
        raise sentry.NonFiniteError(f"Validation after step {step} failed: {error} {offer(run.out)}") from None


def _save(run: _Run, step: int) -> Path:
    """A checkpoint, unless a step since the last one was not finite; then there must be none."""
    began = time.perf_counter()
    _need_finite(run)
    if name := sentry.non_finite_weight(run.model):
        raise sentry.NonFiniteError(
            f"The weights of {name} are not finite after step {step}; lower the learning rate. {offer(run.out)}"
        )
    run.log.sync()
    state = {"settings": run.settings, "stream": run.stream.state_dict()}
    path = checkpoint.save(run.out, step, run.model, run.optimizers, state)
    checkpoint.prune(run.out, run.config.keep, step)
    run.since += time.perf_counter() - began  # the time of a save is no time of a step
    return path
