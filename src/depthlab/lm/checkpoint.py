"""Checkpoints that appear whole or not at all, and are verified before they are used.

OUT/step-000050/
    model.safetensors       weights
    optimizer.safetensors   tensors of the optimizers and of the random generators
    state.json              all that is no tensor: step, settings, model config, data position, random generators
    manifest.json           SHA-256 of the three; written last

A checkpoint is written in a hidden folder aside, every file and the folder reach the disk (fsync), and one rename gives
it its name. Nothing is ever unpickled.
"""

import contextlib
import dataclasses
import json
import os
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import Tensor, nn

from depthlab.data.files import gist, sha256_of_file

_FORMAT = "depthlab-checkpoint-1"
_FILES = ("model.safetensors", "optimizer.safetensors", "state.json")
_NAME = re.compile(r"step-(\d{6,})")
# Hidden names of `save`, `prune` and `write_atomic`.
_LEFT = re.compile(r"\.(step-\d{6,}\.(new|old)|[\w-]+\.jsonl?\.\d+)\.tmp")
# What may differ between the model that was saved and the one it is loaded into: how it computes, not what.
_FREE = ("backend", "recompute")


class CheckpointError(ValueError):
    """A checkpoint that is torn, foreign or cannot be written; the message says which one can be used instead."""


def path_of(out_dir: Path, step: int) -> Path:
    """Where the checkpoint of `step` lies."""
    return Path(out_dir) / f"step-{step:06d}"


def step_of(path: Path) -> int:
    """The step in a checkpoint's name."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise CheckpointError(f"{path} is no checkpoint; its name must be like step-000050.")
    return int(match[1])


def checkpoints(out_dir: Path) -> list[Path]:
    """All checkpoint folders of a run, good or not, the oldest first."""
    found = [p for p in Path(out_dir).glob("step-*") if _NAME.fullmatch(p.name) and p.is_dir()]
    return sorted(found, key=step_of)


def save(
    out_dir: Path,
    step: int,
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    state: dict[str, Any],
) -> Path:
    """Write the checkpoint of `step` and return its folder; `state` is anything JSON can hold.

    Random generators of Python, NumPy, torch and CUDA are saved along.

    Raises:
        CheckpointError: it cannot be written, for example on a full disk; nothing is left of it, and earlier ones are
            untouched.
    """
    out_dir, target = Path(out_dir), path_of(out_dir, step)
    aside = out_dir / f".{target.name}.new.tmp"
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        _write(aside, step, model, optimizers, state)
        _sync_folder(aside)
        if target.exists():  # a torn one, or that of a run which went on from an earlier step
            _set_aside(target)
        os.rename(aside, target)
        _sync_folder(out_dir)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise CheckpointError(
            f"Step {step} cannot be saved in {out_dir} ({_reason(error)}); make room there. {offer(out_dir)}"
        ) from None
    finally:
        clean(out_dir)
    return target


def _write(
    folder: Path, step: int, model: nn.Module, optimizers: list[torch.optim.Optimizer], state: dict[str, Any]
) -> None:
    tensors: dict[str, Tensor] = {}
    tree = {"optimizers": [o.state_dict() for o in optimizers], "random": random_states()}
    tree["parameters"] = parameters_of(optimizers, model)
    packed = _pack(tree, tensors)
    save_model(model, str(folder / "model.safetensors"))
    save_file(tensors, str(folder / "optimizer.safetensors"))
    content = {"format": _FORMAT, "step": step, "model": describe(model), "packed": packed, **state}
    (folder / "state.json").write_text(json.dumps(content), encoding="utf-8")
    for name in _FILES:
        shutil.copymode(folder / "state.json", folder / name)  # safetensors lets only the owner read
        _sync_file(folder / name)
    manifest = {"format": _FORMAT, "sha256": {name: sha256_of_file(folder / name) for name in _FILES}}
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    _sync_file(folder / "manifest.json")


def describe(model: nn.Module) -> dict[str, Any]:
    """{kind, config} of a model: what a checkpoint of it fits."""
    config = model.config
    return {"kind": config.kind, "config": json.loads(json.dumps(dataclasses.asdict(config)))}


def verify(path: Path) -> dict[str, Any]:
    """state.json of the checkpoint at `path`, after every byte of it was compared with the manifest.

    Raises:
        CheckpointError: missing, torn, of another format, or under another step's name.
    """
    path = Path(path)
    step_of(path)
    try:
        manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
        sums = manifest["sha256"]
        if manifest["format"] != _FORMAT or set(sums) != set(_FILES):
            raise ValueError("its manifest is of another version")
        for name in _FILES:
            if sha256_of_file(path / name) != sums[name]:
                raise ValueError(f"{name} does not have its SHA-256")
        state = json.loads((path / "state.json").read_text(encoding="utf-8"))
        if state["step"] != step_of(path):
            raise ValueError(f"it is that of step {state['step']}")
        return state
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        what = f"there is no {Path(error.filename).name}" if isinstance(error, FileNotFoundError) else gist(error)
        raise CheckpointError(f"The checkpoint {path} is damaged ({what}).") from None


def latest_good(
    out_dir: Path, foreign: Callable[[dict[str, Any]], str] = lambda state: ""
) -> tuple[Path | None, dict[str, Any], list[str]]:
    """(path, state, notes): the newest checkpoint that verifies, or None; a note on each newer one that does not.

    Args:
        foreign: says of a state, in words, why its checkpoint is of another run; empty where it is not.
    """
    notes = []
    for path in reversed(checkpoints(out_dir)):
        try:
            state = verify(path)
            if not (why := foreign(state)):
                return path, state, notes
            notes.append(f"The checkpoint {path} is of another run ({why}).")
        except CheckpointError as error:
            notes.append(str(error))
    return None, {}, notes


def offer(out_dir: Path) -> str:
    """A sentence that names the newest good checkpoint of a run, or says that there is none."""
    good, _, _ = latest_good(out_dir)
    return f"The last good checkpoint is {good}." if good else f"There is no good checkpoint in {out_dir}."


def find(place: str | Path) -> tuple[Path, dict[str, Any], list[str]]:
    """(path, state, notes) of one checkpoint: `place` itself, or the newest good one of the run in folder `place`.

    `notes` name damaged ones that were passed over.

    Raises:
        CheckpointError: `place` is torn (the message offers the last good one), holds no good one, or does not exist.
    """
    place = Path(place)
    whole = Path(os.path.abspath(place))  # "." has no name of its own
    place = whole if _NAME.fullmatch(whole.name) and not _NAME.fullmatch(place.name) else place
    if _NAME.fullmatch(place.name):
        try:
            return place, verify(place), []
        except CheckpointError as error:
            raise CheckpointError(f"{error} {offer(place.parent)}") from None
    if not place.is_dir():
        raise CheckpointError(f"{place} is no folder; give one that `depthlab train --out` made.")
    good, state, notes = latest_good(place)
    if good is None:
        raise CheckpointError(" ".join([*notes, f"There is no good checkpoint in {place}."]))
    return good, state, notes


def need_same_model(path: Path, saved: dict[str, Any], model: nn.Module) -> None:
    """CheckpointError naming the first difference between {kind, config} as `saved` and this model's."""
    own = describe(model)
    if saved["kind"] != own["kind"]:
        raise CheckpointError(f"{path} holds a model of kind {saved['kind']!r}, and this is {own['kind']!r}.")
    for name in sorted(set(saved["config"]) | set(own["config"])):
        before, now = saved["config"].get(name), own["config"].get(name)
        if before != now and name not in _FREE:
            raise CheckpointError(f"{path} was saved with {name}={before!r}, and this model has {name}={now!r}.")


def load(
    path: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer] | None = None, state: dict | None = None
) -> dict[str, Any]:
    """Put a checkpoint's weights into `model` and return its state; with `optimizers` also theirs and all generators'.

    Args:
        state: what `verify` gave for `path`, so that it need not be verified twice.

    Raises:
        CheckpointError: torn, of another kind or config of model, or of other optimizers; nothing was changed then.
    """
    state = verify(path) if state is None else state
    need_same_model(path, state["model"], model)
    tree = None
    if optimizers is not None:
        tree = _unpack(state["packed"], load_file(str(path / "optimizer.safetensors")))
        before, now = tree.get("parameters"), parameters_of(optimizers, model)
        if len(tree["optimizers"]) != len(optimizers) or before not in (None, now):
            raise CheckpointError(
                f"{path} holds the state of other optimizers, or of other parameters in them, than this run has; use "
                "the optimizer that it was trained with."
            )
    load_model(model, str(path / "model.safetensors"))
    if tree is not None:
        for optimizer, saved in zip(optimizers, tree["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        restore_random_states(tree["random"])
    return state


def parameters_of(optimizers: list[torch.optim.Optimizer], model: nn.Module) -> list[list[Any]]:
    """For each optimizer its kind, and of each of its groups the names of the parameters, in the order of its state."""
    names = {id(p): name for name, p in model.named_parameters()}
    return [
        [type(one).__name__, *([names.get(id(p), "") for p in group["params"]] for group in one.param_groups)]
        for one in optimizers
    ]


def prune(out_dir: Path, keep: int, step: int) -> None:
    """Delete all but the newest `keep` checkpoints up to `step`; 0 keeps all. Each goes by one rename first.

    Later ones neither count nor go: a resumed run passed them over as damaged or another run's.
    """
    known = [path for path in checkpoints(out_dir) if step_of(path) <= step]
    for path in known[:-keep] if keep else []:
        _set_aside(path)
    clean(out_dir)


def clean(out_dir: Path) -> None:
    """Remove what interrupted writes and deletions of a run left; hidden files of others stay."""
    for left in filter(lambda path: _LEFT.fullmatch(path.name), Path(out_dir).glob(".*.tmp")):
        if left.is_dir():
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.unlink(missing_ok=True)


def random_states() -> dict[str, Any]:
    """States of the global generators of Python, NumPy, torch, and CUDA where it is in use."""
    numpy_state = np.random.get_state(legacy=False)  # noqa: NPY002 - the global stream is what libraries use
    numpy_state["state"]["key"] = numpy_state["state"]["key"].tolist()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    return {"python": random.getstate(), "numpy": numpy_state, "torch": torch.get_rng_state(), "cuda": cuda}


def restore_random_states(states: dict[str, Any]) -> None:
    """Set the global generators as `random_states` found them."""
    random.setstate(states["python"])
    numpy_state = states["numpy"]
    numpy_state["state"]["key"] = np.asarray(numpy_state["state"]["key"], dtype=np.uint32)
    np.random.set_state(numpy_state)  # noqa: NPY002
    torch.set_rng_state(states["torch"])
    if torch.cuda.is_available() and len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(states["cuda"])


def _pack(tree: Any, tensors: dict[str, Tensor]) -> Any:
    """`tree` as JSON, its tensors moved into `tensors`; tuples and dictionaries are marked for `_unpack`."""
    if isinstance(tree, Tensor):
        name = f"t{len(tensors)}"
        tensors[name] = tree.detach().to("cpu", copy=True).contiguous()
        return {"tensor": name}
    if isinstance(tree, dict):
        return {"dict": [[_pack(key, tensors), _pack(value, tensors)] for key, value in tree.items()]}
    if isinstance(tree, tuple):
        return {"tuple": [_pack(item, tensors) for item in tree]}
    if isinstance(tree, list):
        return [_pack(item, tensors) for item in tree]
    if tree is None or isinstance(tree, str | int | float | bool):
        return tree
    raise TypeError(f"A checkpoint cannot hold {type(tree).__name__}; keep numbers, text and tensors in optimizers.")


def _unpack(tree: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(tree, dict):
        ((kind, value),) = tree.items()
        if kind == "tensor":
            return tensors[value]
        if kind == "dict":
            return {_unpack(key, tensors): _unpack(item, tensors) for key, item in value}
        return tuple(_unpack(item, tensors) for item in value)
    return [_unpack(item, tensors) for item in tree] if isinstance(tree, list) else tree


def _set_aside(path: Path) -> None:
    aside = path.with_name(f".{path.name}.old.tmp")
    shutil.rmtree(aside, ignore_errors=True)
    os.rename(path, aside)


def _sync_file(path: Path) -> None:
    with open(path, "rb+") as file:
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    if hasattr(os, "O_DIRECTORY"):
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    with contextlib.suppress(AttributeError):
        if match := re.search(r"\(os error (\d+)\)", str(error)):  # safetensors gives system errors as text
            return os.strerror(int(match[1]))
    return gist(error)
