"""Outcomes of the kernels' own tests, of the memory checkers, and of offsets past 2^31."""

import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from depthlab.kernels.bench import cases, command, suite
from depthlab.kernels.bench.cases import Case
from depthlab.runs import Cell, Experiment, Result, make

TESTS = """
import pytest
def test_one(): pass
@pytest.mark.parametrize("x", [1, 2])
def test_two(x): assert x == 1
@pytest.mark.skip
def test_three(): pass
@pytest.fixture
def broken(): raise RuntimeError
def test_four(broken): pass
"""


def test_outcomes_are_counted_as_pytest_reports_them(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "test_other.py").write_text("def test_it(): pass")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml=report.xml", "."]
    subprocess.run(command, cwd=tmp_path, capture_output=True)
    assert suite.counts((tmp_path / "report.xml").read_text()) == {
        "tests": 6, "passed": 3, "failed": 1, "errors": 1, "skipped": 1,
        "passed/test_some": 2, "passed/test_other": 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("tool", "text", "errors"),
    [
        ("memcheck", "========= ERROR SUMMARY: 0 errors", 0),
        ("memcheck", "========= ERROR SUMMARY: 12 errors", 12),
        ("memcheck", "========= ERROR SUMMARY: 1 error", 1),
        ("racecheck", "========= RACECHECK SUMMARY: 3 hazards displayed (3 errors, 0 warnings)", 3),
        ("racecheck", "========= ERROR SUMMARY: 0 errors", None),
        ("memcheck", "Device not supported", None),
    ],
)
def test_a_checkers_summary_is_read(tool: str, text: str, errors: int | None) -> None:
    assert suite.checker_errors(tool, text) == errors


@pytest.mark.parametrize(
    ("output", "errors", "why"),
    [
        ("launched a\nlaunched b\n========= ERROR SUMMARY: 0 errors", 0, ""),
        ("launched a\n========= ERROR SUMMARY: 2 errors", 2, ""),
        ("========= ERROR SUMMARY: 0 errors", None, "memcheck could not run"),  # nothing was launched
        ("Device not supported at /" + "opt/x", None, "memcheck could not run (Device not supported at ...)"),
    ],
)
def test_a_checker_that_saw_no_launch_is_no_clean_one(
    output: str, errors: int | None, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suite.shutil, "which", lambda name: name)
    monkeypatch.setattr(suite.subprocess, "run", lambda *a, **k: SimpleNamespace(stdout=output, stderr=""))
    result = suite.run_checker("memcheck")
    assert result.diverged.startswith(why) and bool(result.diverged) == bool(why)
    assert math.isnan(result.metrics["errors"]) if errors is None else result.metrics["errors"] == errors


def test_without_the_sanitizer_the_row_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite.shutil, "which", lambda name: None)
    assert suite.run_checker("racecheck").diverged == "compute-sanitizer is not installed"


# ---- past 2^31

LONG = Case("mix", "bf16", 120, 2, 16, "competitive")


def wrapped(case: Case):
    """Offsets that wrap at token 100: tokens from there on are those from 0 on."""
    right = cases.public_step(case, "torch")

    def step(s, f, *weights):
        index = torch.arange(case.tokens) % 100
        return right(s[index], f[index], *weights)

    return step


def leaking(case: Case):
    """The gradient of each token also reaches its neighbour."""
    right = cases.public_step(case, "torch")
    return lambda s, f, *w: right(s + 1e-3 * (s.roll(1, 0) - s.roll(1, 0).detach()), f, *w)


@pytest.mark.parametrize(("make_step", "wrong"), [(None, False), (wrapped, True), (leaking, True)])
def test_wrong_offsets_far_out_are_found(make_step, wrong: bool, cpu, pretend, capsys) -> None:
    pretend(*([make_step] if make_step else []))
    found = suite.beyond(LONG, cpu, edge=8)
    assert (found["faults"] > 0) == wrong
    assert found["elements"] == 120 * 2 * 16
    assert bool(capsys.readouterr().out) == wrong


def test_the_large_case_is_past_2_to_the_31() -> None:
    assert 2**31 < suite.LARGE.tokens * suite.LARGE.n_streams * suite.LARGE.width < 2**31 * 1.1


# ---- the record and the gate


def run_cell(cell: Cell, config: dict) -> list[Result]:
    good = {"tests": 3.0, "passed": 3.0, "failed": 0.0, "errors": 0.0, "skipped": 0.0} | config["suite"]
    checked = {"errors": config["errors"], "cases": 4.0}
    return [
        Result("suite", 0, good),
        Result("memcheck", 0, checked),
        Result("racecheck", 0, {"errors": math.nan}, diverged="not installed"),
        Result("beyond-2_31", 0, {"faults": config["faults"]}),
    ]


def outcome(suite_counts: dict | None = None, errors: float = 0.0, faults: float = 0.0) -> Experiment:
    config = {"suite": suite_counts or {}, "errors": errors, "faults": faults}
    return Experiment(suite.ID, ("MGR-9",), config, [Cell("all", {})], run_cell)


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (outcome(), None),
        (outcome({"failed": 2.0}), "suite counts 2 failed."),
        (outcome({"errors": 1.0}), "suite counts 1 errors."),
        (outcome({"passed": 0.0}), "suite ran no test."),
        (outcome(errors=3.0), "memcheck counts 3 errors."),
        (outcome(faults=1.0), "past 2^31 elements the results are wrong."),
    ],
)
def test_failing_tests_stop_what_follows_with_one_sentence(
    made: Experiment, says: str | None, tmp_path: Path, cpu, capsys: pytest.CaptureFixture[str]
) -> None:
    after = Experiment("after", (), {"suite": {}, "errors": 0.0, "faults": 0.0}, [Cell("all", {})], run_cell)
    code = command.make_all([made, after], tmp_path / "work", tmp_path, cpu)
    assert code == (1 if says else 0)
    assert (tmp_path / "kernels-mgr-tests.json").is_file()  # a failing run is recorded too
    assert (tmp_path / "after.json").is_file() == (says is None)
    said = capsys.readouterr().err
    assert said == (f"depthlab: the kernels' tests fail here, so nothing is timed: {says}\n" if says else "")
    assert suite.failures(make(made, tmp_path / "work", tmp_path)) == ([says] if says else [])


def test_every_check_is_a_cell() -> None:
    assert [c.name for c in suite.tests().cells] == ["suite", "memcheck", "racecheck", "beyond-2^31"]
