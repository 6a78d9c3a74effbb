"""Prefix reuse across calls: what is cached is not computed again, and the answers are stock's without a
cache (contract C17 to C23).
"""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from captures import counts, drop, policy, reasons
from compare import assert_clean, assert_equal
from dropout import train_with_dropout
from families import BY_NAME, UNLIKE, VOCABULARY, build
from modes import MODES
from prefix_reuse import NEW, ask, continued, counted, words
from releases import takes_as
from tape import record

import hf_paged
from hf_paged.model.registry import memory_of
from hf_paged.model.rehearsal import RECORDERS


def pool_of(model: Any, name: str = "full") -> Any:
    return next(group.pool for (kind, _, _), group in memory_of(model).groups.items() if kind.name == name)


# ---- how much is computed


def test_a_long_prefix_is_computed_once() -> None:
    """The second of two calls that share 2,048 of 2,176 tokens computes at most 0.15 of the first."""
    model = build(BY_NAME["llama"])
    first = words(1, 2176)
    _, seen = ask(model, first)
    _, again = ask(model, continued(first, 2048, 128))
    assert seen[0] == 2176
    assert again[0] == 128
    assert sum(again) <= 0.15 * sum(seen)


@pytest.mark.parametrize(
    ("shared", "computed"),
    [(0, 47), (1, 47), (15, 32), (16, 31), (33, 15), (34, 13), (37, 10), (46, 1), (47, 1)],
)
def test_reuse_is_to_the_token(llama: Any, shared: int, computed: int) -> None:
    """C21: whole blocks, and a copy of one that is shared in part, unless it is for a single token; the last
    is always computed.
    """
    first = words(1, 47)
    ask(llama, first)
    _, seen = ask(llama, continued(first, shared, 47 - shared))
    assert seen[0] == computed


def test_thirty_seven_tokens_in_blocks_of_sixteen(llama: Any) -> None:
    """Two blocks and a copy of the partial one, also where the first sequence ended in it."""
    first = words(1, 37)
    ask(llama, first)
    _, seen = ask(llama, continued(first, 37, 20))
    assert seen[0] == 20
    assert pool_of(llama).counts["copies"] == 1


@pytest.mark.parametrize(
    ("name", "padded"),
    [
        *((family.name, False) for family in UNLIKE),
        *((name, True) for name in ("llama", "gemma2", "gpt-oss", "gpt2", "opt", "bloom")),
    ],
)
def test_every_family(name: str, padded: bool) -> None:
    """C23: the same answers, scores included. Models with attention of their own must first show that they
    are causal.
    """
    model = build(BY_NAME[name])
    setting = model.config._attn_implementation
    first = words(3, 21)
    mask = torch.ones_like(first)
    if padded:
        for row, pads in enumerate((3, 0, 7)):
            mask[row, :pads] = 0
    dense, seq2seq = BY_NAME[name].path == "dense", BY_NAME[name].seq2seq
    computed, tried = [], []
    for ids in (first, continued(first, 17, 4), continued(first, 17, 4), first):
        answer, seen = ask(
            model,
            ids * mask,
            4,
            attention_mask=mask,
            return_dict_in_generate=True,
            output_scores=True,
            max_new_tokens=NEW + 2,
        )
        computed.append(seen[0])
        tried = seen[:2] if len(computed) == 2 else tried
        del answer
    if seq2seq:
        assert computed == [1] * 4
    elif padded:
        assert computed == ([21] * 4 if dense else [21, 6, 2, 2])
    else:
        # Attention of its own: the end of the first prefix that is found is computed with and without it, and
        # never a token alone.
        assert computed == ([21, 5, 2, 2] if dense else [21, 5, 1, 1])
        assert tried == ([5, 21] if dense else [5, 1])
    assert_clean(model, setting)


REUSES = {"greedy": 5, "sample": 5, "sample-padded": 6, "beams": 5, "beams-padded": 6, "beam-sample": 5, "penalties": 5, "guidance": 5,
          "assisted": None, "prompt-lookup": None, "chunks": None, "chunks-padded-beams": None}  # fmt: skip
"""How many columns of the second prompt are computed in each mode; None where the first forward holds more or
less than the prompt.
"""


CAPTURED = ["greedy", "sample-padded", "beams", "prompt-lookup", "chunks-padded-beams", "everything-padded"]


WAYS = [*((mode, False) for mode in MODES), *((mode, True) for mode in CAPTURED)]


@pytest.mark.parametrize(
    ("name", "mode", "captured"),
    [(name, *way) for name, ways in (("llama", WAYS), ("gemma3", WAYS[::3])) for way in ways],
    ids=str,
)
def test_every_mode(name: str, mode: str, captured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """C23: beams, samples, chunks, assistants, padding: the same answers, and less computed where nothing
    more is asked for.

    Steps that follow a reused prefix may be captured like any other.
    """
    if name == "gemma3" and mode == "assisted":
        pytest.skip("stock's own sliding cache breaks when an assistant drafts several tokens")
    if captured:
        monkeypatch.setitem(RECORDERS, "cpu", record)
        policy(monkeypatch, least_steps=4)
    model = build(BY_NAME[name])
    object.__setattr__(model, "assistant", build(BY_NAME[name]))
    setting, first = model.config._attn_implementation, words(3, 21)
    for ids in (first, continued(first, 17, 4)):
        arguments = {"input_ids": ids} | MODES[mode](model, ids)
        torch.manual_seed(0)
        stock = model.generate(**copy.copy(arguments))
        torch.manual_seed(0)
        options = {"block_size": 4, "prefix_caching": True, "verify": "bytes"}
        if captured:  # whoever looks on keeps steps from being captured
            paged = model.generate(**copy.copy(arguments), cache_implementation="paged", cache_config=options)
        else:
            with counted(model) as seen:
                paged = model.generate(
                    **copy.copy(arguments), cache_implementation="paged", cache_config=options
                )
        assert_equal(stock, paged)
        del stock, paged
    assert bool(hf_paged.stats(model).reused) == (not mode.startswith("everything"))
    assert not any(pool.mismatched for pool in hf_paged.stats(model).pools)
    if not captured and REUSES.get(mode):
        assert seen[0] == REUSES[mode]
    if captured and not mode.startswith("everything"):
        assert counts(model)["replayed"] or (name, mode) == ("gemma3", "prompt-lookup"), reasons(model)
    drop(model)
    assert_clean(model, setting)


def test_an_observer_sees_every_step(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that is replayed calls no hooks: there is none as long as somebody has hung one up."""
    monkeypatch.setitem(RECORDERS, "cpu", record)
    policy(monkeypatch, least_steps=2)
    first = words(1, 20)
    for expected in (20, 1):
        _, seen = ask(llama, first, 4, max_new_tokens=12, min_new_tokens=12)
        assert seen == [expected] + [1] * 11
    assert not counts(llama)["replayed"]


def test_a_cache_that_is_cropped_behind_replayed_steps(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that a replay merely counted are there when rows change."""
    monkeypatch.setitem(RECORDERS, "cpu", record)
    policy(monkeypatch, least_steps=4)
    first = words(1, 13)
    for new in range(9, 14):
        cache = hf_paged.PagedCache(llama, prefix_caching=new % 2 == 0)
        call = {"past_key_values": cache, "max_new_tokens": new, "min_new_tokens": new, "do_sample": False}
        told = llama.generate(first, attention_mask=torch.ones_like(first), **call)
        cache.crop(-3)
        longer = torch.cat([told[:, : cache.get_seq_length()], words(1, 4, seed=new)], 1)
        again = llama.generate(longer, attention_mask=torch.ones_like(longer), **call)
        assert torch.equal(
            again,
            llama.generate(
                longer, attention_mask=torch.ones_like(longer), **{**call, "past_key_values": None}
            ),
        )
    assert counts(llama)["replayed"]


def test_every_part_of_a_prompt_in_chunks(llama: Any) -> None:
    """Each forward must answer, so each computes a token at least; all the rest is found."""
    first = words(1, 64)
    ask(llama, first, 4, prefill_chunk_size=16)
    _, seen = ask(llama, continued(first, 60, 4), 4, prefill_chunk_size=16)
    assert seen[:4] == [1, 1, 1, 4]


@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
def test_rows_that_differ_from_a_later_chunk_on(llama: Any, padded: bool) -> None:
    """One row while they are equal, three afterwards, and one that is another from the start."""
    ids = torch.cat(
        [continued(words(1, 20), 20, 12, seed=seed) for seed in (1, 2, 3)] + [words(1, 32, seed=4)]
    )
    mask = torch.ones_like(ids)
    if padded:
        mask[:3, :5] = 0
        mask[3, :9] = 0
    for new in (1, 2):
        tail = words(4, new, seed=new)
        longer = torch.cat([ids, tail], 1)
        ask(
            llama,
            longer * torch.cat([mask, torch.ones_like(tail)], 1),
            4,
            attention_mask=torch.cat([mask, torch.ones_like(tail)], 1),
            prefill_chunk_size=8,
        )
    for row in range(4):
        begin = int(mask[row].argmax())
        _, seen = ask(llama, ids[row : row + 1, begin:], 4)
        assert seen[0] == 1, "all chunks of all rows are found"


def test_drafts_after_a_prompt_in_chunks(llama: Any) -> None:
    """Drafts that are refused are no part of the prompt."""
    ids = words(1, 12, seed=1)
    assistant = build(BY_NAME["qwen2"])
    answer, _ = ask(llama, ids, 1, assistant_model=assistant, prefill_chunk_size=50, max_new_tokens=30)
    ask(llama, torch.cat([answer, words(1, 3)], 1), 1, return_dict_in_generate=True, output_scores=True)


@pytest.mark.parametrize(
    ("name", "block_size"),
    [("llama", 16), ("mistral-window", 4), ("gemma3", 4), ("gpt-oss", 2), ("bloom", 16)],
)
def test_a_chat_of_four_turns(name: str, block_size: int) -> None:
    """C17: prompts and answers; of each turn only the new message is computed, and the last token said, which
    nobody has fed yet.

    Behind a window (of 6) the end of an answer is all that is left of it, and all that is needed.
    """
    model = build(BY_NAME[name])
    told = words(1, 30)
    for turn in range(4):
        answer, seen = ask(model, told, block_size, max_new_tokens=12, min_new_tokens=12)
        assert seen[0] == (30 if turn == 0 else 10)
        told = torch.cat([answer, words(1, 9, seed=turn)], 1)


def test_answers_of_beams_are_found_too(llama: Any) -> None:
    """The rows that were left when the search ended, each with its own tokens."""
    answer, _ = ask(
        llama, words(1, 21), 4, num_beams=3, num_return_sequences=3, max_new_tokens=9, min_new_tokens=9
    )
    found = [ask(llama, continued(row[None], row.shape[0], 3), 4)[1][0] for row in answer]
    assert min(found) == 4
    assert max(found) < 3 + 9


def test_samples_and_repetitions_find_their_prompt(llama: Any) -> None:
    """Rows of one prompt are computed once, and less than once if it is cached."""
    first = words(2, 40)
    ask(llama, first, do_sample=True, num_return_sequences=3)
    _, seen = ask(llama, continued(first, 36, 8), do_sample=True, num_return_sequences=3)
    assert seen[0] == 8


def test_rows_wait_for_the_one_that_shares_least(llama: Any) -> None:
    """All rows run through one forward: it begins at the first column that any row lacks."""
    first = words(2, 40)
    ask(llama, first, 4)
    mixed = torch.cat([continued(first[:1], 36, 4), continued(first[1:], 20, 20)])
    assert ask(llama, mixed, 4)[1][0] == 20
    assert ask(llama, torch.cat([first[:1], words(1, 40, seed=8)]), 4)[1][0] == 40


def test_a_system_prompt_under_left_padding(llama: Any) -> None:
    """Rows of other lengths share what they begin with, wherever it stands."""
    system = words(1, 32)
    ask(llama, continued(system, 32, 10), 4)
    rows = [continued(system, 32, own, seed=own + 20) for own in (4, 9, 7)]
    ids, mask = torch.zeros(3, 41, dtype=torch.long), torch.zeros(3, 41, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, 41 - row.shape[1] :], mask[i, 41 - row.shape[1] :] = row[0], 1
    assert ask(llama, ids, 4, attention_mask=mask)[1][0] == 9


# ---- what must stay whole


@pytest.mark.parametrize("asked", ["output_hidden_states", "output_attentions"])
def test_what_is_asked_for_about_a_prompt_is_never_shorter(asked: str) -> None:
    """The prompt is computed whole where its hidden states or attentions are asked for; what it leaves is
    used later.
    """
    model = build(BY_NAME["llama"])
    model.set_attn_implementation("eager")
    first = words(1, 24)
    for expected in (24, 24):
        _, seen = ask(model, first, 4, return_dict_in_generate=True, **{asked: True})
        assert seen[0] == expected
    assert (
        ask(model, first, 4)[1][0] == 24
    )  # the first call whose attention reads pages, and shows that it is causal
    assert ask(model, first, 4)[1][0] == 1


def test_what_another_attention_computes_is_private() -> None:
    """Falcon under sdpa drops its causal mask if it shall return weights: what it stores then depends on later
    tokens, and neither the call's other rows nor later calls may find it.
    """
    model = build(BY_NAME["falcon"])
    asked = {"return_dict_in_generate": True, "output_attentions": True}
    ask(model, words(1, 24), 4)
    ask(model, continued(words(1, 24), 20, 4), 4)
    assert ask(model, continued(words(1, 24), 20, 6), 4)[1][0] < 24, "parts of its prompts are trusted"
    rows = torch.cat([continued(words(1, 16, seed=3), 16, 8, seed=seed) for seed in (1, 2, 3)])
    ask(model, rows, 4, **asked)
    assert ask(model, rows, 4)[1][0] == 24
    ask(model, continued(rows, 20, 4), 4)


def test_all_logits_of_a_prompt(llama: Any) -> None:
    """Whoever asks for every token's logits gets them."""
    first = words(1, 24)
    ask(llama, first, 4)
    _, seen = ask(llama, first, 4, logits_to_keep=0)
    assert seen[0] == 24
    assert ask(llama, first, 4, logits_to_keep=6)[1][0] == 6


def test_an_answer_with_more_than_logits_is_computed_whole(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A field for every token of the prompt, that no setting announces: seen once, and from then on never
    cut.
    """
    original = type(llama).forward

    class Marked(type(llama)):  # type: ignore[misc]
        @takes_as(original)
        def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:
            answer = original(self, input_ids, **kwargs)
            answer["lengths"] = torch.ones_like(input_ids)
            lengths.append(input_ids.shape[1])
            return answer

    lengths: list[int] = []
    llama.__class__ = Marked
    first = words(1, 24)
    for expected in ([24], [1, 24], [24]):
        lengths.clear()
        options = {"block_size": 4, "prefix_caching": True}
        llama.generate(
            first,
            attention_mask=torch.ones_like(first),
            max_new_tokens=1,
            cache_implementation="paged",
            cache_config=options,
        )
        assert lengths == expected


def test_the_log_says_once_why_nothing_is_shared(llama: Any, caplog: pytest.LogCaptureFixture) -> None:
    """For each model and reason; prefix_caching was asked for, and training mode turns it off."""
    first = words(1, 24)
    ask(llama, first, 4)
    assert caplog.messages == []
    train_with_dropout(llama)
    for _ in range(2):
        llama.generate(
            first, past_key_values=hf_paged.PagedCache(llama, prefix_caching=True), max_new_tokens=2
        )
    assert len(caplog.messages) == 1
    assert "does not share this prompt: LlamaForCausalLM is in training mode" in caplog.messages[0]
    assert "model.eval()" in caplog.messages[0]
    assert sum(hf_paged.stats(llama).reasons.values()) == 2


def test_training_mode_and_its_forwards(llama: Any) -> None:
    """Under dropout nothing is shared, and a forward that trains takes the memory (C5)."""
    first = words(1, 24)
    ask(llama, first, 4)
    assert hf_paged.stats(llama).cached
    llama.train()
    options = {"block_size": 4, "prefix_caching": True}
    with counted(llama) as seen:
        llama.generate(
            first,
            attention_mask=torch.ones_like(first),
            max_new_tokens=2,
            cache_implementation="paged",
            cache_config=options,
        )
    assert seen[0] == 24
    llama(first, labels=first).loss.backward()
    assert hf_paged.stats(llama).cached == 0
    llama.eval()
    assert ask(llama, first, 4)[1][0] == 24


def test_rope_that_turns_with_the_longest_row_is_private() -> None:
    """Trap 7: the angles of one row depend on its neighbours."""
    import transformers as tf

    config = tf.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=VOCABULARY,
        max_position_embeddings=32, rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
    )  # fmt: skip
    torch.manual_seed(0)
    model = tf.LlamaForCausalLM(config).eval()
    for length in (20, 40, 20):
        assert ask(model, words(1, length), 4)[1][0] == length
    assert hf_paged.stats(model).reasons["the rotary embedding depends on the longest row"] == 3


def test_a_mask_with_holes_is_private(llama: Any) -> None:
    """A token that is not seen is not the same prompt; and nobody else is given what was computed without
    it.
    """
    first = words(1, 24)
    mask = torch.ones_like(first)
    mask[0, 5] = 0
    assert ask(llama, first, 4, attention_mask=mask)[1][0] == 24
    assert ask(llama, first, 4)[1][0] == 24
    assert ask(llama, first, 4, attention_mask=mask)[1][0] == 24


def test_a_model_that_looks_ahead_is_found_out() -> None:
    """No mask of ours tells whether it is causal: its first prefix is computed again and compared."""
    model = build(BY_NAME["falcon"])
    attention = type(model.transformer.h[0].self_attention)
    original = attention.forward

    def looks_ahead(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return original(self, hidden_states + hidden_states.mean(1, keepdim=True), *args, **kwargs)

    first = words(1, 21)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "forward", looks_ahead)
        for ids in (first, continued(first, 17, 4), first, torch.cat([first, first], 1)):
            assert ids.shape[1] in ask(model, ids, 4)[1][:2]
        assert (
            hf_paged.stats(model).reasons["a chunk of a prompt is computed differently from the whole"] == 3
        )


# ---- kept caches


def test_a_kept_cache_takes_and_leaves(llama: Any) -> None:
    """PagedCache(model, prefix_caching=True): an empty one begins with what others left, and leaves every
    turn to others.
    """
    first = words(1, 40)
    ask(llama, first, 4)
    cache = hf_paged.PagedCache(llama, block_size=4, prefix_caching=True)
    told = continued(first, 36, 6)
    for turn in range(3):
        with counted(llama) as seen:
            answer = llama.generate(
                told,
                attention_mask=torch.ones_like(told),
                past_key_values=cache,
                max_new_tokens=6,
                do_sample=False,
            )
        assert torch.equal(
            answer,
            llama.generate(told, attention_mask=torch.ones_like(told), max_new_tokens=6, do_sample=False),
        )
        assert seen[0] == 6
        told = torch.cat([answer, words(1, 5, seed=turn)], 1)
        assert ask(llama, continued(answer, answer.shape[1], 3), 4)[1][0] == 4
    fork = copy.deepcopy(cache)
    for seed, each in enumerate((cache, fork), 10):
        other = torch.cat([told, words(1, 3, seed=seed)], 1)
        answer = llama.generate(
            other,
            attention_mask=torch.ones_like(other),
            past_key_values=each,
            max_new_tokens=6,
            do_sample=False,
        )
        assert torch.equal(
            answer,
            llama.generate(other, attention_mask=torch.ones_like(other), max_new_tokens=6, do_sample=False),
        )
        assert ask(llama, continued(answer, answer.shape[1], 3), 4)[1][0] == 4


def test_a_cache_that_was_filled_by_hand_is_private(llama: Any) -> None:
    """Nobody noted what a plain forward fed."""
    first = words(1, 20)
    cache = hf_paged.PagedCache(llama, block_size=4, prefix_caching=True)
    with torch.no_grad():
        llama(first, past_key_values=cache)
    longer = torch.cat([first, words(1, 4, seed=2)], 1)
    llama.generate(longer, attention_mask=torch.ones_like(longer), past_key_values=cache, max_new_tokens=4)
    assert hf_paged.stats(llama).reasons["the cache was filled outside of generate()"] == 1
    assert ask(llama, longer, 4)[1][0] == 24


@pytest.mark.parametrize("what", ["reset", "release", "invalidate", "crop"])
def test_taking_things_back_while_a_cache_is_kept(llama: Any, what: str) -> None:
    """Reset, release and invalidate under the feet of a cache that is kept: it goes on, and nobody finds what
    is not there.
    """
    first = words(1, 21)
    cache = hf_paged.PagedCache(llama, block_size=4, prefix_caching=True)
    call = {"past_key_values": cache, "max_new_tokens": 6, "do_sample": False}
    answer = llama.generate(first, attention_mask=torch.ones_like(first), **call)
    other = words(1, 21, seed=6)
    ask(llama, other, 4)
    if what == "reset":
        cache.reset()
        assert hf_paged.stats(llama).held == 0
    elif what == "release":
        hf_paged.release(llama)
    elif what == "invalidate":
        hf_paged.invalidate(llama)
        assert hf_paged.stats(llama).cached == 0
    else:
        cache.crop(-9)
        answer = answer[:, : cache.get_seq_length()]
    assert ask(llama, continued(other, 18, 4), 4)[1][0] == (22 if what == "invalidate" else 4)
    longer = torch.cat([answer, words(1, 4, seed=2)], 1)
    again = llama.generate(longer, attention_mask=torch.ones_like(longer), **call)
    assert torch.equal(
        again,
        llama.generate(longer, attention_mask=torch.ones_like(longer), max_new_tokens=6, do_sample=False),
    )
    memory_of(llama).check()
    assert ask(llama, continued(again, again.shape[1], 3), 4)[1][0] == (
        3 + again.shape[1] if what == "invalidate" else 4
    )
    del cache, call
    assert ask(llama, continued(again, 20, 3), 4)[1][0] == 3


# ---- room


def test_the_least_recently_used_goes_first(llama: Any) -> None:
    """C20: a pool of fixed size keeps what was asked for last."""
    prompts = [words(1, 20, seed=seed) for seed in range(4)]
    options = {"num_blocks": 20}
    for ids in (*prompts[:3], prompts[0]):
        ask(llama, ids, 4, options)
    assert ask(llama, prompts[3], 4, options)[1][0] == 20
    assert ask(llama, prompts[0], 4, options)[1][0] == 1
    assert ask(llama, prompts[1], 4, options)[1][0] == 16  # its end went, its beginning was worth more
    assert hf_paged.stats(llama).evictions > 0


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_storm_of_evictions(name: str) -> None:
    """A pool that hardly holds one call, prompts that begin alike in all ways: right at every turn, whatever
    is still there.
    """
    model = build(BY_NAME[name])
    random = torch.Generator().manual_seed(3)
    base = words(1, 30)
    for turn in range(16):
        rows, shared, own = (
            int(torch.randint(low, high, (), generator=random)) for low, high in ((1, 3), (0, 30), (1, 9))
        )
        ids = continued(base.repeat(rows, 1), shared, own, seed=turn % 4)
        ask(model, ids, 4, {"num_blocks": 32}, num_beams=1 + turn % 2, max_new_tokens=3)
        if turn % 5 == 4:
            base = continued(base, 17, 13, seed=turn)
    assert hf_paged.stats(model).evictions > 10
    assert hf_paged.stats(model).reused > 30


def test_a_pool_that_grows_keeps_what_is_cached(llama: Any) -> None:
    """Rather than to give up prefixes, a pool without a fixed size grows."""
    first = words(1, 20)
    ask(llama, first, 4)
    total = pool_of(llama).total
    for seed in range(3):
        ask(llama, words(4, 60, seed=seed), 4)
    assert pool_of(llama).total > total
    assert ask(llama, first, 4)[1][0] == 1


def test_ordinary_calls_share_the_pool_and_nothing_else(llama: Any) -> None:
    """A call that did not ask neither finds nor leaves anything, and does not cost others what they
    cached.
    """
    first = words(1, 20)
    ask(llama, first, 4)
    with counted(llama) as seen:
        llama.generate(
            first,
            attention_mask=torch.ones_like(first),
            max_new_tokens=6,
            cache_implementation="paged",
            cache_config={"block_size": 4},
        )
    assert seen[0] == 20
    assert len(memory_of(llama).groups) == 1
    llama.generate(
        first,
        attention_mask=torch.ones_like(first),
        max_new_tokens=6,
        cache_implementation="paged",
        cache_config={"block_size": 8},
    )
    assert ask(llama, first, 4)[1][0] == 1


def test_a_hit_must_hold_in_all_groups() -> None:
    """C5: blocks behind a window that were given up end a prefix for the layers that see everything, too."""
    model = build(BY_NAME["gemma3"])
    first = words(1, 40)
    ask(model, first, 4)
    assert ask(model, continued(first, 30, 5), 4)[1][0] == 5
    pool = pool_of(model, "window")
    for block in list(pool._evictor):
        pool.share(block)
        pool.uncache(block)
        pool.drop(block)
    assert ask(model, continued(first, 30, 5), 4)[1][0] == 35


# ---- failures


class _Boom(Exception):
    pass


@pytest.mark.parametrize("cached", [False, True], ids=["cold", "warm"])
@pytest.mark.parametrize("when", [0, 3], ids=["in the prompt", "in a step"])
def test_c22_a_failed_forward_poisons_nothing(llama: Any, when: int, cached: bool) -> None:
    """C22: what it wrote is found by nobody, what it had begun with is found again, and no block is lost."""
    first = words(2, 22)
    if cached:
        ask(llama, first, 4)
    calls = 0

    def fail(module: Any, args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == when + 1:
            raise _Boom

    longer = continued(first, 18, 8)
    handle = llama.model.layers[1].register_forward_pre_hook(fail)
    options = {"block_size": 4, "prefix_caching": True}
    with pytest.raises(_Boom):
        llama.generate(
            longer,
            attention_mask=torch.ones_like(longer),
            max_new_tokens=6,
            min_new_tokens=6,
            cache_implementation="paged",
            cache_config=options,
        )
    handle.remove()
    assert_clean(llama, "sdpa")
    expected = 2 if when else 8 if cached else 26
    assert ask(llama, longer, 4)[1][0] == expected


def test_c22_a_kept_cache_survives_a_failed_turn(llama: Any) -> None:
    """Rolled back to where it was, and what it leaves later is right."""
    first = words(1, 21)
    ask(llama, first, 4)
    cache = hf_paged.PagedCache(llama, block_size=4, prefix_caching=True)
    handle = llama.model.layers[1].register_forward_pre_hook(
        lambda module, args: (_ for _ in ()).throw(_Boom())
    )
    with pytest.raises(_Boom):
        llama.generate(first, attention_mask=torch.ones_like(first), past_key_values=cache, max_new_tokens=6)
    handle.remove()
    assert cache.get_seq_length() == 0
    answer = llama.generate(
        first, attention_mask=torch.ones_like(first), past_key_values=cache, max_new_tokens=6, do_sample=False
    )
    assert torch.equal(
        answer,
        llama.generate(first, attention_mask=torch.ones_like(first), max_new_tokens=6, do_sample=False),
    )
    assert ask(llama, continued(answer, answer.shape[1], 3), 4)[1][0] == 4


def test_no_room_for_a_prompt_that_was_found(llama: Any) -> None:
    """OutOfBlocks with a hit in hand: every block is back, and what was cached is still there."""
    first = words(1, 20)
    ask(llama, first, 4, {"num_blocks": 12})
    with pytest.raises(hf_paged.OutOfBlocks):
        ask(llama, continued(first, 18, 20), 4, {"num_blocks": 12}, max_new_tokens=60)
    assert_clean(llama, "sdpa")
    assert ask(llama, first, 4, {"num_blocks": 12})[1][0] == 1


def test_two_threads_share_a_prefix(llama: Any) -> None:
    """Calls at one time take turns forward by forward: each right, each with what the other left."""
    first = words(1, 40)
    prompts = [continued(first, 36, 4 + i, seed=i) for i in range(4)]
    stock = [
        llama.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=9, do_sample=False)
        for ids in prompts
    ]
    answers: dict[int, torch.Tensor] = {}

    def run(i: int) -> None:
        for _ in range(3):
            answers[i] = llama.generate(
                prompts[i], attention_mask=torch.ones_like(prompts[i]), max_new_tokens=9, do_sample=False,
                cache_implementation="paged", cache_config={"block_size": 4, "prefix_caching": True},
            )  # fmt: skip

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(answers[i], stock[i]) for i in range(4))
    assert hf_paged.stats(llama).reused > 36 * 8
    assert_clean(llama, "sdpa")
