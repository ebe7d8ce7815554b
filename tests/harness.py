"""How tests run a function on a named backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fastattn import use_backend
from fastattn.testing import why_not


def run_on(backend: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The call on ``backend``; skips the test if the backend itself declines."""
    reason = why_not(backend, function, *args, **kwargs)
    if reason is not None:
        pytest.skip(reason)
    with use_backend(backend):
        return function(*args, **kwargs)
