"""Answers to data sets: order, look-ahead, files that are continued, and what breaks a batch off."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import Command
from interrupting import Interrupted
from processes import LIMIT

from hf_paged import demo
from hf_paged.engine import Answers, Engine

GREEDY: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "progress": False}
PROMPTS = [f"{prompt} {i}" for i, prompt in enumerate((demo.prompts() * 2)[:12])]
AHEAD = 8
FILES = ("/engine/batches.py", "/outputs/answer_file.py", "/outputs/rows.py")


@pytest.fixture(scope="module")
def shared() -> Engine:
    return Engine(
        demo.model(), demo.tokenizer(), block_size=4, num_blocks=400, max_batch_sequences=AHEAD // 2
    )


@pytest.fixture(scope="module")
def texts(shared: Engine) -> list[str | None]:
    return [each.text for each in shared.generate(PROMPTS, **GREEDY)]


@pytest.fixture
def stories(shared: Engine) -> Iterator[Engine]:
    """An engine in which a test leaves nothing behind."""
    yield shared
    assert idle(shared)
    shared.check()


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "answers.jsonl"


def idle(engine: Engine) -> bool:
    stats = engine.stats()
    return not (stats["running"] or stats["waiting"] or stats["preempted"])


def in_order(answers: Answers) -> list[str | None]:
    """The texts of answers, in the order of their items."""
    return [output.text for _, output in sorted(answers, key=lambda answer: answer.index)]


def rows(out: Path) -> dict[int, dict[str, Any]]:
    """The rows of a file by index; each index is there once."""
    found = [json.loads(line) for line in out.read_text(encoding="utf-8").split("\n") if line]
    assert len({row["index"] for row in found}) == len(found)
    return {row["index"]: row for row in found}


def texts_in(out: Path) -> list[str | None]:
    found = rows(out)
    return [found[i]["text"] for i in sorted(found)]


# ---- without a file


def test_answers_come_as_they_end(stories: Engine, texts: list[str | None]) -> None:
    asked: list[Any] = [{"prompt": PROMPTS[0], "max_new_tokens": 40}, *PROMPTS[1:]]
    answers = stories.map(asked, **GREEDY)
    found = list(answers)
    assert found[0].index != 0, "the longest answer is not the first one"
    by_index = {index: output.text for index, output in found}
    assert [by_index[i] for i in range(1, 12)] == texts[1:]
    assert (answers.total, answers.done, answers.failed, answers.resumed) == (12, 12, 0, 0)
    assert repr(answers) == "Answers(12 of 12 done, 0 of them before, 0 failed)"


def test_a_generator_is_read_a_little_ahead(stories: Engine, texts: list[str | None]) -> None:
    """At most twice as many items are read and not answered as run at once; their number is not known."""
    read: list[str] = []

    def prompts() -> Iterator[str]:
        for prompt in PROMPTS * 3:
            read.append(prompt)
            yield prompt

    answers = stories.map(prompts(), **GREEDY)
    assert not read
    found: dict[int, str | None] = {}
    for index, output in answers:
        assert len(read) <= len(found) + AHEAD
        found[index] = output.text
    assert [found[i] for i in range(36)] == texts * 3
    assert answers.total is None


def test_a_slow_source_holds_up_no_answer(stories: Engine) -> None:
    read: list[int] = []

    def prompts() -> Iterator[str]:
        for i in range(6):
            read.append(i)
            yield PROMPTS[i]
            time.sleep(0.1)

    for index, _ in stories.map(prompts(), do_sample=False, max_new_tokens=1):
        assert index == 0
        assert len(read) < 6
        break


def test_a_loop_that_is_left_ends_what_is_under_way(stories: Engine) -> None:
    for _ in stories.map(PROMPTS, **GREEDY):
        break
    assert idle(stories)


def test_a_thread_may_drive(texts: list[str | None], out: Path) -> None:
    with Engine(demo.model(), demo.tokenizer(), num_blocks=64, max_batch_sequences=4).start() as engine:
        assert in_order(engine.map(iter(PROMPTS), **GREEDY)) == texts
        engine.map(PROMPTS, out, **GREEDY)
        assert texts_in(out) == texts
        for _ in engine.map(PROMPTS * 20, **GREEDY):
            break
        engine.stop()
        assert idle(engine)
        engine.check()


# ---- forms of data


class Keyed:
    """As transformers' KeyDataset, a data set of torch's: it has no iterator, and need not end by IndexError."""

    def __init__(self, prompts: list[str]) -> None:
        self.prompts = prompts

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, i: int) -> str:
        return self.prompts[i % len(self.prompts)]


class Column:
    """As a column of pandas: it iterates over its values, and is indexed by labels."""

    def __init__(self, prompts: list[str]) -> None:
        self.prompts = prompts

    def __len__(self) -> int:
        return len(self.prompts)

    def __iter__(self) -> Iterator[str]:
        return iter(self.prompts)

    def __getitem__(self, label: str) -> str:
        raise KeyError(label)


@pytest.mark.parametrize("kind", [list, tuple, iter, Keyed, Column])
def test_any_iterable_is_data(stories: Engine, texts: list[str | None], kind: Any) -> None:
    answers = stories.map(kind(PROMPTS[:3]), **GREEDY)
    assert answers.total == 3
    assert in_order(answers) == texts[:3]


def test_items_bring_their_prompts_and_options(stories: Engine) -> None:
    """In dicts: texts, chats, token ids, options of their own; columns that are no options are left alone."""
    tokenizer = demo.tokenizer()
    chat = [{"role": "user", "content": "Tell me a story"}]
    asked: list[Any] = [
        {"prompt": "The fox", "label": 3, "id": "a", "source": None, "adapter": None},
        {"messages": chat, "prompt": None},
        {"prompt": "The fox", "max_new_tokens": 2, "logprobs": 1, "seed": None},
        {"input_ids": tokenizer("The fox")["input_ids"]},
        chat,
        tokenizer("The fox")["input_ids"],
        {"prompt": torch.tensor(tokenizer("The fox")["input_ids"])},
    ]
    found = dict(stories.map(asked, **GREEDY))
    fox, story = (output.text for output in stories.generate(["The fox", chat], **GREEDY))
    assert [found[i].text for i in (0, 3, 5, 6)] == [fox] * 4
    assert [found[i].text for i in (1, 4)] == [story] * 2
    (short,) = found[2].sequences
    assert short.logprobs is not None
    assert (len(short.token_ids), len(short.logprobs)) == (2, 2)


def test_a_key_names_the_column(stories: Engine, texts: list[str | None]) -> None:
    """Nothing else of an item is taken, whatever it is called."""
    asked = [{"question": prompt, "max_new_tokens": 1, "images": 3, "n": 2} for prompt in PROMPTS[:2]]
    assert in_order(stories.map(asked, key="question", **GREEDY)) == texts[:2]


def test_no_data_is_no_answer(stories: Engine, out: Path) -> None:
    assert list(stories.map([])) == []
    assert stories.map([], out).done == 0
    assert out.read_bytes() == b""


class Table:
    """As a DataFrame, which iterates over the names of its columns."""

    columns = ("prompt",)

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)

    def to_dict(self, kind: str) -> list[dict[str, str]]:
        return [{"prompt": "The fox"}]


@pytest.mark.parametrize(
    ("data", "key", "said"),
    [
        ("The fox", None, r"for one of them write \[prompt\]"),
        ({"train": ["The fox"]}, None, "with the keys 'train'; give one of its values"),
        (Table(), None, r'give a column of it, as table\["prompt"\]'),
        (3, None, "data is an iterable of prompts, got int 3"),
        ([5, 6, 7], None, r"got token ids \(5, ...\); write \[ids\]"),
        ([{"question": "Who?"}], None, "got the keys 'question'; name another by key="),
        ([{"role": "user", "content": "Hi"}], None, 'write {"messages": '),
        ([{"prompt": "a", "messages": []}], None, "'prompt' and 'messages'; name one"),
        ([{"prompt": "a", "temprature": 1}], None, "did you mean 'temperature'"),
        ([{"prompt": "a", "max_tokens": 1}], None, "did you mean 'max_new_tokens'"),
        (
            [{"prompt": "a"}],
            "question",
            "key='question': expected items with this key, got one with 'prompt'",
        ),
        (["a"], "question", "got str 'a'"),
    ],
)
def test_data_of_another_form_is_refused(stories: Engine, data: Any, key: str | None, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        list(stories.map(data, key=key, **GREEDY))


@pytest.mark.parametrize(
    "wrong", [{"max_new_token": 5}, {"num_beams": -1}, {"adapter": "poet"}, {"seed": "a"}]
)
def test_a_wrong_option_of_all_is_an_error_of_the_call(
    stories: Engine, out: Path, wrong: dict[str, Any]
) -> None:
    with pytest.raises((ValueError, TypeError), match=next(reversed(wrong))):
        stories.map(PROMPTS, out, **wrong)
    assert not out.exists() or out.read_bytes() == b""


# ---- items that fail


def test_what_cannot_be_answered_is_a_row_and_the_others_go_on(
    stories: Engine, texts: list[str | None], out: Path
) -> None:
    """The next call tries these again, and leaves one row of each."""

    def broken(ids: Any, scores: Any) -> Any:
        raise ZeroDivisionError("a processor")

    failing: dict[int, tuple[Any, str]] = {
        0: (None, "prompt"),
        2: ({"prompt": PROMPTS[2], "max_new_token": 1}, "max_new_tokens"),
        3: ("fox " * 2000, "1024"),
        4: ({"prompt": PROMPTS[4], "num_beams": -1}, "num_beams"),
        5: ({"prompt": PROMPTS[5], "logits_processor": [broken]}, "ZeroDivisionError: a processor"),
        6: ({"prompt": [10**9]}, "1000000000"),
    }
    asked = [failing[i][0] if i in failing else PROMPTS[i] for i in range(8)]
    with pytest.warns(UserWarning, match="6 of 8 items have no complete answer"):
        assert stories.map(asked, out, **GREEDY).failed == 6
    found = rows(out)
    for i, (_, reason) in failing.items():
        assert reason in found[i]["error"]
        assert "text" not in found[i]
    assert [found[i]["text"] for i in (1, 7)] == [texts[1], texts[7]]
    again = stories.map(PROMPTS[:8], out, **GREEDY)
    assert (again.resumed, again.failed) == (2, 0)
    assert texts_in(out) == texts[:8]


def test_a_device_that_fails_is_no_error_of_an_item(
    stories: Engine, texts: list[str | None], out: Path
) -> None:
    """All others would have it, too: the batch ends, and another process goes on."""

    def broken(ids: Any, scores: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    asked: list[Any] = [*PROMPTS[:9], {"prompt": PROMPTS[9], "logits_processor": [broken]}, *PROMPTS[10:]]
    with pytest.raises(RuntimeError, match="the device has failed"):
        stories.map(asked, out, **GREEDY)
    assert all("error" not in row for row in rows(out).values())
    stories.map(PROMPTS, out, **GREEDY)
    assert texts_in(out) == texts


def test_an_engine_that_is_closed_ends_the_batch(texts: list[str | None], out: Path) -> None:
    engine = Engine(demo.model(), demo.tokenizer(), num_blocks=64, max_batch_sequences=2)
    with pytest.raises(RuntimeError, match="the engine is closed"):
        engine.map(PROMPTS, out, **{**GREEDY, "progress": lambda done, total: engine.close()})
    complete = {i: row["text"] for i, row in rows(out).items() if "error" not in row}
    assert 0 < len(complete) < 12
    assert complete.items() <= dict(enumerate(texts)).items()


# ---- files


def test_rows_say_what_was_answered_and_how(stories: Engine, out: Path) -> None:
    asked: list[Any] = ["Once upon a time there was a fox", {"prompt": "狐 \u2028 \U0001f98a", "logprobs": 2}]
    stories.generate([asked[0]], **GREEDY)
    (first,) = stories.generate([asked[0]], **GREEDY)
    stories.map(asked, out, **GREEDY)
    row, other = (rows(out)[i] for i in range(2))
    assert row["text"] == first.text
    assert (row["prompt"], row["finish_reason"]) == (asked[0], "length")
    assert row["usage"] == {
        "prompt_tokens": len(first.prompt_token_ids),
        "cached_tokens": first.cached_tokens,
        "completion_tokens": 6,
    }
    assert first.cached_tokens
    assert row["options"] == {"max_new_tokens": 6, "do_sample": False}
    assert other["prompt"] == asked[1]["prompt"]
    assert [len(other["token_ids"]), len(other["logprobs"])] == [6, 6]
    assert len(other["logprobs"][0]["top_logprobs"]) == 2
    stories.map(
        [{"prompt": "The fox", "do_sample": True, "num_return_sequences": 3, "seed": 1}], out, overwrite=True
    )
    (row,) = rows(out).values()
    assert [each["text"] for each in row["sequences"]] != [row["text"]] * 3
    assert row["sequences"][0]["text"] == row["text"]


def test_a_file_is_continued_by_index_and_content(
    stories: Engine, texts: list[str | None], out: Path
) -> None:
    """Equal items are answers of their own; a changed one is computed again; a torn last line is, too."""
    asked = [*PROMPTS[:4], PROMPTS[0]]
    stories.map(asked, out, **GREEDY)
    assert texts_in(out) == [*texts[:4], texts[0]]
    seen: list[tuple[int, int | None]] = []
    again = stories.map(asked, out, **{**GREEDY, "progress": lambda *counts: seen.append(counts)})
    assert (again.done, again.resumed) == (5, 5)
    assert seen[-1] == (5, 5)
    asked[1] = PROMPTS[7]
    whole = out.read_bytes()
    out.write_bytes(whole[:-20])
    assert stories.map(asked, out, **GREEDY).resumed == 3
    assert texts_in(out) == [texts[0], texts[7], *texts[2:4], texts[0]]
    assert stories.map(PROMPTS, out, **GREEDY).resumed == 3, "more data of the same beginning"
    assert texts_in(out) == texts
    assert stories.map(PROMPTS[:2], out, **GREEDY).resumed == 2
    assert texts_in(out) == texts, "less data takes no answer away"


def test_options_of_an_item_are_its_content(stories: Engine, out: Path) -> None:
    stories.map([{"prompt": "The fox", "label": 1}], out, **GREEDY)
    assert stories.map([{"prompt": "The fox", "label": 2}], out, **GREEDY).resumed == 1
    assert stories.map(["The fox"], out, **GREEDY, priority=3, salt="a", tenant="b").resumed == 1
    assert stories.map([{"prompt": "The fox", "max_new_tokens": 2}], out, **GREEDY).resumed == 0
    assert rows(out)[0]["usage"]["completion_tokens"] == 2


def test_answers_of_another_job_are_not_mixed_in(stories: Engine, texts: list[str | None], out: Path) -> None:
    stories.map(PROMPTS[:2], out, **GREEDY)
    before = out.read_bytes()
    with pytest.raises(
        ValueError, match="made with max_new_tokens=6, and now there is max_new_tokens=7; give an"
    ):
        stories.map(PROMPTS[:2], out, **{**GREEDY, "max_new_tokens": 7})
    with pytest.raises(ValueError, match=r"made with no top_k, and now there is top_k=5"):
        stories.map(PROMPTS[:2], out, **GREEDY, top_k=5)
    other = demo.model()
    with torch.no_grad():
        other.model.norm.weight *= 1.5
    with pytest.raises(
        ValueError, match=r"it has answers of .*@\w+, and the model is .*@\w+ \(the digest is of its weights"
    ):
        Engine(other, demo.tokenizer(), num_blocks=64).map(PROMPTS[:2], out, **GREEDY)
    other = demo.model()
    other.generation_config.repetition_penalty = 1.5
    with pytest.raises(ValueError, match="it has answers of "):
        Engine(other, demo.tokenizer(), num_blocks=64).map(PROMPTS[:2], out, **GREEDY)
    assert out.read_bytes() == before
    assert stories.map(PROMPTS[:1], out, overwrite=True, **{**GREEDY, "max_new_tokens": 7}).resumed == 0
    assert list(rows(out)) == [0]
    out.write_text("my prompts\nare here\n")
    with pytest.raises(ValueError, match=r"line 1 of .* is not a row of answers"):
        stories.map(PROMPTS[:1], out, **GREEDY)
    assert out.read_text() == "my prompts\nare here\n"


def test_adapters_are_known_by_their_content(tmp_path: Path, out: Path) -> None:
    """Of all items, and of one: another adapter of the same name gives other answers."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    engines = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        folder = tmp_path / str(seed)
        peft.get_peft_model(demo.model(), config, "poet").save_pretrained(folder)
        engine = Engine(demo.model(), demo.tokenizer(), num_blocks=64)
        engine.add_adapter("poet", folder / "poet")
        engines.append(engine)
    before, after = engines
    asked = [{"prompt": "The fox", "adapter": "poet"}, "The fox"]
    assert before.map(asked, out, **GREEDY).failed == 0
    assert before.map(asked, out, **GREEDY).resumed == 2
    assert after.map(asked, out, **GREEDY).resumed == 1
    before.map(["The fox"], out, overwrite=True, adapter="poet", **GREEDY)
    assert rows(out)[0]["options"]["adapter"][0].startswith("poet@")
    with pytest.raises(ValueError, match=r"made with adapter=\['poet@\w+'\], and now there is adapter="):
        after.map(["The fox"], out, adapter="poet", **GREEDY)


# ---- what breaks it off


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_what_has_ended_before_an_interrupt_is_in_the_file(
    stories: Engine, texts: list[str | None], out: Path, error: type[BaseException]
) -> None:
    seen: list[int] = []

    def progress(done: int, total: int | None) -> None:
        seen.append(done)
        if done >= 4:
            raise error

    with pytest.raises(error):
        stories.map(PROMPTS, out, **{**GREEDY, "progress": progress})
    assert idle(stories)
    kept = rows(out)
    assert seen[-1] <= len(kept) < 12
    assert {i: row["text"] for i, row in kept.items()}.items() <= dict(enumerate(texts)).items()
    assert stories.map(PROMPTS, out, **GREEDY).resumed == len(kept)
    assert texts_in(out) == texts


def test_interrupts_at_any_place_lose_no_answer(stories: Engine, texts: list[str | None], out: Path) -> None:
    """Ctrl-C at places all over the code of batches: the file is whole, and the next call completes it."""
    counting = Interrupted(files=FILES)
    counting(lambda: stories.map(PROMPTS[:6], out, **GREEDY))
    places = range(2, counting.count, counting.count // 10)
    came = 0
    for at in places:
        out.unlink(missing_ok=True)
        interrupted = Interrupted(at, FILES)
        came += not interrupted(lambda: stories.map(PROMPTS[:6], out, **GREEDY))
        while not idle(stories):
            stories.step()  # a request whose submit() was interrupted has no handle
        stories.check()
        stories.map(PROMPTS[:6], out, **GREEDY)
        assert texts_in(out) == texts[:6], interrupted.where
    assert came >= len(places) - 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_process_that_ends_leaves_its_answers(tmp_path: Path, number: signal.Signals) -> None:
    """Of the command line: `--resume` continues the file."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join(f"The fox {i}\n" for i in range(400)))
    out = tmp_path / "answers.jsonl"
    asked = ["generate", "demo", "--lines", "--file", str(prompts), "--out", str(out), "--max-tokens", "8"]
    command = Command(*asked)
    end = time.monotonic() + LIMIT
    while not out.exists() or out.read_bytes().count(b"\n") < 3:
        assert time.monotonic() < end
        assert command.exitcode is None
        time.sleep(0.01)
    assert command.pid is not None
    os.kill(command.pid, number)
    assert command.wait(LIMIT) == (130 if number == signal.SIGINT else -number)
    lines = out.read_bytes().split(b"\n")[:-1]
    assert 3 <= len(lines) < 400
    kept = [json.loads(line)["index"] for line in lines]
    assert len(set(kept)) == len(kept)
    prompts.write_text("".join(f"The fox {i}\n" for i in range(max(kept) + 1)))
    resumed = Command(*asked, "--resume")
    assert resumed.wait(LIMIT) == 0
    count = max(kept) + 1
    assert f"{count} of {count} done, {len(kept)} of them before, 0 failed" in resumed.stderr.read()
    assert sorted(rows(out)) == list(range(count))
