"""Rows that have ended leave the steps of a call, and what comes out is stock's."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch
from captures import counts, policy
from compare import assert_clean, assert_equal, assert_same
from counted_rows import counted
from families import BY_NAME, VOCABULARY, build
from modes import MODES
from peft import LoraConfig, get_peft_model
from releases import NEEDS_SLOTS
from tape import record
from transformers import LogitsProcessor, StoppingCriteria
from transformers.generation.streamers import BaseStreamer
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput

import hf_paged
from hf_paged.generate.dedupe import answer_all, select_rows
from hf_paged.generate.ended import ComputedRows
from hf_paged.model.capture.step import bucket_of
from hf_paged.model.rehearsal import RECORDERS

EOS, PAD = VOCABULARY - 1, 0
ENDS = [3, 1, 6, 2, 8, 4, 5]
"""The tokens of each row of a model that counts."""


def counting(model: Any) -> Any:
    """The model, made to say t + 1 after token t: the head's rows are the embeddings, moved by one."""
    embeddings = model.get_input_embeddings().weight.data
    unit = embeddings / embeddings.norm(dim=1, keepdim=True)
    model.get_output_embeddings().weight.data.copy_(unit.roll(1, 0) * 8)
    embeddings *= 100
    return model


def prompt_of(ends: list[int]) -> torch.Tensor:
    """Prompts after which row i of a model that counts has ends[i] tokens."""
    ids = torch.randint(5, VOCABULARY, (len(ends), 9), generator=torch.Generator().manual_seed(3))
    ids[:, -1] = EOS - torch.tensor(ends)
    return ids


def compared(model: Any, **arguments: Any) -> tuple[Any, list[int]]:
    """The paged answer, which is stock's, and the rows of its forwards."""
    given = {"eos_token_id": EOS, "pad_token_id": PAD, **arguments}
    given.setdefault("attention_mask", torch.ones_like(given["input_ids"]))
    options = {"block_size": 4, **given.pop("cache_config", {})}
    torch.manual_seed(0)
    stock = model.generate(**given)
    torch.manual_seed(0)
    with counted(model) as seen:
        answer = model.generate(**given, cache_implementation="paged", cache_config=options)
    assert_equal(stock, answer)
    return answer, [rows for rows, _ in seen]


def left_out_of(model: Any, **arguments: Any) -> int:
    """The rows that forwards of a paged call leave out, whose answer is stock's. No hook of ours looks on, so
    its steps may be captured.
    """
    given = {"eos_token_id": EOS, "pad_token_id": PAD, **arguments}
    before = hf_paged.stats(model).rows_left_out
    assert_same(model, **given)
    return hf_paged.stats(model).rows_left_out - before


def running(answer: torch.Tensor, prompt: int) -> list[int]:
    """The rows that run in each step of a call behind its prompt, by its answer."""
    new = answer[:, prompt:-1]  # the last tokens go through no step
    return [int((column != PAD).sum() - (column == EOS).sum()) for column in new.T]


# ---- which rows are computed


@pytest.mark.parametrize("ends", [ENDS, sorted(ENDS), sorted(ENDS, reverse=True), [2, 2, 7, 2]], ids=str)
@pytest.mark.parametrize("options", [{"do_sample": False}, {"do_sample": True, "top_k": 0}], ids=str)
def test_rows_leave_at_the_step_behind_their_end(ends: list[int], options: dict[str, Any]) -> None:
    """C3: one at each step, several at once, the first and the last row first."""
    model = counting(build(BY_NAME["llama"]))
    given = {"input_ids": prompt_of(ends), "max_new_tokens": 12, **options}
    answer, seen = compared(model, **given)
    assert seen == [len(ends), *(sum(end > step for end in ends) for step in range(1, max(ends)))]
    assert seen[1:] == running(answer, 9)
    stats = hf_paged.stats(model)
    assert stats.rows_left_out == len(ends) * max(ends) - sum(seen)
    assert stats.rows_computed == sum(seen)
    assert stats.rows_stay is None
    _, every = compared(model, **given, cache_config={"drop_ended": "off"})
    assert every == [len(ends)] * max(ends)
    assert_clean(model, "sdpa")


def test_rows_leave_in_the_sizes_of_captured_steps() -> None:
    """Of many rows several leave at a time: they move as seldom as the sizes change."""
    model = counting(build(BY_NAME["llama"]))
    ends = [1 + row // 2 for row in range(40)]
    _, seen = compared(model, input_ids=prompt_of(ends), max_new_tokens=25, do_sample=False)
    held = len(ends)
    for step, rows in enumerate(seen[1:], 1):
        left = sum(end > step for end in ends)
        held = left if bucket_of(left) < bucket_of(held) else held
        assert rows == held
    assert len(set(seen)) < 20


@pytest.mark.parametrize("name", MODES)
def test_every_mode_with_rows_that_end(llama: Any, name: str) -> None:
    """All processors of the modes, and modes whose rows stay: beams, assistants, answers with more fields."""
    ids = torch.randint(5, VOCABULARY, (3, 13), generator=torch.Generator().manual_seed(5))
    given = {"input_ids": ids, **MODES[name](_assisted(llama), ids), "eos_token_id": list(range(5, 14))}
    compared(llama, **given)
    assert_clean(llama, "sdpa")


def _assisted(model: Any) -> Any:
    object.__setattr__(model, "assistant", build(BY_NAME["llama"]))
    return model


@NEEDS_SLOTS
@pytest.mark.parametrize(
    ("family", "captured"),
    [
        ("qwen3_5_text", True),
        ("gemma3_text", True),
        ("falcon_h1", True),
        ("lfm2", False),
        ("mamba2", False),
        ("deepseek_v3", False),
    ],
)
def test_what_else_a_row_holds_leaves_with_it(
    family: str, captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recurrent states in slots, windows, latents; with equal prompts, which are forked for rows that run."""
    if captured:
        monkeypatch.setitem(RECORDERS, "cpu", record)
        policy(monkeypatch, least_steps=2)
    model = tiny.build("causal", tiny.config_class("causal", family))
    setting = model.config._attn_implementation
    ids = torch.randint(5, 80, (3, 9), generator=torch.Generator().manual_seed(4))
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    given = {"input_ids": ids * mask, "attention_mask": mask, "do_sample": True, "num_return_sequences": 3}
    left_out = left_out_of(model, **given, eos_token_id=list(range(9)), max_new_tokens=20)
    assert left_out > 6, "the prompt's rows alone were left out"
    assert bool(counts(model)["replayed"]) == captured
    assert_clean(model, setting)


@pytest.mark.parametrize("name", ["bart", "t5", "captured bart"])
def test_an_encoder_s_rows_leave_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what the decoder has stored of them; one mask is padded."""
    monkeypatch.setitem(RECORDERS, "cpu", record)
    policy(monkeypatch, least_steps=2)
    model = build(BY_NAME[name.split()[-1]])
    setting = model.config._attn_implementation
    ids = torch.randint(5, VOCABULARY, (4, 9), generator=torch.Generator().manual_seed(6))
    mask = torch.ones_like(ids)
    mask[2, 5:] = 0
    given = {"input_ids": ids * mask, "attention_mask": mask, "do_sample": True, "num_return_sequences": 2}
    given |= {"eos_token_id": list(range(9)), "max_new_tokens": 20}
    if name == "captured bart":
        assert left_out_of(model, **given) > 4
        assert counts(model)["replayed"]
    else:
        _, seen = compared(model, **given)
        assert min(seen) < 8
    assert_clean(model, setting)


def test_an_encoder_s_answer_is_cut_once() -> None:
    """Steps get the same rows of it, which captured steps then need not copy; their answer has all rows."""
    encoded = BaseModelOutput(last_hidden_state=torch.randn(3, 5, 4))
    computed = ComputedRows.of([0, 0, 2])
    assert computed is not None
    first, second = (
        select_rows({"decoder_input_ids": torch.ones(3, 1).long(), "encoder_outputs": encoded}, computed)
        for _ in range(2)
    )
    few = first["encoder_outputs"].last_hidden_state
    assert torch.equal(few, encoded.last_hidden_state[[0, 2]])
    assert second["encoder_outputs"].last_hidden_state is few
    answer = Seq2SeqLMOutput(logits=torch.randn(2, 1, 7), encoder_last_hidden_state=few)
    whole = answer_all(answer, computed, few.device)
    assert whole.encoder_last_hidden_state is encoded.last_hidden_state
    assert torch.equal(whole.logits, answer.logits[[0, 0, 1]])


def test_a_captured_step_stands_in_for_the_rows_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """One captured step serves all sizes below it; a second call replays from its first step."""
    monkeypatch.setitem(RECORDERS, "cpu", record)
    policy(monkeypatch, least_steps=2)
    model = counting(build(BY_NAME["llama"]))
    ends = [5, 9, 12, 5, 8, 20]
    given = {"input_ids": prompt_of(ends), "max_new_tokens": 20, "do_sample": False}
    for replayed in (14, 19):
        before = counts(model)["replayed"]
        assert left_out_of(model, **given) == 6 * 20 - sum(ends)
        assert counts(model)["replayed"] - before >= replayed
    assert counts(model)["captured"] == 1
    assert_clean(model, "sdpa")


def test_padded_rows_that_leave_cost_no_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that run on are no longer padded: their steps are still those that were captured."""
    monkeypatch.setitem(RECORDERS, "cpu", record)
    policy(monkeypatch, least_steps=2)
    model = counting(build(BY_NAME["llama"]))
    ids = prompt_of([9, 20, 8])
    mask = torch.ones_like(ids)
    mask[0, :3] = mask[2, :1] = 0
    given = {"input_ids": ids * mask, "attention_mask": mask, "max_new_tokens": 20, "do_sample": False}
    assert left_out_of(model, **given) == 3 * 20 - 9 - 20 - 8
    assert counts(model)["captured"] == 1


def test_samples_that_end_at_once_are_never_forked(llama: Any) -> None:
    """A prompt is computed once, and only rows that run behind its first token get tables of their own."""
    ids = torch.randint(5, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(1))
    given = {"input_ids": ids, "do_sample": True, "num_return_sequences": 5, "max_new_tokens": 6}
    answer, seen = compared(llama, **given, eos_token_id=list(range(1, 60)))
    first = int((answer[:, 12] >= 60).sum())
    assert 0 < first < 10
    assert seen[:2] == [2, first]


def test_adapters_leave_with_their_rows() -> None:
    """Each row has an adapter of its own (peft's mixed batches)."""
    model = get_peft_model(build(BY_NAME["llama"]), LoraConfig(r=4, init_lora_weights=False), "one")
    model.add_adapter("other", LoraConfig(r=4, init_lora_weights=False))
    ids = torch.randint(5, VOCABULARY, (6, 9), generator=torch.Generator().manual_seed(8))
    names = ["one", "other", "__base__", "other", "one", "__base__"]
    model.eval()
    given = {"input_ids": ids, "adapter_names": names, "do_sample": True, "max_new_tokens": 12}
    _, seen = compared(model, **given, eos_token_id=list(range(1, 20)))
    assert min(seen) < 6


# ---- what stays


class Noting(LogitsProcessor):
    """A processor of the user's that keeps what it sees of each row, by the row's place."""

    def __init__(self) -> None:
        self.rows: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.rows.append(scores.clone())
        return scores


class Never(StoppingCriteria):
    """A criterion of the user's."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.zeros(len(input_ids), dtype=torch.bool)


STAYS = {
    "off": ({"cache_config": {"drop_ended": "off"}}, "drop_ended is 'off'"),
    "answer": ({"return_dict_in_generate": True}, "return_dict_in_generate"),
    "prefixes": ({"cache_config": {"prefix_caching": True}}, "prefix_caching keeps"),
    "processor": ({"logits_processor": [Noting()]}, "Noting is not transformers' own"),
    "criterion": ({"stopping_criteria": [Never()]}, "Never is not transformers' own"),
    "no EOS": ({"eos_token_id": None}, "no criterion names an EOS token"),
}


@pytest.mark.parametrize("name", STAYS)
def test_rows_stay_where_something_looks_at_them(name: str) -> None:
    """The figures say why."""
    model = counting(build(BY_NAME["llama"]))
    options, words = STAYS[name]
    if name == "no EOS":
        model.generation_config.eos_token_id = None
    _, seen = compared(model, input_ids=prompt_of([2, 5, 3]), max_new_tokens=5, do_sample=False, **options)
    assert seen == [3] * 5
    assert words in str(hf_paged.stats(model).rows_stay)


def test_the_figures_are_those_of_the_last_call() -> None:
    """Of beams, and of a cache that was handed in, after a call whose rows could leave."""
    model = counting(build(BY_NAME["llama"]))
    given = {"input_ids": prompt_of([2, 5]), "max_new_tokens": 5, "do_sample": False}
    compared(model, **given)
    assert hf_paged.stats(model).rows_stay is None
    compared(model, **given, num_beams=2)
    assert "neither greedy decoding nor sampling" in str(hf_paged.stats(model).rows_stay)
    model.generate(**given, past_key_values=hf_paged.PagedCache(model), eos_token_id=EOS, pad_token_id=PAD)
    assert hf_paged.stats(model).rows_stay == "the cache was handed in"


def test_a_user_s_processor_sees_every_row() -> None:
    """The scores of rows that have ended are those that stock computes for them."""
    model = counting(build(BY_NAME["llama"]))
    given = {"input_ids": prompt_of([1, 4, 2]), "max_new_tokens": 4, "do_sample": False, "eos_token_id": EOS}
    kept = []
    for options in ({}, {"cache_implementation": "paged"}):
        noting = Noting()
        model.generate(**given, pad_token_id=PAD, logits_processor=[noting], **options)
        kept.append(noting.rows)
    assert_equal(*kept)


def test_a_cache_of_the_user_s_is_whole() -> None:
    """Rows of a cache that was handed in go on with pad tokens, and the next turn finds them."""
    model = counting(build(BY_NAME["llama"]))
    ids = prompt_of([1, 4, 2])
    given = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": EOS, "pad_token_id": PAD}
    cache = hf_paged.PagedCache(model, block_size=4)
    answer = model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, **given)
    assert cache.lengths == [9 + 3] * 3
    again = torch.cat([answer, ids[:, -3:]], 1)
    mask = torch.ones_like(again)
    assert torch.equal(
        model.generate(again, attention_mask=mask, past_key_values=cache, **given),
        model.generate(again, attention_mask=mask, **given),
    )


class Tape(BaseStreamer):
    """A streamer of any number of rows."""

    def __init__(self) -> None:
        self.given: list[torch.Tensor] = []

    def put(self, value: torch.Tensor) -> None:
        self.given.append(value.clone())

    def end(self) -> None:
        self.given.append(torch.empty(0))


def test_a_streamer_gets_pads_of_rows_that_have_left() -> None:
    model = counting(build(BY_NAME["llama"]))
    tapes = [Tape(), Tape()]
    ids = prompt_of([1, 5, 3])
    given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 5, "do_sample": False}
    given |= {"eos_token_id": EOS, "pad_token_id": PAD}
    model.generate(ids, streamer=tapes[0], **given)
    with counted(model) as seen:
        model.generate(ids, streamer=tapes[1], cache_implementation="paged", **given)
    assert_equal(tapes[0].given, tapes[1].given)
    assert [rows for rows, _ in seen] == [3, 2, 2, 1, 1]


# ---- what goes wrong


def test_an_unknown_value_is_refused(llama: Any, ids: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"drop_ended='on' is not one of \('auto', 'off'\)"):
        llama.generate(ids, cache_implementation="paged", cache_config={"drop_ended": "on"})


def test_a_step_that_fails_behind_rows_that_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is held afterwards, and the next call is right."""
    model = counting(build(BY_NAME["llama"]))
    ids = prompt_of([2, 6, 4])
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    given = {"input_ids": ids * mask, "attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
    calls = []

    def fails(module: Any, args: Any) -> None:
        calls.append(len(args))
        if len(calls) == 4:
            raise RuntimeError("in the middle of a step")

    handle = model.model.layers[1].register_forward_pre_hook(fails)
    with pytest.raises(RuntimeError, match="in the middle of a step"):
        model.generate(**given, eos_token_id=EOS, pad_token_id=PAD, cache_implementation="paged")
    handle.remove()
    assert hf_paged.stats(model).held == 0
    compared(model, **given)
    assert_clean(model, "sdpa")
