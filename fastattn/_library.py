"""Registration of ops with torch: schema, implementation, fake and autograd in one call.

``torch.library.Library`` with ``define`` + ``impl`` is used rather than the ``custom_op``
decorator, whose calls cost about twice as much.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_LIBRARY = torch.library.Library("fastattn", "DEF")


def register_op(
    schema: str,
    implementation: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    setup_context: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
) -> Any:
    """Define ``fastattn::<schema>`` for every device and return its overload.

    ``implementation`` and ``fake`` take the arguments of the schema in order. ``setup_context`` and
    ``backward`` are as in ``torch.library.register_autograd``.
    """
    name = schema.split("(", 1)[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fastattn::{name}", fake, lib=_LIBRARY)
    if backward is not None:
        torch.library.register_autograd(
            f"fastattn::{name}", backward, setup_context=setup_context, lib=_LIBRARY
        )
    return getattr(torch.ops.fastattn, name).default


def differentiate(
    function: Callable[..., tuple[Any, ...]],
    inputs: tuple[Any, ...],
    grad_outputs: tuple[torch.Tensor | None, ...],
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of ``function(*inputs)`` for each input, by torch's autograd.

    Backward ops are differentiated this way, through their reference: second derivatives are
    needed rarely, so they are readable rather than fast.
    """
    leaves = [
        x.detach().requires_grad_() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
        for x in inputs
    ]
    with torch.enable_grad():
        outputs = function(*leaves)
    pairs = [
        (out, grad)
        for out, grad in zip(outputs, grad_outputs, strict=True)
        if out is not None and grad is not None and out.requires_grad
    ]
    wanted = [x for x in leaves if isinstance(x, torch.Tensor) and x.requires_grad]
    if not pairs:
        return tuple(None for _ in inputs)
    outs, grads = zip(*pairs, strict=True)
    found = iter(torch.autograd.grad(outs, wanted, grads, allow_unused=True))
    return tuple(
        next(found) if isinstance(x, torch.Tensor) and x.requires_grad else None for x in leaves
    )
