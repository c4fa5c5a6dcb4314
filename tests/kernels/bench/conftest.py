"""Stand-ins for the fused kernels, so that everything around the timing runs on a CPU."""

import pytest
import torch

from depthlab.kernels.bench import cases, gate
from depthlab.kernels.bench.cases import Case
from depthlab.kernels.bench.subjects import subject


@pytest.fixture
def cpu() -> torch.device:
    return torch.device("cpu")


@pytest.fixture
def tiny() -> Case:
    return Case("mix", "bf16", 16, 3, 20, "competitive")


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch):
    """pretend(make_step): what is timed and checked as "triton" is make_step(case), or plain torch."""

    def install(make_step=lambda case: cases.public_step(case, "torch")) -> None:
        def fake(case: Case, implementation: str) -> cases.Subject:
            if implementation != "triton":
                return subject(case, implementation)
            eager = subject(case, "eager")
            return cases.Subject(eager.inputs, make_step(case), eager.graded)

        for module in ("gate", "mgr", "suite", "live"):
            monkeypatch.setattr(f"depthlab.kernels.bench.{module}.subject", fake)
        gate._fused_faults.cache_clear()

    yield install
    gate._fused_faults.cache_clear()
