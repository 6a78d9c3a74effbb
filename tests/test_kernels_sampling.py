"""Draws and sums of exponentials over rows of scores, against torch's."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import DEVICE, load

kernels = load()
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's way to infinity and NaN
WIDTHS = [1, 7, 300, 4096, 4097, 9000]


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def chances(rows: int, seed: int = 1) -> torch.Tensor:
    made = torch.rand(rows, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    made[:2] = torch.tensor([0.0, 1 - 2.0**-48])[:rows]
    return made.to(DEVICE)


def spans(scores: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Between which numbers each token is drawn, in doubles."""
    shares = scores.double().softmax(-1)
    ends = shares.cumsum(-1).gather(1, tokens[:, None])[:, 0]
    return ends - shares.gather(1, tokens[:, None])[:, 0], ends


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
def test_draw(width: int, cut: bool) -> None:
    """Each token has its share of the numbers from 0 to 1, in order; one that was cut is never drawn."""
    scores = noise(9, width)
    if cut:
        scores = scores.masked_fill(noise(9, width, seed=2) < 2, -torch.inf)
        scores[:, -1] = 0.5
    at = chances(9)
    tokens = kernels.draw(scores, at)
    begin, end = spans(scores, tokens)
    assert bool(((begin <= at + 1e-6) & (at <= end + 1e-6)).all())
    assert bool((scores.gather(1, tokens[:, None]) > -torch.inf).all())


def test_a_draw_depends_on_its_row_alone() -> None:
    """C35: on the scores and the number, not on other rows or where they lie."""
    scores, at = noise(6, 5000), chances(6)
    together = kernels.draw(scores, at)
    wide = torch.full((6, 5008), torch.inf, device=DEVICE)
    wide[:, :5000] = scores
    assert torch.equal(kernels.draw(wide[:, :5000], at), together)
    for row in range(6):
        assert torch.equal(kernels.draw(scores[row : row + 1], at[row : row + 1]), together[row : row + 1])


@pytest.mark.parametrize("trouble", [float("nan"), float("inf"), None])
@pytest.mark.parametrize("place", [0, 4999])
def test_rows_without_a_token(trouble: float | None, place: int) -> None:
    """The answer is outside of the vocabulary; other rows have theirs."""
    scores, at = noise(3, 5000), chances(3)
    right = kernels.draw(scores, at)
    if trouble is None:
        scores[1] = -torch.inf
    else:
        scores[1, place] = trouble
    found = kernels.draw(scores, at)
    assert found.tolist() == [right[0].item(), 5000, right[2].item()]


@pytest.mark.parametrize("width", WIDTHS)
def test_logsumexp(width: int) -> None:
    scores = noise(5, width) + 20
    scores[1] = -torch.inf
    scores[1, -1] = -3.0
    scores[2, :-1] -= 60.0
    top, rest = kernels.logsumexp(scores)
    assert torch.equal(top, scores.amax(1))
    right = (scores.double() - top.double()[:, None]).logsumexp(1)
    torch.testing.assert_close(rest.double(), right, rtol=1e-5, atol=1e-6)
    assert bool((rest >= 0).all())  # no logprob is above zero


def test_logsumexp_of_nothing_and_of_nan() -> None:
    scores = torch.stack([torch.full((10,), -torch.inf), torch.zeros(10), torch.zeros(10)]).to(DEVICE)
    scores[2, 3] = torch.nan
    found = kernels.logsumexp(scores).sum(0)
    assert found[0] == -torch.inf
    assert found[1].item() == pytest.approx(2.302585)
    assert bool(found[2].isnan())


def test_wrong_arguments_are_refused() -> None:
    scores = noise(3, 8)
    with pytest.raises(ValueError, match=r"expected float32 \[rows, width\] with rows in one piece, got"):
        kernels.logsumexp(scores.half())
    with pytest.raises(ValueError, match="with strides"):
        kernels.draw(scores.t(), chances(8))
    with pytest.raises(ValueError, match=r"Invalid at: expected float64 \[3\], got torch.float32 \[3\]"):
        kernels.draw(scores, chances(3).float())
    assert kernels.draw(scores[:0], chances(0)).shape == (0,)
