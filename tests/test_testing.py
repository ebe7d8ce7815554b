"""The testing kit fails what it should fail; every other numerical test leans on that."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch

from fastattn.testing import LAYOUTS, Inputs, check, check_all, poisoned_memory, with_layout
from fastattn.testing.pairwise import label, pairwise, sampled
from fastattn.testing.tolerances import FLOORS

EXACT = torch.linspace(-2, 2, 9, dtype=torch.float64)
INF = float("inf")


def off_by(error: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (EXACT + error).to(dtype)


def test_twice_the_peers_error_passes_and_more_does_not():
    check("x", off_by(1.9e-3), EXACT, off_by(1e-3))
    with pytest.raises(AssertionError, match=r"^x: error 0.0021 > 0.002"):
        check("x", off_by(2.1e-3), EXACT, off_by(1e-3))


@pytest.mark.parametrize("dtype", FLOORS, ids=str)
def test_without_a_peer_the_floor_alone_is_allowed(dtype):
    allowed = FLOORS[dtype].epsilons * torch.finfo(dtype).eps * 2
    exact = torch.full((3,), 2.0, dtype=torch.float64)
    check("x", (exact - allowed * 0.9).to(dtype), exact)
    with pytest.raises(AssertionError, match="x: error"):
        check("x", (exact - allowed * 1.6).to(dtype), exact)
    assert FLOORS[dtype].reason


def test_the_size_of_what_cancels_raises_the_floor():
    zero = torch.zeros(3, dtype=torch.float64)
    noise = torch.full((3,), 1e-4)
    check("x", noise, zero, size=100.0)
    with pytest.raises(AssertionError, match="x: error"):
        check("x", noise, zero)


@pytest.mark.parametrize("bad", [float("nan"), INF, -INF])
def test_what_is_not_finite_never_passes_for_a_number(bad):
    got = EXACT.float()
    got[4] = bad
    with pytest.raises(AssertionError, match=r"x: 1 of 9 not finite or wrongly so; at \[4\]"):
        check("x", got, EXACT, torch.full((9,), bad))


@pytest.mark.parametrize("wrong", [0.0, INF, float("nan"), -1e38])
def test_an_infinity_must_be_that_infinity(wrong):
    exact = torch.tensor([1.0, -INF], dtype=torch.float64)
    check("x", exact.float(), exact)
    with pytest.raises(AssertionError, match="x: 1 of 2 not finite or wrongly so"):
        check("x", torch.tensor([1.0, wrong]), exact)


def test_a_peer_that_overflows_excuses_nothing():
    with pytest.raises(AssertionError, match="x: error"):
        check("x", off_by(1e-2), EXACT, torch.full((9,), INF))


def test_shapes_and_absence_count():
    with pytest.raises(AssertionError, match=r"x: shape \(9, 1\), not \(9,\)"):
        check("x", EXACT.float()[:, None], EXACT)
    with pytest.raises(AssertionError, match=r"x: got None, expected a tensor \(9,\)"):
        check("x", None, EXACT)
    with pytest.raises(AssertionError, match=r"x: got a tensor \(9,\), expected None"):
        check("x", EXACT, None)
    check("x", None, None)
    check("x", torch.zeros(0), torch.zeros(0))


def test_all_failures_are_told_together_by_name():
    with pytest.raises(AssertionError) as caught:
        check_all(("dq", "dk", "dv"), (off_by(1), off_by(0), off_by(2)), (EXACT,) * 3, (None,) * 3)
    lines = str(caught.value).splitlines()
    assert [line.split(":")[0] for line in lines] == ["dq", "dv"]


def test_poisoned_memory_is_nan_within_and_leaves_no_trace():
    before = torch.are_deterministic_algorithms_enabled()
    like = torch.zeros(4, dtype=torch.bfloat16)
    with poisoned_memory():
        made = [torch.empty(4), torch.empty_like(like), like.new_empty(4)]
        made += [torch.empty_strided((2, 2), (1, 2)), torch.empty(4, dtype=torch.float16)]
        assert all(x.isnan().all() for x in made)
        assert torch.are_deterministic_algorithms_enabled()
    assert torch.are_deterministic_algorithms_enabled() == before


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(2, 3, 4), (5,), (1, 1), (), (0, 3), (3, 0)], ids=str)
def test_layouts_keep_values_and_change_strides(layout, shape):
    x = Inputs().normal(*shape)
    found = with_layout(x, layout)
    assert found.shape == x.shape
    if layout == "expanded" and x.numel() > 1:
        assert 0 in found.stride()
    else:
        assert torch.equal(found, x)
    if shape == (2, 3, 4):
        assert found.is_contiguous() == (layout == "contiguous")


def test_inputs_are_the_same_in_every_run():
    first, second = Inputs(3), Inputs(3)
    assert torch.equal(first.normal(5), second.normal(5))
    assert torch.equal(first.rng_state(), second.rng_state())
    assert not torch.equal(Inputs(3).normal(5), Inputs(4).normal(5))


def test_pairwise_meets_every_pair_with_few_cases():
    factors = {"a": range(5), "b": "xyz", "c": (True, False), "d": (None, 1, 2, 3)}
    cases = pairwise(factors)
    for one, other in combinations(factors, 2):
        met = {(case[one], case[other]) for case in cases}
        assert met == {(x, y) for x in factors[one] for y in factors[other]}
    assert 20 <= len(cases) <= 30 and cases == pairwise(factors)
    assert len(sampled(factors, 7)) == 7 and sampled(factors, 7) == sampled(factors, 7)


def test_labels_tell_what_is_not_the_default():
    defaults = {"shape": (1, 2), "p": 0.0, "dtype": torch.float32}
    case = {"shape": (3, 4), "p": 0.0, "dtype": torch.bfloat16}
    assert label(case, defaults) == "3x4-bfloat16" and label(defaults, defaults) == "plain"
