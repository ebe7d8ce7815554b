"""The matrix of attention, and one case of it, or one call, judged on one backend."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

import fastattn
from fastattn.testing import Inputs, check_all, peers, philox, with_layout
from tests.harness import DTYPES, GRAD_LAYOUTS, cast, judge, make_grad, run_on

NEG = float("-inf")


class Shape(NamedTuple):
    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    value_dim: int


SHAPES = [
    Shape(2, 2, 2, 5, 7, 8, 8),
    Shape(1, 1, 1, 1, 1, 16, 16),
    Shape(2, 4, 2, 13, 29, 24, 40),
    Shape(1, 2, 2, 63, 64, 16, 16),
    Shape(1, 1, 1, 64, 65, 32, 32),
    Shape(1, 2, 1, 65, 63, 8, 8),
    Shape(1, 4, 1, 33, 17, 80, 80),
    Shape(2, 2, 2, 1, 130, 64, 64),
    Shape(1, 2, 2, 31, 1, 5, 3),
    Shape(1, 2, 1, 17, 127, 1, 1),
    Shape(1, 1, 1, 9, 19, 129, 20),
    Shape(1, 1, 1, 6, 6, 256, 256),
    Shape(0, 2, 1, 5, 7, 8, 8),
    Shape(2, 0, 0, 5, 7, 8, 8),
    Shape(2, 2, 1, 0, 7, 8, 8),
    Shape(2, 2, 1, 5, 0, 8, 8),
    Shape(1, 2, 2, 5, 7, 0, 4),
    Shape(1, 2, 2, 5, 7, 4, 0),
]
MASKS = (
    "none",
    "bool",
    "bool-heads",
    "bool-keys",
    "bool-2d",
    "bool-dead-rows",
    "bool-sliced",
    "float",
    "float-fp32",
    "float-batch",
    "float-queries",
    "float-sliced",
    "float-expanded",
    "float-inf",
    "float-min",
)
PADDINGS = ("none", "bool", "bool-dead-sample", "float")
PATTERNS = {
    "full": {},
    "causal": {"is_causal": True},
    "causal-right": {"is_causal": True, "causal_alignment": "bottom_right"},
    "window": {"window": (3, 2)},
    "window-right": {"window": (-1, 4), "causal_alignment": "bottom_right"},
    "causal-window": {"is_causal": True, "window": (5, -1)},
    "window-past": {"window": (0, -1), "causal_alignment": "bottom_right"},
}
OUTPUTS = (("output",), ("output", "lse"), ("output", "lse", "weights"), ("lse",), ("weights",))

FACTORS = {
    "shape": SHAPES,
    "mask": MASKS,
    "padding": PADDINGS,
    "pattern": tuple(PATTERNS),
    "dtype": DTYPES,
    "outputs": OUTPUTS,
    "dropout_p": (0.0, 0.3),
    "layout": ("contiguous", "transposed", "strided", "offset", "expanded"),
    "grad_layout": GRAD_LAYOUTS,
    "scale": (None, 0.7),
}
DEFAULTS = {name: values[0] for name, values in FACTORS.items()}

# For CUDA kernels on emulated threads: fewer pairs, for each costs the building of kernels.
EMULATED = {
    **FACTORS,
    "shape": [
        Shape(2, 2, 2, 5, 7, 8, 8),
        Shape(2, 4, 2, 13, 29, 24, 40),
        Shape(1, 2, 1, 65, 63, 64, 64),
        Shape(1, 1, 1, 64, 129, 32, 32),
        Shape(1, 2, 2, 31, 1, 5, 3),
        Shape(1, 1, 1, 9, 70, 129, 20),
        Shape(1, 1, 1, 6, 6, 300, 270),
        Shape(1, 2, 2, 5, 7, 0, 4),
        Shape(2, 2, 1, 5, 0, 8, 8),
        Shape(2, 2, 1, 0, 7, 8, 8),
    ],
    "mask": (
        "none", "bool", "bool-dead-rows", "bool-sliced", "float", "float-fp32", "float-queries",
        "float-expanded", "float-inf", "float-min",
    ),
    "pattern": ("full", "causal", "causal-right", "window", "window-past"),
    "dtype": (torch.float32, torch.float16, torch.bfloat16),
    "scale": (None, 0.7, -0.4),
}  # fmt: skip


def make_mask(kind: str, shape: Shape, dtype: torch.dtype, inputs: Inputs) -> Tensor | None:
    b, h, _, q, k, *_ = shape
    if kind == "none":
        return None
    if kind.startswith("bool"):
        sizes = {"bool-heads": (b, 1, q, k), "bool-keys": (1, 1, 1, k), "bool-2d": (q, k)}
        mask = inputs.bools(*sizes.get(kind, (b, h, q, k)), true=0.6)
        if kind == "bool-dead-rows":
            mask[:, :, ::3] = False
        return with_layout(mask, "offset") if kind == "bool-sliced" else mask
    sizes = {
        "float-fp32": (1, h, q, k),
        "float-batch": (b, 1, q, k),
        "float-queries": (1, 1, q, 1),
        "float-expanded": (1, h, 1, k),
    }
    mask = inputs.normal(*sizes.get(kind, (b, h, q, k)), dtype=dtype)
    if kind == "float-fp32":
        return mask.float()
    if kind == "float-sliced":
        return with_layout(mask, "offset")
    if kind == "float-expanded":
        return mask.expand(b, h, q, k)
    if kind in ("float-inf", "float-min"):
        low = NEG if kind == "float-inf" else torch.finfo(dtype).min
        mask[..., : k // 2] = low
        mask[:, :, ::3] = low
    return mask


def make_padding(kind: str, shape: Shape, inputs: Inputs) -> Tensor | None:
    if kind == "none":
        return None
    padding = inputs.bools(shape.batch, shape.kv_len, true=0.3)
    padding[:, :1] = False
    if kind == "bool-dead-sample":
        padding[:1] = True
    if kind == "float":
        added = inputs.normal(shape.batch, shape.kv_len)
        return added.masked_fill(padding, NEG)
    return padding


def run_case(case: dict, backend: str) -> None:
    """Outputs and gradients of one case by the pass rule; the gradients of every output at once."""
    shape, dtype, outputs = case["shape"], case["dtype"], case["outputs"]
    inputs = Inputs()
    b, h, hk, q_len, kv_len, dk, dv = shape
    sizes = (b, h, q_len, dk), (b, hk, kv_len, dk), (b, hk, kv_len, dv)
    query, key, value = (inputs.normal(*s, dtype=dtype, layout=case["layout"]) for s in sizes)
    mask = make_mask(case["mask"], shape, dtype, inputs)
    padding = make_padding(case["padding"], shape, inputs)
    if padding is not None and padding.dtype == torch.bool:
        hidden = padding[:, None, :, None]
        key, value = (torch.where(hidden, torch.nan, x).to(dtype) for x in (key, value))
    rng_state = inputs.rng_state()
    p, options = case["dropout_p"], dict(PATTERNS[case["pattern"]], scale=case["scale"])
    grads = make_grads(case, dtype, inputs)

    def ours(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple:
        found = run_on(
            backend, fastattn.scaled_dot_product_attention, query, key, value, mask,
            key_padding_mask=padding, dropout_p=p, rng_state=rng_state if p else None,
            enable_gqa=True, return_lse="lse" in outputs, return_weights="weights" in outputs,
            **options,
        )  # fmt: skip
        found = found if isinstance(found, tuple) else (found, None, None)
        return tuple(x for x, name in zip(found, NAMES, strict=True) if name in outputs)

    kept = philox.attention_keep(rng_state, p, (b, h, q_len, kv_len)) if p else None
    merged, hidden = merge_padding(mask, padding)

    def plain(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple:
        added, hide = merge_padding(mask, padding)
        found = peers.attention(
            query, key, value, added, key_padding_mask=hide, keep=kept, dropout_p=p, **options
        )
        return tuple(x for x, name in zip(found, NAMES, strict=True) if name in outputs)

    tensors = (query, key, value, mask)
    exact = peers.gradients(plain, cast(tensors, torch.float64), cast(grads, torch.float64))
    got = peers.gradients(ours, tensors, grads)
    wide = torch.promote_types(dtype, torch.float32)
    peer = peers.gradients(plain, cast(tensors, dtype), cast(grads, dtype))
    stats = peers.gradients(plain, cast(tensors, wide), cast(grads, wide))
    same = [
        wide_one if name == "lse" else one
        for name, one, wide_one in zip(outputs, peer[0], stats[0], strict=True)
    ]
    for name, one in zip(outputs, got[0], strict=True):
        assert one.dtype == (wide if name == "lse" else dtype), name
    check_all(
        (*outputs, "dq", "dk", "dv", "dmask"),
        (*got[0], *got[1]),
        (*exact[0], *exact[1]),
        (*same, *peer[1]),
        sizes=cancelling_sizes(case, tensors, merged, hidden, kept, grads, options),
        dtypes={"dmask": narrower(dtype, mask)},
    )


def compare(backend: str, *tensors: Tensor, **options) -> tuple:
    """(output, gradients of its sum) on ``backend``, after the pass rule for all of them."""
    tensors = tensors + (None,) * (4 - len(tensors))
    ones = torch.ones((), dtype=tensors[0].dtype)
    grads = (ones.expand(*tensors[0].shape[:3], tensors[2].shape[-1]),)
    case = {"outputs": ("output",), "dropout_p": 0.0}
    padding = options.get("key_padding_mask")
    rest = {"scale": None, **{k: v for k, v in options.items() if k != "key_padding_mask"}}
    found = judge(
        ("output", "dq", "dk", "dv", "dmask"),
        lambda *x: (run_on(backend, fastattn.scaled_dot_product_attention, *x, **options),),
        lambda *x: peers.attention(*x, **options)[:1],
        tensors,
        grads,
        sizes=cancelling_sizes(case, tensors, tensors[3], padding, None, grads, rest),
    )
    return found[0][0], found[1]


NAMES = ("output", "lse", "weights")


def make_grads(case: dict, dtype: torch.dtype, inputs: Inputs) -> tuple[Tensor, ...]:
    b, h, _, q_len, kv_len, _, dv = case["shape"]
    sizes = {"output": (b, h, q_len, dv), "lse": (b, h, q_len), "weights": (b, h, q_len, kv_len)}
    wide = torch.promote_types(dtype, torch.float32)
    return tuple(
        make_grad(inputs, sizes[name], wide if name == "lse" else dtype, case["grad_layout"])
        for name in case["outputs"]
    )


def merge_padding(
    mask: Tensor | None, padding: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """(attn_mask, bool key_padding_mask): a floating padding mask is a mask over keys."""
    if padding is None or padding.dtype == torch.bool:
        return mask, padding
    added = padding[:, None, None, :]
    if mask is None:
        return added, None
    if mask.dtype == torch.bool:
        return torch.where(mask, added, NEG), None
    return mask + added, None


def cancelling_sizes(
    case: dict,
    tensors: tuple,
    mask: Tensor | None,
    padding: Tensor | None,
    kept: Tensor | None,
    grads: tuple[Tensor, ...],
    options: dict,
) -> dict[str, float]:
    """The sums of absolute terms behind the answers: rounding errors are in proportion to these.

    A score's own rounding, an epsilon or so of its terms' sum, is the relative error of a weight;
    a backward that recomputes scores in another order than the forward can't be without it.
    """
    query, key, value, _ = cast(tensors, torch.float64)
    if padding is not None:
        key, value = (torch.where(padding[:, None, :, None], 0.0, x) for x in (key, value))
    owner = torch.arange(query.shape[1]) // max(1, query.shape[1] // max(1, key.shape[1]))
    key, value = key[:, owner], value[:, owner]
    mask = None if mask is None or mask.dtype == torch.bool else mask.double()
    bools = tensors[3] if tensors[3] is not None and tensors[3].dtype == torch.bool else None
    plain = dict(options, key_padding_mask=padding)
    _, _, weights = peers.attention(query, key, value, bools if mask is None else mask, **plain)
    p = case["dropout_p"]
    factor = 1.0 if kept is None else kept / (1 - p)
    given = dict(zip(case["outputs"], cast(grads, torch.float64), strict=True))
    grad = torch.zeros_like(weights)
    if "output" in given:
        grad = grad + (given["output"].abs() @ value.abs().mT)
    if "weights" in given:
        grad = grad + given["weights"].abs()
    grad = grad * factor
    total = (weights * grad).sum(-1, keepdim=True)
    if "lse" in given:
        total = total + given["lse"].abs().unsqueeze(-1)
    terms = weights * (grad + total)
    scale = abs(options["scale"] or (query.shape[-1] or 1) ** -0.5)
    scores = scale * (query.abs() @ key.abs().mT)
    worth = max(1.0, scores.max().item() / 4) if scores.numel() else 1.0
    kept_weights = weights * factor
    rows = given.get("output", torch.zeros_like(query[..., :1])).abs()
    found = {
        "output": worth * (kept_weights @ value.abs()),
        "weights": worth * kept_weights,
        "lse": scores,
        "dq": worth * scale * (terms @ key.abs()),
        "dk": worth * group_sum(scale * terms.mT @ query.abs(), tensors[1]),
        "dv": worth * group_sum(kept_weights.mT @ rows, tensors[2]),
        "dmask": worth * (terms if tensors[3] is None else terms.sum_to_size(pad4(tensors[3]))),
    }
    return {name: x.max().item() if x.numel() else 0.0 for name, x in found.items()}


def group_sum(x: Tensor, like: Tensor) -> Tensor:
    b, h, length, dim = x.shape
    return x.reshape(b, like.shape[1], -1, length, dim).sum(2) if x.numel() else x


def pad4(mask: Tensor) -> tuple[int, ...]:
    return (1,) * (4 - mask.dim()) + tuple(mask.shape)


def narrower(dtype: torch.dtype, mask: Tensor | None) -> torch.dtype:
    """Whose rounding the gradient of a float32 mask beside inputs of ``dtype`` has."""
    if mask is None or mask.dtype == torch.bool:
        return dtype
    return min(dtype, mask.dtype, key=lambda d: d.itemsize)
