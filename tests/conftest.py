from __future__ import annotations

import pytest

import fastattn

CPU_BACKENDS = ("reference", "auto")  # each has to run every call of a module on a CPU


@pytest.fixture(params=CPU_BACKENDS)
def backend(request):
    """The test runs once on each backend; "auto" is what a user gets."""
    with fastattn.use_backend(request.param):
        yield request.param
