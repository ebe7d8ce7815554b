"""``fastattn.diagnose``: what the attention in a call sees and gives, for a person to read."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fastattn._dispatch import select
from fastattn.ops.attention.reference import AttentionConfig, visible

_TENSORS = 6
_ROWS, _COLUMNS = 32, 64


@dataclass(frozen=True)
class AttentionReport:
    """One call of attention. Shares are from 0 to 1; entropy is in nats.

    Attributes:
        name: the module that was running, "" for the outermost.
        backend: which ran it.
        query, key, value, mask: described.
        scale: of the scores, and ``head_dim`` the width of query and key it mostly comes from.
        seen: bool [B, H, Lq, Lk], the keys that all masks together leave to each query.
        empty_rows: share of the rows that may attend to nothing.
        unseen_keys: share of the keys that no query sees.
        scores: least and largest among those seen; NaN without any.
        entropy: per head, the mean over its rows that see a key, and ``entropy_limit`` what it
            would be if each row were uniform.
        output_rms, output_max: of the finite elements.
        not_finite: elements of the output that are NaN or infinite.
    """

    name: str
    backend: str
    query: str
    key: str
    value: str
    mask: str
    scale: float
    head_dim: int
    seen: Tensor
    empty_rows: float
    unseen_keys: float
    scores: tuple[float, float]
    entropy: tuple[float, ...]
    entropy_limit: float
    output_rms: float
    output_max: float
    not_finite: int

    def __str__(self) -> str:
        usual = 1.0 / math.sqrt(self.head_dim) if self.head_dim else 1.0
        is_usual = math.isclose(self.scale, usual, rel_tol=1e-6)
        why = f"1 / sqrt({self.head_dim}), the width of query and key"
        lines = [
            f"{self.name or 'attention'}: backend {self.backend}",
            f"  query {self.query}, key {self.key}, value {self.value}",
            f"  scale {self.scale:.6g}: " + (why if is_usual else f"given; {why} is {usual:.6g}"),
            f"  mask {self.mask}; batch 0, head 0, # is seen:",
            *("    " + line for line in _picture(self.seen)),
            f"  rows that see nothing {self.empty_rows:.1%}, keys that no query sees "
            f"{self.unseen_keys:.1%}, pairs seen {_mean(self.seen):.1%}",
            f"  scores from {self.scores[0]:.4g} to {self.scores[1]:.4g}",
            f"  entropy of each head's weights {', '.join(f'{x:.3g}' for x in self.entropy)} "
            f"(uniform: {self.entropy_limit:.3g} nats)",
            f"  output rms {self.output_rms:.4g}, largest {self.output_max:.4g}, "
            f"not finite {self.not_finite}",
        ]
        return "\n".join(lines)


@dataclass(frozen=True)
class Diagnosis:
    """The calls of attention that ``diagnose`` saw, in order; ``print`` it."""

    reports: tuple[AttentionReport, ...]

    def __str__(self) -> str:
        return "\n".join(str(report) for report in self.reports)


class _Watch(TorchDispatchMode):
    """Remembers every attention with the name of the module that was running."""

    def __init__(self, running: list[str]) -> None:
        super().__init__()
        self.running = running
        self.reports: list[AttentionReport] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.fastattn.attention.default:
            self.reports.append(_report(self.running[-1] if self.running else "", args, result[0]))
        return result


def diagnose(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Diagnosis:
    """Run ``function(*args, **kwargs)`` without gradients and look at every attention in it.

    Each call of attention is described by the mask as the kernel sees it, all of ``attn_mask``,
    padding, causal and window together, drawn as text; the scale and where it comes from; rows and
    keys that nothing reaches; the sizes of scores and output; the entropy of each head. Needs the
    memory of all scores. Packed attention (``varlen_attention``) is not described.

    Args:
        function: a module or a function.

    Returns:
        A ``Diagnosis``: ``print`` it, or read ``.reports``.

    Raises:
        TypeError: if ``function`` can't be called.
        ValueError: if it called no attention of fastattn.
    """
    if not callable(function):
        raise TypeError(
            f"function is a {type(function).__name__}; a module or function is accepted"
        )
    running: list[str] = []
    watch = _Watch(running)
    with torch.no_grad(), _named(function, running), watch:
        function(*args, **kwargs)
    if not watch.reports:
        raise ValueError(
            "diagnose: the function given called no attention of fastattn; "
            "fastattn.replace_attention or fastattn.patch_sdpa brings it into a model"
        )
    return Diagnosis(tuple(watch.reports))


@contextmanager
def _named(function: Callable[..., Any], running: list[str]) -> Iterator[None]:
    """``running`` holds the names of the modules within ``function`` that are running."""
    handles = []
    if isinstance(function, nn.Module):
        for name, module in function.named_modules():
            handles += [
                module.register_forward_pre_hook(lambda *_, name=name: running.append(name)),
                module.register_forward_hook(lambda *_: running.pop() and None, always_call=True),
            ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _report(name: str, args: tuple[Any, ...], output: Tensor) -> AttentionReport:
    query, key, value, attn_mask, padding, _ = inputs = args[:_TENSORS]
    cfg = AttentionConfig(*args[_TENSORS:-1])
    seen = _seen(query, key, attn_mask, padding, cfg)
    scores, weights = _scores(query, key, attn_mask, seen, cfg.scale)
    rows = seen.any(-1)
    entropy = -torch.xlogy(weights, weights).sum(-1)
    finite = output[output.isfinite()].double()
    shown = scores[seen]
    return AttentionReport(
        name=name,
        backend=select("attention", query.device, args[-1], *inputs, cfg).name,
        query=_describe(query),
        key=_describe(key),
        value=_describe(value),
        mask=_describe_mask(attn_mask, padding, cfg),
        scale=cfg.scale,
        head_dim=query.shape[-1],
        seen=seen,
        empty_rows=1.0 - _mean(rows),
        unseen_keys=1.0 - _mean(seen.any(-2)),
        scores=(shown.min().item(), shown.max().item()) if shown.numel() else (math.nan,) * 2,
        entropy=tuple(
            head[alive].mean().item()
            for head, alive in zip(entropy.unbind(1), rows.unbind(1), strict=True)
        ),
        entropy_limit=seen.sum(-1)[rows].double().log().mean().item(),
        output_rms=finite.square().mean().sqrt().item() if finite.numel() else math.nan,
        output_max=finite.abs().max().item() if finite.numel() else math.nan,
        not_finite=output.numel() - finite.numel(),
    )


def _seen(
    query: Tensor, key: Tensor, mask: Tensor | None, padding: Tensor | None, cfg: AttentionConfig
) -> Tensor:
    (batch, heads, q_len, _), kv_len = query.shape, key.shape[2]
    seen = torch.ones(batch, heads, q_len, kv_len, dtype=torch.bool, device=query.device)
    band = visible(q_len, kv_len, cfg, query.device)
    seen = seen if band is None else seen & band
    if mask is not None:
        seen = seen & (mask if mask.dtype == torch.bool else mask != float("-inf"))
    return seen if padding is None else seen & ~padding[:, None, None, :]


def _scores(
    query: Tensor, key: Tensor, mask: Tensor | None, seen: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Scores with the mask's bias, -inf where unseen, and their softmax, 0 where unseen."""
    keys = key.repeat_interleave(query.shape[1] // max(key.shape[1], 1), 1)
    scores = query.double() @ keys.double().transpose(-1, -2) * scale
    if mask is not None and mask.dtype != torch.bool:
        scores = scores + mask
    scores = scores.masked_fill(~seen, float("-inf"))
    return scores, scores.softmax(-1).masked_fill(~seen, 0.0)


def _describe(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}"


def _describe_mask(mask: Tensor | None, padding: Tensor | None, cfg: AttentionConfig) -> str:
    parts = [] if mask is None else [f"attn_mask {_describe(mask)}"]
    parts += [] if padding is None else [f"padding {tuple(padding.shape)}"]
    parts += ["causal"] if cfg.is_causal else []
    windowed = cfg.window_left >= 0 or cfg.window_right >= 0
    parts += [f"window ({cfg.window_left}, {cfg.window_right})"] if windowed else []
    if cfg.bottom_right and (cfg.is_causal or windowed):
        parts.append("from the bottom right")
    return ", ".join(parts) or "none"


def _mean(x: Tensor) -> float:
    return x.double().mean().item() if x.numel() else 1.0


def _picture(seen: Tensor) -> list[str]:
    """Of the first batch and head, every n-th row and column where they are many."""
    if seen.numel() == 0:
        return ["(empty)"]
    page = seen[0, 0]
    steps = [-(-size // most) for size, most in zip(page.shape, (_ROWS, _COLUMNS), strict=True)]
    rows = page[:: steps[0], :: steps[1]].tolist()
    lines = ["".join("#" if x else "." for x in row) for row in rows]
    if steps != [1, 1]:
        lines.append(f"(every {steps[0]}. row, every {steps[1]}. column)")
    return lines
