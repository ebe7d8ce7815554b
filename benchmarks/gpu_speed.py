"""Ours beside torch on a GPU: medians of CUDA events, the two alternating, caches flushed before.

Limits are measured in the same run: a copy's bytes a second and a matrix product's flops a second.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import fastattn

ROUNDS = 20
FLUSHED_BYTES = 256 * 2**20


class Case(NamedTuple):
    """``flops`` or ``bytes`` of one call, whichever bounds it; peers by name."""

    name: str
    ours: Callable[[], Any]
    peers: dict[str, Callable[[], Any]]
    flops: float = 0.0
    bytes: float = 0.0


def cases(device: str = "cuda", *, scale: int = 1) -> Iterator[Case]:
    """The shapes of the goals; ``scale`` divides lengths and rows, for machines without a GPU."""
    for dim in (64, 128):
        for length in (512, 2048, 8192):
            yield from _attention(dim, length // scale, 16384 // length // scale, device)
    for columns in (1024, 4096, 8192):
        yield from _rows(8192 // scale, columns, device)
    yield _cross_entropy(8192 // scale, 37000 // scale, device)


def _attention(dim: int, length: int, batch: int, device: str) -> Iterator[Case]:
    heads, batch = 2048 // dim, max(1, batch)
    x = torch.randn(3, batch, heads, length, dim, device=device, dtype=torch.bfloat16)
    for is_causal in (False, True):
        flops = 4 * batch * heads * length**2 * dim * (0.5 if is_causal else 1.0)
        name = f"attention D={dim} S={length} {'causal' if is_causal else 'full'}"
        yield Case(
            f"{name} forward",
            _attend(fastattn.scaled_dot_product_attention, x, is_causal, False),
            {
                kind.name: _with_kernel(
                    kind, _attend(F.scaled_dot_product_attention, x, is_causal, False)
                )
                for kind in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION)
            },
            flops=flops,
        )
        yield Case(
            f"{name} forward and backward",
            _attend(fastattn.scaled_dot_product_attention, x, is_causal, True),
            {
                kind.name: _with_kernel(
                    kind, _attend(F.scaled_dot_product_attention, x, is_causal, True)
                )
                for kind in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION)
            },
            flops=3.5 * flops,
        )


def _attend(
    function: Callable[..., Any], x: torch.Tensor, is_causal: bool, trains: bool
) -> Callable[[], Any]:
    leaves = [t.detach().requires_grad_(trains) for t in x]
    grad = torch.ones_like(x[0])

    def run() -> Any:
        out = function(*leaves, is_causal=is_causal)
        return torch.autograd.grad(out, leaves, grad) if trains else out

    return run


def _with_kernel(kind: SDPBackend, function: Callable[[], Any]) -> Callable[[], Any]:
    def run() -> Any:
        with sdpa_kernel(kind):
            return function()

    return run


def _rows(rows: int, columns: int, device: str) -> Iterator[Case]:
    x, residual = torch.randn(2, rows, columns, device=device, dtype=torch.bfloat16)
    weight, bias = torch.ones(2, columns, device=device, dtype=torch.bfloat16)
    bytes_of_x = x.numel() * x.element_size()
    yield Case(
        f"add_layer_norm {rows} x {columns} dropout",
        lambda: fastattn.add_layer_norm(x, residual, weight, bias, dropout_p=0.1),
        {"torch": lambda: F.layer_norm(residual + F.dropout(x, 0.1), (columns,), weight, bias)},
        bytes=3 * bytes_of_x,
    )
    yield Case(
        f"softmax {rows} x {columns}",
        lambda: fastattn.softmax(x),
        {"torch": lambda: torch.softmax(x, -1)},
        bytes=2 * bytes_of_x,
    )


def _cross_entropy(tokens: int, classes: int, device: str) -> Case:
    hidden = torch.randn(tokens, 1024, device=device, dtype=torch.bfloat16).requires_grad_()
    table = torch.randn(classes, 1024, device=device, dtype=torch.bfloat16).requires_grad_()
    target = torch.randint(classes, (tokens,), device=device)

    def ours() -> Any:
        loss = fastattn.linear_cross_entropy(hidden, table, target, label_smoothing=0.1)
        return torch.autograd.grad(loss, (hidden, table))

    def plain() -> Any:
        loss = F.cross_entropy(F.linear(hidden, table).float(), target, label_smoothing=0.1)
        return torch.autograd.grad(loss, (hidden, table))

    flops = 6 * tokens * classes * 1024
    return Case(f"linear_cross_entropy {tokens} x {classes}", ours, {"torch": plain}, flops=flops)


def measure(seconds: float) -> list[dict[str, Any]]:
    """A row a case: milliseconds and peak megabytes of ours and of each peer, rates, limits."""
    end, limits, rows = time.monotonic() + seconds, _limits(), []
    for case in cases():
        if time.monotonic() > end:
            rows.append({"case": case.name, "skipped": "no time left"})
            continue
        row: dict[str, Any] = {"case": case.name, "times": {}, "peak_mb": {}}
        able = {}
        for name, function in {"fastattn": case.ours, **case.peers}.items():
            try:
                row["peak_mb"][name] = _peak_megabytes(function)
                able[name] = function
            except RuntimeError as error:
                row["times"][name] = f"{error}".split("\n")[0]
        row["times"] |= {name: 1e3 * t for name, t in _alternate(able).items()}
        ours = row["times"]["fastattn"]
        if isinstance(ours, float):
            row["tflops"] = case.flops / ours / 1e9
            row["share_of_limit"] = max(
                case.flops / limits["flops"], case.bytes / limits["bytes"]
            ) / (1e-3 * ours)
        rows.append(row)
    return [{"limits": limits}, *rows]


def _peak_megabytes(function: Callable[[], Any]) -> float:
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def _alternate(functions: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Median seconds of each, after one call to warm up."""
    flushed = torch.empty(FLUSHED_BYTES, dtype=torch.uint8, device="cuda")
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(ROUNDS):
        for name, function in functions.items():
            flushed.zero_()
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            function()
            stop.record()
            stop.synchronize()
            times[name].append(1e-3 * start.elapsed_time(stop))
    return {name: statistics.median(found) for name, found in times.items()}


def _limits() -> dict[str, float]:
    """Bytes a second of a copy (read and written), flops a second of a bfloat16 product."""
    x = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    y = torch.empty_like(x)
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    times = _alternate({"copy": lambda: y.copy_(x), "product": lambda: a @ a})
    return {"bytes": 2 * x.numel() / times["copy"], "flops": 2 * 8192**3 / times["product"]}


def draw(rows: list[dict[str, Any]], out: Path) -> None:
    """gpu_speed.png: how many times faster than each peer."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    bars = [
        (f"{row['case']} / {name}", peer / row["times"]["fastattn"])
        for row in rows
        for name, peer in row.get("times", {}).items()
        if name != "fastattn" and isinstance(peer, float)
        and isinstance(row["times"].get("fastattn"), float)
    ]  # fmt: skip
    figure, axes = pyplot.subplots(figsize=(10, 1 + 0.22 * len(bars)))
    axes.barh([name for name, _ in bars], [ratio for _, ratio in bars])
    axes.axvline(1.0, color="black", linewidth=1)
    axes.invert_yaxis()
    axes.set_xlabel("times as fast as the peer")
    figure.tight_layout()
    figure.savefig(out / "gpu_speed.png")
    pyplot.close(figure)
