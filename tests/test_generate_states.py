"""Recurrent states under generate(), by a layer that counts and by stock's own: wherever a forward may run again,
every token is applied once to the state that later tokens read.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from captures import counts, drop, policy, reasons
from cases import once_each
from counted_states import CountedStates, assert_every_token_once, counting, put_into_generate
from families import BY_NAME, VOCABULARY, build
from poison import poison_free_slots
from releases import NEEDS_SLOTS
from tape import record, rerun
from tiny import build as build_tiny
from tiny import config_class
from transformers import LogitsProcessor, StaticCache

from hf_paged import OutOfBlocks, PagedCache
from hf_paged.generate import forward, prefix_reuse
from hf_paged.model.adapters import Inapplicable
from hf_paged.model.registry import memory_of
from hf_paged.model.rehearsal import RECORDERS
from hf_paged.model.state_slots import StatesAdvanced

NEW = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
SHORT = {"max_new_tokens": 3, "min_new_tokens": 3}
PLACES = pytest.mark.parametrize("in_place", [True, False], ids=["in place", "elsewhere"])


def prompts(rows: int, columns: int = 13) -> torch.Tensor:
    return torch.randint(5, VOCABULARY, (rows, columns), generator=torch.Generator().manual_seed(2))


@pytest.fixture
def model() -> Any:
    made = counting(build(BY_NAME["llama"]))
    made.generation_config.eos_token_id = None
    return made


def without_cache(model: Any, ids: torch.Tensor, new: int = 12) -> torch.Tensor:
    """The greedy answer by the model without a cache: all tokens are computed again for each."""
    for _ in range(new):
        with torch.no_grad():
            logits = model(ids, use_cache=False).logits[:, -1]
        ids = torch.cat([ids, logits.argmax(-1)[:, None]], 1)
    return ids


def paged(model: Any, ids: torch.Tensor, cache: Any = None, **options: Any) -> torch.Tensor:
    held = {"cache_implementation": "paged"} if cache is None else {"past_key_values": cache}
    answer: torch.Tensor = model.generate(ids, **{**NEW, **options, **held})
    return answer


def assert_once(states: CountedStates, answer: torch.Tensor) -> None:
    """Of `answer`, or of its different prompts, whose equal rows lie side by side."""
    assert_every_token_once(states, lambda read: answer[read.owner * (len(answer) // read.rows)].tolist())


class Raises:
    """Raises once in the run that has so many tokens before it, after it has advanced its states."""

    def __init__(self, error: BaseException, start: int) -> None:
        self.error, self.start, self.times = error, start, 0

    def __call__(self, states: CountedStates) -> None:
        if not self.times and states.rows[0].start == self.start:
            self.times += 1
            raise self.error


# ---- captured steps, and replays that are taken back


@PLACES
def test_captures_are_made_of_steps_that_may_run_again(
    in_place: bool, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(RECORDERS, "cpu", rerun)
    policy(monkeypatch, least_steps=4)
    states = CountedStates(in_place)
    put_into_generate(monkeypatch, states)
    answer = paged(model, prompts(2))
    assert bool(counts(model)["replayed"]) is not in_place, reasons(model)
    assert not reasons(model)
    assert torch.equal(answer, without_cache(model, prompts(2)))
    assert_once(states, answer)


class Turns(LogitsProcessor):
    """The user's code between the steps of a call: from some step on the states are in place, and at another
    one the model changes.
    """

    def __init__(self, states: CountedStates, turn: int, change: Callable[[], object], at: int) -> None:
        self.states, self.turn, self.change, self.at = states, turn, change, at
        self.calls = 0
        self.runs: list[int] = []
        """The runs of states before each step."""

    def __call__(self, tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.runs.append(len(self.states.runs))
        if self.calls == self.turn:
            self.states.in_place = True
        if self.calls == self.at:
            self.change()
        return scores


@PLACES
def test_a_replay_is_taken_back_where_the_model_has_changed(
    in_place: bool, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In place the model is looked at first: the step runs once, without the replay. Else it runs twice."""
    monkeypatch.setitem(RECORDERS, "cpu", rerun)
    policy(monkeypatch, least_steps=4)

    def change() -> None:
        for layer in model.model.layers:
            layer.self_attn.scaling = 4.0

    def call(states: CountedStates) -> tuple[torch.Tensor, Turns]:
        for layer in model.model.layers:
            layer.self_attn.scaling = 0.35
        turns = Turns(states, 12 if in_place else 99, change, 16)
        length = {"max_new_tokens": 24, "min_new_tokens": 24}
        return paged(model, prompts(2), logits_processor=[turns], **length), turns

    uncaptured = CountedStates(in_place=False)
    with monkeypatch.context() as patch:
        put_into_generate(patch, uncaptured)
        patch.delitem(RECORDERS, "cpu")
        right, _ = call(uncaptured)
    states = CountedStates(in_place=False)
    put_into_generate(monkeypatch, states)
    answer, turns = call(states)
    assert counts(model)["replayed"] > 8, reasons(model)
    assert turns.runs[16] - turns.runs[15] == (1 if in_place else 2)
    assert torch.equal(answer, right)
    assert_once(states, answer)
    drop(model)


# ---- forwards that fail


@PLACES
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_step_that_failed(
    error: type[BaseException], in_place: bool, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kept cache goes on as if it had not been tried, or says that it cannot."""
    states = CountedStates(in_place)
    put_into_generate(monkeypatch, states)
    cache = PagedCache(model, block_size=4)
    begun = paged(model, prompts(2), cache, **SHORT)
    states.after = Raises(error("failed"), begun.shape[1] - 1)
    with pytest.raises(error, match="failed"):
        paged(model, begun, cache)
    assert cache.get_seq_length() == begun.shape[1] - 1
    assert cache.torn is in_place
    if in_place:
        with pytest.raises(RuntimeError, match="use a new cache, or reset"):
            paged(model, begun, cache)
        return
    answer = paged(model, begun, cache)
    assert torch.equal(answer, without_cache(model, begun))
    assert_once(states, answer)


@PLACES
def test_a_prompt_that_failed_is_given_again(
    in_place: bool, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads no state."""
    states = CountedStates(in_place)
    put_into_generate(monkeypatch, states)
    cache = PagedCache(model, block_size=4)
    states.after = Raises(RuntimeError("failed"), 0)
    with pytest.raises(RuntimeError, match="failed"):
        paged(model, prompts(2), cache)
    answer = paged(model, prompts(2), cache)
    assert torch.equal(answer, without_cache(model, prompts(2)))
    assert_once(states, answer)


@pytest.mark.parametrize(
    ("family", "later"), once_each(["falcon_h1", "jamba", "lfm2", "qwen3_next"], [False, True])
)
def test_a_forward_over_states_that_failed_is_given_again(family: str, later: bool) -> None:
    """It has written elsewhere than it read, so the cache is where it was, and so is a copy of it."""
    model = build_tiny("causal", config_class("causal", family))
    ids = prompts(2) % 75 + 5
    cache = PagedCache(model, block_size=4)
    given = paged(model, ids, cache, **SHORT) if later else ids
    handle = model.model.layers[-1].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        paged(model, given, cache)
    handle.remove()
    for kept in (copy.deepcopy(cache), cache):
        assert torch.equal(paged(model, given, kept), model.generate(given, **NEW))
    memory_of(model).check()


CHANGES: dict[str, tuple[Callable[[Any], object], list[int]]] = {
    "copied": (lambda cache: None, [0, 1, 2]),
    "selected": (lambda cache: cache.batch_select_indices([2, 0]), [2, 0]),
    "repeated": (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
    "reordered": (lambda cache: cache.reorder_cache(torch.tensor([1, 1, 0])), [1, 1, 0]),
    "reset": (lambda cache: cache.reset(), [0, 1, 2]),
    "cropped to nothing": (lambda cache: cache.crop(-99), [0, 1, 2]),
    "cropped by a step": (lambda cache: cache.crop(-1), [0, 1, 2]),
}
"""Changes of a kept cache, and the rows that it holds then."""


@pytest.mark.parametrize(
    ("family", "captured"),
    [("lfm2", False), ("nemotron_h", True), ("qwen3_5_text", False), ("qwen3_5_text", True), ("zaya", True)],
)
def test_a_second_turn_behind_a_kept_cache(
    family: str, captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the whole text from the beginning, by copies of the cache and by the cache itself in the end."""
    poison_free_slots(monkeypatch)
    if captured:
        monkeypatch.setitem(RECORDERS, "cpu", record)
        policy(monkeypatch, least_steps=4)
    model = build_tiny("causal", config_class("causal", family))
    model.generation_config.eos_token_id = None
    ids = prompts(3) % 75 + 5
    call = {"cache_implementation": "paged", "return_dict_in_generate": True}
    first = model.generate(ids, **NEW, **call)
    cache = first.past_key_values
    said = torch.cat([first.sequences, ids[:, :4]], 1)
    wanted = model.generate(said, **NEW)
    for name, (change, rows) in CHANGES.items():
        kept = cache if name == "cropped by a step" else copy.deepcopy(cache)
        change(kept)
        assert torch.equal(paged(model, said[rows], kept), wanted[rows]), name
        memory_of(model).check()
    assert bool(counts(model)["replayed"]) is captured


def test_a_kept_cache_of_other_rows_or_tokens_is_refused() -> None:
    """With what to do instead; the cache is as it was."""
    model = build_tiny("causal", config_class("causal", "qwen3_5_text"))
    ids = prompts(2) % 75 + 5
    cache = PagedCache(model, block_size=4)
    said = paged(model, ids, cache, **SHORT)
    with pytest.raises(ValueError, match=r"holds 2 rows and was given 4; .*batch_repeat_interleave\(\)"):
        paged(model, said, cache, num_beams=2)
    with pytest.raises(
        RuntimeError, match=r"cannot go back 3 tokens: a recurrent state covers all 15, .*; use a new"
    ):
        cache.crop(-3)
    cache.batch_repeat_interleave(2)
    answer = paged(model, said, cache, num_beams=2)
    assert torch.equal(answer, model.generate(said, **NEW, num_beams=2))
    memory_of(model).check()


# ---- what does not fit


@pytest.fixture(scope="module")
def qwen() -> Any:
    made = build_tiny("causal", config_class("causal", "qwen3_5_text"))
    made.generation_config.eos_token_id = None
    return made


@pytest.mark.parametrize(
    ("options", "slots", "said"),
    [
        ({}, 0, "state_slots=0 is not a pool; give 1 or more"),
        ({}, 10**12, "bookkeeping of 1000000000000 blocks .* are free.; lower state_slots"),
        ({}, 1, r"2 more slots .* needed, 1 of 1 are free \(state_slots=1\)"),
        ({"num_beams": 3}, 4, r"6 more slots .* needed, 4 of 4 are free \(state_slots=4\)"),
        ({"num_return_sequences": 4, "do_sample": True}, 5, r"8 more slots .* are free \(state_slots=5\)"),
    ],
)
def test_too_few_slots_and_too_many(options: dict[str, Any], slots: int, said: str, qwen: Any) -> None:
    """The error has the slots that are needed, and those that there are."""
    with pytest.raises((ValueError, OutOfBlocks), match=said):
        qwen.generate(
            prompts(2) % 75 + 5,
            **{**NEW, **options},
            cache_implementation="paged",
            cache_config={"state_slots": slots},
        )
    memory_of(qwen).check()


@NEEDS_SLOTS
def test_caches_of_stock_are_stocks(qwen: Any) -> None:
    """A StaticCache goes on as before; a cache beside the word, and one that holds no states, are refused by
    transformers.
    """
    ids = prompts(2) % 75 + 5
    wanted = qwen.generate(ids, **NEW)
    static = StaticCache(config=qwen.config, max_cache_len=40)
    assert torch.equal(qwen.generate(ids, past_key_values=static, **NEW), wanted)
    with pytest.raises(ValueError, match="use only one of the two"):
        paged(qwen, ids, past_key_values=static)
    with pytest.raises(ValueError, match="only supported for models with only full attention"):
        qwen.generate(ids, cache_implementation="quantized", cache_config={"backend": "quanto"}, **NEW)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("family", ["lfm2", "nemotron_h", "qwen3_5_text"])
def test_padding_counts_as_the_mask_says(family: str, masked: bool) -> None:
    """Without a mask it is text, as in stock."""
    model = build_tiny("causal", config_class("causal", family))
    mask = torch.ones(2, 13, dtype=torch.long)
    mask[0, :4] = 0
    ids = (prompts(2) % 75 + 5) * mask
    given = {"attention_mask": mask} if masked else {"attention_mask": torch.ones_like(mask)}
    answer = paged(model, ids, **given)
    assert torch.equal(answer, model.generate(ids, **given, **NEW))
    if masked:
        alone = model.generate(ids[:1, 4:], **NEW)[0, 9:]
        assert torch.equal(answer[0, 13:], alone)
    memory_of(model).check()


def test_autocast(qwen: Any) -> None:
    ids = prompts(2) % 75 + 5
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(paged(qwen, ids), qwen.generate(ids, **NEW))
    assert torch.equal(paged(qwen, ids), qwen.generate(ids, **NEW))


def test_a_model_is_cast_between_calls() -> None:
    """New calls have states of the new types; a kept cache says why it cannot go on, and goes on later."""
    model = build_tiny("causal", config_class("causal", "zaya")).to(torch.bfloat16).to(torch.float32)
    ids = prompts(2) % 75 + 5
    cache = PagedCache(model, block_size=4)
    said = paged(model, ids, cache, **SHORT)
    wanted = model.generate(said, **NEW)
    model.to(torch.bfloat16)
    assert torch.equal(paged(model, ids), model.generate(ids, **NEW))
    with pytest.raises(
        ValueError, match=r"recurrent states .* in torch.float32, which is in torch.bfloat16 now"
    ):
        paged(model, said, cache)
    model.to(torch.float32)
    assert torch.equal(paged(model, said, cache), wanted)
    memory_of(model).check()


def test_a_failed_step_of_keys_and_values_alone_costs_no_cache(llama: Any) -> None:
    """They are written again."""
    cache = PagedCache(llama, block_size=4)
    given = paged(llama, prompts(2), cache, **SHORT)
    handle = llama.model.layers[-1].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        paged(llama, given, cache)
    handle.remove()
    assert torch.equal(paged(llama, given, cache), llama.generate(given, **NEW))


# ---- rows that are equal, and forwards that draw


@PLACES
@pytest.mark.parametrize("chunk", [None, 5])
def test_equal_rows_of_a_prompt_that_draws(
    chunk: int | None, in_place: bool, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drawing shows that equal rows are not equal: the forward of one runs again as that of all."""
    states = CountedStates(in_place)
    put_into_generate(monkeypatch, states)
    ids = prompts(2)
    given = {"num_return_sequences": 3, "do_sample": True, "prefill_chunk_size": chunk}
    paged(model, ids, **given)  # the layout of answers is known from now on
    states.reads.clear()
    states.runs.clear()
    states.after = lambda states: torch.rand(1)
    answer = paged(model, ids, **given)
    assert [len(run) for run in states.runs][:2] == [2, 6]
    assert_once(states, answer)


@PLACES
def test_equal_rows_are_forked_behind_the_prompt(
    in_place: bool, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later chunk that advances in place is computed for all rows at once: it could not run again."""
    states = CountedStates(in_place)
    put_into_generate(monkeypatch, states)
    given = {"num_return_sequences": 3, "do_sample": True, "prefill_chunk_size": 5}
    paged(model, prompts(2), **given)
    states.reads.clear()
    states.runs.clear()
    answer = paged(model, prompts(2), **given)
    assert [len(run) for run in states.runs][:3] == ([2, 6, 6] if in_place else [2, 2, 2])
    assert_once(states, answer)


# ---- adapters that do not apply


@PLACES
@pytest.mark.parametrize("start", [0, 15])
def test_a_forward_that_is_repeated_without_adapters(
    start: int, in_place: bool, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("peft")

    class Captures:
        def with_adapters(self, *rest: Any) -> Any:
            return contextlib.nullcontext(True)

    monkeypatch.setattr(forward, "can_record", lambda devices: True)
    monkeypatch.setattr(forward, "captures_of", lambda model: Captures())
    states = CountedStates(in_place)
    put_into_generate(monkeypatch, states)
    states.after = raises = Raises(Inapplicable("other rows"), start)
    ids = prompts(2)
    cache = PagedCache(model, graphs=False)
    if in_place and start:
        with pytest.raises(StatesAdvanced):
            paged(model, ids, cache)
        assert cache.torn
        return
    answer = paged(model, ids, cache)
    assert raises.times
    assert torch.equal(answer, without_cache(model, ids))
    assert_once(states, answer)


# ---- prefixes


@PLACES
@pytest.mark.parametrize("asked", [True, False])
def test_no_row_begins_behind_a_prefix_without_its_state(
    asked: bool, in_place: bool, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefix reuse asks whether the cache has states. Where it does not ask, its trial and its hits are
    refused instead of answered.
    """
    states = CountedStates(in_place)
    put_into_generate(monkeypatch, states)
    if not asked:
        monkeypatch.setattr(prefix_reuse, "why_never", lambda *given: None)
    ids = prompts(1, 33)
    given = {"cache_config": {"prefix_caching": True, "block_size": 4}}
    answer = paged(model, ids, **given)
    assert_once(states, answer)
    states.slots_by_owner.clear()  # another call's rows
    if not asked:
        with pytest.raises(StatesAdvanced, match="behind 0"):
            paged(model, ids, **given)
        return
    assert torch.equal(paged(model, ids, **given), answer)
    assert_once(states, answer)


def test_an_answer_of_nothing_but_attention_is_shared_as_before(llama: Any) -> None:
    ids = prompts(1, 33)
    given = {"cache_config": {"prefix_caching": True, "block_size": 4}}
    assert torch.equal(paged(llama, ids, **given), paged(llama, ids, **given))
