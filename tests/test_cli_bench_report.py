"""The report of hf-paged bench: medians, and both directions."""

from __future__ import annotations

import pytest

from hf_paged.cli.bench_report import WHO, Speed, beside, draw, quantiles, table


def test_speeds() -> None:
    speed = Speed.of("ragged", 2, WHO[0], 5, 4.0, [[1.0, 1.5, 2.0], [2.0, 4.0]])
    assert speed.tokens_per_second == 5 / 4
    assert speed.first_token == {"p50": 2000.0, "p99": 2000.0}
    assert speed.between_tokens is not None
    assert speed.between_tokens["p99"] == 2000.0
    assert Speed.of("beams", 4, WHO[0], 5, 4.0, [])[-2:] == (None, None)
    assert Speed.of("equal", 1, WHO[0], 1, 4.0, [[1.0]]).between_tokens is None
    hundred = quantiles([0.001 * i for i in range(1, 101)])
    assert hundred == {"p50": pytest.approx(51), "p99": pytest.approx(100)}


@pytest.mark.parametrize(
    ("ours", "stock", "more", "said"),
    [
        ([20.0, 22.0, 30.0], [10.0, 10.0, 10.0], True, "2.20 x faster"),
        ([10.0, 10.0, 10.0], [20.0, 22.0, 30.0], True, "2.20 x slower"),
        ([10.0, 10.0, 10.0], [20.0, 22.0, 30.0], False, "2.20 x faster"),
        ([11.0, 12.0, 9.0], [10.0, 10.0, 10.0], True, "level"),
        ([11.0, 12.0, 13.0, 14.0, 9.0], [10.0] * 5, True, "1.20 x faster"),
        ([10.01], [10.0], True, "level"),
        ([10.5], [10.0], False, "1.05 x slower"),
    ],
)
def test_both_directions(ours: list[float], stock: list[float], more: bool, said: str) -> None:
    """By the median of the turns; level where less than three quarters agree."""
    assert beside(ours, stock, more) == said


def test_what_was_not_timed_has_no_line() -> None:
    """Beams have tokens a second alone; paged generate() has no times of tokens."""
    found = [
        Speed.of("equal", 2, WHO[0], 100, 1.0, [[0.5, 1.0]]),
        Speed.of("equal", 2, WHO[1], 100, 1.25, []),
        Speed.of("equal", 2, WHO[2], 100, 0.5, [[0.25, 0.5]]),
        *(Speed.of("beams", 4, who, 10, 1.0, []) for who in WHO),
    ]
    lines = table(found)
    assert [line.split() for line in lines[1:3]] == [
        [
            "equal,",
            "batch",
            "of",
            "2",
            "100.0",
            "80.0",
            "1.25",
            "x",
            "slower",
            "200.0",
            "2.00",
            "x",
            "faster",
        ],
        ["beams,", "batch", "of", "4", "10.0", "10.0", "level", "10.0", "level"],
    ]
    assert sum("beams" in line for line in lines) == 1
    first = next(i for i, line in enumerate(lines) if line.startswith("first token, median"))
    assert lines[first + 1].split()[4:] == ["500.0", "250.0", "2.00", "x", "faster"]
    picture = draw(found, ["conditions <here>"])
    assert "conditions &lt;here&gt;" in picture
    assert "200.0 (2.00 x faster)" in picture
