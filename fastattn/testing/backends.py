"""Which backends a test runs on: every one registered, less those whose own ``why_not`` says no."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fastattn
from fastattn import _dispatch


def backends(op: str) -> tuple[str, ...]:
    """The names of the backends registered for ``op``, those for a machine's own devices first."""
    return tuple(_dispatch._ops[op])


def why_not(backend: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> str | None:
    """What ``backend`` itself says against running the call; None if nothing."""
    return fastattn.explain(function, *args, **kwargs).reasons[backend]
