"""hf_paged.check_mismatch: identical in float32, ties in half precision, a broken model found out, a sampler
beside a trainer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
import torch
import transformers as tf
from families import BY_NAME, VOCABULARY, build

import hf_paged
from hf_paged.checking import LogprobGap, Mismatch, RowMismatch
from hf_paged.checking.ties import NOISE
from hf_paged.model.attention import NAME, paged_attention

GREEDY = {"max_new_tokens": 24, "do_sample": False}
MODES = {
    "greedy": (GREEDY, "greedy"),
    "samples": (
        {"max_new_tokens": 12, "do_sample": True, "num_return_sequences": 3, "temperature": 1.3, "top_k": 20},
        "samples",
    ),
    "beams": ({**GREEDY, "num_beams": 3, "num_return_sequences": 2}, "beams"),
    "beam samples": ({"max_new_tokens": 8, "num_beams": 3, "do_sample": True}, "beam samples"),
    "lookup": ({**GREEDY, "prompt_lookup_num_tokens": 3}, "greedy"),
}


@pytest.fixture
def inputs() -> dict[str, torch.Tensor]:
    """Three prompts, two of them padded."""
    ids = torch.randint(5, VOCABULARY, (3, 13), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    mask[2, :9] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


@pytest.fixture
def astray() -> Iterator[list[float]]:
    """From now on what attention makes of the pages is off by so much of its size."""
    by = [0.0]

    def off(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, Any]:
        found, weights = paged_attention(*args, **kwargs)
        return found * (1 + by[0]), weights

    tf.AttentionInterface.register(NAME, off)
    yield by
    tf.AttentionInterface.register(NAME, paged_attention)


@pytest.mark.parametrize("mode", MODES)
def test_float32_is_identical(llama: Any, inputs: dict[str, torch.Tensor], mode: str) -> None:
    options, name = MODES[mode]
    if mode == "lookup":
        inputs = {name: value[1:2] for name, value in inputs.items()}
    report = hf_paged.check_mismatch(llama, inputs, **options, cache_config={"block_size": 4})
    assert report.identical
    assert report.ok
    assert report.mode == name
    assert report.different == ()
    assert report.tokens > 10
    assert "the same tokens" in str(report)


@pytest.mark.parametrize("family", ["t5", "bart", "gemma3"])
def test_other_families_are_identical(family: str, ids: torch.Tensor) -> None:
    assert hf_paged.check_mismatch(build(BY_NAME[family]), ids, **GREEDY).identical


def test_no_length_needs_to_be_given(llama: Any, ids: torch.Tensor, recwarn: pytest.WarningsRecorder) -> None:
    """Both answer with stock's default of 20 tokens, and stock's advice to give a length is left out."""
    report = hf_paged.check_mismatch(llama, ids)
    assert (report.tokens, report.identical) == (20 * len(ids), True)
    assert not [each.message for each in recwarn if "max_length" in str(each.message)]


def test_nothing_is_left_changed(llama: Any, ids: torch.Tensor) -> None:
    """The modules' modes, the random state and the generation config are as before."""
    llama.train()
    llama.lm_head.eval()
    llama.generation_config.cache_implementation = "paged"
    torch.manual_seed(11)
    state = torch.get_rng_state()
    report = hf_paged.check_mismatch(llama, ids, max_new_tokens=4, do_sample=True)
    assert report.identical
    assert torch.equal(state, torch.get_rng_state())
    assert llama.training
    assert not llama.lm_head.training
    assert llama.generation_config.cache_implementation == "paged"
    assert "forward" not in llama.__dict__
    assert not llama.get_input_embeddings()._forward_hooks


def test_stock_runs_on_its_own_cache(llama: Any, ids: torch.Tensor, astray: list[float]) -> None:
    """Under a config with the word, too: else pages would be compared with pages."""
    astray[0] = 3.0
    config = tf.GenerationConfig(**GREEDY, cache_implementation="paged")
    assert not hf_paged.check_mismatch(llama, ids, generation_config=config).ok
    llama.generation_config.cache_implementation = "paged"
    assert not hf_paged.check_mismatch(llama, ids, **GREEDY).ok


@pytest.mark.parametrize("mode", ["greedy", "samples"])
def test_bfloat16_differs_at_ties_only(
    inputs: dict[str, torch.Tensor], astray: list[float], mode: str
) -> None:
    """Pages that are off by as much as the dtype resolves."""
    model = build(BY_NAME["llama"]).to(torch.bfloat16)
    astray[0] = 2**-8
    found: list[RowMismatch] = []
    for seed in range(2):
        prompts = {**inputs, "input_ids": inputs["input_ids"].roll(seed, 1) * inputs["attention_mask"]}
        report = hf_paged.check_mismatch(
            model, prompts, **{**MODES[mode][0], "max_new_tokens": 40, "min_new_tokens": 40}
        )
        assert report.ok, str(report)
        assert report.dtype == "bfloat16"
        assert all(row.apart <= report.rounding for row in report.different)
        assert mode == "samples" or all(row.gap <= 2 * report.rounding for row in report.different)
        found += report.different
    assert found, "nothing differed, so nothing was shown"
    for row in found:
        assert row.verdict == "rounding"
        assert row.stock != row.paged
        assert ("a tie" if mode == "greedy" else "the draw") in str(row)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", ["greedy", "samples"])
def test_a_broken_model_is_found_out(
    inputs: dict[str, torch.Tensor], astray: list[float], mode: str, dtype: torch.dtype
) -> None:
    model = build(BY_NAME["llama"]).to(dtype)
    astray[0] = 1.0
    report = hf_paged.check_mismatch(model, inputs, **{**MODES[mode][0], "max_new_tokens": 24})
    assert report.verdict == "mismatch"
    assert not report.ok
    assert report.measured
    worst = [row for row in report.different if row.verdict == "mismatch"]
    assert worst
    assert "rounding explains" in str(worst[0])
    assert "DIFFERENT beyond rounding" in str(report)


def test_other_tokens_at_the_same_logits_are_no_tie(
    llama: Any, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits agree, and the paged call chooses the second best."""
    generate = type(llama).generate

    def second_best(self: Any, *args: Any, **kwargs: Any) -> Any:
        answer = generate(self, *args, **kwargs)
        if kwargs.get("cache_implementation") == "paged":
            answer.sequences[0, -1] = (answer.sequences[0, -1] + 1) % VOCABULARY
        return answer

    monkeypatch.setattr(tf.GenerationMixin, "generate", second_best)
    (row,) = hf_paged.check_mismatch(
        llama, ids, max_new_tokens=5, min_new_tokens=5, do_sample=False
    ).different
    assert (row.row, row.step, row.verdict) == (0, 4, "mismatch")
    assert "no tie" in row.reason


def test_penalties_count_where_tokens_are_compared(
    llama: Any, inputs: dict[str, torch.Tensor], astray: list[float]
) -> None:
    """The logits that are compared are those behind the user's processors."""
    astray[0] = 1.0
    report = hf_paged.check_mismatch(llama, inputs, **GREEDY, repetition_penalty=1.6, no_repeat_ngram_size=2)
    assert report.verdict == "mismatch"


def test_beams_that_differ(inputs: dict[str, torch.Tensor], astray: list[float]) -> None:
    """Equal scores are explained; others are unknown, which is not ok."""
    model = build(BY_NAME["llama"])
    astray[0] = 0.5
    report = hf_paged.check_mismatch(model, inputs, **{**GREEDY, "num_beams": 3})
    assert report.different
    assert report.verdict == "unknown"
    assert not report.ok
    assert "num_beams=1" in str(report)


def test_a_generate_of_the_model_s_own_cannot_be_followed(
    llama: Any, ids: torch.Tensor, astray: list[float]
) -> None:
    class Own(type(llama)):
        def generate(self, *args: Any, **kwargs: Any) -> Any:
            return super().generate(*args, **kwargs)

    llama.__class__ = Own
    assert hf_paged.check_mismatch(llama, ids, **GREEDY).identical
    astray[0] = 1.0
    report = hf_paged.check_mismatch(llama, ids, **GREEDY)
    assert report.verdict == "unknown"
    assert "generate() of its own" in str(report)


# ---- quantized


class DynamicInt8(torch.nn.Module):
    """A linear layer whose weights and activations are rounded to int8, each row of activations by its own
    scale.
    """

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.scale = linear.weight.abs().amax(1, keepdim=True) / 127
        self.weight = torch.nn.Parameter((linear.weight / self.scale).round() * self.scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-9) / 127
        return ((x / scale).round() * scale) @ self.weight.T


def test_dynamic_int8_is_explained_by_its_own_rounding(
    inputs: dict[str, torch.Tensor], astray: list[float]
) -> None:
    """The dtype says float32, and a 127th decides: what rounding explains is measured on the model."""
    model = build(BY_NAME["llama"])
    for layer in model.model.layers:
        for part in (layer.self_attn, layer.mlp):
            for name, child in list(part.named_children()):
                if isinstance(child, torch.nn.Linear):
                    setattr(part, name, DynamicInt8(child))
    astray[0] = 2e-5
    prompts = torch.randint(5, VOCABULARY, (32, 9), generator=torch.Generator().manual_seed(4))
    report = hf_paged.check_mismatch(model, prompts, max_new_tokens=60, min_new_tokens=60, do_sample=False)
    assert report.different, "nothing differed, so nothing was shown"
    assert report.ok, str(report)
    assert report.dtype == "float32"
    astray[0] = 1.0
    report = hf_paged.check_mismatch(model, inputs, **GREEDY)
    assert report.verdict == "mismatch"
    assert report.rounding > NOISE[torch.float32]
    assert "measured on this model" in str(report)


# ---- a sampler and a trainer


def test_log_probabilities_of_paged_decoding(llama: Any, inputs: dict[str, torch.Tensor]) -> None:
    """Pages say step by step of a completion what one forward says; ragged ends, and an end of sequence in
    the middle.
    """
    completions = [[7, 9, 2, 11, 12], [8, 6], [5, 5, 5]]
    report = hf_paged.check_mismatch(llama, inputs, completions=completions)
    assert report.mode == "log-probabilities"
    assert report.ok
    assert report.logprobs is not None
    assert report.logprobs.tokens == report.tokens == 10
    assert report.logprobs.largest < 1e-4
    assert 0.999 < report.logprobs.lowest_ratio <= report.logprobs.highest_ratio < 1.001
    assert "log-probabilities of 10 tokens" in str(report)


def test_prompts_padded_on_the_right(llama: Any, inputs: dict[str, torch.Tensor]) -> None:
    """As most tokenizers pad: completions begin behind the prompts' last tokens, not behind padding."""
    completions = [[7, 9, 2, 11, 12], [8, 6], [5, 5, 5]]
    lengths = inputs["attention_mask"].sum(1).tolist()
    assert min(lengths) < max(lengths)
    right = {
        name: torch.stack([row.roll(length - len(row)) for row, length in zip(value, lengths, strict=True)])
        for name, value in inputs.items()
    }
    assert not right["attention_mask"][:, -1].all()
    expected = hf_paged.check_mismatch(llama, inputs, completions=completions)
    report = hf_paged.check_mismatch(llama, right, completions=completions)
    assert report.ok, str(report)
    assert report.logprobs == expected.logprobs


@pytest.mark.parametrize("logprobs", [True, None])
def test_outputs_of_an_engine_bring_all_that_is_compared(llama: Any, logprobs: bool | None) -> None:
    """Prompts of several lengths, and other numbers of answers."""
    with hf_paged.Engine(llama, num_blocks=60, block_size=4) as engine:
        options = {"max_new_tokens": 5, "do_sample": True, "eos_token_id": -1, "logprobs": logprobs}
        outputs = engine.generate([[5, 6, 7], [9] * 8], num_return_sequences=3, **options)
        outputs += engine.generate([[8, 7]], **options)
    report = hf_paged.check_mismatch(llama, outputs)
    assert report.ok
    assert report.logprobs is not None
    assert report.logprobs.tokens == 7 * 5
    assert report.logprobs.largest < 1e-4
    outputs[0].sequences[1].token_ids[2] += 1
    assert hf_paged.check_mismatch(llama, outputs).ok == (logprobs is None)
    with pytest.raises(TypeError, match="leave completions= and"):
        hf_paged.check_mismatch(llama, outputs, completions=[[1]])
    with pytest.raises(TypeError, match="inputs must be tensors or an engine's outputs"):
        hf_paged.check_mismatch(llama, [[5, 6, 7]])


def test_log_probabilities_of_an_engine(llama: Any, ids: torch.Tensor) -> None:
    """A sampler's own, of several completions for each prompt (GRPO's rows)."""
    engine = hf_paged.Engine(llama, num_blocks=80, block_size=4)
    outputs = [
        engine.submit(
            row.tolist(), do_sample=True, num_return_sequences=2, seed=1, logprobs=True, max_new_tokens=7
        )
        for row in ids
    ]
    answers = [sequence for output in outputs for sequence in output.result().sequences]
    completions = [answer.token_ids for answer in answers]
    logprobs = [[each.logprob for each in answer.logprobs] for answer in answers]
    engine.check()
    engine.close()
    report = hf_paged.check_mismatch(llama, ids, completions=completions, logprobs=logprobs)
    assert report.ok, str(report)
    assert report.rows == 6
    logprobs[3][2] -= 0.5
    report = hf_paged.check_mismatch(llama, ids, completions=completions, logprobs=logprobs)
    assert report.verdict == "mismatch"
    assert report.logprobs is not None
    assert report.logprobs.largest == pytest.approx(0.5, abs=1e-3)
    assert report.logprobs.highest_ratio == pytest.approx(1.6487, abs=1e-2)
    assert report.logprobs.outside == pytest.approx(1 / report.tokens)


@pytest.mark.parametrize("place", [0, 2])
def test_a_logprob_that_is_no_number(llama: Any, place: int) -> None:
    """Wherever it stands, it is not taken for agreement; and one that is far off ends in no error."""
    ids = torch.randint(5, VOCABULARY, (1, 6))
    completions = [[7, 9, 2]]
    logprobs = [[-1.0, -1.0, -1.0]]
    logprobs[0][place] = math.nan
    report = hf_paged.check_mismatch(llama, ids, completions=completions, logprobs=logprobs)
    assert math.isnan(report.logprobs.largest)
    assert not report.ok
    logprobs[0][place] = -1000.0
    report = hf_paged.check_mismatch(llama, ids, completions=completions, logprobs=logprobs)
    assert report.logprobs.largest > 900
    assert not report.ok


def test_log_probabilities_of_an_encoder_decoder(ids: torch.Tensor) -> None:
    report = hf_paged.check_mismatch(
        build(BY_NAME["bart"]), ids, completions=[[7, 9, 11], [8, 6, 5], [5, 5, 5]]
    )
    assert report.ok, str(report)
    assert report.tokens == 9


def test_log_probabilities_in_bfloat16(inputs: dict[str, torch.Tensor]) -> None:
    model = build(BY_NAME["llama"]).to(torch.bfloat16)
    report = hf_paged.check_mismatch(model, inputs, completions=torch.randint(5, VOCABULARY, (3, 9)))
    assert report.ok, str(report)
    assert report.dtype == "bfloat16"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"logprobs": [[0.0]]}, "completions="),
        ({"completions": [[1]]}, "as many completions as prompts"),
        ({"completions": [[], [], []]}, "empty"),
        ({"completions": [[1], [2, -100], [3]]}, "completion 1 has token ids from -100 to 2, expected 0 to"),
        ({"completions": [[1], [2], [VOCABULARY]]}, f"expected 0 to {VOCABULARY - 1}; leave out padding"),
        ({"completions": [[1], [2], [3, 4]], "logprobs": [[0.0], [0.0], [0.0]]}, "completion 2"),
        ({"completions": [[1], [2], [3]], "logprobs": [[0.0]]}, "expected 3"),
        ({"past_key_values": tf.DynamicCache()}, "whole prompt"),
    ],
)
def test_what_cannot_be_compared_is_an_error(
    llama: Any, ids: torch.Tensor, arguments: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        hf_paged.check_mismatch(llama, ids, **arguments)


def test_options_that_change_nothing_are_an_error(llama: Any, ids: torch.Tensor) -> None:
    with pytest.raises(TypeError, match="temperature"):
        hf_paged.check_mismatch(llama, ids, completions=[[1], [2], [3]], temperature=0.7)


# ---- the report


def test_the_report_is_a_value() -> None:
    row = RowMismatch(1, 4, 17, 23, 1e-3, 2e-3, "rounding", "a tie")
    report = Mismatch("Llama", "bfloat16", "greedy", 2, 30, 0.03, False, (row,))
    assert report.verdict == "rounding"
    assert report == replace(report)
    with pytest.raises(FrozenInstanceError):
        report.rows = 3  # type: ignore[misc]
    assert str(report).splitlines() == [
        "Llama, bfloat16, greedy: the same up to rounding",
        "compared  2 rows, 30 tokens; 1 rows differ",
        "rounding  3.0e-02 of the largest logit (expected in bfloat16)",
        "          row 1 at token 4: 17 (stock) or 23 (paged); a tie",
    ]
    worse = replace(report, different=(row, replace(row, verdict="mismatch")))
    assert worse.verdict == "mismatch"
    gap = LogprobGap(10, 0.5, 0.1, 0.9, 1.2, 0.25)
    assert str(gap).endswith("ratio 0.9000 to 1.2000, 25.00% outside [0.9, 1.1]")
