"""FLOPs and MFU: against torch's own count of a training step, and a worked number."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from depthlab.lm import GPT, GPTConfig, Llama, LlamaConfig, flops_per_token, mfu

GPT_CONFIG = GPTConfig.preset("toy", residual="prenorm", n_layers=2, d_model=32, seq_len=16)
LLAMA_CONFIG = LlamaConfig.preset("toy", n_layers=2, d_model=32, d_hidden=48, n_kv_heads=2, seq_len=16)


@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_the_formula_is_what_torch_counts_in_a_step(kind):
    config, make = {"gpt": (GPT_CONFIG, GPT), "llama": (LLAMA_CONFIG, Llama)}[kind]
    model = make(config)
    tokens = torch.zeros(2, 17, dtype=torch.long)
    math_attention = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)  # two products, nothing twice
    with math_attention, FlopCounterMode(display=False) as counter:
        model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
    assert counter.get_total_flops() == flops_per_token(config) * 32


def test_streams_and_their_gates_count_nothing():
    assert flops_per_token(replace(GPT_CONFIG, residual="mgr-competitive")) == flops_per_token(GPT_CONFIG)


def test_mfu_of_a_known_speed():
    config = GPTConfig.preset("S", residual="prenorm")
    matrices = 12 * 12 * 768**2 + 50_304 * 768
    assert flops_per_token(config) == 6 * matrices + 12 * 12 * 768 * 1024
    assert mfu(500_000, config, 989.0) == pytest.approx(5e5 * flops_per_token(config) / 989e12)
    assert 0.40 < mfu(500_000, config, 989.0) < 0.45


@pytest.mark.parametrize("bad", [(0, 989.0), (1e5, 0.0), (float("nan"), 989.0), (float("inf"), 989.0)])
def test_a_speed_or_peak_that_is_none_is_named(bad):
    with pytest.raises(ValueError, match="is not allowed; use a positive number"):
        mfu(bad[0], GPT_CONFIG, bad[1])
