"""Parsed counters, traces as records, and what a launch of one pass does."""

import math

import pytest
import torch

from depthlab.kernels.bench import counters, inverting, one_launch, profiling
from depthlab.kernels.bench.cases import Case
from depthlab.kernels.bench.counters import BYTES, READ, STATES, TIME, WARPS, WRITTEN, CountersMissing, Launch
from depthlab.runs import Cell

HEAD = (
    '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device",'
    '"CC","Section Name","Metric Name","Metric Unit","Metric Value"'
)


def row(launch: int, kernel: str, metric: str, unit: str, value: str) -> str:
    fixed = '"1","7","(128, 1, 1)","(264, 1, 1)","0","9.0","Command line profiler metrics"'
    return f'"{launch}","4242","python3","127.0.0.1","{kernel}",{fixed},"{metric}","{unit}","{value}"'


OUTPUT = "\n".join(
    [
        "==PROF== Connected to process 4242",
        '==PROF== Profiling "layer_fwd_kernel": 0%....50%....100% - 1 pass',
        "launched mix/competitive/bf16/T=1000,n=4,C=8/triton forward",
        "==PROF== Disconnected from process 4242",
        HEAD,
        row(0, "layer_fwd_kernel", "dram__bytes_read.sum", "Kbyte", "80"),
        row(0, "layer_fwd_kernel", "dram__bytes_write.sum", "byte", "79,000"),
        row(0, "layer_fwd_kernel", "gpu__time_duration.sum", "usecond", "1,312.5"),
        "==PROF== a line in between",
        row(1, "reduce<float, (int)4>(T1)", "dram__bytes_read.sum", "Mbyte", "0.01"),
        row(1, "reduce<float, (int)4>(T1)", "dram__bytes_write.sum", "byte", "0"),
        row(1, "reduce<float, (int)4>(T1)", "gpu__time_duration.sum", "ns", "500"),
    ]
)


def test_counters_are_read_with_their_units_and_thousands() -> None:
    first, second = counters.parse(OUTPUT, BYTES)
    assert first == Launch("layer_fwd_kernel", {READ: 80_000, WRITTEN: 79_000, TIME: 1_312_500})
    assert second == Launch("reduce<float, (int)4>(T1)", {READ: 10_000, WRITTEN: 0, TIME: 500})


def test_the_sum_over_launches_is_in_units_of_nC_and_a_token() -> None:
    case = Case("mix", "bf16", 1000, 4, 8, "competitive")  # n C = 64 bytes a token
    found = counters.summarize(counters.parse(OUTPUT, BYTES), case, "forward")
    assert found == {
        "forward_reads_nC": 90 / 64,
        "forward_writes_nC": 79 / 64,
        "forward_bytes_per_token": 169,
        "forward_kernels": 2,
        "forward_kernel_us": 1313,
    }


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no table in its output"),
        ("==ERROR== ERR_NVGPUCTRPERM - no permission", "ERR_NVGPUCTRPERM - no permission"),
        ("\n".join(OUTPUT.splitlines()[:-1]), "gave no gpu__time_duration.sum for launch 1"),
        (OUTPUT.replace("Kbyte", "sector"), "gave the unit 'sector'"),
        (OUTPUT.replace('"80"', '"n/a"'), "gave 'n/a' for dram__bytes_read.sum, which is no number"),
        (OUTPUT.replace('"80"', '"nan"'), "gave 'nan' for dram__bytes_read.sum"),
        (HEAD, "saw no launch"),
        ('"ID", said the program', "no table in its output"),
    ],
)
def test_missing_counters_are_named(text: str, says: str) -> None:
    with pytest.raises(CountersMissing, match=says):
        counters.parse(text, BYTES)


def counted(kernel: str, **stalled: float) -> Launch:
    """A launch at 1,000 tokens whose warps issue a quarter of the time and else wait as said."""
    values = dict.fromkeys(WARPS, 0.0) | {counters.ISSUED: 0.5, counters.RESIDENT: 2.0, counters.INSTRUCTIONS: 8e6}
    values |= {counters.SPILLS[0]: 1e6, counters.SPILLS[1]: 6e5}
    for reason, ratio in {"selected": 1.0, **stalled}.items():
        values[f"smsp__average_warps_issue_stalled_{reason}_per_issue_active.ratio"] = ratio
    return Launch(kernel, values)


def test_a_warps_time_is_shared_out_among_its_states() -> None:
    launches = [
        counted("layer_fwd_kernel", long_scoreboard=3.0),
        counted("layer_bwd_kernel", barrier=0.5, short_scoreboard=1.0, wait=1.0, not_selected=0.5),
        counted("reduce_kernel", wait=9.0),
    ]
    found = counters.warps(launches, Case("mix", "bf16", 1000, 4, 8, "competitive"))
    assert {state: found[f"forward_{state}"] for state in STATES} == {
        "issuing": 0.25, "ready": 0, "memory": 0.75, "exchange": 0, "arithmetic": 0, "other": 0,
    }  # fmt: skip
    assert found["backward_exchange"] == 1.5 / 4 and found["backward_arithmetic"] == 0.25
    assert found["backward_ready"] == 0.125
    assert (found["forward_resident"], found["forward_issued"]) == (2, 0.5)
    assert (found["forward_instructions"], found["forward_spilling"]) == (8000, 0.2)
    launches[0].values[counters.ISSUED] = 0.0
    with pytest.raises(CountersMissing, match="counted nothing in layer_fwd_kernel"):
        counters.warps(launches, Case("mix", "bf16", 1000, 4, 8, "competitive"))
    launches[0].values[counters.ISSUED] = 0.5
    with pytest.raises(CountersMissing, match="saw no layer_bwd_kernel"):
        counters.warps(launches[:1], Case("mix", "bf16", 1000, 4, 8, "competitive"))


def test_every_state_of_a_warp_is_asked_for_once() -> None:
    asked = [name for name in WARPS if "_stalled_" in name]
    assert len(asked) == len(set(asked)) == sum(map(len, STATES.values())) == 18


def test_what_warps_do_is_a_row_with_the_same_metrics_when_it_could_not_be_counted(monkeypatch) -> None:
    cell = next(c for c in profiling.profile().cells if c.name.startswith("warps/"))
    launches = [counted(f"layer_{which}_kernel", wait=1.0) for which in ("fwd", "bwd")]
    monkeypatch.setattr(profiling, "count", lambda case, name, which, metrics: launches)
    monkeypatch.setattr(profiling.gate, "require", lambda *_: None)
    (right,) = profiling.run_cell(cell, {"device": "cpu"})
    monkeypatch.setattr(profiling, "count", counters.count)
    monkeypatch.setattr(counters.shutil, "which", lambda name: None)
    (missing,) = profiling.run_cell(cell, {"device": "cpu"})
    assert missing.metrics.keys() == right.metrics.keys() and right.metrics["backward_arithmetic"] == 0.5
    assert missing.diverged == "Nsight Compute (ncu) is not installed" and not right.diverged


def test_counters_run_one_launch_of_the_same_case(monkeypatch: pytest.MonkeyPatch) -> None:
    case, commands = Case("mix", "bf16", 64, 4, 32, "independent"), []

    def run(command: list[str], **_: object):
        commands.append(command)
        return type("Done", (), {"stdout": OUTPUT, "stderr": "==ERROR== it failed", "returncode": len(commands) - 1})

    monkeypatch.setattr(counters.shutil, "which", lambda name: name)
    monkeypatch.setattr(counters.subprocess, "run", run)
    assert len(counters.count(case, "triton", "backward")) == 2
    (command,) = commands
    with pytest.raises(CountersMissing, match="ended with code 1 .ERROR== it failed"):
        counters.count(case, "triton", "backward")
    assert command[0] == "ncu" and "dram__bytes_read.sum,dram__bytes_write.sum,gpu__time_duration.sum" in command
    assert command[command.index("--clock-control") + 1] == "none"
    launched = []
    monkeypatch.setattr(one_launch, "launch", lambda *given: launched.append(given))
    one_launch.main([*command[command.index("depthlab.kernels.bench.one_launch") + 1 :], "--device", "cpu"])
    assert launched == [(case, "triton", "backward", torch.device("cpu"))]


def test_one_launch_runs_every_operation_and_gate(capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["--tokens", "3", "--streams", "2", "--width", "5", "--dtype", "fp32", "--device", "cpu"]
    for which in ("forward", "backward", "both"):
        one_launch.main(["--implementation", "eager", "--op", "all", "--pass", which, *shape])
        said = capsys.readouterr().out.splitlines()
        assert [line.split("/")[0] for line in said] == [
            "launched mix",
            "launched mix",
            "launched mix-inverting",
            "launched mix-inverting",
            "launched append",
            "launched pool",
        ]


def test_one_launch_of_everything_keeps_rows_exactly_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, backward = [], inverting.mix_and_pool_backward
    monkeypatch.setattr(
        inverting, "mix_and_pool_backward", lambda m, e, *a, **k: seen.append(e) or backward(m, e, *a, **k)
    )
    shape = ["--tokens", "9", "--streams", "2", "--width", "5", "--dtype", "fp32", "--device", "cpu"]
    one_launch.main(["--implementation", "eager", "--op", "all", *shape])
    assert [exact is None for exact in seen] == [True, True, False, False] * 2  # warm-up and launch, for both gates
    assert all(len(exact.values) for exact in seen if exact)


def test_without_ncu_the_row_says_so_and_holds_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters.shutil, "which", lambda name: None)
    cell = next(c for c in profiling.profile().cells if c.name.startswith("counters/") and c.name.endswith("/eager"))
    (result,) = profiling.run_cell(cell, {"device": "cpu"})
    assert result.diverged == "Nsight Compute (ncu) is not installed"
    assert all(math.isnan(v) for v in result.metrics.values())
    assert "forward_reads_nC" in result.metrics and "backward_writes_nC" in result.metrics


def test_the_models_row_has_the_floor_and_the_papers_count() -> None:
    case = Case("mix", "bf16", 131072, 4, 1024, "competitive")
    (result,) = profiling.run_cell(Cell("model/x", {"case": vars(case), "model": True}), {"device": "cpu"})
    assert (result.metrics["forward_reads_nC"], result.metrics["forward_writes_nC"]) == (1.25, 1.25)
    assert (result.metrics["paper_forward_reads_nC"], result.metrics["paper_forward_writes_nC"]) == (3, 1)
    assert result.metrics["forward_bytes_per_token"] == 10 * 1024 * 2


def test_a_trace_is_kept_in_order_with_names_starts_and_durations(cpu) -> None:
    found = profiling.trace(Case("pool", "fp32", 4, 2, 8), "eager", cpu)
    assert len(found) > 5 and found[0][1] == 0
    assert [start for _, start, _ in found] == sorted(start for _, start, _ in found)
    result = profiling.traced("trace/x", [("a<b::MulFunctor<float>>(int)", 0.0, 2.0), ("layer_fwd_kernel", 5.0, 3.0)])
    assert result.metrics == {
        "launches": 2, "kernel_us": 5, "span_us": 8, "000/a-MulFunctor": 2, "001/layer_fwd_kernel": 3,
    }  # fmt: skip
    assert result.curves["start_us"].y == [0, 5]
    with pytest.raises(ValueError, match="has 0 kernels; a record holds 1 to 200"):
        profiling.traced("trace/x", [])


@pytest.mark.parametrize(
    ("kernel", "plain"),
    [
        ("layer_fwd_kernel", "layer_fwd_kernel"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, "
         "std::array<char*, 3ul> >(int, at::native::CUDAFunctor_add<float>)",
         "vectorized_elementwise_kernel-CUDAFunctor_add"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::BinaryFunctor<float, float, float, "
         "at::native::binary_internal::MulFunctor<float> >, std::array<char*, 3ul> >(int)",
         "vectorized_elementwise_kernel-MulFunctor"),
        ("void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)"
         "::{lambda()#3}::operator()() const>(int)", "unrolled_elementwise_kernel-direct_copy_kernel_cuda"),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float, float>, "
         "unsigned int>>(at::native::ReduceOp<float>)", "reduce_kernel-MeanOps"),
        ("Memcpy DtoD (Device -> Device)", "Memcpy_DtoD"),
    ],
)  # fmt: skip
def test_kernel_names_lose_their_template_arguments_but_not_what_they_compute(kernel: str, plain: str) -> None:
    assert profiling.plain_name(kernel) == plain


def test_the_profiles_cells_are_traces_counters_and_models() -> None:
    names = [cell.name for cell in profiling.profile().cells]
    shape = "mix/competitive/bf16/T=131072,n=4,C=1024"
    assert {
        "trace/eager",
        "trace/triton",
        f"counters/{shape}/eager",
        f"counters/{shape}/triton",
        f"model/{shape}",
    } <= set(names)
    assert len(set(names)) == len(names)
