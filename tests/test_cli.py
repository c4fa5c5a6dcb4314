"""The command line is thin: it parses, calls one function, and turns our errors into one sentence and exit code 2."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import depthlab
from depthlab import claims, data, nbtools, runs
from depthlab.cli import main
from depthlab.runs import Cell, Experiment, Result, grid


def run_cell(cell: Cell, config: dict[str, Any]) -> list[Result]:
    if config["fail"]:
        raise ZeroDivisionError("no batch")
    return [Result("relu", cell.settings["seed"], {"v1": 1.0})]


def a_run(fail: bool = False) -> Experiment:
    return Experiment("a-run", ("GC-1",), {"fail": fail}, grid(seed=[0, 1, 2]), run_cell)


def test_the_module_and_the_version() -> None:
    done = subprocess.run([sys.executable, "-m", "depthlab", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"depthlab {depthlab.__version__}\n"


def test_help_imports_no_part_of_the_package() -> None:
    code = (
        "import sys, depthlab.cli\n"
        "try: depthlab.cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        "print([m for m in ('torch', 'numpy', 'yaml', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    for command in ("claims", "runs", "notebooks", "exercises", "data", "doctor"):
        assert command in done.stdout


@pytest.mark.parametrize(
    "command",
    [["frob"], ["runs", "make"], ["notebooks"], ["data"], ["train"], ["claims", "--x"]]
    + [["claims", "--check", "--write", "x"]],
)
def test_what_is_no_command_is_refused_with_the_usage(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(command)
    assert caught.value.code == 2
    assert "usage: depthlab" in capsys.readouterr().err


def test_no_command_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "commands:" in capsys.readouterr().out


def test_claims_prints_every_claim_and_the_counts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["claims"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if not line.startswith(" ")][:-1] == [r.id for r in claims.rows()]
    assert lines[-1] == claims.summary()


def test_claims_by_id_show_what_each_rule_saw(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["claims", "MGR-3", "GC-1"]) == 0
    assert capsys.readouterr().out.rstrip("\n") == claims.report("MGR-3", "GC-1")
    assert main(["claims", "GC-99"]) == 2


def test_claims_writes_and_checks_a_readme(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("<!-- generated: claims -->\n<!-- end: claims -->\n")
    monkeypatch.setattr("depthlab.cli._root", lambda: tmp_path)
    assert main(["claims", "--check"]) == 1
    assert "depthlab claims --write README.md" in capsys.readouterr().err
    assert main(["claims", "--write", str(readme)]) == 0
    assert main(["claims", "--check"]) == 0
    assert main(["claims", "--write", str(readme)]) == 0
    assert "already up to date" in capsys.readouterr().out


def test_a_broken_ledger_is_one_sentence_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> None:
        raise claims.LedgerError("Row GC-1 has\nno sense.")

    monkeypatch.setattr(claims, "verdicts", broken)
    for command in (["claims"], ["claims", "--check"], ["claims", "--write", "README.md"]):
        assert main(command) == 2
        assert capsys.readouterr() == ("", "depthlab: Row GC-1 has no sense.\n")
    monkeypatch.setenv("DEPTHLAB_DEBUG", "1")
    with pytest.raises(claims.LedgerError):
        main(["claims"])


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (KeyError("x"), 2, "unexpected KeyError"),
        (ValueError(), 2, "unexpected ValueError"),
        (ImportError("No module named 'nbclient'"), 2, "depthlab doctor"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_other_errors_end_without_a_traceback(
    error: BaseException, code: int, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(**_: object) -> None:
        raise error

    monkeypatch.setattr(data, "prepare", fail)
    assert main(["data", "prepare"]) == code
    shown = capsys.readouterr().err
    assert says in shown
    assert shown.count("\n") == (1 if says else 0)


def test_a_closed_output_is_no_error() -> None:
    command = f"{sys.executable} -m depthlab data prepare >&-"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_closed_pipe_is_no_error() -> None:
    command = f"{sys.executable} -m depthlab claims | head -n 1"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_runs_make_writes_the_record_where_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(claims, "experiment", lambda record_id: a_run())
    monkeypatch.chdir(tmp_path)
    assert main(["runs", "make", "a-run", "--work-dir", "work", "--out-dir", "out"]) == 0
    assert json.loads((tmp_path / "out/a-run.json").read_text())["command"] == "depthlab runs make a-run"
    assert "a-run: 3 seeds" in capsys.readouterr().out


def test_runs_make_says_what_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["runs", "make", "../a-run"]) == 2
    assert "lists no record '../a-run'" in capsys.readouterr().err
    monkeypatch.setattr(claims, "experiment", lambda record_id: a_run(fail=True))
    folders = ["--work-dir", str(tmp_path / "work"), "--out-dir", str(tmp_path / "out")]
    assert main(["runs", "make", "a-run", *folders]) == 2
    assert "ZeroDivisionError: no batch" in capsys.readouterr().err
    assert main(["runs", "make", "a-run", *folders, "--processes", "0"]) == 2
    assert "processes=0" in capsys.readouterr().err


def test_runs_lists_every_record_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs"]) == 0
    listed = [line.split(":")[0] for line in capsys.readouterr().out.splitlines() if not line.startswith(" ")]
    assert listed == runs.record_ids()


def test_runs_tells_a_stale_record(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def stale(*_: object) -> None:
        raise claims.LedgerError("Record a-run is stale.")

    monkeypatch.setattr(claims, "current_record", stale)
    monkeypatch.setattr("depthlab.runs.record.record_ids", lambda: ["a-run"])
    assert main(["runs"]) == 1
    assert "a-run: Record a-run is stale." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "function", "given"),
    [
        (["notebooks", "run"], "run", ((None,), {"in_place": False, "out_dir": "build/notebooks"})),
        (["notebooks", "run", "a", "--in-place"], "run", ((["a"],), {"in_place": True, "out_dir": "build/notebooks"})),
        (["notebooks", "check", "a", "b"], "check", ((["a", "b"],), {})),
        (["exercises", "--check"], "write_exercises", ((), {"check": True})),
    ],
)
def test_notebook_commands_pass_their_arguments_and_exit_code_on(
    command: list[str], function: str, given: tuple, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    monkeypatch.setattr(nbtools, function, lambda *a, **k: calls.append((a, k)) or 1)
    assert main(command) == 1
    assert calls == [given]


def test_the_links_command_mends_the_colab_links(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(nbtools, "sync_colab", lambda: calls.append("synced"))
    assert main(["notebooks", "links"]) == 0
    assert calls == ["synced"]


def test_doctor_finds_the_core_well_and_says_how_to_get_the_rest(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from depthlab import doctor

    assert main(["doctor"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "The core works."
    real = doctor.metadata.version
    monkeypatch.setattr(data, "prepare", lambda: [])  # it was well, and takes a while

    def without(*missing: str) -> None:
        def version(name: str) -> str:
            if name in missing:
                raise doctor.metadata.PackageNotFoundError(name)
            return real(name)

        monkeypatch.setattr(doctor.metadata, "version", version)

    without("torchvision", "triton", "nbval")
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert "torchvision is missing; run: pip install -e '.[data]'" in shown
    assert "absent   triton; kernels use plain torch instead" in shown
    without("safetensors")
    assert main(["doctor"]) == 1
    assert "missing  safetensors is missing; run: pip install -e ." in capsys.readouterr().out


def test_doctor_tells_a_damaged_bundle(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def damaged() -> None:
        raise data.DataError("mnist/x is truncated.")

    monkeypatch.setattr(data, "prepare", damaged)
    assert main(["doctor"]) == 1
    assert "broken   mnist/x is truncated." in capsys.readouterr().out


def test_commands_of_a_checkout_work_in_any_folder(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": ""}
    done = subprocess.run(
        [sys.executable, "-m", "depthlab", "claims"], cwd=tmp_path, capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []
