"""The attraction of a pair, against the formula."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mctf.core.criteria import TINY, Criteria, attraction, unit_rows

temperatures = st.one_of(st.just(0.0), st.just(1.0), st.floats(0.01, 3))


@settings(max_examples=50)
@given(
    taus=st.builds(Criteria, tau_sim=temperatures, tau_info=temperatures, tau_size=temperatures),
    tokens=st.integers(4, 12),
    protected=st.integers(0, 2),
    sized=st.booleans(),
)
def test_attraction_is_the_product_of_three(taus: Criteria, tokens: int, protected: int, sized: bool) -> None:
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(2, tokens, 5, generator=generator, dtype=torch.float64)
    a = torch.rand(2, tokens, generator=generator, dtype=torch.float64) + 0.01
    s = torch.randint(1, 5, (2, tokens), generator=generator).double()
    found = attraction(x, a, s if sized else None, taus, protected=protected)
    even = [i for i in range(0, tokens, 2) if i >= protected]
    odd = [j for j in range(1, tokens, 2) if j >= protected]
    assert found.shape == (2, len(even), len(odd))
    for image in range(2):
        for row, i in enumerate(even):
            for column, j in enumerate(odd):
                cosine = torch.cosine_similarity(x[image, i], x[image, j], dim=0).item()
                expected = ((cosine + 1) / 2) ** taus.tau_sim
                expected *= (1 / (a[image, i] * a[image, j]).item()) ** taus.tau_info
                if sized:
                    expected *= (1 / (s[image, i] * s[image, j]).item()) ** taus.tau_size
                assert found[image, row, column].item() == pytest.approx(expected, rel=1e-6)


def test_a_pair_nobody_looks_at_attracts_most() -> None:
    x = torch.ones(1, 4, 3)
    a = torch.tensor([[0.4, 0.4, 0.0, 0.2]])  # token 2 underflowed
    found = attraction(x, a, None, Criteria(), protected=0)
    assert found.isfinite().all()
    assert found.argmax() == 3  # tokens 2 and 3
    assert found[0, 1, 1].item() == pytest.approx((1 / (TINY * 0.2)) ** (1 / 20), rel=1e-4)


def test_opposite_tokens_do_not_attract() -> None:
    x = torch.tensor([[[1.0, 0.0], [-1.0, 0.0], [1.0, 1e-9], [1.0, 0.0]]])
    for tau in (0.5, 1.0, 3.0):
        found = attraction(x, torch.ones(1, 4), None, Criteria(tau_sim=tau), protected=0)
        assert found.isfinite().all()
        torch.testing.assert_close(found[0], torch.tensor([[0.0, 1.0], [0.0, 1.0]]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_scores_have_at_least_the_precision_of_float32(dtype: torch.dtype) -> None:
    x = torch.randn(1, 6, 4).to(dtype)
    expected = torch.float64 if dtype == torch.float64 else torch.float32
    assert unit_rows(x).dtype == expected
    assert attraction(x, torch.ones(1, 6), None, Criteria(), protected=1).dtype == expected


def test_unit_rows() -> None:
    x = torch.tensor([[[3.0, 4.0], [0.0, 0.0], [1e-8, 0.0], [1e15, 1e15]]])
    half = math.sqrt(0.5)
    torch.testing.assert_close(unit_rows(x)[0], torch.tensor([[0.6, 0.8], [0.0, 0.0], [1.0, 0.0], [half, half]]))
