"""Stop strings: sequences end exactly where stock's generate() ends them, and thousands of strings cost next
to nothing. `stop` ends answers where their texts have one.
"""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch
from cases import examples
from engine_answers import checked_answers
from engine_steps import interrupted_forward, job_of
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, StopStringCriteria

from hf_paged import demo
from hf_paged.engine import Engine
from hf_paged.engine.outputs import stops
from hf_paged.engine.outputs.stops import StopLists
from hf_paged.engine.outputs.stream import Stream

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
    for _ in range(examples(20)):
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
    assert ended > 100


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


def with_blanks() -> Any:
    """Tokens are words, and a text loses the blank that it begins with."""
    pieces = [
        "<unk>",
        "<s>",
        "▁",
        "a",
        "b",
        "c",
        "d",
        "e",
        "f",
        "▁a",
        "▁b",
        "ab",
        "▁ab",
        "bc",
        "c▁a",
        "é",
        "ñ",
    ]
    made = Tokenizer(
        models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], unk_token="<unk>")
    )
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    made.decoder = decoders.Metaspace(prepend_scheme="first")
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", bos_token="<s>")


def first_end(tokenizer: Any, ids: list[int], strings: list[str], least: int) -> int | None:
    """How many tokens an answer has when its text has one of the strings, which ends behind the first
    ones.
    """
    before = len(tokenizer.decode(ids[:least], skip_special_tokens=True).rstrip("�"))
    for end in range(least + 1, len(ids) + 1):
        text = tokenizer.decode(ids[:end], skip_special_tokens=True)
        if any(text.rfind(string) + len(string) > before for string in strings if string in text):
            return end
    return None


TOKENIZERS = {make.__name__: make() for make in (byte_level, byte_fallback, words, with_blanks)}
TOKENIZERS["demo"] = demo.tokenizer()


def tokens_of(name: str) -> list[int]:
    """Tokens of few letters; without bytes that are no characters, of which decoders have their own views."""
    tokenizer = TOKENIZERS[name]
    found = [
        token
        for piece, token in tokenizer.get_vocab().items()
        if set(piece) <= set(LETTERS + "▁ĠÃ©±ñ") or token in tokenizer.all_special_ids
    ]
    return sorted(found)


@settings(max_examples=examples(150))
@given(data=st.data(), name=st.sampled_from(sorted(TOKENIZERS)), least=st.integers(0, 4))
def test_an_answer_ends_as_soon_as_its_text_has_a_stop_string(data: Any, name: str, least: int) -> None:
    """A stop string ends at any tokens that it is made of, special ones among them; and so do beams, which
    are read from their ends.
    """
    tokenizer = TOKENIZERS[name]
    ids = data.draw(st.lists(st.sampled_from(tokens_of(name)), min_size=1, max_size=16))
    letters = st.text("abcé ñ" if name != "words" else "abcé", min_size=1, max_size=4)
    strings = [*data.draw(st.lists(letters, max_size=2)), data.draw(st.text("abc", min_size=1, max_size=3))]
    stop = StopLists().stop(tokenizer, strings, least)
    assert stop is not None
    stream = Stream(0, tokenizer, whole=False, stop=stop)
    end = None
    for place, token in enumerate(ids, 1):
        ended = stream.stops_with(token)
        assert stream.stops_with(token) == ended  # asking is not reading
        assert stop.automaton.ended(ids[:place], least) == ended
        if ended:
            end = place
            stream.add([token], [], "stop")
            break
        stream.add([token], [], None)
    assert end == first_end(tokenizer, ids, strings, least), (strings, tokenizer.convert_ids_to_tokens(ids))
    if end is None:
        stream.add([], [], "length")
    texts = [increment.text or "" for increment in stream.take()]
    output = stream.output(False)
    assert output.token_ids == ids[:end]
    if name != "with_blanks" or not set(ids) & set(tokenizer.all_special_ids):
        assert "".join(texts) == output.text
    whole = tokenizer.decode(ids[:end], skip_special_tokens=True)
    assert whole.startswith(output.text or "")
    assert (output.text == whole) == (end is None)
    if not least:
        assert not any(string in (output.text or "") for string in strings)


def test_special_tokens_are_stop_strings_too() -> None:
    """Though no text has them: whole, and beside words. A part of their names is none."""
    tokenizer = demo.tokenizer()
    user = tokenizer.convert_tokens_to_ids("<|user|>")
    fox = tokenizer(" fox", add_special_tokens=False)["input_ids"]

    def ended(strings: Any, ids: list[int]) -> bool:
        stop = StopLists().stop(tokenizer, strings)
        assert stop is not None
        return stop.automaton.ended(ids, 0)

    assert ended(["user", "<|user|>"], [*fox, user])
    assert not ended("<|user|>", [user, *fox])
    assert not ended(["user", "|>", "x<|us"], [*fox, user])
    assert ended("x<|user|> f", [*fox, user, *fox])
    assert ended("x f", [*fox, user, *fox])


def test_moves_are_forgotten_beyond_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stops, "MOST_MOVES", 5)
    tokenizer = demo.tokenizer()
    stop = StopLists().stop(tokenizer, ["the fox", "owl"])
    assert stop is not None
    ids = tokenizer("Once there was a heron and the fox", add_special_tokens=False)["input_ids"]
    found = [stop.automaton.ended(ids[: i + 1], 0) for i in range(len(ids))]
    assert found == [False] * (len(ids) - 1) + [True]


@pytest.mark.parametrize(
    ("ahead", "blocks", "kind"),
    [
        (True, 20, {"do_sample": False}),
        (True, 36, {"do_sample": True, "seed": 2, "num_return_sequences": 3, "logprobs": 1}),
        (False, 36, {"do_sample": True, "seed": 2, "num_return_sequences": 3, "logprobs": 1}),
        (False, 20, {"do_sample": False, "min_new_tokens": 9}),
    ],
    ids=["greedy ahead", "samples ahead", "samples", "min_new_tokens"],
)
def test_answers_leave_off_before_their_stop_string(ahead: bool, blocks: int, kind: dict[str, Any]) -> None:
    """They are the answers without one, up to it; beside others in small pools, preempted and broken into."""
    model, tokenizer = demo.model(), demo.tokenizer()
    prompts = demo.prompts()[:5]
    asked = {**kind, "max_new_tokens": 30}
    with Engine(model, tokenizer, num_blocks=400, prefix_caching=False) as engine:
        plain = engine.generate(prompts, **asked)
    strings = [(output.text or "")[-25:-22] for output in plain[::2]]
    sizes = {"block_size": 4, "num_blocks": blocks, "max_batch_tokens": 32, "max_batch_sequences": 8}
    with Engine(model, tokenizer, run_ahead=ahead, **sizes) as engine:
        handles = [engine.submit(prompt, stop=strings, **asked) for prompt in prompts]
        interrupted_forward(model, 9)
        with pytest.raises(KeyboardInterrupt):
            handles[-1].result()
        checked_answers(engine, handles)
        assert engine.stats()["preemptions"] or kind["do_sample"]
        ends = []
        for output, handle in zip(plain, handles, strict=True):
            pieces = handle.read()
            for i, (right, found) in enumerate(zip(output.sequences, handle.result().sequences, strict=True)):
                least = asked.get("min_new_tokens", 0)
                end = first_end(tokenizer, right.token_ids, strings, least)
                assert found.token_ids == right.token_ids[:end]
                assert found.finish_reason == ("stop" if end else right.finish_reason)
                assert "".join(piece.text or "" for piece in pieces if piece.index == i) == found.text
                assert found.logprobs is None or len(found.logprobs) == len(found.token_ids)
                ends.append(end)
        assert len(ends) - ends.count(None) > 2


def test_beams_end_at_stop_strings() -> None:
    """As with a criterion that reads the text of each beam's answer."""
    model, tokenizer = demo.model(), demo.tokenizer()
    asked = {"num_beams": 3, "num_return_sequences": 2, "do_sample": False, "max_new_tokens": 24}
    prompt = demo.prompts()[1]
    begin = len(tokenizer(prompt)["input_ids"])
    strings = [".", "lett"]

    def ended(ids: torch.Tensor, scores: Any) -> torch.Tensor:
        rows = [first_end(tokenizer, row[begin:], strings, 0) == len(row) - begin for row in ids.tolist()]
        return torch.tensor(rows)

    with Engine(model, tokenizer, num_blocks=200) as engine:
        found = engine.submit(prompt, stop=strings, **asked).result()
        right = engine.submit(prompt, stopping_criteria=[ended], **asked).result()
    assert [each.token_ids for each in found.sequences] == [each.token_ids for each in right.sequences]
    assert [each.finish_reason for each in found.sequences] == [
        each.finish_reason for each in right.sequences
    ]
    assert "stop" in [each.finish_reason for each in found.sequences]
    assert not any(string in (each.text or "") for each in found.sequences for string in strings)


def test_a_stop_string_in_the_prompt_or_across_its_end_is_none() -> None:
    model, tokenizer = demo.model(), demo.tokenizer()
    asked = {"do_sample": False, "max_new_tokens": 12}
    with Engine(model, tokenizer, num_blocks=200) as engine:
        prompt = demo.prompts()[0]
        plain = engine.submit(prompt, **asked).result()
        straddling = prompt[-3:] + (plain.text or "")[:2]
        found = engine.submit(prompt, stop=[prompt[-4:], straddling], **asked).result()
        assert (found.text, found.finish_reason) == (plain.text, "length")


@pytest.mark.parametrize("given_stop", [3, [3], ["a", None], "", ["a", ""], "€€", {"a": 1}])
def test_a_stop_that_ends_nothing_is_refused(given_stop: Any) -> None:
    with (
        Engine(demo.model(), words(), num_blocks=50) as engine,
        pytest.raises(ValueError, match=r"^stop|stop strings"),
    ):
        engine.submit([5, 6], stop=given_stop)


def test_stop_needs_a_tokenizer_and_none_is_none() -> None:
    with Engine(demo.model(), num_blocks=50) as engine:
        with pytest.raises(ValueError, match=r"stop='a' needs the model's tokenizer"):
            engine.submit([5, 6], stop="a")
        for nothing in (None, [], ()):
            assert job_of(engine.submit([5, 6], stop=nothing, max_new_tokens=2)).params.stop is None
