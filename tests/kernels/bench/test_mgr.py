"""The table that is measured, a run of a small part of it on a CPU, and the command around it."""

import math
import subprocess
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from depthlab import runs
from depthlab.cli import main
from depthlab.kernels.bench import cases, command, gate, inverting, live, mgr, needs, peers, reading
from depthlab.kernels.bench.cases import COMPARED, STREAMS, TOKENS, WIDTHS, Case, quick_table, table
from depthlab.kernels.bench.subjects import subject
from depthlab.runs import RunError

PASSES = ("forward", "backward", "both")


# ---- the table


def test_the_table_covers_every_shape_and_compiles_at_six() -> None:
    cases = [case for case, _ in table()]
    main_rows = {(c.tokens, c.n_streams, c.width) for c in cases if (c.op, c.gate, c.dtype) == MAIN}
    assert main_rows == {(t, n, c) for t in TOKENS for n in STREAMS for c in WIDTHS}
    counted = Counter(name for _, names in table() for name in names)
    assert counted["compile"] == len(COMPARED) == 6
    assert counted["triton"] == len(cases)
    assert counted["liger-mhc"] == 3 and counted["liger-attnres"] == counted["fla-attnres"] == 2
    assert sum(c.gate == "independent" for c in cases) == 2
    assert sum(c.dtype == "fp32" for c in cases) == 3
    assert {c.op for c in cases} == {"mix", "append", "pool"}


MAIN = ("mix", "competitive", "bf16")


def test_names_are_those_of_the_record_and_read_back() -> None:
    names = [f"{case.name}/{name}" for case, implementations in table() for name in implementations]
    assert "mix/competitive/bf16/T=32768,n=4,C=1024/triton" in names
    assert len(set(names)) == len(names)
    for case, implementations in table():
        for name in implementations:
            assert reading.parse_variant(f"{case.name}/{name}") == (case, name)
    assert reading.parse_variant("machine") is None
    assert reading.parse_variant("counters/mix/competitive/bf16/T=1,n=4,C=8/eager") is None
    assert reading.parse_variant("counters/pool/bf16/T=1,n=4,C=8/eager") is None


def test_the_record_repeats_the_whole_table_three_times() -> None:
    made = mgr.bench()
    assert made.id == "kernels-mgr-bench"
    assert Counter(c.settings["seed"] for c in made.cells) == dict.fromkeys(range(3), len(table()) + 1)
    assert set(mgr.rows_of(made)) == {case for case, _ in table()}


def test_inverting_has_a_small_record_of_its_own_beside_ordinary_mixing() -> None:
    made = mgr.inverting()
    assert made.id == "kernels-mgr-inverting" and made.claims == ("MGR-10",) and len(made.cells) == 3 * (12 + 1)
    timed = mgr.rows_of(made)
    plain = {(c.n_streams, c.width) for c in timed if c.op == "mix"}
    assert plain == {(c.n_streams, c.width) for c in timed if c.op == "mix-inverting"}
    assert plain == {(n, c) for n in (4, 8) for c in (768, 1024, 1280)}
    assert reading.parse_variant(f"{timed[1].name}/triton") == (timed[1], "triton")


def test_a_trial_is_a_part_of_the_table_under_another_name() -> None:
    quick = mgr.trial(quick=True)
    assert quick.id == "kernels-mgr-trial" and len(quick.cells) == len(quick_table()) + 1
    only = mgr.trial(only="C=1024/liger-mhc")
    assert [c.settings["implementations"] for c in only.cells if "op" in c.settings] == [["liger-mhc"]] * 6
    with pytest.raises(ValueError, match="No row of the benchmark holds 'C=7,'; give a part of a name like 'mix/"):
        mgr.trial(only="C=7,")


# ---- a run on a CPU


def small(implementations: list[str], repetitions: int = 2, **changes: object) -> runs.Experiment:
    case = Case(
        **{"op": "mix", "dtype": "bf16", "tokens": 16, "n_streams": 3, "width": 20, "gate": "competitive"} | changes
    )
    return mgr.experiment("kernels-mgr-trial", [(case, implementations)], "cpu", repetitions)


def test_a_run_gives_each_implementations_row_and_reading_it_the_ratio_a_repetition(tmp_path: Path, pretend) -> None:
    pretend()
    record = runs.make(small(["eager", "triton"]), tmp_path / "work", tmp_path)
    ours, theirs = (f"mix/competitive/bf16/T=16,n=3,C=20/{name}" for name in ("triton", "eager"))
    assert set(record.metrics) == {"machine", ours, theirs}
    assert all(v > 0 for v in record.values("machine.copy_gbps") + record.values("machine.float32_tflops"))
    table = reading.rows(record).set_index("implementation")
    for which in PASSES:
        a, b = (record.values(f"{v}.{which}_ms") for v in (theirs, ours))
        ratios = [x / y for x, y in zip(a, b, strict=True)]
        assert table[f"{which}_over_eager"]["triton"] == sum(ratios) / 2  # the median of two
        assert math.isnan(table[f"{which}_over_eager"]["eager"])


@pytest.mark.parametrize(("op", "peer"), [("mix", "liger-mhc"), ("pool", "liger-attnres"), ("pool", "fla-attnres")])
def test_a_peer_that_is_not_installed_is_a_row_that_says_so(
    op: str, peer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("liger_kernel", "liger_kernel.transformers", "fla", "fla.ops", "fla.ops.attnres"):
        monkeypatch.setitem(__import__("sys").modules, module, None)
    record = runs.make(small([peer], op=op, gate="competitive" if op == "mix" else ""), tmp_path / "w", tmp_path)
    (variant,) = set(record.metrics) - {"machine"}
    assert "is not installed" in record.diverged[variant]["0"]
    assert all(math.isnan(v) for v in record.values(f"{variant}.both_ms"))
    assert reading.rows(record).why.iloc[0].endswith("is not installed")


def test_a_peer_that_fails_once_has_no_ratio_and_costs_no_other_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pretend
) -> None:
    pretend()
    calls = iter(range(2))

    def fails_at_first(case: Case) -> cases.Subject:
        if next(calls) == 0:
            raise AttributeError("no such kernel")
        return cases.Subject(lambda g: cases.inputs(case, g), cases.public_step(case, "torch"), 2)

    monkeypatch.setitem(peers.PEERS, "liger-mhc", fails_at_first)
    record = runs.make(small(["eager", "triton", "liger-mhc"]), tmp_path / "w", tmp_path)
    table = reading.rows(record).set_index("implementation")
    assert math.isnan(table["both_over_liger-mhc"]["triton"]) and math.isnan(table.both_ms["liger-mhc"])
    assert table.both_over_eager["triton"] > 0 and table.why["liger-mhc"] == "liger-mhc failed here (AttributeError)"


def test_a_peer_that_fails_is_a_row_and_our_failure_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pretend
) -> None:
    def broken(case: Case) -> None:
        raise AttributeError("no such kernel")

    monkeypatch.setitem(peers.PEERS, "liger-mhc", broken)
    record = runs.make(small(["eager", "liger-mhc"]), tmp_path / "w", tmp_path)
    variant = "mix/competitive/bf16/T=16,n=3,C=20/liger-mhc"
    assert record.diverged == {variant: dict.fromkeys("01", "liger-mhc failed here (AttributeError)")}
    monkeypatch.setattr(mgr, "subject", lambda case, name: broken(case))
    with pytest.raises(RunError, match="AttributeError: no such kernel"):
        runs.make(small(["eager"]), tmp_path / "w", tmp_path)


def test_the_compiled_reference_gives_the_references_results(monkeypatch: pytest.MonkeyPatch, cpu) -> None:
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **k: real(f, backend="aot_eager", **k))
    for case in (
        Case("mix", "bf16", 8, 3, 12, "independent"),
        Case("append", "fp32", 8, 3, 12),
        Case("pool", "fp32", 8, 3, 12),
    ):
        compiled, eager = subject(case, "compile"), subject(case, "eager")
        drawn = eager.inputs(torch.Generator().manual_seed(0))
        for a, b in zip(compiled.step(*drawn), eager.step(*drawn), strict=True):
            torch.testing.assert_close(a, b)


def test_mixing_that_rebuilds_its_streams_gives_the_results_of_mixing(cpu) -> None:
    """In float64, where rebuilding loses next to nothing; and what is timed keeps no streams."""
    case = Case("mix", "fp64", 8, 3, 12, "independent")
    for above in (None, 0.5):
        results = []
        for step in (subject(case, "eager").step, inverting.step(case, "torch", above)):
            drawn = cases.inputs(case, torch.Generator().manual_seed(0))
            outputs = step(*drawn)
            results.append(
                [*outputs, *torch.autograd.grad(outputs[:2], drawn, [torch.ones_like(y) for y in outputs[:2]])]
            )
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b)
    saved = subject(replace(case, op="mix-inverting"), "eager").step(*drawn)[0].grad_fn.saved_tensors
    assert not any(x.data_ptr() == drawn[0].data_ptr() for x in saved)
    with pytest.raises(ValueError, match="torch.compile has no mixing that rebuilds its streams"):
        subject(replace(case, op="mix-inverting"), "compile")


def test_an_unknown_implementation_is_refused() -> None:
    with pytest.raises(
        ValueError, match="no implementation 'cuda' to time; use one of eager, compile, triton, liger-mhc"
    ):
        subject(Case("pool", "bf16", 8, 3, 12), "cuda")
    assert set(peers.PEERS) == {"liger-mhc", "liger-attnres", "fla-attnres"}


# ---- the gate in the command


def wrong(case: Case):
    right = subject(case, "eager").step
    return lambda s, f, w_gate, bias, w_pool: right(s, f, 0 * w_gate, bias, w_pool)


def test_wrong_kernels_give_no_row_one_sentence_and_exit_code_1(
    tmp_path: Path, pretend, cpu, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend(wrong)
    made = small(["eager", "triton"])
    assert command.make_all([made], tmp_path / "work", tmp_path / "out", cpu) == 1
    said = capsys.readouterr()
    assert said.err.startswith("depthlab: the kernels are wrong here, so nothing is timed: mix/competitive/")
    assert said.err.count("\n") == 1
    assert not (tmp_path / "out").exists()
    pretend()
    assert command.make_all([made], tmp_path / "work", tmp_path / "out", cpu) == 0
    assert (tmp_path / "out/kernels-mgr-trial.json").is_file()


def test_a_cell_that_is_run_by_itself_is_gated_too(tmp_path: Path, pretend) -> None:
    pretend(wrong)
    with pytest.raises(RunError, match="GateFailed: The kernels are wrong here") as caught:
        runs.make(small(["eager", "triton"]), tmp_path / "work", tmp_path)
    assert isinstance(caught.value.__cause__, gate.GateFailed)
    assert not (tmp_path / "kernels-mgr-trial.json").exists()


# ---- without a GPU


@pytest.mark.skipif(needs.missing() is None, reason="this machine can run the benchmark")
@pytest.mark.parametrize("given", [[], ["--quick"], ["--only", "pool"], ["--parts", "profile"]])
def test_without_a_gpu_the_command_says_what_is_missing(
    given: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = ["--out", str(tmp_path / "out"), "--work-dir", str(tmp_path / "work")]
    assert main(["bench", "mgr", *given, *folders]) == 2
    said = capsys.readouterr()
    assert said.err == f"depthlab: {needs.missing()}\n" and said.out == ""
    assert "a CUDA device" in said.err
    assert list(tmp_path.iterdir()) == []


def test_without_triton_that_is_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert needs.missing().startswith("The benchmark needs triton; run it on a machine")
    with pytest.raises(needs.BenchUnavailable):
        live.measure_here()


@pytest.mark.parametrize(
    ("absent", "says"),
    [({"fla"}, "fla-core is not"), ({"fla", "liger_kernel"}, "liger-kernel and fla-core are not"), (set(), "")],
)
def test_absent_peers_are_named_before_the_benchmark(absent, says, monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None if name in absent else object())
    monkeypatch.setattr(needs, "require", lambda: None)
    monkeypatch.setattr(command, "make_all", lambda *_: 0)
    asked = [("bench", False, ""), ("bench", True, ""), ("bench", False, "/triton"), ("tests", False, "")]
    for parts, quick, only in asked:  # only the first times a peer
        assert command.run(parts, quick, only, tmp_path, tmp_path) == 0
    said = capsys.readouterr().err
    assert said.count("\n") == bool(says) and says in said
    assert ("pip install 'depthlab[peers]'" in said) == bool(says)


def test_make_bench_runs_the_command() -> None:
    root = Path(__file__).parents[3]
    done = subprocess.run(
        ["make", "-n", "--no-print-directory", "bench"], cwd=root, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == ".venv/bin/python -m depthlab bench mgr"


def test_unknown_parts_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "mgr", "--parts", "bench,plots"]) == 2
    assert "give some of tests, bench, inverting, profile, comma-separated" in capsys.readouterr().err


def test_the_live_benchmark_gives_a_row_an_implementation(pretend) -> None:
    pretend()
    found = live.measure_here(16, 3, 20, device="cpu", samples=2)
    assert list(found.implementation) == ["eager", "triton"]
    assert (found.forward_ms > 0).all() and (found.copy_gbps > 0).all()


def test_the_live_benchmark_runs_apart_without_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def run(command: list[str], *, env: dict[str, str], **_: object) -> subprocess.CompletedProcess:
        seen.append((command[1:], env))
        return subprocess.CompletedProcess(command, 0, '[{"implementation":"eager","both_ms":2.5}]\n', "")

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(live.subprocess, "run", run)
    found = live.measure_apart()
    assert found.to_dict("records") == [{"implementation": "eager", "both_ms": 2.5}]
    ((command, environment),) = seen
    assert command == ["-m", "depthlab.kernels.bench.live"] and "TRITON_INTERPRET" not in environment
    failed = subprocess.CompletedProcess([], 1, "", "Traceback\nGateFailed: the streams are off\n")
    monkeypatch.setattr(live.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(RuntimeError, match="The live benchmark failed: GateFailed: the streams are off"):
        live.measure_apart()
