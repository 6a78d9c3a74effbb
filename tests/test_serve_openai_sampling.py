"""Options of a body as those of the engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("fastapi")

from serving import Served, generated, ids, serving, text


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving() as made:
        yield made


def test_draws_are_those_of_their_seed(served: Served) -> None:
    options = {"max_tokens": 12, "temperature": 0.9, "top_p": 0.9, "top_k": 30, "seed": 7, "n": 3}
    found = served.complete("The owl", **options, return_token_ids=True)
    again = served.complete("The owl", **options, return_token_ids=True)
    tokens = [choice["token_ids"] for choice in found["choices"]]
    assert tokens == [choice["token_ids"] for choice in again["choices"]]
    engine = served.engine
    output = engine.submit(
        ids("The owl"), max_new_tokens=12, do_sample=True, temperature=0.9, top_p=0.9, top_k=30, seed=7,
        num_return_sequences=3,
    ).result(60)  # fmt: skip
    assert tokens == [sequence.token_ids for sequence in output.sequences]
    assert len(set(map(tuple, tokens))) > 1


def test_without_a_temperature_tokens_are_drawn_from_all(served: Served) -> None:
    """As in OpenAI's API: temperature 1, and no top_k of transformers' own."""
    options = {"prompt": "The", "max_tokens": 30, "seed": 3, "return_token_ids": True}
    found = served.post("/v1/completions", options).json()["choices"][0]["token_ids"]
    output = served.engine.submit(
        ids("The"), max_new_tokens=30, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, seed=3
    ).result(60)
    assert found == output.sequences[0].token_ids


def test_penalties_and_biases(served: Served) -> None:
    """A biased token comes at once; penalties keep it from coming again."""
    always = {"logit_bias": {"50": 100}, "max_tokens": 6, "return_token_ids": True}
    assert served.complete("The fox", **always)["choices"][0]["token_ids"] == [50] * 6
    for name in ("presence_penalty", "frequency_penalty"):
        once = {
            "logit_bias": {"50": 10, "51": 9.9, "52": 9.8},
            "max_tokens": 3,
            "return_token_ids": True,
            name: 2.0,
        }
        assert len(set(served.complete("The fox", **once)["choices"][0]["token_ids"])) == 3
    found = served.complete("The fox", max_tokens=12, repetition_penalty=1.3, return_token_ids=True)
    assert [found["choices"][0]["token_ids"]] == generated(
        "The fox", max_new_tokens=12, repetition_penalty=1.3
    )


def test_usual_options_are_the_engines(served: Served) -> None:
    """Penalties, biases and stop strings have the answers of `submit()`, and none runs for its request
    alone.
    """
    before = served.engine.stats()["slow_processors"]
    common = {"presence_penalty": 0.5, "frequency_penalty": 0.75, "stop": ["zq", "ery wo"]}
    found = served.complete(
        "The fox", max_tokens=40, logit_bias={"50": -3}, min_tokens=3, return_token_ids=True, **common
    )
    output = served.engine.submit(
        ids("The fox"),
        max_new_tokens=40,
        do_sample=False,
        logit_bias={50: -3},
        min_new_tokens=3,
        **{**common, "stop": None},
    ).result(60)
    wanted = output.sequences[0].token_ids
    full = text(wanted)
    choice = found["choices"][0]
    assert "ery wo" in full
    assert (choice["text"], choice["finish_reason"]) == (full[: full.index("ery wo")], "stop")
    assert choice["token_ids"] == wanted[: len(choice["token_ids"])]
    assert served.engine.stats()["slow_processors"] == before
