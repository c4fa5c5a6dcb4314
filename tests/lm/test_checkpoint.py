"""A checkpoint gives back every bit, or is refused by name; one that cannot be written leaves no trace."""

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import SafetensorError

from depthlab.lm import checkpoint
from depthlab.lm.checkpoint import CheckpointError
from depthlab.lm.gpt import GPT, GPTConfig
from depthlab.lm.llama import Llama, LlamaConfig
from depthlab.lm.optimizers import OPTIMIZERS, build_optimizers
from depthlab.runs import seed_everything

FILES = ("manifest.json", "model.safetensors", "optimizer.safetensors", "state.json")


def tiny(seed: int = 0, **changes) -> GPT:
    config = GPTConfig(**{"vocab_size": 32, "seq_len": 8, "n_layers": 2, "n_heads": 2, "d_model": 8} | changes)
    return GPT(config, torch.Generator().manual_seed(seed))


def moved(model, optimizers, steps: int = 3):
    """Some steps whose gradients come from the global generator, so that a generator not restored would show."""
    for _ in range(steps):
        tokens = torch.randint(32, (2, 9))
        model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.fixture
def run(tmp_path) -> Path:
    """A folder with the checkpoints of steps 1, 2 and 3."""
    model = tiny()
    optimizers = build_optimizers(model)
    for step in (1, 2, 3):
        moved(model, optimizers, 1)
        checkpoint.save(tmp_path / "run", step, model, optimizers, {"mine": [step]})
    return tmp_path / "run"


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_goes_on_bit_for_bit_from_what_was_loaded(optimizer, tmp_path):
    seed_everything(7)
    model = tiny()
    optimizers = build_optimizers(model, optimizer)
    moved(model, optimizers)
    path = checkpoint.save(tmp_path, 3, model, optimizers, {"mine": {"x": 0.1}})
    moved(model, optimizers)
    end = random.random(), np.random.random(), torch.rand(())  # noqa: NPY002

    seed_everything(8)
    other = tiny(seed=1)
    theirs = build_optimizers(other, optimizer)
    moved(other, theirs, 1)
    state = checkpoint.load(path, other, theirs)
    moved(other, theirs)
    assert (random.random(), np.random.random(), torch.rand(())) == end  # noqa: NPY002
    assert (state["step"], state["mine"]) == (3, {"x": 0.1})
    for (name, a), b in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    for mine, their in zip(optimizers, theirs, strict=True):
        assert repr(mine.state_dict()["param_groups"]) == repr(their.state_dict()["param_groups"])
        for a, b in zip(mine.state_dict()["state"].values(), their.state_dict()["state"].values(), strict=True):
            assert a.keys() == b.keys() and all(torch.equal(torch.as_tensor(a[k]), torch.as_tensor(b[k])) for k in a)


def test_a_tied_llama_comes_back(tmp_path):
    shape = {"vocab_size": 32, "seq_len": 8, "n_layers": 2, "n_heads": 2, "d_model": 8, "d_hidden": 16}
    for tied in (True, False):
        model, other = (Llama(LlamaConfig(**shape, tied=tied)) for _ in range(2))
        checkpoint.load(checkpoint.save(tmp_path, 1, model, [], {}), other)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_the_folder_is_as_documented_and_readable_by_all_who_can_read_the_rest(run):
    assert [p.name for p in checkpoint.checkpoints(run)] == ["step-000001", "step-000002", "step-000003"]
    assert tuple(sorted(p.name for p in (run / "step-000003").iterdir())) == FILES
    assert len({(run / "step-000003" / name).stat().st_mode for name in FILES}) == 1
    assert not list(run.glob(".*"))


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_a_cut_or_a_missing_file_is_refused_and_the_last_good_one_offered(run, name):
    path = run / "step-000003" / name
    good = path.read_bytes()
    draw = random.Random(0)
    damages = [good[: draw.randrange(len(good))] for _ in range(5)] + [b"", None]
    for _ in range(20):
        place = draw.randrange(len(good))
        damages.append(good[:place] + bytes([good[place] ^ (1 << draw.randrange(8))]) + good[place + 1 :])
    for damage in damages:
        path.unlink(missing_ok=True)
        if damage is not None:
            path.write_bytes(damage)
        if name == "manifest.json" and damage is not None and _says_the_same(damage, good):
            continue
        with pytest.raises(CheckpointError) as caught:
            checkpoint.find(run / "step-000003")
        assert str(run / "step-000003") in str(caught.value)
        assert f"The last good checkpoint is {run / 'step-000002'}." in str(caught.value)
        found, state, notes = checkpoint.find(run)
        assert (found, state["step"], len(notes)) == (run / "step-000002", 2, 1)
        assert "step-000003" in notes[0] and "is damaged" in notes[0]
    path.write_bytes(good)
    assert checkpoint.find(run)[0] == run / "step-000003"


def _says_the_same(damage: bytes, good: bytes) -> bool:
    """White space may change in the manifest."""
    try:
        return json.loads(damage) == json.loads(good)
    except ValueError:
        return False


def test_where_nothing_is_good_every_damaged_one_is_named(run):
    for path in checkpoint.checkpoints(run):
        (path / "state.json").unlink()
    with pytest.raises(CheckpointError, match=r"000003 is damaged .*000002 .*000001 .* There is no good checkpoint in"):
        checkpoint.find(run)
    with pytest.raises(CheckpointError, match="is no folder"):
        checkpoint.find(run / "nothing")


@pytest.mark.parametrize(("saved", "other"), [("flt", "muon"), ("muon", "flt"), ("flt", "adamw"), ("adamw", "muon")])
def test_the_state_of_other_optimizers_is_refused_before_anything_changes(saved, other, tmp_path):
    """flt and muon have as many optimizers of the same shapes, and their parameters in another order."""
    shape = LlamaConfig(vocab_size=32, seq_len=8, n_layers=2, n_heads=2, d_model=8, d_hidden=16)
    model, fresh = (Llama(shape, torch.Generator().manual_seed(seed)) for seed in (0, 1))
    optimizers = build_optimizers(model, saved)
    moved(model, optimizers, 1)
    path = checkpoint.save(tmp_path, 1, model, optimizers, {})
    before = {name: value.clone() for name, value in fresh.state_dict().items()}
    with pytest.raises(CheckpointError, match="holds the state of other optimizers, or of other parameters in them"):
        checkpoint.load(path, fresh, build_optimizers(fresh, other))
    assert all(torch.equal(before[name], value) for name, value in fresh.state_dict().items())
    checkpoint.load(path, fresh, build_optimizers(fresh, saved))


def test_another_kind_or_config_is_refused_before_anything_changes(run):
    path = run / "step-000003"
    llama = Llama(LlamaConfig(vocab_size=32, seq_len=8, n_layers=2, n_heads=2, d_model=8, d_hidden=16))
    for model, says in (
        (llama, "holds a model of kind 'gpt', and this is 'llama'"),
        (tiny(residual="prenorm"), "was saved with residual='mgr-competitive', and this model has residual='prenorm'"),
        (tiny(n_streams=2), "n_streams=4, and this model has n_streams=2"),
        (tiny(vocab_size=33), "vocab_size=32, and this model has vocab_size=33"),
    ):
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(CheckpointError, match=says):
            checkpoint.load(path, model)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    checkpoint.load(path, tiny(backend="torch"))  # how it is computed is no property of the weights


def full_disk(monkeypatch, where: str) -> None:
    if where == "tensors":  # safetensors reports system errors as text

        def fail(*_: object) -> None:
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

        monkeypatch.setattr(checkpoint, "save_file", fail)
    else:

        def refuse(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(checkpoint.os, where, refuse)


@pytest.mark.parametrize("where", ["tensors", "fsync", "rename"])
def test_a_full_disk_is_one_sentence_and_leaves_what_was_there(run, monkeypatch, where):
    before = content(run)
    model = tiny()
    with monkeypatch.context() as patch:
        full_disk(patch, where)
        with pytest.raises(CheckpointError) as caught:
            checkpoint.save(run, 4, model, build_optimizers(model), {})
    assert str(caught.value) == (
        f"Step 4 cannot be saved in {run} (No space left on device); make room there. "
        f"The last good checkpoint is {run / 'step-000003'}."
    )
    assert content(run) == before and not list(run.glob(".*"))


def test_a_file_that_may_not_grow_is_the_same_sentence_from_the_real_system(run):
    pytest.importorskip("resource")
    code = """
import resource, sys
from depthlab.lm import checkpoint
from depthlab.lm.gpt import GPT, GPTConfig
model = GPT(GPTConfig(vocab_size=256, seq_len=64, n_layers=2, n_heads=2, d_model=64))
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    checkpoint.save(sys.argv[1], 4, model, [], {})
except checkpoint.CheckpointError as error:
    print(error)
"""
    before = content(run)
    done = subprocess.run([sys.executable, "-c", code, str(run)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"Step 4 cannot be saved in {run} (File too large); make room there. The last good")
    assert content(run) == before and not list(run.glob(".*"))


def test_a_damaged_checkpoint_is_replaced_when_its_step_comes_again(run):
    (run / "step-000003" / "state.json").write_text("{")
    model = tiny()
    checkpoint.save(run, 3, model, build_optimizers(model), {"mine": "new"})
    assert checkpoint.verify(run / "step-000003")["mine"] == "new"
    assert not list(run.glob(".*"))


def test_only_the_newest_are_kept_and_what_kills_left_is_removed(run):
    shutil.copytree(run / "step-000001", run / ".step-000009.new.tmp")
    os.rename(run / "step-000001", run / ".step-000001.old.tmp")
    checkpoint.clean(run)
    assert [p.name for p in sorted(run.iterdir())] == ["step-000002", "step-000003"]
    checkpoint.prune(run, 0, 3)
    assert len(checkpoint.checkpoints(run)) == 2
    checkpoint.prune(run, 1, 3)
    assert [p.name for p in run.iterdir()] == ["step-000003"]


def test_later_checkpoints_that_were_passed_over_never_push_out_a_good_one(run):
    (run / "step-000003" / "state.json").write_text("{")
    checkpoint.prune(run, 1, 2)
    assert [p.name for p in sorted(run.iterdir())] == ["step-000002", "step-000003"]


def test_hidden_files_of_others_are_left_alone(run):
    for name in (".mine.tmp", ".step-1.new.tmp", ".notes.json.tmp"):
        (run / name).touch()
    for name in (".run.json.123.tmp", ".log.jsonl.7.tmp", ".nonfinite-step-000002.json.9.tmp"):
        (run / name).touch()
    checkpoint.clean(run)
    assert sorted(p.name for p in run.glob(".*")) == [".mine.tmp", ".notes.json.tmp", ".step-1.new.tmp"]


def test_a_checkpoint_under_another_steps_name_is_refused(run):
    shutil.rmtree(run / "step-000003")
    os.rename(run / "step-000001", run / "step-000003")
    with pytest.raises(CheckpointError, match="is damaged .it is that of step 1.*The last good checkpoint is"):
        checkpoint.find(run / "step-000003")
    assert checkpoint.latest_good(run)[0] == run / "step-000002"


def test_the_current_folder_may_be_a_checkpoint(run, monkeypatch):
    monkeypatch.chdir(run / "step-000002")
    assert checkpoint.find(".")[1]["step"] == 2
    monkeypatch.chdir(run)
    assert checkpoint.find(".")[1]["step"] == 3 and checkpoint.find("step-000001")[1]["step"] == 1


def test_what_json_cannot_hold_is_refused_before_a_wrong_number_is_saved(tmp_path):
    model = tiny()
    optimizers = build_optimizers(model)
    optimizers[0].param_groups[0]["odd"] = object()
    with pytest.raises(TypeError, match="cannot hold object"):
        checkpoint.save(tmp_path, 1, model, optimizers, {})
    assert not list(tmp_path.iterdir())


def test_nothing_is_ever_unpickled():
    source = Path(checkpoint.__file__).parent
    for path in source.glob("*.py"):
        text = path.read_text()
        assert "torch.load(" not in text and "import pickle" not in text, path.name
