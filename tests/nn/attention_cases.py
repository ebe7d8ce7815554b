"""MultiHeadAttention beside torch's: one case of the matrix of arguments, run by both, compared."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

import fastattn
from fastattn.testing import Inputs, check_all

NEG = float("-inf")
FACTORS = {
    "embed_dim_num_heads": ((12, 3), (8, 2), (6, 1), (4, 4)),
    "kdim_vdim": ((None, None), (5, None), (None, 7), (5, 5), (5, 7)),
    "bias": (True, False),
    "add_bias_kv": (False, True),
    "add_zero_attn": (False, True),
    "batch_first": (False, True),
    "inputs": ("self", "cross", "distinct"),
    "batch": (3, 1, None),
    "lengths": ((5, 5), (3, 6), (6, 3), (1, 4), (4, 1)),
    "padding": ("none", "bool", "float"),
    "mask": ("none", "bool", "bool-heads", "float", "float-heads"),
    "is_causal": (False, True),
    "need_weights": (True, False),
    "average_attn_weights": (True, False),
    "mode": ("train", "eval", "no-grad"),
    "dtype": (torch.float64, torch.float32, torch.bfloat16),
}
DEFAULTS = {name: values[0] for name, values in FACTORS.items()}


def run_case(case: dict[str, Any]) -> None:
    """Output, weights and every gradient of ours against torch's in float64 (the exact answer)."""
    case = _possible(case)
    inputs = Inputs(1)
    tensors = _tensors(case, inputs)
    state = _state(case, inputs)
    grads = _grad_outputs(case, inputs)
    dtype = case["dtype"]
    right = _run(_torch_module(case, state, torch.float64), case, tensors, grads, torch.float64)
    peer = _run(_torch_module(case, state, dtype), case, tensors, grads, dtype)
    ours = _run(_our_module(case, state, dtype), case, tensors, grads, dtype)
    assert ours.keys() == peer.keys()
    names = tuple(ours)
    sizes = {name: _size(name, right) for name in names}
    check_all(names, *(tuple(r[n] for n in names) for r in (ours, right, peer)), sizes=sizes)


def _possible(case: dict[str, Any]) -> dict[str, Any]:
    """Self-attention has one length and width, keys that are the values one width."""
    case = dict(case)
    if case["inputs"] == "self":
        case["lengths"] = (case["lengths"][0],) * 2
        case["kdim_vdim"] = (None, None)
    if case["inputs"] == "cross" and case["kdim_vdim"] != (None, None):
        case["kdim_vdim"] = (5, 5)
    return case


def _tensors(case: dict[str, Any], inputs: Inputs) -> dict[str, Tensor]:
    """The tensor arguments of forward; those that are one object share a name.

    Every row sees its first key at least, because torch gives NaN to one that sees none.
    """
    dtype, batch = case["dtype"], case["batch"]
    q_len, kv_len = case["lengths"]
    embed_dim, heads = case["embed_dim_num_heads"]

    def sequence(length: int, width: int | None) -> Tensor:
        shape = (length, batch) if not case["batch_first"] else (batch, length)
        shape = (length,) if batch is None else shape
        return inputs.normal(*shape, width or embed_dim, dtype=dtype)

    kdim, vdim = case["kdim_vdim"]
    made = {"query": sequence(q_len, None)}
    if case["inputs"] != "self":
        made["key"] = sequence(kv_len, kdim)
    if case["inputs"] == "distinct":
        made["value"] = sequence(kv_len, vdim)
    if case["padding"] != "none":
        shape = (kv_len,) if batch is None else (batch, kv_len)
        made["key_padding_mask"] = _mask(case["padding"], shape, dtype, inputs)
    if case["mask"] != "none":
        shape = (q_len, kv_len)
        if case["mask"].endswith("-heads"):
            shape = ((batch or 1) * heads, *shape)
        made["attn_mask"] = _mask(case["mask"], shape, dtype, inputs)
    return made


def _mask(kind: str, shape: tuple[int, ...], dtype: torch.dtype, inputs: Inputs) -> Tensor:
    blocked = inputs.bools(*shape, true=0.4)
    blocked[..., 0] = False
    if kind.startswith("bool"):
        return blocked
    return inputs.normal(*shape, dtype=dtype).masked_fill(blocked, NEG)


def _state(case: dict[str, Any], inputs: Inputs) -> dict[str, Tensor]:
    """Parameters with biases that are not zero."""
    shapes = _torch_module(case, None, torch.float32).state_dict()
    return {
        name: (inputs.normal(*x.shape) * x.shape[-1] ** -0.5).to(case["dtype"])
        for name, x in shapes.items()
    }


def _arguments(case: dict[str, Any]) -> dict[str, Any]:
    embed_dim, num_heads = case["embed_dim_num_heads"]
    kdim, vdim = case["kdim_vdim"]
    same = ("bias", "add_bias_kv", "add_zero_attn", "batch_first")
    chosen = {name: case[name] for name in same}
    return {"embed_dim": embed_dim, "num_heads": num_heads, "kdim": kdim, "vdim": vdim, **chosen}


def _torch_module(
    case: dict[str, Any], state: dict[str, Tensor] | None, dtype: torch.dtype
) -> nn.MultiheadAttention:
    """Always in training, where torch takes one path for all arguments."""
    module = nn.MultiheadAttention(**_arguments(case), dtype=dtype)
    if state is not None:
        module.load_state_dict(state)
    return module


def _our_module(
    case: dict[str, Any], state: dict[str, Tensor], dtype: torch.dtype
) -> fastattn.MultiHeadAttention:
    dropout = 0.0 if case["mode"] == "train" else 0.5
    module = fastattn.MultiHeadAttention(**_arguments(case), dropout=dropout, dtype=dtype)
    module.load_state_dict(state)
    return module.train(case["mode"] == "train")


def _grad_outputs(case: dict[str, Any], inputs: Inputs) -> dict[str, Tensor]:
    """Of output and weights, longer than any."""
    return {"output": inputs.normal(999), "weights": inputs.normal(999)}


def _run(
    module: nn.MultiheadAttention,
    case: dict[str, Any],
    tensors: dict[str, Tensor],
    grads: dict[str, Tensor],
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    wide = {
        name: x.to(dtype).requires_grad_() if x.is_floating_point() else x
        for name, x in tensors.items()
    }
    arguments = {"key": wide.get("key", wide["query"]), **wide}
    arguments.setdefault("value", arguments["key"])
    arguments.update(
        need_weights=case["need_weights"], average_attn_weights=case["average_attn_weights"]
    )
    ours = isinstance(module, fastattn.MultiHeadAttention)
    if case["is_causal"] and ours:
        arguments["is_causal"] = True
    elif case["is_causal"]:
        arguments["attn_mask"] = _with_causal(wide.get("attn_mask"), case["lengths"])
    no_grad = case["mode"] == "no-grad"
    with torch.no_grad() if no_grad else nullcontext():
        output, weights = module(**arguments)
    assert (weights is not None) == case["need_weights"]
    found = {"output": output} if weights is None else {"output": output, "weights": weights}
    result = {name: x.detach() for name, x in found.items()}
    if no_grad:
        return result
    loss = sum((x.flatten() * grads[name].to(x)[: x.numel()]).sum() for name, x in found.items())
    loss.backward()
    leaves = {name: x for name, x in wide.items() if x.requires_grad}
    leaves.update(module.named_parameters())
    return {**result, **{f"d{name}": x.grad for name, x in leaves.items()}}


def _with_causal(mask: Tensor | None, lengths: tuple[int, int]) -> Tensor:
    hidden = torch.ones(lengths, dtype=torch.bool).triu(1)
    if mask is None:
        return hidden
    return mask | hidden if mask.dtype == torch.bool else mask.masked_fill(hidden, NEG)


def _size(name: str, exact: dict[str, Tensor]) -> float:
    """Gradients that vanish, as that of a key's bias does, come of terms as large as the others."""
    if not name.startswith("d"):
        return 0.0
    return max(x.abs().max().item() for n, x in exact.items() if n.startswith("d"))
