"""Whatever users bring along raises in its own request only: tokenizers, processors, criteria, and what these do to the engine (C34)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_engine_exact import PROMPTS, alone, answers
from test_engine_trouble import GREEDY, Does, Fails, assert_neighbours_unharmed, neighbours
from transformers import LogitsProcessor

from hf_paged.engine import Engine


class Tokenizer:
    """Reads numbers, and raises at answers that begin with some token, as often as it is told to."""

    def __init__(self, sore: int, error: BaseException | None = None, times: int = 1000) -> None:
        self.sore, self.error, self.left = sore, error or LookupError("unreadable"), times

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        if tokens[:1] == [self.sore] and self.left:
            self.left -= 1
            raise self.error
        return " ".join(map(str, tokens)) + " "


def readers(model: Any, ahead: bool = False, **trouble: Any) -> Engine:
    """An engine whose tokenizer raises at the answers to PROMPTS[4], and at nobody else's."""
    said = [alone(model, prompt, **GREEDY)[0] for prompt in PROMPTS[:5]]
    assert said[4][0] not in [answer[0] for answer in said[:4]]
    options = {"block_size": 4, "num_blocks": 60, "max_batch_tokens": 24, "max_batch_sequences": 8, "run_ahead": ahead}
    return Engine(model, Tokenizer(said[4][0], **trouble), **options)


PLAIN = {"max_new_tokens": 9, "do_sample": False}


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("kind", [{}, {"bad_words_ids": None}, {"num_beams": 2}, {"num_beams": 2, "num_return_sequences": 2}])
def test_a_tokenizer_that_raises_at_an_answer(model: Any, kind: dict[str, Any], ahead: bool) -> None:
    """The request ends as an error, with its tokens and without their text; the step that ends it is everybody's and goes on."""
    engine = readers(model, ahead)
    handles = neighbours(engine)
    plain = engine.submit(PROMPTS[3], **PLAIN)
    bad = engine.submit(PROMPTS[4], **{**GREEDY, **kind})
    expected = alone(model, PROMPTS[4], **{**GREEDY, **kind})
    output = bad.result()
    assert (output.finish_reason, str(output.error)) == ("error", "unreadable")
    assert [sequence.token_ids for sequence in output.sequences] == expected
    sore = [tokens[0] == engine.tokenizer.sore for tokens in expected]
    assert any(sore)
    assert [sequence.finish_reason == "error" for sequence in output.sequences] == sore
    assert [sequence.text == "" for sequence in output.sequences] == sore
    for handle in [plain, *handles]:
        assert handle.result().text.split() == [str(token) for token in handle.result().sequences[0].token_ids]
    assert answers(plain.result()) == alone(model, PROMPTS[3], **PLAIN)
    assert_neighbours_unharmed(engine, handles)


@pytest.mark.parametrize("thread", [False, True])
def test_a_tokenizer_that_raises_while_somebody_reads(model: Any, thread: bool) -> None:
    """Whoever reads gets the tokens that are there, then the end: the trouble is the request's, not the reader's."""
    engine = readers(model)
    handles = neighbours(engine)
    bad = engine.submit(PROMPTS[4], **{**GREEDY, "max_new_tokens": 30})
    if thread:
        engine.start()
    increments = list(bad)
    assert {increment.text for increment in increments} == {""}
    assert [increment.finish_reason for increment in increments] == [None] * (len(increments) - 1) + ["error"]
    tokens = [token for increment in increments for token in increment.token_ids]
    assert tokens
    assert thread or len(tokens) < 9  # who drives by reading hears of it at once
    assert tokens == bad.result().sequences[0].token_ids
    assert tokens == alone(model, PROMPTS[4], **{**GREEDY, "max_new_tokens": 30})[0][: len(tokens)]
    assert str(bad.result().error) == "unreadable"
    assert_neighbours_unharmed(engine, handles)
    engine.stop()
    late = engine.submit(PROMPTS[4], **GREEDY)
    late.cancel()
    assert (late.result().finish_reason, late.result().error) == ("abort", None)  # of nothing there is nothing to read
    engine.close()


def test_a_tokenizer_that_is_interrupted(model: Any) -> None:
    """Ctrl-C while an answer is read reaches the caller once, and the request ends with it: its tokens are there, its text is not."""
    engine = readers(model, error=KeyboardInterrupt(), times=1)
    handles = neighbours(engine)
    own = engine.submit(PROMPTS[4], **GREEDY)
    with pytest.raises(KeyboardInterrupt):
        own.result()
    engine.check()
    assert (own.result().finish_reason, own.result().text, type(own.result().error)) == ("error", "", KeyboardInterrupt)
    assert [own.result().sequences[0].token_ids] == alone(model, PROMPTS[4], **GREEDY)
    assert_neighbours_unharmed(engine, handles)


@pytest.mark.parametrize("kind", [{}, {"num_beams": 2}, {"do_sample": True}])
def test_scores_of_another_shape(engine: Engine, kind: dict[str, Any]) -> None:
    """A token beyond the vocabulary would break the next forward, and on a GPU everybody's."""

    class Wider(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            return torch.cat([scores, scores + 100], 1)

    handles = neighbours(engine)
    output = engine.submit(PROMPTS[4], **{**GREEDY, **kind, "logits_processor": [Wider()]}).result()
    assert "must keep the shape" in str(output.error)
    assert_neighbours_unharmed(engine, handles)


@pytest.mark.parametrize("kind", [{}, {"repetition_penalty": 1.2}], ids=["plain", "processed"])
@pytest.mark.parametrize("ahead", [False, True])
def test_a_temperature_that_makes_everything_infinite(model: Any, kind: dict[str, Any], ahead: bool) -> None:
    """Nothing can be drawn from that: no token beyond the vocabulary is."""
    with Engine(model, block_size=4, num_blocks=60, max_batch_tokens=24, max_batch_sequences=8, run_ahead=ahead) as engine:
        handles = neighbours(engine)
        output = engine.submit(PROMPTS[4], do_sample=True, temperature=1e-43, max_new_tokens=4, **kind).result()
        assert output.finish_reason == "error"
        assert not output.sequences[0].token_ids
        assert_neighbours_unharmed(engine, handles)


@pytest.mark.parametrize("where", ["logits_processor", "stopping_criteria"])
def test_what_is_run_for_a_request_tracks_no_gradients(engine: Engine, where: str) -> None:
    """As in generate()."""
    seen: list[bool] = []

    class Looks(Fails):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            seen.append(torch.is_grad_enabled())
            return super().__call__(*args, **kwargs)

    engine.submit(PROMPTS[4], **{**GREEDY, where: [Looks(99, ValueError())]}).result()
    assert set(seen) == {False}


def test_the_engine_is_not_paused_from_within(engine: Engine) -> None:
    handles = neighbours(engine)
    output = engine.submit(PROMPTS[4], max_new_tokens=4, stopping_criteria=[Does(engine.pause)]).result()
    assert "must not pause" in str(output.error)
    assert_neighbours_unharmed(engine, handles)


def test_closing_from_within_a_step_waits_for_its_end(engine: Engine) -> None:
    handles = neighbours(engine)
    own = engine.submit(PROMPTS[4], max_new_tokens=4, do_sample=False, stopping_criteria=[Does(engine.close)])
    assert own.result().finish_reason == "abort"
    assert len(own.result().sequences[0].token_ids) == 1
    assert [handle.result().finish_reason for handle in handles] == ["abort"] * 3
    with pytest.raises(RuntimeError, match="closed"):
        engine.step()


@pytest.mark.parametrize("kind", [{}, {"num_beams": 2}])
def test_who_comes_and_goes_in_the_middle_of_a_step(engine: Engine, kind: dict[str, Any]) -> None:
    """From a criterion, as a finalizer might do it anywhere: the books learn of it between two steps."""
    handles = neighbours(engine)
    inner: list[Any] = []

    def act() -> None:
        waiting = engine.stats()["waiting"]
        inner.append(engine.submit(PROMPTS[0], **GREEDY))
        inner.append(engine.submit(PROMPTS[1], **GREEDY))
        inner[-1].cancel()
        assert engine.stats()["waiting"] == waiting

    own = engine.submit(PROMPTS[4], **{**GREEDY, **kind, "max_new_tokens": 2}, stopping_criteria=[Does(act)])
    assert len(answers(own.result())[0]) == 2
    assert len(inner) == 4
    assert [handle.result().finish_reason for handle in inner] == ["length", "abort"] * 2
    assert [answers(handle.result()) for handle in inner[::2]] == [alone(engine.model, PROMPTS[0], **GREEDY)] * 2
    assert_neighbours_unharmed(engine, handles)


@pytest.mark.parametrize("ahead", [False, True])
def test_an_interrupt_while_the_engine_is_paused(model: Any, ahead: bool) -> None:
    """What is on its way is heard of by then, criteria included: nobody loses a token that was told."""
    with Engine(model, block_size=4, num_blocks=60, max_batch_tokens=24, max_batch_sequences=8, run_ahead=ahead) as engine:
        handles = neighbours(engine)
        breaks = Fails(2, KeyboardInterrupt())
        own = engine.submit(PROMPTS[4], **PLAIN, stopping_criteria=[breaks])
        while breaks.left:
            engine.step()
        if ahead:
            with pytest.raises(KeyboardInterrupt):
                engine.pause()
            engine.check()
        breaks.left = 99
        engine.pause()
        engine.check()
        assert engine.stats()["blocks"]["full"]["held"] == 0
        engine.resume()
        if ahead:
            assert (own.result().finish_reason, type(own.result().error)) == ("error", KeyboardInterrupt)
        else:
            assert answers(own.result()) == alone(model, PROMPTS[4], **PLAIN)
        assert_neighbours_unharmed(engine, handles)
