"""Every field of a GenerationConfig is honoured as generate() honours it, or refused by name at submit()."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from engine_answers import PROMPTS, alone, answers
from families import BY_NAME, VOCABULARY, build
from generation_fields import HONOURED_HERE, REFUSED_HERE
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    StoppingCriteria,
)

from hf_paged import demo
from hf_paged.engine import Engine
from hf_paged.engine.requests.fields import BESIDE_AN_ASSISTANT, HONOURED, KNOWN, REFUSED, generation_fields


class Stateful(LogitsProcessor):
    """Counts per row: whoever drops rows, or shows it others', changes what it does."""

    def __init__(self) -> None:
        self.seen: torch.Tensor | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.seen = (
            torch.zeros(len(input_ids), dtype=torch.long)
            if self.seen is None
            else self.seen + input_ids[:, -1] % 3 + 1
        )
        scores[torch.arange(len(scores)), self.seen % VOCABULARY] = -torch.inf
        return scores


@pytest.fixture(scope="module")
def model() -> Any:
    return build(BY_NAME["llama"])


@pytest.fixture(scope="module")
def engine(model: Any) -> Engine:
    return Engine(model, block_size=4, num_blocks=60, max_batch_tokens=24, max_batch_sequences=8)


def test_no_field_is_unknown() -> None:
    """A new field of transformers fails here until somebody has said what becomes of it."""
    fields = {name for name, _ in generation_fields(GenerationConfig())}
    assert fields - KNOWN == set()
    assert not HONOURED & REFUSED.keys()


@pytest.mark.parametrize("case", HONOURED_HERE)
def test_options_do_what_they_do_in_generate(model: Any, engine: Engine, case: str) -> None:
    """Greedy tokens under each option, among neighbours without it."""
    options = {"max_new_tokens": 9, "do_sample": False, **HONOURED_HERE[case]}
    if options["max_new_tokens"] is None or "max_length" in options:
        del options["max_new_tokens"]
    handles = [engine.submit(prompt, **options) for prompt in PROMPTS[:4]]
    plain = [engine.submit(prompt, max_new_tokens=9, do_sample=False) for prompt in PROMPTS[:4]]
    found = [answers(handle.result()) for handle in handles]
    options = {name: value for name, value in options.items() if name != "return_dict_in_generate"}
    assert found == [alone(model, prompt, **options) for prompt in PROMPTS[:4]]
    assert [answers(handle.result()) for handle in plain] == [
        alone(model, prompt, max_new_tokens=9, do_sample=False) for prompt in PROMPTS[:4]
    ]


@pytest.mark.parametrize(
    "option", [{"top_h": 0.5}, {"typical_p": 0.5}, {"epsilon_cutoff": 0.02}, {"eta_cutoff": 0.3}]
)
def test_rarer_cuts_are_applied(engine: Engine, option: dict[str, Any]) -> None:
    """Sampling options that leave the most likely tokens: a draw from what they leave is among them, and they
    matter.
    """
    plain = engine.generate(
        [PROMPTS[1]],
        do_sample=True,
        top_k=0,
        max_new_tokens=20,
        seed=3,
        num_return_sequences=4,
        temperature=2.0,
    )[0]
    cut = engine.generate(
        [PROMPTS[1]],
        do_sample=True,
        top_k=0,
        max_new_tokens=20,
        seed=3,
        num_return_sequences=4,
        temperature=2.0,
        **option,
    )[0]
    assert answers(plain) != answers(cut)


def test_a_config_object_and_the_models_own(model: Any, engine: Engine) -> None:
    """Fields that are not given are taken from the model's generation_config, as in generate()."""
    config = GenerationConfig(max_new_tokens=5, repetition_penalty=1.5, eos_token_id=2, pad_token_id=0)
    assert answers(engine.submit(PROMPTS[1], config).result()) == alone(
        model, PROMPTS[1], generation_config=config
    )
    model.generation_config.max_new_tokens = 4
    try:
        assert answers(engine.submit(PROMPTS[1]).result()) == alone(model, PROMPTS[1])
    finally:
        model.generation_config.max_new_tokens = None


def test_processors_see_every_sample_to_the_end(model: Any, engine: Engine) -> None:
    """As in generate(), a processor's rows stay in place when some of the samples have ended."""
    processor, rows = Stateful(), []

    class Watching(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            rows.append(input_ids.shape)
            return input_ids[:, -1] % 5 == 0

    output = engine.submit(
        PROMPTS[0],
        do_sample=True,
        num_return_sequences=3,
        max_new_tokens=12,
        seed=1,
        logits_processor=[processor],
        stopping_criteria=[Watching()],
    ).result()
    lengths = [len(sequence.token_ids) for sequence in output.sequences]
    assert len(set(lengths)) > 1
    assert rows == [(3, 4 + i) for i in range(max(lengths))]
    assert processor.seen is not None
    assert len(processor.seen) == 3


@pytest.mark.parametrize("name", [name for name in REFUSED if name != "disable_compile"])
def test_the_rest_is_refused_by_name(engine: Engine, name: str) -> None:
    """None is dropped silently, and nothing was queued."""
    config = GenerationConfig(max_new_tokens=3)
    setattr(config, name, REFUSED_HERE[name])
    with pytest.raises(ValueError, match=rf"{name}=.* is not supported by the engine"):
        engine.submit(PROMPTS[0], config)
    assert engine.stats()["waiting"] == 0


@pytest.mark.parametrize("name", [name for name in REFUSED if name != "disable_compile"])
def test_a_refusal_says_where_an_option_is_written(
    model: Any, engine: Engine, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is told to leave out what the model's own config says."""
    config = GenerationConfig(max_new_tokens=3)
    setattr(config, name, REFUSED_HERE[name])
    where = rf"{name}=.* is not .*the generation_config has it, set generation_config\.{name} = None"
    with pytest.raises(ValueError, match=where):
        engine.submit(PROMPTS[0], config)
    own = copy.copy(model.generation_config)
    monkeypatch.setattr(model, "generation_config", own)
    setattr(own, name, REFUSED_HERE[name])
    with pytest.raises(
        ValueError, match=rf"{name}=.* is not .*; model.*set model\.generation_config\.{name} = None"
    ) as error:
        engine.submit(PROMPTS[0], max_new_tokens=3)
    assert "leave it out" not in str(error.value)
    setattr(own, name, None)
    with pytest.raises(ValueError, match=rf"{name}=.* is not .*leave it out"):
        engine.submit(PROMPTS[0], max_new_tokens=3, **{name: REFUSED_HERE[name]})
    assert engine.submit(PROMPTS[0], max_new_tokens=3).result().error is None


def test_counts_say_where_they_are_written(
    model: Any, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "generation_config", copy.copy(model.generation_config))
    model.generation_config.num_beams = 0
    with pytest.raises(
        ValueError, match=r"num_beams=0 of model\.generation_config is not a number of at least 1"
    ):
        engine.submit(PROMPTS[0], max_new_tokens=3)
    with pytest.raises(ValueError, match="num_beams=0 is not a number of at least 1"):
        engine.submit(PROMPTS[0], max_new_tokens=3, num_beams=0)


def test_options_of_an_assistant_say_nothing_without_one(model: Any, engine: Engine) -> None:
    values = {
        **dict.fromkeys(BESIDE_AN_ASSISTANT, 3),
        "num_assistant_tokens_schedule": "heuristic",
        "assistant_ensemble_weight": 0.5,
    }
    config = GenerationConfig(max_new_tokens=3, **values)
    assert answers(engine.submit(PROMPTS[0], config).result()) == alone(model, PROMPTS[0], max_new_tokens=3)


@pytest.mark.parametrize(
    "keyword", ["assistant_model", "streamer", "attention_mask", "max_new_token", "synced_gpus"]
)
def test_unknown_keywords_are_refused(engine: Engine, keyword: str) -> None:
    with pytest.raises(ValueError, match=keyword):
        engine.submit(PROMPTS[0], **{keyword: 1})


@pytest.mark.parametrize(
    ("keyword", "hint"),
    [
        ("max_new_token", "did you mean 'max_new_tokens'"),
        ("n", "did you mean 'num_return_sequences'"),
        ("logit_processor", "did you mean 'logits_processor'"),
        ("streamer", "iterate over the handle"),
        ("assistant_model", "does not draft"),
        ("tokenizer", r"Engine\(model, tokenizer\)"),
        ("attention_mask", "without padding"),
        ("inputs", "first argument"),
        ("past_key_values", "pages"),
        ("xyzzy", "a request takes"),
    ],
)
def test_an_unknown_keyword_says_what_to_do(engine: Engine, keyword: str, hint: str) -> None:
    with pytest.raises(ValueError, match=rf"does not take \['{keyword}'\].*{hint}"):
        engine.submit(PROMPTS[0], **{keyword: 1})


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"stop_strings": ["a"]}, r"stop_strings=\['a'\] need .* Engine\(model, tokenizer\)"),
        ({"eos_token_id": "</s>"}, "a special token is an int.*'eos_token_id': '</s>'"),
        ({"prefix_allowed_tokens_fn": 3}, "prefix_allowed_tokens_fn is a function, got int 3"),
        ({"max_new_tokens": None, "max_length": 2}, "the prompt has 3 tokens and max_length=2 leaves none"),
    ],
)
def test_errors_name_what_the_engine_wants(engine: Engine, options: dict[str, Any], error: str) -> None:
    """Not what an argument of generate() would be, and not in the middle of a step."""
    with pytest.raises((TypeError, ValueError), match=error):
        engine.submit(PROMPTS[0], **{"max_new_tokens": 3, **options})


def test_an_unknown_option(engine: Engine) -> None:
    config = GenerationConfig(max_new_tokens=3)
    config.sparkle = 3
    with pytest.raises(ValueError, match="sparkle=3 is a generation option that the engine does not know"):
        engine.submit(PROMPTS[0], config)


def test_what_generate_refuses(engine: Engine) -> None:
    with pytest.raises(ValueError, match="leaves none to generate; give max_new_tokens instead"):
        engine.submit(PROMPTS[3], max_length=30)
    with pytest.raises(ValueError, match="leaves none to generate; shorten it: the model is made for"):
        engine.submit(PROMPTS[3] * 1000, max_length=30)
    with pytest.raises(ValueError, match="num_return_sequences"):
        engine.submit(PROMPTS[3], num_return_sequences=2, do_sample=False)
    with pytest.raises(ValueError, match="seed=-1"):
        engine.submit(PROMPTS[3], seed=-1)
    with pytest.raises(ValueError, match="logprobs=97"):
        engine.submit(PROMPTS[3], logprobs=97)
    with pytest.raises(TypeError, match="generation_config must be a GenerationConfig, got dict"):
        engine.submit(PROMPTS[3], {"max_new_tokens": 3})


@pytest.mark.parametrize("name", ["max_length", "max_new_tokens", "num_beams", "num_return_sequences"])
@pytest.mark.parametrize("value", [0, -1, 2.5, "2"])
def test_counts_are_whole_numbers(engine: Engine, name: str, value: Any) -> None:
    """4.5 new tokens were counted otherwise for one sequence than for several, and -1 beams were none."""
    with pytest.raises((TypeError, ValueError)):
        engine.submit(
            PROMPTS[1], **{"max_new_tokens": 4, "do_sample": name == "num_return_sequences", name: value}
        )
    config = GenerationConfig(max_new_tokens=4, do_sample=name == "num_return_sequences")
    setattr(config, name, value)
    with pytest.raises((TypeError, ValueError)):
        engine.submit(PROMPTS[1], config)


def test_numbers_of_numpy_are_numbers(engine: Engine) -> None:
    one, other = ({"max_new_tokens": kind(4), "num_beams": kind(2)} for kind in (int, np.int64))
    assert answers(engine.submit(PROMPTS[1], **one).result()) == answers(
        engine.submit(PROMPTS[1], **other).result()
    )


def test_stop_strings_and_time() -> None:
    """Stop strings end where generate() ends; max_time is a length."""
    model, tokenizer = demo.model(), demo.tokenizer()
    prompts = demo.prompts()[:4]
    with Engine(model, tokenizer, num_blocks=200, max_batch_tokens=64, max_batch_sequences=8) as engine:
        outputs = engine.generate(prompts, max_new_tokens=40, do_sample=False, stop_strings=["er", "."])
        for prompt, output in zip(prompts, outputs, strict=True):
            ids = tokenizer(prompt, return_tensors="pt").input_ids
            right = model.generate(
                ids, max_new_tokens=40, do_sample=False, stop_strings=["er", "."], tokenizer=tokenizer
            )
            assert output.sequences[0].token_ids == right[0, ids.shape[1] :].tolist()
            assert output.finish_reason == "stop"
        late = engine.generate(prompts[:1], max_new_tokens=40, max_time=0.0, do_sample=False)[0]
        assert (len(late.sequences[0].token_ids), late.finish_reason) == (1, "length")
    with Engine(model, num_blocks=200) as engine, pytest.raises(ValueError, match="tokenizer"):
        engine.submit([5, 6], stop_strings=["er"])


def test_logprobs_are_the_models_own(model: Any, engine: Engine) -> None:
    """Before any processor, of the token that was chosen, with as many top tokens as asked for."""
    options = {"max_new_tokens": 6, "do_sample": False, "repetition_penalty": 1.8}
    right = model.generate(
        torch.tensor([PROMPTS[1]]), return_dict_in_generate=True, output_logits=True, **options
    )
    sequence = engine.submit(PROMPTS[1], logprobs=3, **options).result().sequences[0]
    for step, token, note in zip(right.logits, sequence.token_ids, sequence.logprobs, strict=True):
        logprobs = step[0].log_softmax(-1)
        assert note.token_id == token
        assert note.logprob == pytest.approx(float(logprobs[token]), abs=2e-4)
        assert [place for place, _ in note.top_logprobs] == logprobs.topk(3)[1].tolist()
    assert sequence.cumulative_logprob == pytest.approx(sum(note.logprob for note in sequence.logprobs))
    assert (
        engine.submit(PROMPTS[1], logprobs=True, **options).result().sequences[0].logprobs[0].top_logprobs
        == ()
    )
    assert engine.submit(PROMPTS[1], **options).result().sequences[0].cumulative_logprob is None
