"""MultiHeadAttention under torch.compile, autocast, eval, half precision, checkpointing."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import fastattn
from fastattn.testing import Inputs

PADDING = torch.tensor([[0, 0, 0, 0, 1], [0, 0, 1, 1, 1]]).bool()
CALLS = {
    "plain": ({}, {}),
    "no weights": ({}, dict(need_weights=False)),
    "causal": ({}, dict(need_weights=False, is_causal=True)),
    "padding": ({}, dict(key_padding_mask=PADDING)),
    "mask": ({}, dict(attn_mask=torch.eye(5).bool(), need_weights=False)),
    "float masks": (
        {},
        dict(attn_mask=torch.eye(5).repeat(8, 1, 1), key_padding_mask=PADDING * -1.0),
    ),
    "dropout": (dict(dropout=0.3), dict(need_weights=False)),
    "dropout weights": (dict(dropout=0.3), dict(average_attn_weights=False)),
    "seq first": (dict(batch_first=False), {}),
    "extras": (
        dict(num_kv_heads=2, head_dim=3, v_head_dim=5, window=(2, 0), add_bias_kv=True),
        dict(is_causal=True, key_padding_mask=PADDING),
    ),
}


def make(embed_dim=8, num_heads=4, **arguments):
    arguments.setdefault("batch_first", True)
    return fastattn.MultiHeadAttention(embed_dim, num_heads, **arguments)


def sequence(module, length=5, batch=2):
    shape = (batch, length) if module.batch_first else (length, batch)
    return Inputs().normal(*shape, module.embed_dim)


def run(function, module, x, **given):
    """Output, weights and gradients, from the same random numbers."""
    torch.manual_seed(3)
    leaf = x.detach().requires_grad_()
    output, weights = function(leaf, leaf, leaf, **given)
    loss = output.sum() if weights is None else output.sum() + weights.square().sum()
    grads = torch.autograd.grad(loss, [leaf, *module.parameters()], allow_unused=True)
    return output, weights, grads


@pytest.mark.parametrize("name", CALLS)
def test_compiles_whole(name):
    arguments, given = CALLS[name]
    module = make(**arguments)
    x = sequence(module)
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(run(compiled, module, x, **given), run(module, module, x, **given))


def test_compiles_whole_for_unbatched_and_cross():
    module = make(kdim=6)
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    inputs = Inputs()
    query, key, value = inputs.normal(3, 8), inputs.normal(4, 6), inputs.normal(4, 8)
    torch.testing.assert_close(compiled(query, key, value), module(query, key, value))


def test_compiled_once_for_all_batch_sizes_and_lengths():
    module = make()
    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend=counter, dynamic=True)
    compilations = []
    for batch, length in ((2, 5), (3, 7), (4, 9)):
        x = sequence(module, length, batch)
        padding = torch.zeros(batch, length, dtype=torch.bool)
        padding[:, -1] = True
        found = compiled(x, x, x, key_padding_mask=padding)
        torch.testing.assert_close(found, module(x, x, x, key_padding_mask=padding))
        compilations.append(counter.frame_count)
    assert compilations[0] == compilations[-1] > 0


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("extra", [{}, dict(add_bias_kv=True, add_zero_attn=True)])
def test_autocast(backend, extra, need_weights):
    module = make(32, 4, **extra)
    x = sequence(module)
    right = run(module, module, x, need_weights=need_weights)
    with torch.autocast("cpu", torch.bfloat16):
        output, weights, grads = run(module, module, x, need_weights=need_weights)
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.float(), right[0], rtol=0.03, atol=0.03)
    if need_weights:
        torch.testing.assert_close(weights.float(), right[1], rtol=0.03, atol=0.03)
    assert [g.dtype for g in grads] == [torch.float32] * len(grads)
    for grad, expected in zip(grads, right[2], strict=True):
        torch.testing.assert_close(grad, expected, rtol=0.1, atol=0.1)


def test_autocast_output_dtype_is_torchs():
    theirs, ours = nn.MultiheadAttention(8, 2), fastattn.MultiHeadAttention(8, 2)
    x = Inputs().normal(5, 2, 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert ours(x, x, x)[0].dtype == theirs(x, x, x)[0].dtype == torch.bfloat16


@pytest.mark.parametrize("name", CALLS)
def test_eval_equals_training_without_dropout(backend, name):
    arguments, given = CALLS[name]
    module = make(**arguments)
    x = sequence(module)
    with torch.no_grad():
        evaluated = module.eval()(x, x, x, **given)
    with torch.inference_mode():
        inferred = module(x, x, x, **given)
    module.train().dropout = 0.0
    torch.testing.assert_close(evaluated, module(x, x, x, **given), rtol=0, atol=0)
    torch.testing.assert_close(inferred, evaluated, rtol=0, atol=0)


@pytest.mark.parametrize("name", CALLS)
def test_activation_checkpointing_repeats_the_dropout(backend, name):
    arguments, given = CALLS[name]
    module = make(**arguments)
    x = sequence(module)

    def checkpointed(*tensors, **kwargs):
        return checkpoint(module, *tensors, use_reentrant=False, **kwargs)

    torch.testing.assert_close(
        run(checkpointed, module, x, **given), run(module, module, x, **given), rtol=0, atol=0
    )


def test_training_draws_another_mask_each_call_and_the_same_for_a_seed(backend):
    module = make(dropout=0.5)
    x = sequence(module)
    torch.manual_seed(1)
    first, second = module(x, x, x)[0], module(x, x, x)[0]
    torch.manual_seed(1)
    again = module(x, x, x)[0]
    assert torch.equal(first, again) and not torch.equal(first, second)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_takes_float32_masks(backend, dtype):
    module = make(dtype=dtype)
    x, mask = sequence(module).to(dtype), Inputs(1).normal(5, 5)
    output, weights = module(x, x, x, attn_mask=mask)
    assert output.dtype == weights.dtype == dtype
    expected, _ = make_like(module, torch.float64)(*(x.double(),) * 3, attn_mask=mask.double())
    torch.testing.assert_close(output.double(), expected, rtol=0.02, atol=0.02)


def make_like(module, dtype):
    other = make(dtype=dtype)
    other.load_state_dict(module.state_dict())
    return other


@pytest.mark.parametrize("batch, q_len, kv_len", [(0, 3, 4), (2, 0, 4), (2, 3, 0), (0, 0, 0)])
@pytest.mark.parametrize("need_weights", [False, True])
def test_empty(backend, need_weights, batch, q_len, kv_len):
    """No batch, no query, no key: a query without keys gives the bias of the output projection."""
    module = make()
    nn.init.normal_(module.out_proj.bias)
    query, key = torch.ones(batch, q_len, 8), torch.ones(batch, kv_len, 8)
    output, weights = module(query, key, key, need_weights=need_weights)
    assert output.shape == query.shape
    assert not need_weights or weights.shape == (batch, q_len, kv_len)
    if kv_len == 0:
        torch.testing.assert_close(output, module.out_proj.bias.expand_as(output))
    output.sum().backward()
    assert module.in_proj_weight.grad.isfinite().all()


def test_inside_torchs_transformer_layers():
    """In training, where torch's layers call their attention, the swap changes no number."""
    inputs = Inputs()
    source, target = inputs.normal(2, 5, 8), inputs.normal(2, 4, 8)
    layer = nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    mask = nn.Transformer.generate_square_subsequent_mask(4)
    given = dict(tgt_mask=mask, tgt_is_causal=True, memory_key_padding_mask=PADDING)
    expected = layer(target, source, **given)
    for name in ("self_attn", "multihead_attn"):
        swapped = fastattn.MultiHeadAttention(8, 2, batch_first=True)
        swapped.load_state_dict(getattr(layer, name).state_dict())
        setattr(layer, name, swapped)
    torch.testing.assert_close(layer(target, source, **given), expected)
