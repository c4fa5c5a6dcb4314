"""Statistics and rotation of the timing, with the host's clock."""

import math
import time
import weakref

import numpy as np
import pytest
import torch

from depthlab.kernels.bench import measure, needs, timing
from depthlab.kernels.bench.cases import Case
from depthlab.kernels.bench.subjects import subject


def test_the_summary_is_the_median_with_its_percentiles_of_one_call() -> None:
    samples = [8.0, 2.0, 4.0, 6.0, 10.0, 100.0]  # of two calls each
    found = timing.summarize(samples, calls=2)
    assert found.median_ms == 3.5
    assert (found.p20_ms, found.p80_ms) == (np.quantile(samples, 0.2) / 2, np.quantile(samples, 0.8) / 2)


@pytest.mark.parametrize("samples", [[], [1.0, 0.0], [1.0, math.nan], [1.0, math.inf]])
def test_no_time_comes_from_bad_samples(samples: list[float]) -> None:
    with pytest.raises(ValueError, match="samples, not all positive"):
        timing.summarize(samples, calls=1)


def test_a_call_that_takes_two_milliseconds_is_timed_so(cpu: torch.device) -> None:
    found = timing.launched([lambda: time.sleep(0.002)] * 2, 5, cpu)
    assert 2.0 <= found.p20_ms <= found.median_ms <= found.p80_ms
    assert found.median_ms < 20
    assert not found.graphed


def test_every_output_of_a_round_is_held_until_its_end(cpu: torch.device) -> None:
    """Else the allocator would hand the same memory to each call, and the cache would take the writes."""
    live, most = weakref.WeakSet(), []

    def call() -> torch.Tensor:
        result = torch.empty(1)
        live.add(result)
        most.append(len(live))
        return result

    timing.launched([call] * 4, 3, cpu)
    assert max(most) == 4


def test_input_sets_are_added_until_a_round_outgrows_the_cache(
    cpu: torch.device, tiny: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "footprint", lambda device: 3 * tiny.bytes("forward") + 1)
    eager, seen = subject(tiny, "eager"), set()

    def step(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        seen.add(inputs[0].data_ptr())
        return eager.step(*inputs)

    drawn = type(eager)(eager.inputs, step, eager.graded)
    measure.measure(drawn, tiny, copy_gbps=1.0, device=cpu, samples=2, seed=0)
    assert len(seen) == 4


def test_a_cpu_has_no_graphs_to_replay_and_no_memory_to_read(cpu: torch.device) -> None:
    assert timing.replayed([lambda: None], 3, cpu) is None
    assert timing.peak_mib(lambda: None, cpu) is None


def test_copies_and_products_have_a_positive_rate(cpu: torch.device) -> None:
    assert timing.copy_gbps(cpu, 2**16, 3) > 0
    assert timing.float32_tflops(cpu, 32, 3) > 0


def test_a_row_has_the_promised_metrics_and_the_models_gbps(cpu: torch.device, tiny: Case) -> None:
    found = measure.measure(subject(tiny, "eager"), tiny, copy_gbps=2.0, device=cpu, samples=3, seed=0)
    assert list(found) == measure.metric_names(cpu)
    for which in ("forward", "backward", "both"):
        assert found[f"{which}_gbps"] == pytest.approx(tiny.bytes(which) / found[f"{which}_ms"] / 1e6)
        assert found[f"{which}_share"] == found[f"{which}_gbps"] / 2.0
        assert found[f"{which}_ms"] == found[f"{which}_launched_ms"]
        assert found[f"{which}_p20_ms"] <= found[f"{which}_ms"] <= found[f"{which}_p80_ms"]


@pytest.mark.gpu
@pytest.mark.skipif(needs.missing() is not None, reason="needs CUDA and triton")
@pytest.mark.parametrize("implementation", ["eager", "triton"])
def test_on_a_gpu_rows_are_replayed_from_graphs_and_know_their_memory(implementation: str) -> None:
    case, device = Case("mix", "bf16", 4096, 4, 1024, "competitive"), torch.device("cuda")
    found = measure.measure(subject(case, implementation), case, timing.copy_gbps(device), device, samples=5, seed=0)
    assert set(found) == set(measure.metric_names(device))
    assert found["forward_graphed"] == found["backward_graphed"] == found["both_graphed"] == 1
    assert found["forward_peak_mib"] >= case.tokens * 5 * case.width * 2 / 2**20  # at least the results
    assert 0 < found["both_share"] < 1.2


def test_slow_calls_are_sampled_less_often_and_quick_ones_as_often_as_asked() -> None:
    counted = {"slow": 0, "quick": 0}

    def call(name: str, seconds: float) -> None:
        counted[name] += 1
        time.sleep(seconds)

    found = timing.launched([lambda: call("slow", 0.06)], 30, torch.device("cpu"))
    timing.launched([lambda: call("quick", 0.002)], 30, torch.device("cpu"))
    assert counted["slow"] < 20 and found.median_ms >= 60
    assert counted["quick"] >= 30
