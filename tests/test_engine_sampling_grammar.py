"""Answers that match a grammar, in the engine and in generate(): the same tokens, and texts that parse."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llguidance")

import torch
from adapters import adapted, lora
from transformers import LogitsProcessor, LogitsProcessorList

from hf_paged import Engine, demo
from hf_paged.engine.host_sampler import NoToken
from hf_paged.engine.sampling.grammar import (
    Grammar,
    GrammarError,
    Grammars,
    choice_grammar,
    json_grammar,
    lark_grammar,
    regex_grammar,
)

SCHEMA = {
    "type": "object",
    "properties": {"animal": {"enum": ["fox", "owl", "bear"]}, "legs": {"type": "integer", "maximum": 9, "minimum": 0}},
    "required": ["animal", "legs"], "additionalProperties": False,
}  # fmt: skip
GRAMMARS = {
    "schema": lambda: json_grammar(SCHEMA),
    "regex": lambda: regex_grammar("(fox|owl), [a-z]{3,8}\\."),
    "choice": lambda: choice_grammar(["The fox ran.", 'The "owl" flew.', "A bär\n"]),
    "lark": lambda: lark_grammar('start: "The " ANIMAL+ "."\nANIMAL: /(fox|owl) /'),
}
PROMPTS = ["The fox", "Every night the owl", "The old bear slept", "One day the mouse went to the"]


def matches(name: str, text: str) -> bool:
    if name == "schema":
        found = json.loads(text)
        return found.keys() == {"animal", "legs"} and found["animal"] in ("fox", "owl", "bear")
    patterns = {
        "regex": "(fox|owl), [a-z]{3,8}\\.",
        "choice": 'The fox ran\\.|The "owl" flew\\.|A bär\n',
        "lark": "The ((fox|owl) )+\\.",
    }
    return re.fullmatch(patterns[name], text) is not None


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return demo.tokenizer()


@pytest.fixture(scope="module")
def model() -> Any:
    return demo.model()


@pytest.fixture(scope="module")
def grammars(tokenizer: Any, model: Any) -> Grammars:
    return Grammars(tokenizer, model.config.vocab_size, [1])


@pytest.fixture
def engine(model: Any, tokenizer: Any) -> Iterator[Engine]:
    with Engine(model, tokenizer, block_size=8, num_blocks=300, max_batch_tokens=64) as made:
        yield made
        made.check()


def generated(model: Any, ids: list[int], processor: Any, **options: Any) -> list[int]:
    inputs = torch.tensor([ids])
    out = model.generate(
        inputs, attention_mask=torch.ones_like(inputs), logits_processor=LogitsProcessorList([processor]), max_new_tokens=40,
        **{"do_sample": False, **options},
    )  # fmt: skip
    answer = out[0, len(ids) :].tolist()
    return answer[: answer.index(1) + 1] if 1 in answer else answer


@pytest.mark.parametrize("ahead", [False, True])
def test_the_engine_answers_as_generate(
    model: Any, tokenizer: Any, grammars: Grammars, engine: Engine, ahead: bool
) -> None:
    """A batch of different grammars beside requests without one; with a penalty, logprobs and a bias, too."""
    with Engine(
        model, tokenizer, block_size=8, num_blocks=300, max_batch_tokens=64, run_ahead=ahead
    ) as engine:
        asked: list[tuple[Any, list[int]]] = []
        for i, prompt in enumerate(PROMPTS * 2):
            ids = tokenizer(prompt)["input_ids"]
            name = list(GRAMMARS)[i % 4]
            grammar = GRAMMARS[name]()
            options: dict[str, Any] = {"repetition_penalty": 1.3} if i >= 4 else {}
            if i == 5:
                options["sequence_bias"] = [[[40], 3.0]]
            wanted = generated(model, ids, grammars.compiled(grammar).processor(len(ids)), **options)
            processor = grammars.compiled(grammar).processor(len(ids))
            handle = engine.submit(
                ids, max_new_tokens=40, do_sample=False, logits_processor=[processor], logprobs=i == 6 or None, **options
            )  # fmt: skip
            asked.append((handle, wanted))
            free = engine.submit(ids, max_new_tokens=20, do_sample=False)
            inputs = torch.tensor([ids])
            out = model.generate(
                inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=20, do_sample=False
            )
            asked.append((free, out[0, len(ids) :].tolist()))
        for handle, wanted in asked:
            assert list(handle.result().sequences[0].token_ids) == wanted
        assert engine.stats()["slow_processors"] == {}
        engine.check()


@pytest.mark.parametrize("name", GRAMMARS)
def test_every_answer_matches(grammars: Grammars, engine: Engine, tokenizer: Any, name: str) -> None:
    """Samples, beams, and beside a processor of the user's own."""
    ids = tokenizer(PROMPTS[0])["input_ids"]
    processor = grammars.compiled(GRAMMARS[name]()).processor(len(ids))
    ways: list[dict[str, Any]] = [
        {"do_sample": True, "num_return_sequences": 6, "seed": 1, "temperature": 1.5, "top_p": 0.9},
        {"do_sample": False, "num_beams": 3, "num_return_sequences": 3},
    ]
    for options in ways:
        output = engine.submit(ids, max_new_tokens=60, logits_processor=[processor], **options).result()
        assert output.error is None
        for each in output.sequences:
            assert each.finish_reason == "stop"
            assert matches(name, tokenizer.decode(each.token_ids, skip_special_tokens=True))
    own = [lambda ids, scores: scores - 1, processor]
    output = engine.submit(
        ids, max_new_tokens=60, do_sample=True, seed=3, num_return_sequences=3, logits_processor=own
    ).result()
    assert all(
        matches(name, tokenizer.decode(each.token_ids, skip_special_tokens=True)) for each in output.sequences
    )


def test_beams_are_those_of_generate(model: Any, grammars: Grammars, engine: Engine, tokenizer: Any) -> None:
    ids = tokenizer(PROMPTS[2])["input_ids"]
    grammar = GRAMMARS["schema"]()
    wanted = generated(model, ids, grammars.compiled(grammar).processor(len(ids)), num_beams=3)
    processor = grammars.compiled(grammar).processor(len(ids))
    output = engine.submit(
        ids, max_new_tokens=40, do_sample=False, num_beams=3, logits_processor=[processor]
    ).result()
    assert list(output.sequences[0].token_ids) == wanted


class Widened(LogitsProcessor):
    """A processor that is shown no more tokens than its grammar was compiled for, the last ones forbidden."""

    def __init__(self, grammar: Grammar, prompt: int) -> None:
        self.vocabulary = grammar.vocabulary
        self.inner = grammar.processor(prompt)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        more = self.vocabulary - scores.shape[1]
        return self.inner(input_ids, torch.nn.functional.pad(scores, (0, more), value=-torch.inf))[:, :-more]


@pytest.mark.parametrize("beams", [1, 3])
def test_requests_of_an_adapter_with_fewer_tokens_than_the_grammar(
    grammars: Grammars, tokenizer: Any, tmp_path: Path, beams: int
) -> None:
    few = demo.model()
    few.resize_token_embeddings(few.config.vocab_size - 8)  # without "Once", "At", " storm" and others
    few = adapted(lora(modules_to_save=["embed_tokens", "lm_head"]), model=few)
    few.save_pretrained(tmp_path)
    ids = tokenizer(PROMPTS[2])["input_ids"]
    # The second answer begins with a token that the adapter lacks.
    free = grammars.compiled(regex_grammar("(Once|The|At) [a-z ]{20,60}"))
    absent = grammars.compiled(lark_grammar("start: <[841]>"))
    with Engine(demo.model(), tokenizer, block_size=8, num_blocks=300) as engine:
        engine.add_adapter("few", tmp_path / "one")
        call = {"max_new_tokens": 40, "do_sample": False, "num_beams": beams, "adapter": "few"}
        handle = engine.submit(ids, logits_processor=[free.processor(len(ids))], **call)
        other = engine.submit(ids, logits_processor=[absent.processor(len(ids))], **call)
        wanted = generated(few, ids, Widened(free, len(ids)), num_beams=beams)
        assert list(handle.result().sequences[0].token_ids) == wanted
        error = other.result().error
        assert isinstance(error, NoToken) if beams > 1 else error is not None
        engine.check()


def test_a_grammar_of_more_tokens_than_the_model_is_refused(
    tokenizer: Any, engine: Engine, model: Any
) -> None:
    ids = tokenizer(PROMPTS[2])["input_ids"]
    size = model.config.vocab_size
    large = Grammars(tokenizer, size + 8, [1]).compiled(GRAMMARS["regex"]())
    for beams in (1, 3):
        processor = large.processor(len(ids))
        handle = engine.submit(ids, max_new_tokens=4, num_beams=beams, logits_processor=[processor])
        assert f"compiled for {size + 8} tokens and the model has {size}" in str(handle.result().error)
    with pytest.raises(GrammarError, match=f"compiled for {size + 8} tokens and the model has {size}"):
        generated(model, ids, large.processor(len(ids)))


def test_preemption_changes_nothing(model: Any, grammars: Grammars, tokenizer: Any) -> None:
    ids = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    grammar = regex_grammar("[a-z ]{60,80}")
    wanted = [
        generated(model, each, grammars.compiled(grammar).processor(len(each)), repetition_penalty=1.2)
        for each in ids
    ]
    for mode in ("swap", "recompute"):
        with Engine(model, tokenizer, block_size=4, num_blocks=26, preemption=mode, watermark=0.0) as engine:
            handles = [
                engine.submit(
                    each, max_new_tokens=40, do_sample=False, repetition_penalty=1.2,
                    logits_processor=[grammars.compiled(grammar).processor(len(each))],
                )
                for each in ids
            ]  # fmt: skip
            assert [list(handle.result().sequences[0].token_ids) for handle in handles] == wanted
            assert engine.stats()["preemptions"] > 0
            engine.check()


@pytest.mark.parametrize(
    "grammar",
    [
        lambda: json_grammar({"type": "nonsense"}),
        lambda: json_grammar({"type": "object", "required": ["a"], "properties": {"a": False}}),
        lambda: json_grammar({"allOf": [{"type": "string"}, {"type": "integer"}]}),
        lambda: json_grammar(False),
        lambda: json_grammar({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}),
        lambda: json_grammar({"$ref": "http://127.0.0.1:1/x"}),
        lambda: regex_grammar("("),
        lambda: regex_grammar("[^\\s\\S]"),
        lambda: lark_grammar("start: missing"),
        lambda: lark_grammar("start: " + "(" * 50_000 + '"a"' + ")" * 50_000),
    ],
)
def test_impossible_grammars_are_refused(grammars: Grammars, grammar: Any) -> None:
    with pytest.raises(GrammarError):
        grammars.compiled(grammar())


def test_deep_grammars_do_not_end_the_process(grammars: Grammars) -> None:
    """llguidance recurses on the stack; a chain that overflows eight megabytes is compiled."""
    chain = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(2600)}
    grammars.compiled(json_grammar({"$defs": {**chain, "d2600": {"type": "string"}}, "$ref": "#/$defs/d0"}))


def test_trouble_of_one_grammar_is_its_own(grammars: Grammars, engine: Engine, tokenizer: Any) -> None:
    """A grammar for other tokens, and a sequence that leaves its grammar: only that request ends."""
    ids = tokenizer(PROMPTS[0])["input_ids"]
    grammar = GRAMMARS["choice"]()
    other = Grammars(tokenizer, 900, [1])
    bad = engine.submit(ids, max_new_tokens=5, logits_processor=[other.compiled(grammar).processor(len(ids))])
    good = engine.submit(
        ids,
        max_new_tokens=40,
        do_sample=False,
        logits_processor=[grammars.compiled(grammar).processor(len(ids))],
    )
    long = engine.submit(
        ids, max_new_tokens=9, min_new_tokens=9, do_sample=False, logits_processor=[grammars.compiled(regex_grammar("ab")).processor(len(ids))]
    )  # fmt: skip
    assert "compiled for 900 tokens" in str(bad.result().error)
    assert matches("choice", tokenizer.decode(good.result().sequences[0].token_ids, skip_special_tokens=True))
    assert long.result().error is not None
    with pytest.raises(GrammarError, match="no end of sequence"):
        Grammars(tokenizer, 848, []).compiled(grammar)
