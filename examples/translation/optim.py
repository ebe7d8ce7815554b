"""The paper's optimizer and learning rate (section 5.3)."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from examples.translation.config import TrainingConfig


def learning_rate(step: int, d_model: int, warmup_steps: int, factor: float = 1.0) -> float:
    """factor * d_model^-0.5 * min(step^-0.5, step * warmup_steps^-1.5).

    The first update is step 1: step 0 would have rate 0 and waste a batch. Raises ValueError below.
    """
    if step < 1:
        raise ValueError(f"step must be at least 1, not {step}")
    return factor * d_model**-0.5 * min(step**-0.5, step * warmup_steps**-1.5)


def adam(parameters: Iterable[torch.nn.Parameter], config: TrainingConfig) -> torch.optim.Adam:
    """Adam(0.9, 0.98, 1e-9), one fused call for all parameters; its rate is set at every step."""
    return torch.optim.Adam(
        parameters,
        lr=0.0,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_eps,
        fused=True,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
