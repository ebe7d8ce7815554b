"""linear_cross_entropy: every backend against the float64 answer."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import gradcheck

import fastattn
from fastattn import use_backend
from fastattn.ops.cross_entropy import _chunked, _cpu
from fastattn.testing import Inputs, backends, check_all, peers
from fastattn.testing.pairwise import pairwise, sampled
from tests.harness import DTYPES, judge, make_grad, named, run_on

BACKENDS = backends("linear_cross_entropy")
FACTORS = {
    "tokens": ((2, 7), (1,), (64,), (65,), (3, 2, 5), (130,), ()),
    "dims": ((16, 33), (8, 1), (1, 5), (63, 130), (40, 1000), (65, 64)),
    "dtype": DTYPES,
    "bias": (False, True),
    "class_weight": (False, True),
    "label_smoothing": (0.0, 0.1, 1.0),
    "smoothing": ("uniform", "exclusive"),
    "ignored": ("none", "some", "other-index"),
    "reduction": ("mean", "sum", "none"),
    "layout": ("contiguous", "transposed", "strided", "offset", "expanded"),
    "grad_layout": ("contiguous", "strided", "expanded", "sum"),
}
DEFAULTS = {name: values[0] for name, values in FACTORS.items()}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", named(pairwise(FACTORS), DEFAULTS))
def test_matrix(case, backend):
    run_case(case, backend)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", named(sampled(FACTORS, 1500), DEFAULTS))
def test_more_of_the_matrix(case, backend):
    run_case(case, backend)


def run_case(case: dict, backend: str) -> None:
    (dim, classes), tokens, dtype = case["dims"], case["tokens"], case["dtype"]
    inputs, wide = Inputs(), torch.promote_types(dtype, torch.float32)
    hidden = inputs.normal(*tokens, dim, dtype=dtype, layout=case["layout"])
    weight = inputs.normal(classes, dim, dtype=dtype, layout=case["layout"])
    bias = inputs.normal(classes, dtype=dtype) if case["bias"] else None
    class_weight = inputs.uniform(classes, dtype=dtype) + 0.1 if case["class_weight"] else None
    target = inputs.integers(0, classes, *tokens)
    ignore_index = 3 if case["ignored"] == "other-index" else -100
    if case["ignored"] == "some" and tokens:
        target[..., 1::3] = -100
    settings = {
        name: case[name] for name in ("label_smoothing", "smoothing", "reduction")
    } | {"ignore_index": ignore_index}  # fmt: skip
    shape = tokens if case["reduction"] == "none" else ()
    grad = make_grad(inputs, shape, wide, case["grad_layout"])
    counted = target != ignore_index
    if case["reduction"] == "mean" and not counted.any():
        settings["reduction"] = "sum"  # the mean over nothing has a test of its own

    def ours(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple:
        loss, nll = run_on(
            backend, fastattn.linear_cross_entropy, hidden, weight, target, bias=bias,
            class_weight=class_weight, return_nll=True, **settings,
        )  # fmt: skip
        assert loss.dtype == nll.dtype == wide and not nll.requires_grad
        return loss, nll

    def plain(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple:
        loss, nll = peers.linear_cross_entropy(
            hidden, weight, target, bias, class_weight, **settings
        )
        return loss.reshape(shape), nll.reshape(shape)

    names = ("loss", "nll", "dhidden", "dweight", "dbias")
    judge(names, ours, plain, (hidden, weight, bias), (grad, None),
          sizes=sizes(hidden, weight, class_weight, grad, settings, counted),
          dtypes=dict.fromkeys(names, dtype))  # fmt: skip


def sizes(
    hidden: Tensor, weight: Tensor, class_weight: Tensor | None, grad: Tensor, settings: dict,
    counted: Tensor,
) -> dict[str, float]:  # fmt: skip
    """Logits are sums of dim terms; gradients are differences of probabilities that may cancel."""
    terms = (hidden.double().abs() @ weight.double().abs().T).max().item()
    top = 1.0 if class_weight is None else class_weight.max().item()
    low = 1.0 if class_weight is None else class_weight.min().item()
    count = counted.sum().item()
    share = 1 / max(1, count * low) if settings["reduction"] == "mean" else 1.0
    size = 2 * top * share * grad.double().abs().max().item()
    tokens = hidden.double().reshape(-1, hidden.shape[-1])
    return {
        "loss": top * terms * (count if settings["reduction"] == "sum" else 1),
        "nll": top * terms * (count if settings["reduction"] == "sum" else 1),
        "dhidden": size * weight.abs().max().item(),
        "dweight": size * tokens.abs().sum(0).max().item(),
        "dbias": size * count,
    }


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("eps", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_reference_is_torch_in_float64(reduction, eps, weighted):
    inputs = Inputs()
    hidden, weight = inputs.normal(9, 6, dtype=torch.float64), inputs.normal(11, 6).double()
    bias = inputs.normal(11, dtype=torch.float64)
    class_weight = inputs.uniform(11, dtype=torch.float64) if weighted else None
    target = inputs.integers(0, 11, 9)
    target[4] = -100
    grad = (inputs.normal(*((9,) if reduction == "none" else ()), dtype=torch.float64),)
    options = {"label_smoothing": eps, "reduction": reduction}

    def right(hidden, weight, bias):
        logits = F.linear(hidden, weight, bias)
        return (F.cross_entropy(logits, target, class_weight, **options),)

    def ours(hidden, weight, bias):
        return (
            fastattn.linear_cross_entropy(
                hidden, weight, target, bias=bias, class_weight=class_weight, **options
            ),
        )

    expected = peers.gradients(right, (hidden, weight, bias), grad)
    with use_backend("reference"):
        found = peers.gradients(ours, (hidden, weight, bias), grad)
    check_all(("loss", "dhidden", "dweight", "dbias"), (*found[0], *found[1]),
              (*expected[0], *expected[1]), (None,) * 4)  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("smoothing", ["uniform", "exclusive"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_gradients_by_differences(backend, smoothing, reduction):
    inputs = Inputs()
    hidden, weight, bias = (
        inputs.normal(*s, dtype=torch.float64).requires_grad_() for s in ((3, 4), (5, 4), (5,))
    )
    target = torch.tensor([4, -100, 0])
    class_weight = inputs.uniform(5, dtype=torch.float64)
    assert gradcheck(
        lambda hidden, weight, bias: run_on(
            backend, fastattn.linear_cross_entropy, hidden, weight, target, bias=bias,
            class_weight=class_weight, label_smoothing=0.2, smoothing=smoothing,
            reduction=reduction,
        ),
        (hidden, weight, bias),
    )  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
def test_exclusive_smoothing_is_the_papers(backend):
    """The target has 1 - eps, each of the other V - 1 classes eps / (V - 1)."""
    inputs, classes, eps = Inputs(), 7, 0.1
    hidden, weight = inputs.normal(5, 4), inputs.normal(classes, 4)
    target = inputs.integers(0, classes, 5)
    shares = torch.full((5, classes), eps / (classes - 1)).scatter(1, target[:, None], 1 - eps)
    right = -(shares * F.log_softmax(hidden @ weight.T, -1)).sum(-1)
    found = run_on(backend, fastattn.linear_cross_entropy, hidden, weight, target,
                   label_smoothing=eps, smoothing="exclusive", reduction="none")  # fmt: skip
    torch.testing.assert_close(found, right)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("tokens", [(4,), (0,), (2, 0)], ids=str)
def test_nothing_to_count_is_as_torch(backend, reduction, tokens):
    hidden, weight = torch.ones(*tokens, 3, requires_grad=True), torch.ones(5, 3)
    target = torch.full(tokens, -100)
    found = run_on(backend, fastattn.linear_cross_entropy, hidden, weight, target,
                   reduction=reduction)  # fmt: skip
    right = F.cross_entropy((hidden @ weight.T).flatten(0, -2), target.flatten(),
                            reduction=reduction)  # fmt: skip
    torch.testing.assert_close(found.flatten(), right.flatten(), equal_nan=True)
    grads = (torch.autograd.grad(loss.sum(), hidden)[0] for loss in (found, right))
    torch.testing.assert_close(*grads, equal_nan=True)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2), (1, 2)], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_gradients_asked_for_alone_are_the_same(backend, wanted, reduction):
    inputs = Inputs()
    given = [inputs.normal(6, 4), inputs.normal(5, 4), inputs.normal(5)]
    target = inputs.integers(0, 5, 6)

    def loss(hidden, weight, bias):
        return (
            run_on(backend, fastattn.linear_cross_entropy, hidden, weight, target, bias=bias,
                   reduction=reduction).sum(),
        )  # fmt: skip

    _, right = peers.gradients(loss, tuple(given), (torch.tensor(1.0),))
    tensors = [x.clone().requires_grad_(i in wanted) for i, x in enumerate(given)]
    found = torch.autograd.grad(loss(*tensors)[0], [tensors[i] for i in wanted])
    for i, grad in zip(wanted, found, strict=True):
        torch.testing.assert_close(grad, right[i])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_chunks_give_what_the_whole_gives(backend, reduction, monkeypatch):
    inputs = Inputs()
    tensors = (inputs.normal(67, 8), inputs.normal(9, 8), inputs.normal(9))
    target = inputs.integers(0, 9, 67)
    grad = make_grad(inputs, (67,) if reduction == "none" else (), torch.float32, "contiguous")

    def loss(hidden, weight, bias):
        return (
            run_on(backend, fastattn.linear_cross_entropy, hidden, weight, target, bias=bias,
                   reduction=reduction),
        )  # fmt: skip

    whole = peers.gradients(loss, tensors, (grad,))
    for module in (_chunked, _cpu):
        monkeypatch.setattr(module, "CHUNK_BYTES", 1)
    parts = peers.gradients(loss, tensors, (grad,))
    for one, other in zip((*whole[0], *whole[1]), (*parts[0], *parts[1]), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_second_derivative_is_one_clear_error(reduction):
    hidden, weight = torch.ones(3, 4, requires_grad=True), torch.ones(5, 4)
    loss = fastattn.linear_cross_entropy(hidden, weight, torch.arange(3), reduction=reduction)
    (grad,) = torch.autograd.grad(loss.sum(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="linear_cross_entropy has no second derivative"):
        torch.autograd.grad(grad.sum(), hidden)
