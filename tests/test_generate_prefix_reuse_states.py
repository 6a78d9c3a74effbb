"""Prefix reuse of models with recurrent states: blocks and a snapshot of the states behind exactly their tokens,
and stock's answers (contract C17 to C23).
"""

from __future__ import annotations

import functools
import sys
import weakref
from typing import Any

import pytest
import torch
from captures import counts, policy
from poison import poison_free_slots
from prefix_reuse import ask, continued
from prefix_reuse import words as any_words
from releases import NEEDS_SLOTS
from tape import record
from tiny import build, config_class

import hf_paged
from hf_paged import PagedCache
from hf_paged.model import state_functions
from hf_paged.model.registry import memory_of
from hf_paged.model.rehearsal import RECORDERS

pytestmark = NEEDS_SLOTS
FAMILIES = [
    "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "inkling_text", "jamba", "kimi_linear", "lfm2",
    "lfm2_moe", "lfm3", "mamba", "mamba2", "nemotron_h", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text",
    "qwen3_next", "zamba", "zamba2", "zaya",
]  # fmt: skip
OF_OTHER_CODE = ("zaya",)
"""Families whose layers step a state by code that is not known."""
EVERY_16 = {"state_every": 16}
EVERY_80 = {"state_every": 80}
"""A prompt leaves a snapshot behind 20 tokens and more."""


def words(*shape: int, seed: int = 5) -> torch.Tensor:
    return any_words(*shape, seed=seed) % 75 + 5


def make(family: str) -> Any:
    model = build("causal", config_class("causal", family))
    model.generation_config.eos_token_id = None
    return model


def states_of(model: Any) -> Any:
    return next(pool for pool in hf_paged.stats(model).pools if pool.kind == "state")


@pytest.fixture
def qwen(monkeypatch: pytest.MonkeyPatch) -> Any:
    poison_free_slots(monkeypatch)
    return make("qwen3_5_text")


@pytest.mark.parametrize("family", FAMILIES)
def test_turns_of_a_chat(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each turn computes its new tokens and the last one of the answer, in other modes too. Stock's beams do
    not end as the rows of their answers, so nothing is asked behind them. Rows with padding follow.
    """
    poison_free_slots(monkeypatch)
    model = make(family)
    told, _ = ask(model, words(1, 18), 4, EVERY_16)
    for seed, way in enumerate(({}, {"do_sample": True, "num_return_sequences": 2}, {"num_beams": 2})):
        told = torch.cat([told[:1], words(1, 4, seed=seed)], 1)
        before = hf_paged.stats(model).computed
        told, _ = ask(model, told, 4, EVERY_16, **way)
        tried = family in OF_OTHER_CODE and not seed  # its first prefix is computed again
        assert hf_paged.stats(model).computed - before == (27 if tried else 5)
    assert not hf_paged.stats(model).reasons
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, :4] = 0
    ask(model, words(2, 9) * mask, 4, EVERY_16, attention_mask=mask)


@pytest.mark.parametrize("family", ["mamba2", "qwen3_5_text"])
def test_the_third_prompt_begins_where_the_second_has_parted(family: str) -> None:
    """Its first part ends there. A second that parts from nothing is computed in one."""
    model = make(family)
    first = words(1, 40)
    computed = [
        ask(model, ids, 4, EVERY_80)[1][:2]
        for ids in (first, continued(first, 22, 18), continued(first, 22, 9, seed=3))
    ]
    assert computed == [[40, 1], [22, 18], [9, 1]]


def test_a_prompt_leaves_snapshots_on_its_way(qwen: Any) -> None:
    """Every `state_every` tokens, once a first prompt has shown that parts of it are computed like the whole."""
    ask(qwen, words(1, 12, seed=1), 4, EVERY_16)
    first = words(1, 40)
    assert ask(qwen, first, 4, EVERY_16)[1][:3] == [16, 16, 8]
    assert ask(qwen, continued(first, 39, 5), 4, EVERY_16)[1][:2] == [7, 5]  # 32 found, 39 in blocks
    assert ask(qwen, continued(first, 31, 5), 4, EVERY_16)[1][:3] == [15, 1, 4]  # 16, and 31


def test_snapshots_keep_to_their_number(qwen: Any) -> None:
    """Two rows of a call and their steps have slots first; of snapshots those go that save fewest tokens."""
    options = {"state_slots": 2, "state_snapshots": 3, **EVERY_16}
    for seed in range(5):
        ask(qwen, words(1, 20, seed=seed), 4, options)
        assert states_of(qwen).blocks == 5
    assert states_of(qwen).evictions
    last = words(1, 20, seed=4)
    assert ask(qwen, continued(last, 20, 3), 4, options)[1][0] == 3
    ask(qwen, words(1, 20, seed=9), 4, options, num_beams=2)


def test_a_growing_pool_has_room_for_snapshots(qwen: Any) -> None:
    for seed in range(4):
        ask(qwen, words(1, 20, seed=seed), 4, {"state_snapshots": 5})
    assert states_of(qwen).blocks <= 2 + 5


def test_captured_steps_write_in_no_snapshot(qwen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RECORDERS, "cpu", record)
    policy(monkeypatch, least_steps=4)
    config = {"block_size": 4, "prefix_caching": True, **EVERY_16}
    first = words(1, 24)
    for ids in (first, continued(first, 24, 2), continued(first, 24, 3)):
        call = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12, "do_sample": False}
        answer = qwen.generate(ids, **call, cache_implementation="paged", cache_config=config)
        assert torch.equal(answer, qwen.generate(ids, **call))
    assert counts(qwen)["replayed"]
    assert hf_paged.stats(qwen).reused == 48


def test_rows_of_one_length_begin_together(qwen: Any) -> None:
    first = words(3, 24)
    ask(qwen, first, 4, EVERY_16)
    assert ask(qwen, continued(first, 24, 4), 4, EVERY_16)[1][0] == 4
    twice = continued(first, 24, 4)[[0, 0, 2]]
    assert ask(qwen, twice, 4, EVERY_16)[1][0] == 4


@pytest.mark.parametrize("family", ["mamba2", "qwen3_5_text"])
def test_padded_rows_compute_their_prompts(family: str) -> None:
    """A state of theirs is behind more columns than tokens. Blocks they leave."""
    model = make(family)
    ids = words(2, 24)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    for _ in range(2):
        assert ask(model, ids * mask, 4, attention_mask=mask)[1][0] == 24
    alone = ask(model, ids[1:], 4, EVERY_80)[1]
    assert alone[:2] == ([24, 1] if family == "mamba2" else [23, 1])  # a part behind what blocks have


def test_bytes_and_tokens_are_verified(qwen: Any) -> None:
    for verify in ("tokens", "bytes"):
        told, _ = ask(qwen, words(1, 24), 4, {"verify": verify})
        assert ask(qwen, continued(told, 28, 4), 4, {"verify": verify})[1][0] == 4


def test_a_part_that_fails(qwen: Any) -> None:
    """Its rows are given back; snapshots before it are found (C22)."""
    ask(qwen, words(1, 12), 4, EVERY_16)
    first = words(1, 40, seed=3)
    times = []

    def fail(module: Any, arguments: Any) -> None:
        times.append(1)
        if len(times) == 2:
            raise RuntimeError("a part fails")

    cache = PagedCache(qwen, block_size=4, prefix_caching=True, state_every=16)
    with qwen.model.layers[-1].register_forward_pre_hook(fail), pytest.raises(RuntimeError, match="a part"):
        qwen.generate(first, attention_mask=torch.ones_like(first), past_key_values=cache, max_new_tokens=2)
    assert not cache.get_seq_length()
    memory_of(qwen).check()
    new = {"max_new_tokens": 4, "do_sample": False, "attention_mask": torch.ones_like(first)}
    answer = qwen.generate(first, past_key_values=cache, **new)
    assert torch.equal(answer, qwen.generate(first, **new))
    ask(qwen, first, 4, EVERY_16)


def test_prompts_in_chunks_of_the_users(qwen: Any) -> None:
    first = words(1, 24)
    for _ in range(2):
        assert ask(qwen, first, 4, EVERY_16, prefill_chunk_size=10)[1][0] == 10
    assert ask(qwen, continued(first, 24, 4), 4, EVERY_16)[1][0] == 4


def test_no_snapshots_are_no_prefixes(qwen: Any) -> None:
    for _ in range(2):
        assert ask(qwen, words(1, 20), 4, {"state_snapshots": 0})[1][0] == 20
    assert hf_paged.stats(qwen).reasons["layers keep recurrent states, and state_snapshots=0"] == 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"state_every": 0}, "state_every=0 is no number of tokens; give 1 or more"),
        ({"state_snapshots": -1}, "state_snapshots=-1 is no number of slots; give 0 or more"),
        ({"state_snapshots": True}, "state_snapshots must be an int, got True"),
    ],
)
def test_options(options: dict[str, Any], said: str, qwen: Any) -> None:
    with pytest.raises((ValueError, TypeError), match=said):
        PagedCache(qwen, prefix_caching=True, **options)


def test_scans_of_other_signatures_keep_their_states(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A part of a prompt would begin without one, as in transformers. The log says so once for a class."""
    monkeypatch.setattr(state_functions, "_told", weakref.WeakKeyDictionary())
    model = make("jamba")
    file = sys.modules[type(model).__module__]
    stock = file.mamba_selective_scan
    monkeypatch.setattr(file, "mamba_selective_scan", lambda *args, **kwargs: stock(*args, **kwargs))
    first = words(1, 20)
    for ids in (first, continued(first, 20, 3)):
        assert ask(model, ids, 4, EVERY_16)[1][0] == ids.shape[1]
    (reason,) = hf_paged.stats(model).reasons
    assert "forgets its states" in reason
    assert "mamba_selective_scan has other parameters" in reason
    assert sum("JambaForCausalLM: " in each for each in caplog.messages) == 1


def test_layers_of_other_code_are_tried_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first prefix that is found is computed again, and the answers are compared."""
    model = make("qwen3_5_text")
    file = sys.modules[type(model).__module__]
    for name in ("torch_chunk_gated_delta_rule", "causal_conv1d_fn"):
        own = functools.partial(lambda stock, *args, **kwargs: stock(*args, **kwargs), getattr(file, name))
        monkeypatch.setattr(file, name, own)
    first = words(1, 20)
    computed = [ask(model, each, 4, EVERY_16)[1][:2] for each in (first, *[continued(first, 20, 3)] * 2)]
    assert computed == [[20, 1], [3, 23], [3, 1]]
