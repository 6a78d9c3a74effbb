"""Users' callables raise in their own request only: tokenizers, processors, criteria, and what these do to
the engine (C34).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from cases import every_other
from engine_answers import PROMPTS, alone, answers
from engine_faults import GREEDY, Does, Fails, assert_neighbours_unharmed, neighbours
from families import BY_NAME, VOCABULARY, build
from releases import NEWER_LOOPS
from transformers import LogitsProcessor, RepetitionPenaltyLogitsProcessor
from transformers.generation.streamers import BaseStreamer

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
    options = {
        "block_size": 4,
        "num_blocks": 60,
        "max_batch_tokens": 24,
        "max_batch_sequences": 8,
        "run_ahead": ahead,
    }
    return Engine(model, Tokenizer(said[4][0], **trouble), **options)


PLAIN = {"max_new_tokens": 9, "do_sample": False}


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(
    "kind", [{}, {"bad_words_ids": None}, {"num_beams": 2}, {"num_beams": 2, "num_return_sequences": 2}]
)
def test_a_tokenizer_that_raises_at_an_answer(model: Any, kind: dict[str, Any], ahead: bool) -> None:
    """The request ends as an error, with its tokens and without their text; the step that ends it is
    everybody's and goes on.
    """
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
        assert handle.result().text.split() == [
            str(token) for token in handle.result().sequences[0].token_ids
        ]
    assert answers(plain.result()) == alone(model, PROMPTS[3], **PLAIN)
    assert_neighbours_unharmed(engine, handles)


@pytest.mark.parametrize("thread", [False, True])
def test_a_tokenizer_that_raises_while_a_stream_is_read(model: Any, thread: bool) -> None:
    """Whoever reads gets the tokens that are there, then the end: the trouble is the request's, not the
    reader's.
    """
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
    assert (late.result().finish_reason, late.result().error) == (
        "abort",
        None,
    )  # of nothing there is nothing to read
    engine.close()


def test_a_tokenizer_that_is_interrupted(model: Any) -> None:
    """Ctrl-C while an answer is read reaches the caller once, and the request ends with it: its tokens are
    there, its text is not.
    """
    engine = readers(model, error=KeyboardInterrupt(), times=1)
    handles = neighbours(engine)
    own = engine.submit(PROMPTS[4], **GREEDY)
    with pytest.raises(KeyboardInterrupt):
        own.result()
    engine.check()
    assert (own.result().finish_reason, own.result().text, type(own.result().error)) == (
        "error",
        "",
        KeyboardInterrupt,
    )
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
    with Engine(
        model, block_size=4, num_blocks=60, max_batch_tokens=24, max_batch_sequences=8, run_ahead=ahead
    ) as engine:
        handles = neighbours(engine)
        output = engine.submit(
            PROMPTS[4], do_sample=True, temperature=1e-43, max_new_tokens=4, **kind
        ).result()
        assert output.finish_reason == "error"
        assert "temperature=1e-43" in str(output.error)
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
    assert [answers(handle.result()) for handle in inner[::2]] == [
        alone(engine.model, PROMPTS[0], **GREEDY)
    ] * 2
    assert_neighbours_unharmed(engine, handles)


@pytest.mark.parametrize("ahead", [False, True])
def test_an_interrupt_while_the_engine_is_paused(model: Any, ahead: bool) -> None:
    """Criteria know all tokens on their way by then: nobody loses a token that was told."""
    with Engine(
        model, block_size=4, num_blocks=60, max_batch_tokens=24, max_batch_sequences=8, run_ahead=ahead
    ) as engine:
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


# ---- what they answer

PROMPT = PROMPTS[2]


@pytest.fixture(scope="module")
def one() -> Engine:
    """One engine for all answers: it must be whole after each."""
    return Engine(
        build(BY_NAME["llama"]), block_size=4, num_blocks=60, max_batch_tokens=24, max_batch_sequences=8
    )


MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "no ends": {"eos_token_id": None},
    "samples": {"do_sample": True, "num_return_sequences": 2},
    "samples, no ends": {"do_sample": True, "num_return_sequences": 2, "eos_token_id": None},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
}


def parity(engine: Engine, mode: str, **given: Any) -> tuple[Any, Any]:
    """The outcomes of a request in stock generate() and the engine: tokens, lengths of drawn ones, or
    "refused".

    Paged generate() must do as stock does.
    """
    options = {"do_sample": False, "eos_token_id": 2, "max_new_tokens": 6, **MODES[mode], **given}
    ids, found = torch.tensor([PROMPT]), []
    for backend in ({}, {"cache_implementation": "paged"}):
        torch.manual_seed(0)
        try:
            found.append(engine.model.generate(ids, **options, **backend)[:, len(PROMPT) :].tolist())
        except Exception:
            found.append("refused")
    assert found[0] == found[1]
    output = engine.submit(PROMPT, **options, seed=0).result()
    ours: Any = (
        "refused" if output.error is not None else [sequence.token_ids for sequence in output.sequences]
    )
    engine.check()
    assert engine.stats()["blocks"]["full"]["held"] == 0
    if "refused" in (found[0], ours) or not options["do_sample"]:
        return found[0], ours
    return [len(row) for row in found[0]], [len(row) for row in ours]


def late(ids: torch.Tensor) -> bool:
    """True for a row that is three tokens longer than the prompt."""
    return ids.shape[1] >= len(PROMPT) + 3


CRITERIA: dict[str, Callable[[torch.Tensor, Any], Any]] = {
    "bool": lambda ids, scores: late(ids),
    "int": lambda ids, scores: int(late(ids)),
    "an even int": lambda ids, scores: 2 * int(late(ids)),
    "an odd int": lambda ids, scores: 3 * int(late(ids)),
    "0-d": lambda ids, scores: torch.tensor(late(ids)),
    "[1]": lambda ids, scores: torch.tensor([late(ids)]),
    "[rows]": lambda ids, scores: torch.full((len(ids),), late(ids)),
    "[rows] of int": lambda ids, scores: torch.full((len(ids),), int(late(ids))),
    "[rows] of float": lambda ids, scores: torch.full((len(ids),), float(late(ids))),
    "[1, rows]": lambda ids, scores: torch.full((1, len(ids)), late(ids)),
    "[rows, 1]": lambda ids, scores: torch.full((len(ids), 1), late(ids)),
    "[rows + 1]": lambda ids, scores: torch.full((len(ids) + 1,), late(ids)),
    "numpy [rows]": lambda ids, scores: np.full((len(ids),), late(ids)),
    "numpy [rows] of int": lambda ids, scores: np.full((len(ids),), int(late(ids))),
    "numpy 0-d": lambda ids, scores: np.array(late(ids)),
    "numpy's bool": lambda ids, scores: np.bool_(late(ids)),
    "numpy's int": lambda ids, scores: np.int64(late(ids)),
    "list": lambda ids, scores: [late(ids)] * len(ids),
    "None": lambda ids, scores: None,
    "float": lambda ids, scores: float(late(ids)),
    "str": lambda ids, scores: "stop",
}


@pytest.mark.parametrize(("kind", "mode"), every_other([*CRITERIA], [*MODES]))
def test_a_criterion_answers_as_generate_takes_it(one: Engine, kind: str, mode: str) -> None:
    """The engine takes an answer for what stock generate() takes it; what that refuses is an error of the
    request.
    """
    if mode == "beams" and kind in ("numpy [rows]", "numpy 0-d"):
        pytest.skip("stock's beams end empty: numpy's booleans become uint8, whose ~ is no negation")
    stock, ours = parity(one, mode, stopping_criteria=[CRITERIA[kind]])
    assert ours == stock
    if kind in ("bool", "0-d", "[rows]", "numpy [rows]"):
        assert ours != "refused"


@pytest.mark.parametrize("kind", ["numpy [rows]", "numpy 0-d"])
def test_numpy_booleans_stop_beams_as_torch_booleans_do(one: Engine, kind: str) -> None:
    """Stock's beam search ends with empty answers there."""
    stock, _ = parity(one, "beams", stopping_criteria=[CRITERIA["[rows]"]])
    _, ours = parity(one, "beams", stopping_criteria=[CRITERIA[kind]])
    assert ours == stock


class Heard(BaseStreamer):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.tokens.append(-1)


@pytest.mark.parametrize("kind", CRITERIA)
@pytest.mark.parametrize("draft", ["assistant_model", "prompt_lookup_num_tokens"])
def test_drafts_and_streamers_beside_a_criterion(one: Engine, kind: str, draft: str) -> None:
    """Paged generate() leaves them to transformers' loops: the same tokens, in the same pieces, and the same
    refusals.
    """
    if kind == "an even int" and not NEWER_LOOPS:
        pytest.skip(
            "assisted decoding of this transformers never ends: an even int is true for it, and its lowest "
            "bit is not set"
        )
    drafts = {"assistant_model": one.model, "prompt_lookup_num_tokens": 3}
    found = []
    for backend in ({}, {"cache_implementation": "paged"}):
        streamer = Heard()
        options = {
            "max_new_tokens": 6,
            "do_sample": False,
            "streamer": streamer,
            draft: drafts[draft],
            **backend,
        }
        try:
            made = one.model.generate(
                torch.tensor([PROMPT]), **options, stopping_criteria=[CRITERIA[kind]]
            ).tolist()
        except Exception as error:
            made = type(error)
        found.append((made, streamer.tokens))
    assert found[0] == found[1]


def test_an_answer_that_is_refused_is_named(engine: Engine) -> None:
    def unsure(ids: torch.Tensor, scores: Any) -> Any:
        return [False]

    handles = neighbours(engine)
    output = engine.submit(PROMPT, **GREEDY, stopping_criteria=[unsure]).result()
    assert output.finish_reason == "error"
    assert "the stopping criterion unsure answered list [False], expected a bool" in str(output.error)
    assert_neighbours_unharmed(engine, handles)


class Scores(LogitsProcessor):
    """Answers with what a function makes of the scores."""

    def __init__(self, make: Callable[[torch.Tensor], Any]) -> None:
        self.make = make

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> Any:
        return self.make(scores)


PROCESSED: dict[str, Callable[[torch.Tensor], Any]] = {
    "changed": lambda scores: scores * 2,
    "in place": lambda scores: scores.mul_(3),
    "[vocabulary]": lambda scores: scores[0],
    "[1, vocabulary]": lambda scores: scores[:1],
    "[1, rows, vocabulary]": lambda scores: scores[None],
    "a row more": lambda scores: torch.cat([scores, scores[:1]]),
    "longer": lambda scores: torch.cat([scores, scores - 100], 1),
    "beyond the end": lambda scores: torch.cat([scores, scores + 100], 1),
    "cut": lambda scores: scores[:, : VOCABULARY // 2],
    "fp64": lambda scores: scores.double(),
    "fp16": lambda scores: scores.half(),
    "whole numbers": lambda scores: (scores * 100).long(),
    "with gradients": lambda scores: scores.clone().requires_grad_(),
    "numpy": lambda scores: scores.numpy(),
    "list": lambda scores: scores.tolist(),
    "None": lambda scores: None,
}


@pytest.mark.parametrize(("kind", "mode"), every_other([*PROCESSED], [*MODES]))
def test_a_processor_answers_as_generate_takes_it(one: Engine, kind: str, mode: str) -> None:
    if mode == "beams" and kind in ("cut", "longer") and not NEWER_LOOPS:
        pytest.skip("beam search of this transformers takes the model's own vocabulary alone")
    stock, ours = parity(one, mode, logits_processor=[Scores(PROCESSED[kind])])
    assert ours == stock
    if (kind, mode) == ("[vocabulary]", "greedy"):
        assert ours != "refused"


ALLOWED: dict[str, Callable[[int, torch.Tensor], Any]] = {
    "list": lambda batch, ids: [5, 6, 7, 10 + batch],
    "tuple": lambda batch, ids: (5, 6, 7),
    "range": lambda batch, ids: range(5, 9),
    "tensor": lambda batch, ids: torch.tensor([5, 6, 7]),
    "numpy": lambda batch, ids: np.array([5, 6, 7]),
    "set": lambda batch, ids: {5, 6, 7},
    "nothing": lambda batch, ids: [],
    "None": lambda batch, ids: None,
    "int": lambda batch, ids: 5,
    "beyond the end": lambda batch, ids: [5, 1000],
}


@pytest.mark.parametrize(("kind", "mode"), every_other([*ALLOWED], [*MODES]))
def test_allowed_tokens_as_generate_takes_them(one: Engine, kind: str, mode: str) -> None:
    stock, ours = parity(one, mode, prefix_allowed_tokens_fn=ALLOWED[kind])
    assert ours == stock


def test_a_penalty_with_a_prompt_that_it_ignores(one: Engine) -> None:
    """Transformers takes a number there, or one for each row in a tensor from 5.23 on."""
    lengths: list[Any] = [0, 4] + ([torch.tensor([4])] if NEWER_LOOPS else [])
    for length in lengths:
        penalty = RepetitionPenaltyLogitsProcessor(1.9, prompt_ignore_length=length)
        stock, ours = parity(one, "greedy", logits_processor=[penalty])
        assert ours == stock != "refused"
    if NEWER_LOOPS:
        penalty = RepetitionPenaltyLogitsProcessor(1.9, prompt_ignore_length=torch.tensor([4, 2]))
        stock, ours = parity(one, "samples", logits_processor=[penalty])
        assert ours == stock != "refused"


def test_beams_go_on_where_one_of_them_has_no_token(one: Engine) -> None:
    """A constraint may leave a beam nothing: the others go on, drawn or not, as in generate()."""
    dead = Scores(lambda scores: scores.index_fill(0, torch.tensor([1]), -torch.inf))
    stock, ours = parity(one, "beams", logits_processor=[dead])
    assert ours == stock != "refused"
    drawn = one.submit(
        PROMPT, num_beams=3, do_sample=True, max_new_tokens=4, logits_processor=[dead]
    ).result()
    assert drawn.error is None


# ---- no token

NOTHING: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "drawn": {"do_sample": True},
    "beams": {"num_beams": 2},
}


@pytest.mark.parametrize("kind", NOTHING)
def test_scores_of_nothing_but_minus_infinity(engine: Engine, kind: str) -> None:
    """There is no token to choose: not even the first one of the vocabulary."""
    handles = neighbours(engine)
    nothing = Scores(lambda scores: torch.full_like(scores, -torch.inf))
    output = engine.submit(PROMPTS[4], max_new_tokens=4, **NOTHING[kind], logits_processor=[nothing]).result()
    assert output.finish_reason == "error"
    assert "no token is left" in str(output.error)
    assert not output.sequences[0].token_ids
    assert_neighbours_unharmed(engine, handles)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("kind", NOTHING)
@pytest.mark.parametrize("value", [-torch.inf, torch.nan])
def test_a_model_without_a_finite_logit(model: Any, value: float, kind: str, ahead: bool) -> None:
    """The model's own logits, in steps where tokens are chosen with everybody's."""
    with Engine(model, block_size=4, num_blocks=60, run_ahead=ahead) as engine:
        model.lm_head.register_forward_hook(lambda module, inputs, logits: torch.full_like(logits, value))
        output = engine.submit(PROMPTS[4], max_new_tokens=4, **NOTHING[kind]).result()
        assert output.finish_reason == "error"
        assert "the model's logits" in str(output.error)
        assert "NaN or all -inf" in str(output.error)
        assert not output.sequences[0].token_ids
        engine.check()
