"""depthlab train, generate, eval and runs: a small run from start to end, and one sentence for whatever is wrong."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from depthlab.cli import main
from depthlab.lm import checkpoint, commands
from depthlab.lm import corpus as corpora
from depthlab.lm.tokens import write_tokens

SMALL = ["--layers", "2", "--heads", "2", "--width", "16", "--seq-len", "16", "--streams", "2", "--batch-size", "2"]
SMALL += ["--steps", "4", "--checkpoint-every", "2", "--log-every", "2", "--evaluate-every", "2"]
SMALL += ["--evaluate-tokens", "64", "--warmup", "1"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DEPTHLAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CI", "true")


@pytest.fixture
def story(tmp_path) -> str:
    path = tmp_path / "story.txt"
    path.write_text("the cat sat on the mat and the dog sat on the cat; " * 60)
    return str(path)


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def sentence(arguments: list[str], capsys) -> str:
    """What a refused command says: exit code 2, nothing on stdout, one line."""
    capsys.readouterr()
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert err.startswith("depthlab: ") and err.count("\n") == 1 and "unexpected" not in err
    return err


@pytest.fixture
def run(tmp_path, story) -> Path:
    assert main(["train", *SMALL, "--data", story, "--out", str(tmp_path / "run")]) == 0
    return tmp_path / "run"


def test_a_run_is_trained_evaluated_continued_and_listed(tmp_path, story, capsys):
    run = tmp_path / "run"
    assert main(["train", *SMALL, "--data", story, "--out", str(run)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert re.fullmatch(rf"{run}: step 4, loss \d\.\d{{4}}, validation loss \d\.\d{{4}}; {run}/step-000004", said[-1])
    assert (run / "step-000002" / "model.safetensors").is_file()

    assert main(["eval", str(run)]) == 0
    found = re.search(
        r"loss ([\d.]+) nats a token, perplexity ([\d.]+), ([\d.]+) bits per byte", capsys.readouterr().out
    )
    loss, perplexity, bits = map(float, found.groups())
    assert perplexity == pytest.approx(np.exp(loss), rel=1e-3) and bits == pytest.approx(loss / np.log(2), rel=1e-3)

    texts = []
    for seed in ("1", "1", "2"):
        assert main(["generate", str(run), "--prompt", "the ", "--tokens", "40", "--seed", seed]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2] and texts[0].startswith("the ")

    for listing in (["runs", str(run)], ["runs", "show", str(run)]):
        assert main(listing) == 0
        head, row = capsys.readouterr().out.splitlines()
        assert head.split("  ")[0] == "run" and "val loss" in head
        assert row.split()[:3] == [str(run), "gpt", "mgr-competitive"] and "4/4" in row


@pytest.mark.parametrize("model", ["gpt", "llama"])
def test_every_model_goes_through_the_same_commands(model, story, tmp_path, capsys):
    out = str(tmp_path / "out")
    assert main(["train", *SMALL, "--model", model, "--residual", "hc", "--data", story, "--out", out]) == 0
    assert main(["eval", out, "--split", "test"]) == 0
    assert main(["generate", out, "--prompt", "a", "--tokens", "3", "--temperature", "0"]) == 0
    assert main(["runs", out]) == 0
    assert model in capsys.readouterr().out


def test_bpe_runs_keep_their_tokenizer_and_count_bits_per_byte(story, tmp_path, capsys):
    pytest.importorskip("tokenizers")
    out = str(tmp_path / "out")
    assert main(["train", *SMALL, "--tokenizer", "bpe-270", "--data", story, "--out", out]) == 0
    assert checkpoint.find(out)[1]["model"]["config"]["vocab_size"] == 270
    assert main(["eval", out, "--split", "train"]) == 0
    loss, bits = re.search(r"loss ([\d.]+) .* ([\d.]+) bits per byte", capsys.readouterr().out).groups()
    assert float(bits) < 0.9 * float(loss) / np.log(2)  # a token is more than a byte
    assert main(["generate", out, "--prompt", "the cat", "--tokens", "5"]) == 0
    assert capsys.readouterr().out.startswith("the cat")


def test_bits_per_byte_of_the_first_tokens_count_their_bytes_and_not_the_mean(tmp_path, capsys):
    pytest.importorskip("tokenizers")
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat and the dog sat on the cat; " * 60 + "qzj xvk 0123456789 " * 150)
    out = str(tmp_path / "out")
    assert main(["train", *SMALL, "--tokenizer", "bpe-270", "--data", str(text), "--out", out]) == 0
    source, tokenizer = corpora.read_text(str(text)), corpora.load_tokenizer(tmp_path / "out" / "tokenizer.json")
    ids = tokenizer.encode(source.train)
    for most in (5, 300, len(ids) - 1):
        found = commands.evaluate_run(out, split="train", max_tokens=most)
        n_bytes = len(tokenizer.decode(ids[1 : most + 1]).encode())
        assert found.n_tokens == most
        assert found.bits_per_byte == pytest.approx(found.loss_nats * most / np.log(2) / n_bytes, rel=1e-9)
    assert commands.evaluate_run(out, split="train").bits_per_byte == pytest.approx(found.bits_per_byte, rel=1e-9)


def test_a_model_never_meets_text_by_another_tokenizer(tmp_path, story, capsys):
    pytest.importorskip("tokenizers")
    out, kept = str(tmp_path / "out"), tmp_path / "out" / "tokenizer.json"
    assert main(["train", *SMALL, "--tokenizer", "bpe-270", "--data", story, "--out", out]) == 0
    corpora.save_tokenizer(corpora.ByteTokenizer(), kept)
    for command in ("generate", "eval"):
        said = sentence([command, out], capsys)
        assert f"{kept} is the tokenizer 'bytes', and the run was trained with 'bpe-270-" in said
    os.remove(kept)
    for command, says in (("generate", "so it cannot write text"), ("eval", "so it reads no text; give a .tokens")):
        said = sentence([command, out], capsys)
        assert "was trained on ids of tokenizer 'bpe-270-" in said and says in said
    ids = corpora.corpus(story, "bpe-270").split("train")
    write_tokens(tmp_path / "same.tokens", [ids.ids], ids.vocab_size, tokenizer=ids.tokenizer)
    assert main(["eval", out, "--data", str(tmp_path / "same.tokens")]) == 0
    write_tokens(tmp_path / "other.tokens", [ids.ids], ids.vocab_size, tokenizer="bpe-270-0")
    assert "is from 'bpe-270-0', and" in sentence(["eval", out, "--data", str(tmp_path / "other.tokens")], capsys)


def test_a_byte_run_needs_no_tokenizer_file(run, capsys):
    os.remove(run / "tokenizer.json")
    assert main(["eval", str(run)]) == 0 and main(["generate", str(run), "--tokens", "2"]) == 0


def test_a_model_with_more_ids_than_its_tokenizer_still_writes(tmp_path, story, capsys):
    out = str(tmp_path / "out")
    assert main(["train", *SMALL, "--vocab-size", "2000", "--data", story, "--out", out]) == 0
    assert main(["generate", out, "--tokens", "40"]) == 0
    assert "\ufffd" in capsys.readouterr().out


def test_a_resumed_run_needs_none_of_its_options_again(run, story, capsys):
    before = content(run)
    for path in (run / "step-000004").iterdir():
        path.unlink()
    (run / "step-000004").rmdir()
    assert main(["train", "--out", str(run), "--resume"]) == 0
    after = content(run)
    changed = [name for name in before if before[name] != after[name]]
    assert changed == ["log.jsonl"]  # by its timings
    assert main(["train", "--out", str(run), "--resume", *SMALL, "--data", story, "--keep", "1"]) == 0


def test_a_mistyped_folder_begins_no_run(tmp_path, capsys):
    message = sentence(["train", "--resume", "--out", str(tmp_path / "nothing")], capsys)
    assert "nothing holds no run to resume; give the folder of one, or options to begin one with." in message
    assert not (tmp_path / "nothing").exists()
    sentence(["train", "--resume", "--keep", "2", "--out", str(tmp_path / "nothing")], capsys)


@pytest.mark.parametrize(("optimizer", "rate"), [("adamw", 2e-3), ("muon", 0.02), ("flt", 0.02)])
def test_the_toy_presets_rate_is_adamws(optimizer, rate, story, tmp_path):
    """Every other optimizer has its own, which a rate on the command line replaces."""
    more = ["--data", story, "--optimizer", optimizer, "--warmup", "0", "--schedule", "constant", "--log-every", "1"]
    for out, given, expected in (("own", [], rate), ("given", ["--lr", "0.01"], 0.01)):
        assert main(["train", *SMALL, *more, *given, "--out", str(tmp_path / out)]) == 0
        lines = [json.loads(line) for line in (tmp_path / out / "log.jsonl").read_text().splitlines()]
        assert lines[-1]["lr"] == pytest.approx(expected)


def test_a_new_run_can_begin_with_the_weights_of_another(run, story, tmp_path, capsys):
    begin = ["train", *SMALL, "--data", story, "--out", str(tmp_path / "next"), "--from", str(run / "step-000002")]
    assert main([*begin, "--lr", "1e-9"]) == 0
    before, after = (
        load_file(folder / "model.safetensors") for folder in (run / "step-000002", tmp_path / "next/step-000004")
    )
    assert all(torch.allclose(before[name], after[name], atol=1e-6) for name in before)
    assert "d_model=16, and this model has d_model=128" in sentence(
        ["train", "--data", story, "--out", str(tmp_path / "other"), "--from", str(run)], capsys
    )
    assert not (tmp_path / "other").exists()


def test_the_toy_preset_learns(tmp_path):
    out = tmp_path / "toy"
    short = ["--steps", "12", "--evaluate-every", "4", "--evaluate-tokens", "2048", "--batch-size", "4"]
    assert main(["train", "--preset", "toy", *short, "--data", "sotu", "--seed", "0", "--out", str(out)]) == 0
    log = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    losses = [line["val_loss"] for line in log if "val_loss" in line]
    assert len(losses) == 4 and losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] - 1


def test_ctrl_c_is_exit_code_130_one_sentence_and_a_checkpoint(tmp_path, story):
    out = tmp_path / "out"
    options = [*SMALL, "--steps", "100000", "--checkpoint-every", "0", "--data", story, "--out", str(out)]
    command = [sys.executable, "-m", "depthlab", "train", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        end = time.monotonic() + 240
        while not (out / "log.jsonl").exists() or (out / "log.jsonl").read_text().count("\n") < 3:
            assert process.poll() is None and time.monotonic() < end, process.communicate()
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        said, errors = process.communicate(timeout=240)
    finally:
        process.kill()
    assert (process.returncode, errors) == (130, "")
    (saved,) = checkpoint.checkpoints(out)
    step = checkpoint.step_of(saved)
    assert said == f"Interrupted at step {step} of 100000. The last good checkpoint is {saved}. Go on with --resume.\n"
    checkpoint.verify(saved)


# ---- one sentence each, and nothing is lost


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--residual", "resnet"], "residual='resnet' is unknown; use one of prenorm, hc, mhc-lite"),
        (
            ["--streams", "9"],
            "n_streams=9 is too many for residual='mgr-competitive' with n_layers=2 (4 sublayers); use",
        ),
        (["--vocab-size", "100"], "vocab_size=100 of the model is below the 256 of the train part of"),
        (["--seq-len", "4000"], "seq_len=4000 needs 4,001 tokens and the train part of file story.txt has"),
        (["--width", "15"], "d_model=15 is not divisible by n_heads=2"),
        (["--model", "mlp"], "model='mlp' is unknown; use one of gpt, llama"),
        (["--model", "llama", "--dropout", "0.1"], "dropout is an option of --model gpt"),
        (["--preset", "XXL"], "preset='XXL' is unknown; use one of toy, S, M, L"),
        (["--optimizer", "sgd"], "optimizer='sgd' is unknown; use one of adamw, muon, flt"),
        (["--schedule", "step"], "schedule='step' is unknown"),
        (["--precision", "int8"], "precision='int8' is unknown; use one of float32, bfloat16"),
        (["--lr", "-1"], "lr=-1.0 is not allowed; use a positive number"),
        (["--steps", "0"], "steps=0 is not allowed; use 1 or more"),
        (["--warmup", "5"], "warmup_steps=5 is not allowed; use 0 to steps=4"),
        (["--batch-size", "0"], "batch_size=0 is not allowed"),
        (["--tokenizer", "words"], "tokenizer='words' is unknown; use bytes or bpe-SIZE"),
        (["--data", "war-and-peace"], "data='war-and-peace' is unknown; use sotu, the path of a .txt or .tokens file"),
        (["--data", "nothing.txt"], "nothing.txt cannot be read (No such file or directory)"),
        (["--device", "abacus"], "device='abacus' is not here; use auto, cpu, or cuda where there is one"),
        (["--seed", "-1"], "seed=-1 is not allowed; use 0 or more"),
    ],
)
def test_a_wrong_option_is_named_with_its_value_and_what_is_allowed(options, says, story, tmp_path, capsys):
    out = tmp_path / "out"
    assert says in sentence(["train", *SMALL, "--data", story, "--out", str(out), *options], capsys)
    assert not list(out.glob("step-*")) and not (out / "run.json").exists()
    assert main(["train", *SMALL, "--data", story, "--out", str(out)]) == 0  # a failed start does not stand in the way


def test_a_folder_with_a_run_is_refused_and_untouched(run, story, capsys):
    before = content(run)
    said = sentence(["train", *SMALL, "--data", story, "--out", str(run)], capsys)
    assert f"{run} holds a run already; go on with it by --resume (resume=True), or give another folder." in said
    assert content(run) == before


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--streams", "1"], "n_streams=2, and now it is 1"),
        (["--residual", "prenorm"], "residual='mgr-competitive', and now it is 'prenorm'"),
        (["--steps", "8"], "steps=4, and now it is 8"),
        (["--seed", "3"], "seed=0, and now it is 3"),
        (["--data", "sotu"], "and now it is 'sotu'"),
        (["--batch-size", "4"], "batch_size=2, and now it is 4"),
        (["--preset", "S"], "preset='toy', and now it is 'S'"),
        (["--model", "llama"], "model='gpt', and now it is 'llama'"),
    ],
)
def test_a_changed_setting_is_named_with_both_values_and_nothing_is_lost(options, says, run, capsys):
    before = content(run)
    assert says in sentence(["train", "--out", str(run), "--resume", *options], capsys)
    assert content(run) == before


def test_a_torn_checkpoint_is_refused_by_name_and_the_last_good_one_offered(run, capsys):
    (run / "step-000004" / "model.safetensors").write_bytes(b"")
    offered = f"The last good checkpoint is {run / 'step-000002'}."
    for command in (["eval"], ["generate"]):
        said = sentence([*command, str(run / "step-000004")], capsys)
        assert f"The checkpoint {run / 'step-000004'} is damaged" in said and offered in said
    assert main(["eval", str(run)]) == 0
    out, err = capsys.readouterr()
    assert f"The checkpoint {run / 'step-000004'} is damaged" in err and "step-000002" in err and "bits per byte" in out


def test_a_corrupt_token_file_is_refused(tmp_path, capsys):
    path = tmp_path / "a.tokens"
    write_tokens(path, [np.arange(3000) % 200], 200, tokenizer="mine")
    out = tmp_path / "out"
    assert main(["train", *SMALL, "--data", str(path), "--out", str(out)]) == 0
    assert "ids of tokenizer 'mine' and has no" in sentence(["generate", str(out)], capsys)
    with open(path, "rb+") as file:
        file.seek(5000)
        file.write(b"\xff")
    before = content(out)
    for command in (["train", "--out", str(out), "--resume"], ["eval", str(out)]):
        assert f"The token file {path} does not have the SHA-256 of its header; write it again." in sentence(
            command, capsys
        )
    assert content(out) == before


def test_text_of_another_vocabulary_is_refused(run, tmp_path, capsys):
    write_tokens(tmp_path / "a.tokens", [np.arange(3000) % 300], 300)
    said = sentence(["eval", str(run), "--data", str(tmp_path / "a.tokens")], capsys)
    assert "has a vocabulary of 300, and the model in" in said and "vocab_size=256" in said
    write_tokens(tmp_path / "b.tokens", [np.arange(3000) % 200], 200, tokenizer="bpe-200-0")
    assert "from 'bpe-200-0', and the model was trained with 'bytes'" in sentence(
        ["eval", str(run), "--data", str(tmp_path / "b.tokens")], capsys
    )


@pytest.mark.slow
def test_a_full_disk_is_one_sentence_and_the_last_checkpoint_stays(tmp_path, story):
    """The real system's refusal: no file may grow beyond 300 kB, which the second model needs and the log does not."""
    pytest.importorskip("resource")
    out = tmp_path / "out"
    options = [*SMALL, "--width", "64", "--data", story, "--out", str(out)]
    code = "import resource, sys\nfrom depthlab.cli import main\n"
    code += "if sys.argv[1] == 'full': resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))\n"
    code += "sys.exit(main(sys.argv[2:]))"

    def depthlab(disk: str, *arguments: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-c", code, disk, "train", *arguments]
        return subprocess.run(command, capture_output=True, text=True)

    done = depthlab("full", *options)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"depthlab: Step 2 cannot be saved in {out} (File too large); make room there. "
        f"There is no good checkpoint in {out}.\n"
    )
    assert not list(out.glob("step-*")) and not list(out.glob(".*"))
    assert depthlab("free", *options, "--resume").returncode == 0
    for path in (out / "step-000004").iterdir():
        path.unlink()
    (out / "step-000004").rmdir()
    before = content(out / "step-000002")
    done = depthlab("full", "--out", str(out), "--resume")
    assert f"Step 4 cannot be saved in {out} (File too large); make room there." in done.stderr
    assert f"The last good checkpoint is {out / 'step-000002'}." in done.stderr
    assert content(out / "step-000002") == before and not list(out.glob(".*"))


def test_folders_without_a_run_are_named(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    for command in (["eval"], ["generate"]):
        assert "There is no good checkpoint in" in sentence([*command, str(tmp_path / "empty")], capsys)
        assert "is no folder; give one that" in sentence([*command, str(tmp_path / "none")], capsys)
    for name in ("empty", "none"):
        assert "holds no training run" in sentence(["runs", str(tmp_path / name)], capsys)


def test_a_loss_that_is_not_finite_is_a_sentence_and_no_unexpected_error(run, monkeypatch, capsys):
    def broken(*arguments, **how):
        raise FloatingPointError("The loss of tokens 0 to 8 is nan.")

    monkeypatch.setattr(commands, "evaluate", broken)
    assert sentence(["eval", str(run)], capsys) == "depthlab: The loss of tokens 0 to 8 is nan.\n"


def test_a_checkpoint_of_a_kind_or_setting_that_is_not_known_is_refused(run, capsys):
    path = run / "step-000004"
    with pytest.raises(checkpoint.CheckpointError, match="holds a model of kind 'gpt'; known: llama"):
        commands.load_run(run, models={"llama": commands.MODELS["llama"]})
    state = json.loads((path / "state.json").read_text())
    state["model"]["config"]["colour"] = "red"
    (path / "state.json").write_text(json.dumps(state))
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["sha256"]["state.json"] = checkpoint.sha256_of_file(path / "state.json")
    (path / "manifest.json").write_text(json.dumps(manifest))
    assert "has the setting 'colour', which this version does not know" in sentence(["eval", str(run)], capsys)


def test_prompts_and_counts_out_of_range_are_named(run, capsys):
    assert "prompt='' has no token" in sentence(["generate", str(run), "--prompt", ""], capsys)
    assert "prompt='\\udcff' is no text" in sentence(["generate", str(run), "--prompt", "\udcff"], capsys)
    assert f"seed={10**30} is not allowed" in sentence(["generate", str(run), "--seed", str(10**30)], capsys)
    assert "temperature=-1.0 is not allowed" in sentence(["generate", str(run), "--temperature", "-1"], capsys)
    assert "max_tokens=0" in sentence(["eval", str(run), "--tokens", "0"], capsys)
    assert "split='middle' has no text here" in sentence(["eval", str(run), "--split", "middle"], capsys)


def test_a_run_goes_on_when_nobody_reads_its_progress(tmp_path, story):
    out = tmp_path / "out"
    options = [*SMALL, "--steps", "40", "--data", story, "--out", str(out)]
    command = f"{sys.executable} -m depthlab train {' '.join(options)} | head -n 1"
    environment = {**os.environ, "CI": ""}
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=environment)
    assert (done.stdout.count("\n"), done.stderr) == (1, "")
    assert checkpoint.step_of(checkpoint.find(out)[0]) == 40
