"""The tools around torch: export, flop counter, profiler, saved tensors, meta, determinism."""

from __future__ import annotations

import io

import pytest
import torch
from torch import nn
from torch.export import Dim, export, load, save
from torch.utils.flop_counter import FlopCounterMode

import fastattn
from fastattn.testing import Inputs
from tests.ops.calls import CALLS, forward_and_backward

B, H, L, S, D, E = 2, 4, 5, 7, 8, 6


def counted(function):
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


def run(call):
    return forward_and_backward(call, *call.tensors)


def attend(attention, **given):
    inputs = Inputs()
    q, k, v = (
        inputs.normal(B, heads, n, d).requires_grad_()
        for heads, n, d in ((H, L, D), (2, S, D), (2, S, E))
    )
    attention(q, k, v, enable_gqa=True, **given).sum().backward()


def test_attention_s_flops_are_torch_s():
    """torch counts its fused kernel's products, and scores computed again in the backward."""
    pairs = 2 * B * H * L * S
    found = counted(lambda: attend(fastattn.scaled_dot_product_attention))
    assert found == pairs * (D + E) + pairs * (3 * D + 2 * E)
    assert counted(lambda: attend(fastattn.scaled_dot_product_attention, is_causal=True)) == found


def test_packed_attention_s_flops_are_those_of_its_sequences():
    ends = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    x = torch.ones(5, H, D, requires_grad=True)

    def run():
        fastattn.varlen_attention(x, x, x, ends, ends).sum().backward()

    assert counted(run) == 2 * H * (2 * 2 + 3 * 3) * (2 * D + 5 * D)


@pytest.mark.parametrize("trains", [True, False])
def test_cross_entropy_s_flops(trains):
    """The logits and two gradients, as of torch's linear layer."""
    hidden, weight = torch.ones(5, D, requires_grad=trains), torch.ones(11, D, requires_grad=trains)
    target = torch.zeros(5, dtype=torch.long)

    def run():
        loss = fastattn.linear_cross_entropy(hidden, weight, target)
        return loss.backward() if trains else loss

    assert counted(run) == 2 * 5 * D * 11 * (3 if trains else 1)


def test_a_module_s_flops_by_name():
    model = nn.Sequential()
    model.layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
    fastattn.replace_attention(model)
    counter = FlopCounterMode(display=False)
    with counter:
        model.layer(torch.ones(2, 5, 8))
    (name,) = [n for n in counter.get_flop_counts() if n.endswith("self_attn")]
    counts = counter.get_flop_counts()[name]
    assert counts[torch.ops.fastattn.attention] == 2 * 2 * 2 * 5 * 5 * (4 + 4)


@pytest.mark.parametrize("name", CALLS)
def test_the_profiler_shows_the_op_by_name(name):
    call = CALLS[name]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run(call)
    assert f"fastattn::{call.op}" in {event.key for event in profile.key_averages()}


@pytest.mark.parametrize("name", CALLS)
def test_saved_tensors_may_go_elsewhere_and_come_back(name):
    call = CALLS[name]
    expected = run(call)
    with torch.autograd.graph.save_on_cpu():
        found = run(call)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", CALLS)
def test_deterministic_mode(name):
    call = CALLS[name]
    expected = run(call)
    torch.use_deterministic_algorithms(True)
    try:
        found = run(call)
    finally:
        torch.use_deterministic_algorithms(False)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("need_weights", [True, False])
def test_a_module_on_the_meta_device(need_weights):
    module = fastattn.MultiHeadAttention(8, 2, batch_first=True, device="meta")
    x = torch.empty(2, 5, 8, device="meta", requires_grad=True)
    output, weights = module(x, x, x, need_weights=need_weights, is_causal=True)
    output.sum().backward()
    assert output.is_meta and output.shape == x.grad.shape == (2, 5, 8)
    assert not need_weights or weights.shape == (2, 5, 5)
    assert module.in_proj_weight.grad.is_meta


@pytest.mark.slow
def test_an_exported_transformer_takes_other_sizes_after_a_journey_to_a_file():
    model = nn.Transformer(8, 2, 1, 1, 16, batch_first=True).eval()
    fastattn.replace_attention(model)

    class WithMasks(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, source, target, padding):
            return self.model(
                source, target, tgt_is_causal=True, src_key_padding_mask=padding,
                memory_key_padding_mask=padding,
            )  # fmt: skip

    def arguments(batch, source, target):
        inputs = Inputs()
        padding = torch.zeros(batch, source, dtype=torch.bool)
        padding[0, -1] = True
        return inputs.normal(batch, source, 8), inputs.normal(batch, target, 8), padding

    batch, source, target = Dim("batch"), Dim("source"), Dim("target")
    shapes = ({0: batch, 1: source}, {0: batch, 1: target}, {0: batch, 1: source})
    exported = export(WithMasks(), arguments(3, 6, 5), dynamic_shapes=shapes)
    file = io.BytesIO()
    save(exported, file)
    file.seek(0)
    loaded = load(file).module()
    for sizes in ((3, 6, 5), (2, 9, 4)):
        given = arguments(*sizes)
        torch.testing.assert_close(loaded(*given), WithMasks()(*given))
