"""What one eager call of an op costs by the way it is registered: microseconds, printed as a table.

Every form wraps the same function, a product on 256 floats, with the same arguments, so the rows
differ only in how torch reaches it. docs/adr/0003 draws the conclusion.

    python -m benchmarks.registration [--blocks 200] [--rounds 5] [--json]
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.benchmark import Timer

import fastattn

SCHEMA = "(Tensor x, Tensor? mask, bool is_causal, float scale, str backend) -> Tensor"
BACKWARD_SCHEMA = "(Tensor grad, float scale, str backend) -> Tensor"
LIBRARY = torch.library.Library("registration_benchmark", "DEF")
CALLS = 20  # in a block
CASES = ("no grad", "forward", "forward + backward")

Form = Callable[..., Tensor]


def forward(x: Tensor, mask: Tensor | None, is_causal: bool, scale: float, backend: str) -> Tensor:
    return x * scale


def backward(grad: Tensor, scale: float, backend: str) -> Tensor:
    return grad * scale


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, _, _, ctx.scale, ctx.backend = inputs
    ctx.save_for_backward(output)


def define(name: str) -> tuple[Any, Any]:
    """The forward and the backward as ops without autograd, by ``define`` and ``impl``."""
    for op, schema, function in (
        (name, SCHEMA, forward),
        (f"{name}_backward", BACKWARD_SCHEMA, backward),
    ):
        LIBRARY.define(op + schema)
        LIBRARY.impl(op, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"registration_benchmark::{op}", function, lib=LIBRARY)
    namespace = torch.ops.registration_benchmark
    return getattr(namespace, name).default, getattr(namespace, f"{name}_backward").default


def function_around(run: Form, run_backward: Form) -> type[torch.autograd.Function]:
    class Around(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Tensor:
            output = run(*inputs)
            setup_context(ctx, inputs, output)
            return output

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
            return run_backward(grad, ctx.scale, ctx.backend), None, None, None, None

    return Around


def with_custom_op() -> Form:
    op = torch.library.custom_op(
        "registration_benchmark::custom", forward, mutates_args=(), schema=SCHEMA
    )
    op_backward = torch.library.custom_op(
        "registration_benchmark::custom_backward", backward, mutates_args=(), schema=BACKWARD_SCHEMA
    )
    op.register_autograd(
        lambda ctx, grad: (op_backward(grad, ctx.scale, ctx.backend), None, None, None, None),
        setup_context=setup_context,
    )
    return op


def with_register_autograd() -> Form:
    op, op_backward = define("registered")
    torch.library.register_autograd(
        "registration_benchmark::registered",
        lambda ctx, grad: (op_backward(grad, ctx.scale, ctx.backend), None, None, None, None),
        setup_context=setup_context,
        lib=LIBRARY,
    )
    return op


def with_function_on_autograd_key() -> Form:
    op, op_backward = define("keyed")

    def below_autograd(*inputs: Any) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            return op(*inputs)

    around = function_around(below_autograd, op_backward)

    def on_autograd_key(x: Tensor, *rest: Any) -> Tensor:
        if torch.is_grad_enabled() and x.requires_grad:
            return around.apply(x, *rest)
        return below_autograd(x, *rest)

    LIBRARY.impl("keyed", on_autograd_key, "Autograd")
    return op


def with_function_around_op() -> Form:
    op, op_backward = define("wrapped")
    return unless_grad_is_needed(op, function_around(op, op_backward))


def with_function_alone() -> Form:
    return unless_grad_is_needed(forward, function_around(forward, backward))


def unless_grad_is_needed(run: Form, around: type[torch.autograd.Function]) -> Form:
    """As fastattn decides: the autograd.Function only where a gradient will be wanted."""

    def call(x: Tensor, *rest: Any) -> Tensor:
        if torch.is_grad_enabled() and x.requires_grad:
            return around.apply(x, *rest)
        return run(x, *rest)

    return call


def forms() -> dict[str, Callable[[Tensor], Tensor]]:
    """Each row of the table: what is called on x."""
    registered: dict[str, Form] = {
        "the function alone": forward,
        "custom_op + register_autograd": with_custom_op(),
        "define + impl + register_autograd": with_register_autograd(),
        "define + impl + Function on the Autograd key": with_function_on_autograd_key(),
        "autograd.Function around a defined op": with_function_around_op(),
        "autograd.Function around the function": with_function_alone(),
    }
    rows: dict[str, Callable[[Tensor], Tensor]] = {
        name: lambda x, op=op: op(x, None, False, 2.0, "auto") for name, op in registered.items()
    }
    shipped = torch.ops.fastattn.softmax.default
    rows["fastattn.softmax, through torch's dispatcher"] = lambda x: shipped(
        x, None, False, 1.0, "auto"
    )
    rows["fastattn.softmax, as called"] = fastattn.softmax
    rows["torch.softmax"] = lambda x: torch.softmax(x, -1)
    return rows


def measure(call: Callable[[Tensor], Tensor], blocks: int) -> dict[str, float]:
    """Microseconds of a call without gradients, with them, and with the backward.

    Of ``blocks`` short blocks the fastest counts: other programs only ever add to the time.
    """
    x, grad = torch.ones(256), torch.ones(256)
    leaf = torch.ones(256, requires_grad=True)

    def both() -> None:
        leaf.grad = None
        call(leaf).backward(grad)

    runs = (lambda: call(x), lambda: call(leaf), both)
    timers = [Timer("run()", globals={"run": run}) for run in runs]
    best = [min(timer.timeit(CALLS).mean for _ in range(blocks)) for timer in timers]
    return dict(zip(CASES, (1e6 * each for each in best), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--blocks", type=int, default=200, help="per measurement (200)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds; the best of each counts (5)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()

    rows = forms()
    best: dict[str, dict[str, float]] = {}
    for _ in range(options.rounds):
        for name, call in rows.items():
            found = measure(call, options.blocks)
            best[name] = {k: min(v, best.get(name, found)[k]) for k, v in found.items()}

    if options.json:
        print(json.dumps({"torch": torch.__version__, "microseconds": best}, indent=2))
        return
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}")
    print(f"{'microseconds a call, 256 floats':<46}" + "".join(f"{case:>20}" for case in CASES))
    for name, row in best.items():
        print(f"{name:<46}" + "".join(f"{value:>20.1f}" for value in row.values()))


if __name__ == "__main__":
    main()
