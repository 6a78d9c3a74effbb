"""Stop strings: sequences end exactly where stock's generate() ends them, and thousands of strings cost next
to nothing.
"""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch
from engine_steps import job_of
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, StopStringCriteria

from hf_paged import demo
from hf_paged.engine import Engine
from hf_paged.engine.requests.stops import StopLists

LETTERS = "abcé ñ"
NEW = {"max_new_tokens": 30, "do_sample": False}


def byte_level() -> Any:
    """Tokens are bytes and pieces of words; a letter may be two tokens."""
    symbols = pre_tokenizers.ByteLevel.alphabet()
    pieces = ["ab", "ca", "abc", "Ã©", "aÃ", "ĠÃ", "cab", "Ġa", "bcÃ"]
    vocabulary = {symbol: i for i, symbol in enumerate([*sorted(symbols), *pieces])}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made)


def byte_fallback() -> Any:
    """Tokens are words and bytes by name, as sentencepiece makes them."""
    words = ["<unk>", "▁", "a", "b", "c", "d", "e", "f", "ab", "▁a", "bca", "▁ñ", "ca▁b"]
    vocabulary = [*words, *[f"<0x{byte:02X}>" for byte in range(256)]]
    made = Tokenizer(
        models.BPE(
            vocab={word: i for i, word in enumerate(vocabulary)},
            merges=[],
            byte_fallback=True,
            unk_token="<unk>",
        )
    )
    replaced = decoders.Replace("▁", " ")
    made.decoder = decoders.Sequence([replaced, decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")


def words() -> Any:
    """Tokens are words of letters, with holes between their ids and one without a text."""
    pieces = ["a", "b", "c", "d", "e", "f", "ab", "bc", "abca", " ", " a", "ca", "abcabc", "é", "ñé"]
    vocabulary = {piece: 2 * i for i, piece in enumerate(pieces)} | {"<unk>": 50}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")


@pytest.mark.parametrize("make", [byte_level, byte_fallback, words, demo.tokenizer])
def test_rows_end_where_transformers_ends_them(make: Any) -> None:
    """Random strings, overlapping ones and ones that end alike, over random tokens with ids beyond the
    vocabulary.
    """
    tokenizer, chance, lists, ended = make(), random.Random(1), StopLists(), 0
    ids = [*tokenizer.get_vocab().values(), max(tokenizer.get_vocab().values()) + 1]
    usual = [
        tokenizer.get_vocab()[token] for token in tokenizer.get_vocab() if set(token) <= set(LETTERS + "▁ĠÃ©")
    ]
    usual += [i for i in ids if chance.random() < 4 / len(ids)]
    for _ in range(60):
        count, longest = chance.choice([1, 2, 5, 20]), chance.choice([1, 2, 4, 9])
        strings = ["".join(chance.choices(LETTERS, k=chance.randint(1, longest))) for _ in range(count)]
        strings += [string[-2:] for string in strings if chance.random() < 0.1]
        strings += [tokenizer.decode(chance.choices(usual, k=3)).replace("�", "") or "a" for _ in range(2)]
        rows = torch.tensor(
            [chance.choices(usual if chance.random() < 0.9 else ids, k=12) for _ in range(40)]
        )
        for length in (1, 3, 12):
            right = StopStringCriteria(tokenizer, strings)(rows[:, :length], None).tolist()
            found = lists.criterion(tokenizer, strings)(rows[:, :length], None).tolist()
            assert found == right, (strings, [tokenizer.decode(row[:length]) for row in rows])
            ended += sum(right)
    assert ended > 400


@pytest.mark.parametrize("strings", ["er", ["er", "."], ["", "er"], ["e", "her", "the fox"], ["é", "q"]])
def test_answers_end_where_those_of_generate_end(strings: Any) -> None:
    model, tokenizer = demo.model(), demo.tokenizer()
    prompts = demo.prompts()[:4]
    with Engine(model, tokenizer, num_blocks=200) as engine:
        for prompt, output in zip(
            prompts, engine.generate(prompts, stop_strings=strings, **NEW), strict=True
        ):
            ids = tokenizer(prompt, return_tensors="pt").input_ids
            right = model.generate(ids, stop_strings=strings, tokenizer=tokenizer, **NEW)
            assert output.sequences[0].token_ids == right[0, ids.shape[1] :].tolist()
        engine.check()


def test_many_strings_cost_little() -> None:
    """A list of 20,000 is made once, in linear time, and a step with it takes what one with a few takes."""
    chance = random.Random(3)
    strings = ["".join(chance.choices("abcdefghijklmnop", k=chance.randint(4, 14))) for _ in range(20_000)]
    model, tokenizer = demo.model(), demo.tokenizer()
    with Engine(model, tokenizer, num_blocks=200) as engine:
        begin = time.thread_time()
        handles = [engine.submit(demo.prompts()[i % 4], stop_strings=strings, **NEW) for i in range(8)]
        # Of transformers' matrices each of the first would take half a minute.
        assert time.thread_time() - begin < 4
        assert len({id(job_of(handle).params.criteria[0]) for handle in handles}) == 1
        criterion = job_of(handles[0]).params.criteria[0]
        rows = torch.randint(5, len(tokenizer), (32, 200))
        begin = time.thread_time()
        for _ in range(10):
            criterion(rows, None)
        assert (time.thread_time() - begin) / 10 < 0.05
        assert all(handle.result().error is None for handle in handles)


def test_lists_are_kept_by_what_they_say() -> None:
    tokenizer, lists = words(), StopLists()
    first = lists.criterion(tokenizer, ["a", "bc"])
    assert lists.criterion(tokenizer, ["a", "bc"]) is first
    assert lists.criterion(tokenizer, ["a"]) is not first
    tokenizer.add_tokens(["zzz"])  # another vocabulary
    row = torch.tensor([[tokenizer.convert_tokens_to_ids("zzz")]])
    assert lists.criterion(tokenizer, ["a", "bc"]) is not first
    assert lists.criterion(tokenizer, ["zz"])(row, None).tolist() == [True]
    assert lists.criterion(byte_level(), ["a"])(torch.tensor([[0]]), None).tolist() == [False]


@pytest.mark.parametrize("strings", [[], 3, [3], ["a", None], ["€"], "€"])
def test_what_can_end_nothing_is_refused(strings: Any) -> None:
    with (
        Engine(demo.model(), words(), num_blocks=50) as engine,
        pytest.raises(ValueError, match=r"stop.string"),
    ):
        engine.submit([5, 6], stop_strings=strings)


def test_a_criterion_of_the_users_own_stays() -> None:
    """In generate() it takes the place of the one that the option would make."""
    model, tokenizer = demo.model(), demo.tokenizer()
    with Engine(model, tokenizer, num_blocks=200) as engine:
        own = StopStringCriteria(tokenizer, ["zq"])
        handle = engine.submit(demo.prompts()[0], stop_strings=["er"], stopping_criteria=[own], **NEW)
        assert list(job_of(handle).params.criteria) == [own]
