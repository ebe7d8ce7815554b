"""compile, export and autocast as users needed them elsewhere, right here."""

from __future__ import annotations

import pytest
import torch

import fastattn
from fastattn.testing import Inputs
from tests.ops.calls import RecordOps, described

attention = fastattn.scaled_dot_product_attention


def test_pytorch_133671_strides_of_fake_and_real_outputs():
    """q and k contiguous, v and grad_out [B, L, H, D] in memory, S = 513."""
    from torch._subclasses import FakeTensorMode

    def run(grad_layout):
        query, key = (torch.zeros(1, 2, 513, 8).requires_grad_() for _ in range(2))
        value = torch.zeros(1, 513, 2, 8).transpose(1, 2).requires_grad_()
        out = attention(query, key, value)
        grad = torch.ones(1, 513, 2, 8).transpose(1, 2) if grad_layout else torch.ones_like(out)
        return out, *torch.autograd.grad(out, (query, key, value), grad)

    for transposed in (False, True):
        real = run(transposed)
        with FakeTensorMode():
            fake = run(transposed)
        with RecordOps():
            dispatched = run(transposed)
        for one, *others in zip(real, fake, dispatched, strict=True):
            assert all(described(one) == described(other) for other in others)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_liger_871_compiled_layer_norm(backend):
    torch._dynamo.reset()
    inputs = Inputs()
    x, residual = (inputs.normal(4, 128, 768, dtype=torch.bfloat16) for _ in range(2))
    weight, bias = (inputs.normal(768, dtype=torch.bfloat16) for _ in range(2))
    tensors = [t.requires_grad_() for t in (x, residual, weight, bias)]
    compiled = torch.compile(fastattn.add_layer_norm, fullgraph=True, backend=backend)
    found, right = compiled(*tensors), fastattn.add_layer_norm(*tensors)
    assert torch.equal(found, right)
    grads = [torch.autograd.grad(out.float().square().sum(), tensors) for out in (found, right)]
    assert all(map(torch.equal, *grads))


def test_pytorch_122321_export_with_a_dynamic_batch():
    class Attend(torch.nn.Module):
        def forward(self, query, key, value):
            return attention(query, key, value, is_causal=True)

    inputs = Inputs()
    example = tuple(inputs.normal(3, 2, 5, 8) for _ in range(3))
    batch = torch.export.Dim("batch")
    program = torch.export.export(Attend(), example, dynamic_shapes=[{0: batch}] * 3)
    for size in (1, 3, 17):
        again = tuple(inputs.normal(size, 2, 5, 8) for _ in range(3))
        torch.testing.assert_close(program.module()(*again), Attend()(*again))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_pytorch_99012_a_float32_mask_under_autocast(dtype):
    inputs = Inputs()
    query, key, value = (inputs.normal(2, 8, 64, 32).requires_grad_() for _ in range(3))
    mask = torch.zeros(64, 64).masked_fill(torch.ones(64, 64).triu(1).bool(), -torch.inf)
    with torch.autocast("cpu", dtype=dtype):
        out = attention(query, key, value, mask)
        right = attention(query, key, value, is_causal=True)
    assert out.dtype == dtype
    torch.testing.assert_close(out, right, rtol=0, atol=torch.finfo(dtype).eps)
    assert torch.autograd.grad(out.sum(), query)[0].dtype == torch.float32
