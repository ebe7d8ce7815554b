"""Ops as torch sees them: schemas, fakes, autograd, compile, export, and the short way round."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

import fastattn
from fastattn import use_backend
from fastattn.testing import backends, why_not, with_layout
from tests.ops.calls import (
    CALLS,
    RecordOps,
    described,
    forward_and_backward,
    make_calls,
    record_ops,
)

ON_BACKENDS = [
    pytest.param(call, backend, id=f"{name}-{backend}")
    for name, call in CALLS.items()
    for backend in backends(call.op)
]


def skip_where_declined(call, backend) -> None:
    reason = why_not(backend, call.function, *call.tensors)
    if reason is not None:
        pytest.skip(reason)


@pytest.mark.parametrize(("call", "backend"), ON_BACKENDS)
def test_opcheck(call, backend):
    """Schema (no input written, no output aliased), autograd, fake, AOT with dynamic shapes."""
    skip_where_declined(call, backend)
    with use_backend(backend):
        recorded = record_ops(call)
    assert len(recorded) == 2 or call.op == "linear_cross_entropy"
    for op, args in recorded:
        torch.library.opcheck(op, leaves(args, True), test_utils=EAGER_CHECKS)
        # Second derivatives of the backward are gradgradcheck's; cross entropy refuses them.
        first_order = "backward" not in op.__name__ and "cross_entropy" not in op.__name__
        torch.library.opcheck(op, leaves(args, first_order), test_utils=TRACED_CHECKS)


EAGER_CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")
TRACED_CHECKS = ("test_aot_dispatch_dynamic",)


def leaves(args: tuple, wants_grad: bool) -> tuple:
    return tuple(
        a.detach().clone().requires_grad_(wants_grad and a.is_floating_point())
        if isinstance(a, Tensor) else a
        for a in args
    )  # fmt: skip


@pytest.mark.parametrize(("call", "backend"), ON_BACKENDS)
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "expanded"])
def test_fakes_have_the_strides_of_the_real_ones(call, backend, layout):
    skip_where_declined(call, backend)
    tensors = [
        x if x is None or not x.is_floating_point() else with_layout(x, layout)
        for x in call.tensors
    ]
    with use_backend(backend), RecordOps() as recorded:
        forward_and_backward(call, *tensors)
    for op, args in recorded.calls:
        real = op(*args)
        mode = FakeTensorMode()
        fake = op(*(mode.from_tensor(a) if isinstance(a, Tensor) else a for a in args))
        both = ((real, fake),) if isinstance(real, Tensor) else zip(real, fake, strict=True)
        for one, other in both:
            assert described(one) == described(other), op


@pytest.mark.parametrize(("call", "backend"), ON_BACKENDS)
def test_the_registered_op_does_what_the_short_way_does(call, backend):
    """Plain eager calls go round torch's dispatcher; under a mode they pass through it."""
    skip_where_declined(call, backend)
    with use_backend(backend):
        plain = forward_and_backward(call, *call.tensors)
        with RecordOps() as recorded:
            dispatched = forward_and_backward(call, *call.tensors)
    assert recorded.calls
    for one, other in zip((*plain[0], *plain[1]), (*dispatched[0], *dispatched[1]), strict=True):
        assert torch.equal(one, other) and one.stride() == other.stride()


@pytest.mark.parametrize("name", CALLS)
def test_compile_whole_with_dynamic_sizes(name):
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    def compiled(*tensors):
        return CALLS[name].function(*tensors)

    with torch._dynamo.config.patch(error_on_recompile=True):
        for batch, length in ((3, 5), (4, 9), (7, 17)):
            call = make_calls(batch, length)[name]
            right = forward_and_backward(call, *call.tensors)
            found = forward_and_backward(call._replace(function=compiled), *call.tensors)
            for one, other in zip((*found[0], *found[1]), (*right[0], *right[1]), strict=True):
                torch.testing.assert_close(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_compile_with_inductor(name):
    torch._dynamo.reset()
    call = CALLS[name]
    compiled = call._replace(function=torch.compile(call.function, fullgraph=True))
    found, right = (forward_and_backward(c, *c.tensors) for c in (compiled, call))
    for one, other in zip((*found[0], *found[1]), (*right[0], *right[1]), strict=True):
        torch.testing.assert_close(one, other)


def test_compiled_code_follows_use_backend():
    torch._dynamo.reset()
    compiled = torch.compile(fastattn.dropout, fullgraph=True, backend="aot_eager")
    compiled(torch.ones(4), 0.5)
    with use_backend("triton"), pytest.raises(fastattn.BackendError, match="triton"):
        compiled(torch.ones(4), 0.5)
    compiled(torch.ones(4), 0.5)


@pytest.mark.parametrize("name", ["attention", "layer-norm", "softmax", "dropout"])
def test_export_with_a_dynamic_batch(name):
    class Holder(torch.nn.Module):
        def forward(self, *tensors):
            return CALLS[name].function(*tensors)

    call = CALLS[name]
    batch = torch.export.Dim("batch", min=2, max=64)
    shared = {"layer-norm": (2, 3), "softmax": (1,), "attention": (3,)}.get(name, ())
    shapes = tuple({} if i in shared else {0: batch} for i in range(len(call.tensors)))
    program = torch.export.export(Holder(), call.tensors, dynamic_shapes={"tensors": shapes})
    again = make_calls(batch=7)[name]
    found, right = (f(*again.tensors) for f in (program.module(), call.function))
    for one, other in zip(as_tuple(found), as_tuple(right), strict=True):
        torch.testing.assert_close(one, other)


def as_tuple(x) -> tuple:
    return (x,) if isinstance(x, Tensor) else tuple(x)


@pytest.mark.parametrize("name", CALLS)
def test_inputs_and_their_gradients_are_never_written(name):
    """Twice through the same graph gives the same, bit for bit, and changes no argument."""
    call = CALLS[name]
    leaves = [x.clone().requires_grad_() if x.is_floating_point() else x for x in call.tensors]
    outputs = as_tuple(call.function(*leaves))
    grads = [torch.randn_like(o) for o in outputs]
    before = [x.detach().clone() for x in (*leaves, *grads, *outputs)]
    wanted = [x for x in leaves if x.requires_grad]
    first, second = (
        torch.autograd.grad(outputs, wanted, grads, retain_graph=True) for _ in range(2)
    )
    assert all(map(torch.equal, first, second))
    assert all(map(torch.equal, before, (*leaves, *grads, *outputs)))


@pytest.mark.parametrize("name", CALLS)
def test_runs_are_bitwise_equal(name):
    call = CALLS[name]
    first = forward_and_backward(call, *call.tensors)
    for _ in range(10):
        again = forward_and_backward(call, *call.tensors)
        assert all(map(torch.equal, (*first[0], *first[1]), (*again[0], *again[1])))
