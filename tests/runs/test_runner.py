"""The runner keeps finished cells, refuses what does not belong to the run, and writes a record only when whole."""

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from depthlab.runs import Cell, Curve, Experiment, Result, RunError, grid, make, progress

CALLS: list[str] = []


@pytest.fixture(autouse=True)
def forget_calls() -> None:
    CALLS.clear()


def steady(cell: Cell, config: dict[str, Any]) -> list[Result]:
    CALLS.append(cell.name)
    value = config["base"] + cell.settings["seed"]
    return [Result(cell.settings["variant"], cell.settings["seed"], {"loss": value}, {"c": Curve([0, 1], [value, 0])})]


def failing_at_seed_1(cell: Cell, config: dict[str, Any]) -> list[Result]:
    if cell.settings["seed"] == 1:
        raise ZeroDivisionError("no batch")
    return steady(cell, config)


def interrupted_at_seed_1(cell: Cell, config: dict[str, Any]) -> list[Result]:
    if cell.settings["seed"] == 1:
        raise KeyboardInterrupt
    return steady(cell, config)


def diverging_at_seed_1(cell: Cell, config: dict[str, Any]) -> list[Result]:
    seed = cell.settings["seed"]
    if seed != 1:
        return [Result("a", seed, {"loss": 1.0}, {"c": Curve([0, 1, 2], [1.0, 2.0, 3.0])})]
    return [Result("a", seed, {"loss": math.nan}, {"c": Curve([0, 1], [1.0, math.inf])}, "loss not finite at step 1")]


def drawing(cell: Cell, config: dict[str, Any]) -> list[Result]:
    return [Result("a", cell.settings["seed"], {"drawn": torch.rand(()).item(), "threads": torch.get_num_threads()})]


def unsorted(cell: Cell, config: dict[str, Any]) -> list[Result]:
    return [Result("a", cell.settings["seed"], {"z": 1.0, "a": 2.0})]


def spoiling(cell: Cell, config: dict[str, Any]) -> list[Result]:
    config.clear()
    return [Result(cell.settings.pop("variant"), cell.settings.pop("seed"), {"loss": 1.0})]


def nothing(cell: Cell, config: dict[str, Any]) -> list[Result]:
    return []


def seed_missing_in_b(cell: Cell, config: dict[str, Any]) -> list[Result]:
    return [Result("a", 0, {"loss": 1.0}), Result("a", 1, {"loss": 1.0}), Result("b", 0, {"loss": 1.0})]


def same_seed_twice(cell: Cell, config: dict[str, Any]) -> list[Result]:
    return [Result("a", 0, {"loss": 1.0}), Result("a", 0, {"loss": 1.0})]


def other_metrics(cell: Cell, config: dict[str, Any]) -> list[Result]:
    return [Result("a", 0, {"loss": 1.0}), Result("a", 1, {"accuracy": 1.0})]


def other_x(cell: Cell, config: dict[str, Any]) -> list[Result]:
    return [Result("a", s, {"loss": 1.0}, {"c": Curve([0, s + 1], [0.0, 0.0])}) for s in (0, 1)]


def some(run_cell: Any = steady, base: float = 0.5, variants: tuple[str, ...] = ("a",), seeds: int = 3) -> Experiment:
    return Experiment("some-run", ("GC-1",), {"base": base}, grid(variant=variants, seed=range(seeds)), run_cell)


def cell_files(work: Path) -> list[Path]:
    return sorted(work.glob("some-run/*/*.json"))


def test_the_record_holds_every_number_in_the_order_of_seeds(tmp_path: Path) -> None:
    record = make(some(variants=("b", "a")), tmp_path / "work", tmp_path / "out")
    assert record.metrics == {"b": {"loss": [0.5, 1.5, 2.5]}, "a": {"loss": [0.5, 1.5, 2.5]}}
    assert record.curve("a", "c")[1].tolist() == [[0.5, 0.0], [1.5, 0.0], [2.5, 0.0]]
    assert (record.seeds, record.claims) == ([0, 1, 2], ["GC-1"])
    assert record.config["base"] == 0.5
    assert record.config["cells"][0] == {"variant": "b", "seed": 0}
    assert json.loads((tmp_path / "out/some-run.json").read_text())["metrics"] == record.metrics


def test_variants_and_metrics_keep_the_order_they_were_given_in(tmp_path: Path) -> None:
    assert list(make(some(unsorted), tmp_path / "work", tmp_path / "out").metrics["a"]) == ["z", "a"]
    assert list(make(some(variants=("b", "a")), tmp_path / "work", tmp_path / "out").metrics) == ["b", "a"]


def test_a_failed_cell_keeps_the_finished_ones_and_only_the_rest_runs_again(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="variant=a,seed=1 of some-run failed .ZeroDivisionError: no batch"):
        make(some(failing_at_seed_1), tmp_path / "work", tmp_path / "out")
    assert len(cell_files(tmp_path / "work")) == 1
    assert not (tmp_path / "out/some-run.json").exists()
    CALLS.clear()
    make(some(), tmp_path / "work", tmp_path / "out")
    assert CALLS == ["variant=a,seed=1", "variant=a,seed=2"]


def test_making_a_finished_record_again_really_runs_it_again(tmp_path: Path) -> None:
    make(some(), tmp_path / "work", tmp_path / "out")
    make(some(), tmp_path / "work", tmp_path / "out")
    assert len(CALLS) == 6


def test_more_seeds_use_the_cells_that_are_there(tmp_path: Path) -> None:
    with pytest.raises(RunError):
        make(some(failing_at_seed_1), tmp_path / "work", tmp_path / "out")
    CALLS.clear()
    make(some(seeds=5), tmp_path / "work", tmp_path / "out")
    assert "variant=a,seed=0" not in CALLS
    assert len(CALLS) == 4


def test_another_config_uses_nothing_of_the_old_one_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RunError):
        make(some(failing_at_seed_1), tmp_path / "work", tmp_path / "out")
    record = make(some(base=10.0), tmp_path / "work", tmp_path / "out")
    assert record.values("a.loss") == [10.0, 11.0, 12.0]
    assert "1 finished cells" in capsys.readouterr().out
    assert len(cell_files(tmp_path / "work")) == 1  # the old one, left alone


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "null",
        lambda text: "[" * 100_000,
        lambda text: text.replace('"loss": 0.5', '"loss": 0.25'),
        lambda text: text.replace('"seed": 0', '"seed": 7'),
    ],
    ids=["truncated", "empty", "null", "deep", "number changed", "seed changed"],
)
def test_a_torn_or_edited_cell_is_computed_again_and_said_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: Any
) -> None:
    with pytest.raises(RunError):
        make(some(failing_at_seed_1), tmp_path / "work", tmp_path / "out")
    (file,) = cell_files(tmp_path / "work")
    whole = file.read_text()
    file.write_text(damage(whole))
    assert file.read_text() != whole
    CALLS.clear()
    record = make(some(), tmp_path / "work", tmp_path / "out")
    assert CALLS[0] == "variant=a,seed=0"
    assert "is damaged" in capsys.readouterr().out
    assert record.values("a.loss") == [0.5, 1.5, 2.5]


@pytest.mark.parametrize("other", [{"cpu": "Another CPU"}, {"gpus": ["Another GPU"]}])
def test_a_cell_of_another_machine_is_computed_again(
    other: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib

    provenance = importlib.import_module("depthlab.runs.provenance")
    hardware = provenance.hardware()
    with monkeypatch.context() as patch:
        patch.setattr(provenance, "hardware", lambda: hardware | other)
        with pytest.raises(RunError):
            make(some(failing_at_seed_1), tmp_path / "work", tmp_path / "out")
    CALLS.clear()
    make(some(), tmp_path / "work", tmp_path / "out")
    assert len(CALLS) == 3


def test_cells_of_two_commits_are_kept_but_the_record_is_not_clean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DEPTHLAB_CLEAN", "1")
    monkeypatch.setenv("DEPTHLAB_COMMIT", "a" * 40)
    with pytest.raises(RunError):
        make(some(failing_at_seed_1), tmp_path / "work", tmp_path / "out")
    monkeypatch.setenv("DEPTHLAB_COMMIT", "b" * 40)
    record = make(some(), tmp_path / "work", tmp_path / "out")
    assert (record.commit, record.clean) == ("b" * 40, False)
    assert "another commit" in capsys.readouterr().out
    assert make(some(), tmp_path / "work", tmp_path / "out").clean is True


def test_kept_cells_of_changed_sources_make_the_record_unclean_at_the_same_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEPTHLAB_COMMIT", "a" * 40)
    monkeypatch.setenv("DEPTHLAB_CLEAN", "0")
    with pytest.raises(RunError):
        make(some(failing_at_seed_1), tmp_path / "work", tmp_path / "out")
    monkeypatch.setenv("DEPTHLAB_CLEAN", "1")
    assert make(some(), tmp_path / "work", tmp_path / "out").clean is False
    assert make(some(), tmp_path / "work", tmp_path / "out").clean is True


def test_a_diverged_run_is_recorded_as_null_with_its_reason(tmp_path: Path) -> None:
    record = make(some(diverging_at_seed_1), tmp_path / "work", tmp_path / "out")
    assert record.metrics["a"]["loss"] == [1.0, None, 1.0]
    assert record.curves["a"]["c"]["y"] == [[1.0, 2.0, 3.0], [1.0, None, None], [1.0, 2.0, 3.0]]
    assert record.diverged == {"a": {"1": "loss not finite at step 1"}}
    assert math.isnan(record.values("a.loss")[1])


def test_a_cell_draws_the_same_numbers_whatever_ran_before_it_and_on_one_thread(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        torch.manual_seed(1)
        first = make(some(drawing), tmp_path / "work", tmp_path / "out")
        torch.manual_seed(2)
        fewer = make(some(drawing, seeds=2), tmp_path / "work", tmp_path / "out")
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert first.values("a.drawn")[:2] == fewer.values("a.drawn")
    assert len(set(first.values("a.drawn"))) == 3
    assert set(first.values("a.threads")) == {1.0}
    assert first.hardware["threads"] == 1


def test_a_cell_that_changes_its_settings_spoils_nothing(tmp_path: Path) -> None:
    experiment = some(spoiling)
    record = make(experiment, tmp_path / "work", tmp_path / "out")
    assert record.config_hash == experiment.config_hash == some().config_hash


@pytest.mark.parametrize(
    ("run_cell", "says"),
    [
        (nothing, "at least one"),
        (seed_missing_in_b, "no result for seed 1"),
        (same_seed_twice, "came from two cells"),
        (other_metrics, "same metrics"),
        (other_x, "another x for seed 1"),
    ],
)
def test_results_that_make_no_table_are_refused(run_cell: Any, says: str, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=says):
        make(some(run_cell, seeds=1), tmp_path / "work", tmp_path / "out")
    assert not (tmp_path / "out/some-run.json").exists()


def test_two_runs_in_one_work_folder_do_not_mix(tmp_path: Path) -> None:
    fcntl = pytest.importorskip("fcntl")
    (tmp_path / "work/some-run").mkdir(parents=True)
    with open(tmp_path / "work/some-run/lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(RunError, match="Another run of some-run works"):
            make(some(), tmp_path / "work", tmp_path / "out")
    make(some(), tmp_path / "work", tmp_path / "out")


@pytest.mark.parametrize("name", ["work", "out"])
def test_a_folder_that_cannot_be_written_is_refused_before_anything_runs(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("a file, not a folder")
    with pytest.raises(RunError, match=f"Cannot write in .*{name}.*give another folder"):
        make(some(), tmp_path / "work", tmp_path / "out")
    assert CALLS == []


def test_a_full_disk_is_one_sentence_and_leaves_no_torn_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("depthlab.runs.worker.os.fsync", full)
    with pytest.raises(RunError, match="No space left on device"):
        make(some(), tmp_path / "work", tmp_path / "out")
    assert [path.name for path in (tmp_path / "work/some-run").rglob("*") if path.is_file()] == ["lock"]


@pytest.mark.parametrize("processes", [0, -1, 1.5, True, None])
def test_an_impossible_number_of_processes_is_refused(processes: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="processes"):
        make(some(), tmp_path / "work", tmp_path / "out", processes)


def test_an_interrupt_says_what_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt):
        make(some(interrupted_at_seed_1), tmp_path / "work", tmp_path / "out")
    assert "1 of 3 cells are finished and kept" in capsys.readouterr().out


def test_wall_time_adds_up_over_restarts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 1000, 10))  # every look at the clock is 10 s later: a cell takes 10 s
    monkeypatch.setattr("depthlab.runs.worker.time.monotonic", lambda: float(next(clock)))
    with pytest.raises(RunError):
        make(some(failing_at_seed_1), tmp_path / "work", tmp_path / "out")
    (file,) = cell_files(tmp_path / "work")
    seconds = json.loads(file.read_text())["cell"]["seconds"]
    assert make(some(), tmp_path / "work", tmp_path / "out").wall_time_s == 3 * seconds > 0


@pytest.mark.parametrize(("ci", "speaks"), [("", True), ("true", False)])
def test_progress_speaks_only_in_long_runs_outside_ci(
    ci: str, speaks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CI", ci)
    make(some(), tmp_path / "work", tmp_path / "out")
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(progress, "_QUIET_FOR_S", 0.0)
    with progress.Progress("some-run", done=1, total=3) as line:
        time.sleep(0.2)
        line.finished("variant=a,seed=1", 2.0)
    said = capsys.readouterr().out
    assert ("some-run: 2 of 3 cells after 0 s, finished variant=a,seed=1 in 2 s\n" in said) == speaks
    assert "\r" not in said
    assert speaks or said == ""
