"""MultiHeadAttention computes what torch's module does, over all arguments in pairs."""

from __future__ import annotations

import pytest

from fastattn.testing.pairwise import label, pairwise, sampled
from tests.nn.attention_cases import DEFAULTS, FACTORS, run_case

pytestmark = pytest.mark.filterwarnings("ignore:Support for mismatched")


def named(cases: list[dict]) -> list:
    return [pytest.param(case, id=f"{i}-{label(case, DEFAULTS)}") for i, case in enumerate(cases)]


@pytest.mark.parametrize("case", named(pairwise(FACTORS) + sampled(FACTORS, 200, seed=1)))
def test_matrix(case, backend):
    run_case(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", named(sampled(FACTORS, 2000)))
def test_more_of_the_matrix(case, backend):
    run_case(case)
