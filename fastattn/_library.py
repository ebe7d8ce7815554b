"""Registration of ops with torch: schema, implementation, fake and autograd in one call.

``torch.library.Library`` with ``define`` + ``impl`` is used rather than the ``custom_op``
decorator, whose calls cost a fifth more. Plain eager calls go round torch's dispatcher
altogether, which saves some 10 us forward and 40 us backward (docs/adr/0003).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import TransformType, peek_interpreter_stack
from torch.autograd import forward_ad

_LIBRARY = torch.library.Library("fastattn", "DEF")
_PLAIN = (Tensor, torch.nn.Parameter)
_has_storage = torch._C._has_storage  # none: a tensor that vmap, grad or is_grads_batched wrapped
_AUTOGRAD_KEYS = (
    torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradFunctionality)
    | torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradOther)
    | torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradNestedTensor)
)


class Op:
    """A registered op. Calling it reaches the implementation by the shortest way that is right."""

    def __init__(
        self,
        overload: Any,
        implementation: Callable[..., Any],
        function: type[torch.autograd.Function] | None,
        transformed: type[torch.autograd.Function],
        flops: Callable[..., int] | None,
    ):
        self.overload = overload
        self._implementation = implementation
        self._function = function
        self._transformed = transformed
        self._flops = flops

    def __call__(self, *args: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.overload(*args)
        if _is_intercepted():
            return self._intercepted(*args)
        needs_grad = False
        for x in args:
            if isinstance(x, Tensor):
                if type(x) not in _PLAIN or not (x.is_cpu or x.is_cuda) or not _has_storage(x):
                    return self.overload(*args)
                needs_grad = needs_grad or x.requires_grad
        if self._function is not None and needs_grad and torch.is_grad_enabled():
            return self._function.apply(*args)
        return self._implementation(*args)

    def _intercepted(self, *args: Any) -> Any:
        if self._flops is not None and "torch.utils.flop_counter" in sys.modules:
            self._tell_flop_counters(self._flops)
        if forward_ad._current_level >= 0:
            self._refuse_tangents(args)
        if torch._C._are_functorch_transforms_active():
            if peek_interpreter_stack().key() in (TransformType.Grad, TransformType.Vmap):
                return self._transformed.apply(*args)
        return self.overload(*args)

    def _tell_flop_counters(self, flops: Callable[..., int]) -> None:
        """Those that are counting; importing torch's registry would import triton."""
        for mode in torch.utils._python_dispatch._get_current_dispatch_mode_stack():
            registry = getattr(getattr(mode, "counter", None), "flop_registry", None)
            if registry is not None:
                registry.setdefault(
                    self.overload._overloadpacket, lambda *args, out_val=None: flops(*args)
                )

    def _refuse_tangents(self, args: tuple[Any, ...]) -> None:
        """Forward-mode derivatives, which the kernels would silently take for zero."""
        for x in args:
            if isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None:
                raise NotImplementedError(
                    f"{self.overload.name()} got a tensor with a tangent (jvp, jacfwd, hessian, "
                    "make_dual); reverse mode is accepted: grad, vjp, jacrev, or for second "
                    "derivatives jacrev of jacrev"
                )


def register_op(
    schema: str,
    implementation: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    setup_context: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
    flops: Callable[..., int] | None = None,
) -> Op:
    """Define ``fastattn::<schema>`` for every device.

    ``implementation`` and ``fake`` take the arguments of the schema in order. ``setup_context`` and
    ``backward`` are as in ``torch.library.register_autograd``. ``flops``, of the same arguments, is
    what ``torch.utils.flop_counter`` counts: products of matrices, masked ones too, as for torch's.
    """
    name = schema.split("(", 1)[0]
    implementation = _without_autocast(implementation)
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fastattn::{name}", fake, lib=_LIBRARY)
    overload = getattr(torch.ops.fastattn, name).default
    function = None
    if setup_context is not None and backward is not None:
        backward = _without_autocast(backward)
        torch.library.register_autograd(
            f"fastattn::{name}", backward, setup_context=setup_context, lib=_LIBRARY
        )
        function = _autograd_function(name, implementation, setup_context, backward)
    transformed = _transformed_function(name, overload, setup_context, backward)
    op = Op(overload, implementation, function, transformed, flops)
    rule = functools.partial(_run_one_by_one, op)
    setattr(transformed, "vmap", staticmethod(rule))  # noqa: B010 - which mypy takes for a method
    torch.library.register_vmap(f"fastattn::{name}", rule, lib=_LIBRARY)
    return op


def _without_autocast(function: Callable[..., Any]) -> Callable[..., Any]:
    """The public functions have cast already; within an op torch's own ops must round nothing."""

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        if not torch._C._is_any_autocast_enabled():
            return function(*args)
        with torch._C._DisableAutocast():
            return function(*args)

    return run


def _autograd_function(
    name: str,
    implementation: Callable[..., Any],
    setup_context: Callable[..., None],
    backward: Callable[..., Any],
) -> type[torch.autograd.Function]:
    def forward(ctx: Any, *args: Any) -> Any:
        outputs = implementation(*args)
        setup_context(ctx, args, outputs)
        return outputs

    members = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type(f"fastattn_{name}", (torch.autograd.Function,), members)


def _transformed_function(
    name: str,
    overload: Callable[..., Any],
    setup_context: Callable[..., None] | None,
    backward: Callable[..., Any] | None,
) -> type[torch.autograd.Function]:
    """The same in the slower form that ``torch.func`` can differentiate and run over samples."""

    def no_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    def no_backward(ctx: Any, *grads: Any) -> None:
        raise NotImplementedError(f"fastattn::{name} has no derivative")

    members = {
        "forward": staticmethod(lambda *args: overload(*args)),
        "setup_context": staticmethod(setup_context or no_context),
        "backward": staticmethod(backward or no_backward),
    }
    return type(f"fastattn_{name}", (torch.autograd.Function,), members)


def _run_one_by_one(op: Op, info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
    """``torch.vmap`` of an op: a call for each sample, stacked."""
    batched = [isinstance(x, Tensor) and d is not None for x, d in zip(args, in_dims, strict=True)]
    samples = [
        op(*(x.select(d, i) if b else x for x, d, b in zip(args, in_dims, batched, strict=True)))
        for i in range(info.batch_size)
    ]
    if isinstance(samples[0], Tensor):
        return torch.stack(samples), 0
    return tuple(torch.stack(x) for x in zip(*samples, strict=True)), (0,) * len(samples[0])


def wants_grad(x: Any) -> bool:
    """Whether x may get a gradient; in ``torch.func`` it knows of the innermost level only."""
    if not isinstance(x, Tensor):
        return False
    return x.requires_grad or torch._C._are_functorch_transforms_active()


def _is_intercepted() -> bool:
    """Whether something watches or transforms calls: modes, torch.func, tangents, the profiler."""
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._len_torch_function_stack() > 0
        or torch._C._are_functorch_transforms_active()
        or torch.autograd._profiler_enabled()
        or forward_ad._current_level >= 0
    )


@contextmanager
def recording() -> Iterator[None]:
    """Autograd inside an implementation, even where torch's dispatcher, as in compiled code, has
    called it below autograd, so that ``torch.enable_grad`` alone would record nothing."""
    included = torch._C._dispatch_tls_local_include_set()
    excluded = torch._C._dispatch_tls_local_exclude_set() - _AUTOGRAD_KEYS
    with torch.enable_grad(), torch._C._ForceDispatchKeyGuard(included, excluded):
        yield


def differentiate(
    function: Callable[..., tuple[Any, ...]],
    inputs: tuple[Any, ...],
    grad_outputs: tuple[Tensor | None, ...],
) -> tuple[Tensor | None, ...]:
    """Gradients of ``function(*inputs)`` for each input, by torch's autograd.

    Backward ops are differentiated this way, through their reference: second derivatives are
    needed rarely, so they are readable rather than fast.
    """
    if torch._C._are_functorch_transforms_active():
        return _differentiate_in_transform(function, inputs, grad_outputs)
    leaves = [
        x.detach().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x
        for x in inputs
    ]
    with recording():
        outputs = function(*leaves)
    pairs = [
        (out, grad)
        for out, grad in zip(outputs, grad_outputs, strict=True)
        if out is not None and grad is not None and out.requires_grad
    ]
    wanted = [x for x in leaves if isinstance(x, Tensor) and x.requires_grad]
    if not pairs:
        return tuple(None for _ in inputs)
    outs, grads = zip(*pairs, strict=True)
    found = iter(torch.autograd.grad(outs, wanted, grads, allow_unused=True))
    return tuple(next(found) if isinstance(x, Tensor) and x.requires_grad else None for x in leaves)


def _differentiate_in_transform(
    function: Callable[..., tuple[Any, ...]],
    inputs: tuple[Any, ...],
    grad_outputs: tuple[Tensor | None, ...],
) -> tuple[Tensor | None, ...]:
    """The same within ``torch.func``, where no tensor may be told to require a gradient."""
    places = [i for i, x in enumerate(inputs) if isinstance(x, Tensor) and x.is_floating_point()]
    grads: list[Tensor] = []

    def of_leaves(*leaves: Tensor) -> tuple[Tensor, ...]:
        changed = dict(zip(places, leaves, strict=True))
        outputs = function(*(changed.get(i, x) for i, x in enumerate(inputs)))
        pairs = [
            (out, grad)
            for out, grad in zip(outputs, grad_outputs, strict=True)
            if out is not None and grad is not None
        ]
        grads[:] = [grad for _, grad in pairs]
        return tuple(out for out, _ in pairs)

    pull_back = torch.func.vjp(of_leaves, *(inputs[i] for i in places))[1]
    found = dict(zip(places, pull_back(tuple(grads)), strict=True))
    return tuple(found.get(i) for i in range(len(inputs)))
