"""The ops' tests at every instruction-set level but the one that the other tests run on."""

from __future__ import annotations

import pytest

from fastattn import _native
from tests.native.builds import build, run_ops

if not _native.available():
    pytest.skip(str(_native.why_not_available()), allow_module_level=True)

OTHERS = [isa for isa in _native.isas_built() if isa != _native.isa()]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("isa", OTHERS)
def test_half_of_the_matrix(isa):
    run_ops(isa, one_in=2)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("isa", OTHERS)
def test_random_cases_as_well(isa):
    run_ops(isa, "-m", "not gpu")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_random_cases_without_any_extension():
    run_ops("generic", "-m", "not gpu", folder=build("generic", ("generic",)))
