"""Memory that shows what was never written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Within it, every uninitialised floating tensor (torch.empty, x.new_empty, ...) holds NaN."""
    settings: Any = torch.utils.deterministic
    before = (
        settings.fill_uninitialized_memory,
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    settings.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        settings.fill_uninitialized_memory = before[0]
        torch.use_deterministic_algorithms(before[1], warn_only=before[2])
