"""What `depthlab train`, `generate`, `eval` and `runs` do; the command line only parses and prints."""

import dataclasses
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from depthlab.data import DataError
from depthlab.lm import checkpoint, runlog
from depthlab.lm.corpus import ByteTokenizer, Corpus, Tokenizer, corpus, load_tokenizer, save_tokenizer
from depthlab.lm.evaluation import Evaluation, evaluate
from depthlab.lm.generation import generate as continue_tokens
from depthlab.lm.gpt import GPT, GPTConfig
from depthlab.lm.llama import Llama, LlamaConfig
from depthlab.lm.settings import check_choice, check_seed
from depthlab.lm.tokens import TokenStream
from depthlab.lm.training import FREE, TrainConfig, TrainResult, cannot_write, holds_run, need_new, train
from depthlab.residuals import Recompute

# kind -> (config, model): config.preset(name, **changes) and model(config, generator). Callers may add kinds of theirs,
# whose config may have options of its own in `training`; they come on top of the preset's.
Models = dict[str, tuple[Any, Any]]
MODELS: Models = {"gpt": (GPTConfig, GPT), "llama": (LlamaConfig, Llama)}

# What is not given on the command line; a preset's own come on top, and the model's fields are the preset's.
OPTIONS: dict[str, Any] = {
    "model": "gpt",
    "preset": "toy",
    "data": "sotu",
    "tokenizer": "bytes",
    "batch_size": 8,
    "start": None,
}
PRESET_OPTIONS: dict[str, dict[str, Any]] = {
    "toy": {"lr": 2e-3, "batch_size": 8, "evaluate_every": 50, "evaluate_tokens": 8192, "checkpoint_every": 50},
}
# --recompute by name; a config holds the fields
RECOMPUTE = {"off": None, "auto": dataclasses.asdict(Recompute())}
_TRAINING = [field.name for field in dataclasses.fields(TrainConfig)]
TOKENIZER = "tokenizer.json"


def train_run(
    out: str | Path, given: dict[str, Any], resume: bool = False, device: str = "auto", models: Models = MODELS
) -> TrainResult:
    """Train in folder `out`. `given`: options by name; the others are the run's own (`resume`), or defaults.

    Options are `OPTIONS`, the fields of `TrainConfig` and those of the model's config; start: a checkpoint, or a run,
    whose weights the new run begins with.

    Raises:
        ValueError: an option out of range, by its name. TrainingError: no run to resume, and no option to begin one
            with. TrainingError, CheckpointError, DataError: as `train`.
    """
    out = Path(out)
    if not resume:
        need_new(out)
    elif set(given) <= set(FREE) and not holds_run(out):
        sentence = f"{out} holds no run to resume; give the folder of one, or options to begin one with."
        raise runlog.TrainingError(sentence)
    options = _options(out, given, resume, models)
    check_choice("model", options["model"], models)
    config_type, model_type = models[options["model"]]
    training = TrainConfig(**{name: value for name, value in options.items() if name in _TRAINING})
    source = corpus(options["data"], options["tokenizer"])
    shape = {name: value for name, value in options.items() if name not in (*_TRAINING, *OPTIONS)}
    _check_options(shape, options["model"], models)
    config = config_type.preset(options["preset"], **{"vocab_size": source.split("train").vocab_size, **shape})
    stream = TokenStream(source.split("train"), options["batch_size"], config.seq_len, training.seed)
    model = model_type(config, torch.Generator().manual_seed(training.seed)).to(pick_device(device))
    if options["start"] is not None and not checkpoint.checkpoints(out):
        path, state, _ = checkpoint.find(options["start"])
        checkpoint.load(path, model, state=state)
    if source.tokenizer is not None and not holds_run(out):
        try:
            save_tokenizer(source.tokenizer, out / TOKENIZER)
        except OSError as error:
            raise cannot_write(out, error) from None
    validation = source.validation if source.validation is not None and len(source.validation) > 1 else None
    about = {"options": {name: options[name] for name in OPTIONS}, "tokenizer": stream.tokens.tokenizer}
    return train(model, stream, training, out, validation, resume, about=about)


def _check_options(shape: dict[str, Any], model: str, models: Models) -> None:
    fields = {kind: [field.name for field in dataclasses.fields(config)] for kind, (config, _) in models.items()}
    for name in shape:
        others = [kind for kind in fields if name in fields[kind]]
        if others and model not in others:
            raise ValueError(f"{name} is an option of --model {' and '.join(others)}, not of {model}; leave it out.")
        check_choice(f"option of {model}", name, fields[model])


def _options(out: Path, given: dict[str, Any], resume: bool, models: Models) -> dict[str, Any]:
    """All options of a run. A resumed run's own come before the defaults, so that they need not be given again."""
    if "recompute" in given:
        check_choice("recompute", given["recompute"], RECOMPUTE)
        given = given | {"recompute": RECOMPUTE[given["recompute"]]}
    if resume and (out / runlog.RUN).exists():
        settings = runlog.read_run(out)["settings"]
        own = {**settings["model"]["config"], **settings["training"], **settings["about"].get("options", {})}
        for name, value in given.items():
            if name not in FREE and own.get(name, value) != value:
                raise runlog.changed(out, name, own[name], value)
        return {**OPTIONS, **own, **given}
    preset = PRESET_OPTIONS.get(given.get("preset", OPTIONS["preset"]), {})
    config_type, _ = models.get(given.get("model", OPTIONS["model"]), (None, None))
    chosen = {**getattr(config_type, "training", {}), **given}
    if chosen.get("optimizer", "adamw") != "adamw":  # whose rate a preset's is
        preset = {name: value for name, value in preset.items() if name != "lr"}
    return {**OPTIONS, **preset, **chosen}


def pick_device(device: str) -> torch.device:
    """ "auto" is CUDA where there is one, else the CPU. ValueError for a device that is not here."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError):
        raise ValueError(f"device={device!r} is not here; use auto, cpu, or cuda where there is one.") from None
    return found


@dataclasses.dataclass(frozen=True)
class Trained:
    """A trained model in eval mode, the checkpoint it is from, its tokenizer and its data (None where unknown).

    A run on a file of ids may know the name of their tokenizer and have none.
    """

    model: nn.Module
    path: Path
    tokenizer: Tokenizer | None
    tokenizer_name: str | None
    data: str | None


def load_run(place: str | Path, device: str = "auto", models: Models = MODELS) -> Trained:
    """The model of a checkpoint, or of the newest good one of a run; damaged ones passed over are named on stderr.

    Raises:
        CheckpointError: torn, missing, or of a kind or config this version does not know. DataError: its tokenizer is
            damaged, or not the one it was trained with.
    """
    path, state, notes = checkpoint.find(place)
    saved = state["model"]
    if saved["kind"] not in models:
        raise checkpoint.CheckpointError(f"{path} holds a model of kind {saved['kind']!r}; known: {', '.join(models)}.")
    config_type, model_type = models[saved["kind"]]
    known = {field.name for field in dataclasses.fields(config_type)}
    if strange := sorted(set(saved["config"]) - known):
        raise checkpoint.CheckpointError(f"{path} has the setting {strange[0]!r}, which this version does not know.")
    here = {name: value for name, value in {"backend": "auto", "recompute": None}.items() if name in known}
    model = model_type(config_type(**saved["config"] | here)).to(pick_device(device))
    checkpoint.load(path, model, state=state)
    if notes:
        print(*notes, f"Using {path}.", file=sys.stderr)
    about = state["settings"]["about"]
    name = about.get("tokenizer")
    tokenizer = _kept_tokenizer(path.parent / TOKENIZER, name)
    name = tokenizer.name if tokenizer and name is None else name
    return Trained(model.eval(), path, tokenizer, name, about.get("options", {}).get("data"))


def _kept_tokenizer(kept: Path, name: str | None) -> Tokenizer | None:
    if not kept.exists():
        return ByteTokenizer() if name == "bytes" else None
    tokenizer = load_tokenizer(kept)
    if name is not None and tokenizer.name != name:
        raise DataError(
            f"{kept} is the tokenizer {tokenizer.name!r}, and the run was trained with {name or 'an unknown one'!r}; "
            "put that one back, or delete the file."
        )
    return tokenizer


def generate_text(
    place: str | Path,
    prompt: str,
    n_tokens: int = 200,
    seed: int = 0,
    temperature: float = 1.0,
    top_k: int | None = None,
    device: str = "auto",
    models: Models = MODELS,
) -> str:
    """`prompt` and what the model of `place` writes after it; equal arguments give an equal text on a CPU.

    Raises:
        ValueError: a prompt that is empty or no text, a seed out of range, or a run without its tokenizer; and as
            `load_run` and `generate`.
    """
    check_seed("seed", seed)
    if not prompt:
        raise ValueError("prompt='' has no token to go on from; give at least one character.")
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError(f"prompt={prompt!r} is no text; give it in UTF-8.") from None
    trained = load_run(place, device, models)
    if trained.tokenizer is None:
        raise ValueError(f"{trained.path} {_without_tokenizer(trained)}, so it cannot write text.")
    on = next(trained.model.parameters()).device
    start = torch.from_numpy(trained.tokenizer.encode(prompt).astype("int64")).unsqueeze(0).to(on)  # [1, T]
    generator = torch.Generator().manual_seed(seed)
    ids = continue_tokens(trained.model, start, n_tokens, temperature, top_k, generator)
    return trained.tokenizer.decode(ids[0].tolist())


def evaluate_run(
    place: str | Path,
    data: str | None = None,
    split: str = "validation",
    max_tokens: int | None = None,
    device: str = "auto",
    models: Models = MODELS,
) -> Evaluation:
    """How well the model of `place` predicts a split of `data`, by default of what it was trained on.

    Raises:
        ValueError: tokens outside the model's vocabulary, by another tokenizer, or none; text for a run without its
            tokenizer; and as `load_run`.
    """
    trained = load_run(place, device, models)
    source = data or trained.data
    if source is None:
        raise ValueError(f"{trained.path} does not say what it was trained on; give data.")
    tokens = _same_tokens(source, trained).split(split)
    if tokens.vocab_size > trained.model.config.vocab_size:
        raise ValueError(
            f"{tokens.source} has a vocabulary of {tokens.vocab_size}, and the model in {trained.path} has "
            f"vocab_size={trained.model.config.vocab_size}; use the tokenizer that it was trained with."
        )
    bytes_per_token = tokens.bytes_per_token
    if trained.tokenizer is not None:  # of just the tokens that are predicted
        predicted = tokens.ids[1:] if max_tokens is None else tokens.ids[1 : max(max_tokens, 0) + 1]
        bytes_per_token = trained.tokenizer.count_bytes(predicted) / len(predicted) if len(predicted) else None
    return evaluate(trained.model, tokens.ids, bytes_per_token=bytes_per_token, max_tokens=max_tokens)


def _without_tokenizer(trained: Trained) -> str:
    of = f"tokenizer {trained.tokenizer_name!r}" if trained.tokenizer_name else "an unknown tokenizer"
    return f"was trained on ids of {of} and has no {TOKENIZER} beside it"


def _same_tokens(source: str, trained: Trained) -> Corpus:
    if trained.tokenizer is None and not source.endswith(".tokens"):
        raise ValueError(f"{trained.path} {_without_tokenizer(trained)}, so it reads no text; give a .tokens file.")
    found, own = corpus(source, trained.tokenizer or "bytes"), trained.tokenizer_name
    for tokens in filter(None, (found.train, found.validation, found.test)):
        if own and tokens.tokenizer and tokens.tokenizer != own:
            raise ValueError(f"{tokens.source} is from {tokens.tokenizer!r}, and the model was trained with {own!r}.")
    return found


def runs_table(folders: list[str]) -> str:
    """The training runs in `folders` as one aligned table."""
    rows = runlog.table(folders)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)
