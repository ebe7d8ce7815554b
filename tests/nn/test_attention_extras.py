"""What torch's module has not: head widths, grouped queries, window, alignment, decoding."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fastattn
from fastattn.testing import Inputs, peers, philox

EXTRAS = {
    "wide heads (Table 3)": dict(head_dim=6, v_head_dim=3),
    "one head (Table 3 A)": dict(num_heads=1, head_dim=12, v_head_dim=5),
    "odd embed_dim": dict(embed_dim=13, head_dim=2),
    "d_k only (Table 3 B)": dict(head_dim=2, v_head_dim=3),
    "grouped": dict(num_kv_heads=2),
    "one kv head": dict(num_kv_heads=1, v_head_dim=5),
    "kdim": dict(num_kv_heads=2, head_dim=5, kdim=7),
    "kdim vdim": dict(head_dim=5, kdim=7, vdim=9, batch_first=False),
    "window": dict(window=(2, 1)),
    "window int": dict(window=1, num_kv_heads=2),
    "window left": dict(window=(1, -1), batch_first=False),
    "alignment": dict(causal_alignment="bottom_right"),
    "window alignment": dict(window=(1, 0), causal_alignment="bottom_right", head_dim=5),
}


def make(embed_dim=12, num_heads=4, **arguments):
    arguments.setdefault("batch_first", True)
    module = fastattn.MultiHeadAttention(embed_dim, num_heads, dtype=torch.float64, **arguments)
    for name, parameter in module.named_parameters():
        if "bias" in name:
            nn.init.normal_(parameter)
    return module


def written_out(module, query, key, value, *, is_causal=False, mask=None, keep=None, p=0.0):
    """The formula of the paper head by head, from the parameters; batch first."""
    heads, kv_heads = module.num_heads, module.num_kv_heads
    widths = [heads * module.head_dim, kv_heads * module.head_dim, kv_heads * module.v_head_dim]
    if module.in_proj_weight is None:
        matrices = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    else:
        matrices = module.in_proj_weight.split(widths)
    biases = module.in_proj_bias.split(widths)
    q, k, v = (x @ w.T + b for x, w, b in zip((query, key, value), matrices, biases, strict=True))
    window = module.window
    window = (window, window) if isinstance(window, int) else window
    seen = peers.attention_pattern(
        q.shape[1], k.shape[1], is_causal, module.causal_alignment, window
    )
    seen = seen if mask is None else seen & mask
    outputs, weights = [], []
    for h in range(heads):
        g = h // (heads // kv_heads)
        one = slice(h * module.head_dim, (h + 1) * module.head_dim)
        kv, vv = (slice(g * d, (g + 1) * d) for d in (module.head_dim, module.v_head_dim))
        scores = q[..., one] @ k[..., kv].mT / module.head_dim**0.5
        scores = scores.masked_fill(~seen, float("-inf"))
        weight = torch.nan_to_num(torch.softmax(scores, -1))
        if keep is not None:
            weight = weight * keep[:, h] / (1 - p)
        outputs.append(weight @ v[..., vv])
        weights.append(weight)
    out = torch.cat(outputs, -1) @ module.out_proj.weight.T + module.out_proj.bias
    return out, torch.stack(weights, 1)


def sequences(module, q_len, kv_len):
    inputs = Inputs()
    query = inputs.normal(2, q_len, module.embed_dim, dtype=torch.float64)
    key = inputs.normal(2, kv_len, module.kdim, dtype=torch.float64)
    return query, key, inputs.normal(2, kv_len, module.vdim, dtype=torch.float64)


def forward(module, query, key, value, **given):
    if module.batch_first:
        return module(query, key, value, **given)
    output, weights = module(*(x.transpose(0, 1) for x in (query, key, value)), **given)
    return output.transpose(0, 1), weights


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("lengths", [(4, 4), (3, 6), (6, 3)])
@pytest.mark.parametrize("name", EXTRAS)
def test_formula(backend, name, lengths, is_causal):
    module = make(**EXTRAS[name])
    tensors = [x.requires_grad_() for x in sequences(module, *lengths)]
    leaves = [*tensors, *module.parameters()]
    found = forward(module, *tensors, is_causal=is_causal, average_attn_weights=False)
    without, _ = forward(module, *tensors, is_causal=is_causal, need_weights=False)
    right = written_out(module, *tensors, is_causal=is_causal)
    torch.testing.assert_close(found, right)
    torch.testing.assert_close(without, right[0])
    grads = [Inputs(1).normal(*x.shape, dtype=x.dtype) for x in right]
    torch.testing.assert_close(
        torch.autograd.grad(found, leaves, grads), torch.autograd.grad(right, leaves, grads)
    )


@pytest.mark.parametrize("name", ["grouped", "wide heads (Table 3)", "window alignment"])
def test_self_attention_takes_the_packed_product(name):
    module = make(**EXTRAS[name])
    x = sequences(module, 5, 5)[0]
    packed, apart = module(x, x, x), module(x, x.clone(), x.clone())
    torch.testing.assert_close(packed, apart)


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("name", ["grouped", "kdim vdim", "window"])
def test_dropout_is_the_documented_philox(backend, name, need_weights):
    p = 0.3
    module = make(**EXTRAS[name], dropout=p)
    tensors = [x.requires_grad_() for x in sequences(module, 5, 6)]
    torch.manual_seed(5)
    rng_state = torch.randint(2**63 - 1, (2,))
    keep = philox.attention_keep(rng_state, p, (2, 4, 5, 6))
    torch.manual_seed(5)
    output, weights = forward(
        module, *tensors, need_weights=need_weights, average_attn_weights=False
    )
    right, right_weights = written_out(module, *tensors, keep=keep, p=p)
    torch.testing.assert_close(output, right)
    if need_weights:
        torch.testing.assert_close(weights, right_weights)
    leaves = [*tensors, *module.parameters()]
    torch.testing.assert_close(
        torch.autograd.grad(output.sum(), leaves), torch.autograd.grad(right.sum(), leaves)
    )


@pytest.mark.parametrize("mask", ["none", "bool", "float", "bool-heads"])
@pytest.mark.parametrize("padding", ["none", "bool", "float"])
@pytest.mark.parametrize("pattern", ["causal", "window", "bottom_right"])
def test_appended_keys_are_exempt_from_everything(backend, pattern, padding, mask):
    extras = {"window": dict(window=(1, 0)), "bottom_right": dict(causal_alignment="bottom_right")}
    module = make(add_bias_kv=True, add_zero_attn=True, **extras.get(pattern, {}))
    plain = make(**extras.get(pattern, {}))
    inputs = Inputs(3)
    tensors = sequences(module, 3, 5)
    given = {"is_causal": pattern != "window"}
    if padding != "none":
        given["key_padding_mask"] = torch.tensor([[0, 0, 0, 1, 1], [1, 1, 1, 1, 1]]).bool()
        if padding == "float":
            given["key_padding_mask"] = given["key_padding_mask"] * -1.5
    if mask != "none":
        shape = (8, 3, 5) if mask == "bool-heads" else (3, 5)
        given["attn_mask"] = inputs.bools(*shape)
        if mask == "float":
            given["attn_mask"] = inputs.normal(*shape, dtype=torch.float64)
    _, weights = module(*tensors, average_attn_weights=False, **given)
    assert weights.shape == (2, 4, 3, 7)
    assert (weights[..., 5:] > 0).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 3, dtype=torch.float64))
    plain.load_state_dict(module.state_dict(), strict=False)
    _, without = plain(*tensors, average_attn_weights=False, **given)
    seen = without.sum(-1, keepdim=True)  # 0 in rows that see no key of the sequence
    share = weights[..., :5].sum(-1, keepdim=True)
    torch.testing.assert_close(weights[..., :5], without * share)
    assert ((share > 0) == (seen > 0)).all()


def test_parts_make_up_the_forward(backend):
    module = make(num_kv_heads=2, head_dim=5, v_head_dim=3)
    query, key, _ = sequences(module, 3, 6)
    q, (k, v) = module.project_query(query), module.project_key_value(key, key)
    assert q.shape == (2, 4, 3, 5) and k.shape == (2, 2, 6, 5) and v.shape == (2, 2, 6, 3)
    context = fastattn.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    output, _ = module(query, key, key, need_weights=False)
    torch.testing.assert_close(module.merge_heads(context), output)
    for apart, together in zip(module.project_key_value(key, key.clone()), (k, v), strict=True):
        torch.testing.assert_close(apart, together)


@pytest.mark.parametrize("name", ["grouped", "kdim", "wide heads (Table 3)"])
def test_decoding_with_a_cache_equals_causal_attention(backend, name):
    module = make(**{**EXTRAS[name], "kdim": None})
    x = sequences(module, 6, 6)[0]
    expected, _ = module(x, x, x, is_causal=True, need_weights=False)
    keys, values, outputs = [], [], []
    for t in range(6):
        now = x[:, t : t + 1]
        key, value = module.project_key_value(now, now)
        keys.append(key)
        values.append(value)
        context = fastattn.scaled_dot_product_attention(
            module.project_query(now), torch.cat(keys, 2), torch.cat(values, 2), enable_gqa=True
        )
        outputs.append(module.merge_heads(context))
    torch.testing.assert_close(torch.cat(outputs, 1), expected)


def test_nan_in_padding_does_not_reach_the_output(backend):
    module = make(num_kv_heads=2)
    query, key, value = sequences(module, 3, 5)
    padding = torch.tensor([[0, 0, 0, 0, 1], [0, 0, 1, 1, 1]]).bool()
    expected = module(query, key, value, key_padding_mask=padding)
    hidden = padding.unsqueeze(-1)
    found = module(
        query,
        key.masked_fill(hidden, float("nan")),
        value.masked_fill(hidden, float("inf")),
        key_padding_mask=padding,
    )
    torch.testing.assert_close(found, expected)


def test_output_projection_is_called_as_a_module():
    module = make()
    calls = []
    module.out_proj.register_forward_hook(lambda *_: calls.append(1))
    x = sequences(module, 3, 3)[0]
    module(x, x, x)
    assert calls == [1]


@pytest.mark.parametrize("batch_first", [False, True])
def test_no_copy_between_projection_and_attention(batch_first):
    """The heads are views of one product, and the output is contiguous."""
    module = make(batch_first=batch_first)
    x = sequences(module, 5, 5)[0]
    q, k, v = module._project(x, x, x, seq_first=not batch_first)
    memory = {part.untyped_storage().data_ptr() for part in (q, k, v)}
    assert len(memory) == 1
    assert q.untyped_storage().nbytes() == 3 * x.untyped_storage().nbytes()
    output, _ = module(x, x, x, need_weights=False)
    assert output.is_contiguous()
