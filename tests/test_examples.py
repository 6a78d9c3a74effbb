"""The examples and the README run as they stand."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
from transformers import DynamicCache

import hf_paged
from hf_paged import demo
from hf_paged.trace import read

ROOT = Path(__file__).parent.parent
SHORTENED = {"rollouts": ["--steps", "8", "--svg", "{folder}/curves.svg"], "grpo_trl": ["--steps", "4"]}
"""Arguments of examples that take long."""


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_example(
    example: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if example.stem == "grpo_trl":
        pytest.importorskip("trl", reason="needs TRL, which is no dependency")
    arguments = [each.format(folder=tmp_path) for each in SHORTENED.get(example.stem, [])]
    monkeypatch.setattr("sys.argv", [str(example), *arguments])
    runpy.run_path(str(example), run_name="__main__")
    out = capsys.readouterr().out
    assert len(out.split()) > 20
    if example.stem in ("beams", "batch"):
        assert re.search(r"^seconds on (cpu|cuda).*: stock \d+\.\d+, paged \d+\.\d+$", out, re.M)
        assert "the same tokens\n" in out
    if example.stem == "best_of_n":
        assert re.search(r"^seconds: stock \d+\.\d+, paged \d+\.\d+, engine \d+\.\d+$", out, re.M)
        named, held = re.findall(r"^blocks: (\d+) in the tables of 64 rows, (\d+) in memory$", out, re.M)[0]
        assert int(held) < int(named) / 2
        assert re.search(r"^tokens that the engine has not read again: \d", out, re.M)
        assert "generate() has the same tokens" in out
    if example.stem == "rollouts":
        assert len(example.read_text().splitlines()) <= 80
        rows = re.findall(r"reward +(\d+\.\d+) +mismatch (\S+) +memory (\d+) MB", out)
        assert len(rows) == 8
        assert sum(float(reward) for reward, *_ in rows[-3:]) > sum(float(reward) for reward, *_ in rows[:3])
        assert {float(mismatch) for _, mismatch, _ in rows} == {0.0}
        assert float(rows[-1][2]) < 1.1 * float(rows[2][2])
        picture = (tmp_path / "curves.svg").read_text()
        assert [len(points.split()) for points in re.findall(r'points="(.*?)"', picture)] == [8, 8]
    if example.stem == "one_adapter":
        assert re.findall(r"peft's tokens in (\d of \d)", out) == ["2 of 2", "2 of 2", "1 of 1"]
        said = dict(re.findall(r"^(greedy|loud|model alone|products alone): (.*)$", out, re.M))
        assert "!" in said["greedy"]
        assert said["loud"] == said["greedy"]
        assert "!" not in said["model alone"]
        assert said["greedy"] != said["products alone"]
    if example.stem == "hybrid":
        there = re.findall(r"^turn \d: (\d+) of (\d+) tokens were there; ' the owl", out, re.M)
        assert [int(all_of_it) - int(found) for found, all_of_it in there] == [4, 5, 5]
    if example.stem == "finetune_then_serve":
        assert "generate() has the same tokens" in out
        stories = re.findall(r"^(the model|loud|moonlit) *: (.*)$", out, re.M)
        styles = [[mark in story for mark in ("!", "moon shone", "Nobody")] for _, story in stories]
        assert styles[:3] == [[False, False, False], [True, False, False], [False, True, False]]
        assert stories[3] == stories[1]  # served while the other one was trained
        assert styles[4] == [False, False, True]
        assert stories[5:] == stories[:2]
        assert re.search(r"^moral *: .*<moral> Sleep well", out, re.M)
        assert re.search(r"^from its folder, with \d+ tokens: the same answer$", out, re.M)


@pytest.mark.parametrize("terminal", [True, False])
def test_eight_side_by_side(
    terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In a terminal a picture after every step, else one at the end; whoever had to wait says the same
    words.
    """
    monkeypatch.setattr("sys.argv", ["serve.py", "--delay", "0", "--trace", str(tmp_path / "steps.jsonl")])
    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal)
    monkeypatch.setenv("COLUMNS", "160")
    runpy.run_path(str(ROOT / "examples" / "serve.py"), run_name="__main__")
    pictures = capsys.readouterr().out.split("\033[H\033[J")
    steps = read(tmp_path / "steps.jsonl").steps
    assert len(pictures) == (len(steps) if terminal else 1)
    last = pictures[-1]
    heads = [head for line in last.splitlines() if line.startswith("[") for head in line.split(" | ")]
    assert len(heads) == 8
    assert sum("[length]" in head or "[stop]" in head for head in heads) == 8
    assert any(head.startswith("[length] greedy") for head in heads)
    model, tokenizer = demo.model(), demo.tokenizer()
    ids = tokenizer(demo.prompts()[0], return_tensors="pt").input_ids
    right = tokenizer.decode(
        model.generate(ids, do_sample=False, max_new_tokens=48)[0], skip_special_tokens=True
    ).split()
    panel = " ".join(line.split(" | ")[0] for line in last.splitlines()[1:11]).split()
    assert panel == right
    assert sum(step.blocks[0].held > 20 for step in steps) > 5
    assert re.search(r"^step \d+, full\n[0-7:.*]{40}\n", last, re.M)
    if terminal:
        assert [len(picture.split()) for picture in pictures[1:4]] != [len(pictures[1].split())] * 3


@pytest.mark.parametrize(
    "arguments",
    [["--system", "200"], [str(Path(demo.__file__).parent / "data"), "--turns", "2", "--system", "90"]],
)
def test_a_chat_computes_what_is_new(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every turn finds the prompt before it and its answer, less what its text is not cut into again; a model
    may be a path.
    """
    monkeypatch.setattr("sys.argv", ["chat", *arguments])
    runpy.run_path(str(ROOT / "examples" / "chat.py"), run_name="__main__")
    out = capsys.readouterr().out
    turns = [
        [int(number) for number in re.findall(r"(?<!\S)\d+(?!\S)", row)]
        for row in re.findall(r"^ +\d+ +\d+\.\d+ .*$", out, re.M)
    ]
    assert [turn[0] for turn in turns] == list(range(1, 3 if "--turns" in arguments else 5))
    assert turns[0][2] == 0
    for (_, computed, reused, whole), before in zip(turns[1:], turns, strict=False):
        assert computed + reused == whole
        assert before[3] <= reused < before[3] + 24  # nobody has fed the last token of an answer
    assert all(turn[1] < 45 for turn in turns[1:])
    assert re.search(r"^the second turn takes \d\.\d\d of the first, prompts reused$", out, re.M)
    assert "\nthe same tokens\n" in out


@pytest.mark.parametrize("name", ["beams", "batch", "best_of_n", "chat"])
def test_the_big_shape_asks_for_a_gpu(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", [name, "--shape", "llama8b"])
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit):
        runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    assert "needs a GPU" in capsys.readouterr().err


def blocks_of(page: str) -> list[str]:
    """The Python of a page, without what needs a server, a model with eyes, or a trainer that the page leaves
    open.
    """
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.S)
    return [block for block in blocks if not re.search(r"openai|AutoProcessor|Trainer\(\.\.\.", block)]


@pytest.mark.parametrize(
    ("page", "count"),
    [
        ("README.md", 3),
        ("docs/batches.md", 1),
        ("docs/generate.md", 1),
        ("docs/engine.md", 4),
        ("docs/trl.md", 1),
    ],
)
def test_a_page_runs_as_it_stands(
    page: str, count: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """All its Python in order, as in a notebook: nothing is defined beforehand, and `await` stands at the
    top.
    """
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    blocks = blocks_of(page)
    assert len(blocks) == count
    for block in blocks:
        left = eval(compile(block, page, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)
        if inspect.iscoroutine(left):
            asyncio.run(left)
    out = capsys.readouterr().out
    if page == "README.md":
        assert "PagedCache(rows=12" in out
    if page == "docs/generate.md":
        assert re.search(r"prompts +\d\d tokens reused", out)
        return
    if page == "docs/trl.md":
        assert int(out.split()[0]) > 0  # bytes that had stayed while the model trained
        return
    assert len(out.split()) > 40
    names["engine"].close()
    names["engine"].check()


LORA = 'LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)'
BEFORE = """
import hf_paged, peft, torch
from hf_paged import Engine, demo
from peft import LoraConfig
model, base, tokenizer = demo.model(), demo.model(), demo.tokenizer()
engine, prompts, ids = Engine(model, tokenizer), demo.prompts()[:3], tokenizer("Once upon").input_ids
inputs = tokenizer(prompts, return_tensors="pt", padding=True)
"""
TO_ADD = f"""
model = demo.model()
peft.get_peft_model(demo.model(), {LORA}, "polite").save_pretrained(".")
state_dict = peft.get_peft_model_state_dict(peft.get_peft_model(demo.model(), {LORA}))
another_peft_model = peft.get_peft_model(demo.model(), {LORA}, "curt")
engine = Engine(model, tokenizer)
"""
TO_PROMPT = """
engine.close()
given = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 3}
model = peft.get_peft_model(demo.model(), peft.PromptTuningConfig(**given), "polite")
engine = Engine(model.eval(), tokenizer)
tasks = peft.MultitaskPromptTuningConfig(**given, num_tasks=3)
engine.add_adapter("tasks", peft.get_peft_model(demo.model(), tasks, "tasks"))
"""
TO_SCALE = """
engine.close()
model = peft.get_peft_model(demo.model(), peft.IA3Config(task_type="CAUSAL_LM"), "ia3").eval()
"""
TO_TRAIN = """
ids, mask = inputs["input_ids"], inputs["attention_mask"]
positions = (mask.cumsum(-1) - 1).clamp(min=0)
loss_of = lambda logprobs: -logprobs.mean()
"""


@pytest.mark.parametrize(
    ("page", "befores"),
    [
        ("adapters.md", ["", "", TO_ADD, TO_PROMPT, TO_SCALE]),
        ("batch_invariant.md", [TO_TRAIN]),
        ("engine_reference.md", ["", ""]),
        ("mismatch.md", ["", ""]),
    ],
)
def test_a_page_runs_with_what_it_takes_for_granted(
    page: str, befores: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its models, prompts and folders are made beforehand; `LoraConfig(...)` becomes one with layers."""
    if page == "engine_reference.md":
        pytest.importorskip("llguidance")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(BEFORE, names)
    blocks = blocks_of(f"docs/{page}")
    for block, before in zip(blocks, befores, strict=True):
        exec(before, names)
        exec(block.replace("LoraConfig(...)", LORA).replace("path/of/the/folder", "polite"), names)
    names["engine"].close()
    names["engine"].check()


def test_a_saved_word(tmp_path: Path) -> None:
    """It is saved with the model: without this package stock's cache answers, and the line of docs/generate.md
    takes it out.
    """
    model, tokenizer = demo.model(), demo.tokenizer()
    inputs = tokenizer("The moon fell", return_tensors="pt")
    options = {"max_new_tokens": 5, "do_sample": False, "return_dict_in_generate": True}
    model.generation_config.update(cache_implementation="paged", cache_config={"block_size": 8})
    model.save_pretrained(tmp_path / "with")
    loaded = type(model).from_pretrained(tmp_path / "with")
    paged = loaded.generate(**inputs, **options)
    assert isinstance(paged.past_key_values, hf_paged.PagedCache)
    hf_paged.uninstall()
    try:
        stock = loaded.generate(**inputs, **options)
    finally:
        hf_paged.install()
    assert type(stock.past_key_values) is DynamicCache
    assert stock.sequences.tolist() == paged.sequences.tolist()
    line = "model.generation_config.update(cache_implementation=None, cache_config=None)"
    assert f"`{line}`" in (ROOT / "docs" / "generate.md").read_text()
    exec(line, {"model": loaded})
    loaded.save_pretrained(tmp_path / "without")
    saved = (tmp_path / "without" / "generation_config.json").read_text()
    assert "paged" not in saved
    assert "block_size" not in saved


def test_demo_draws_the_blocks(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The output of scripts/demo: identical tokens, blocks that several rows share, and the costs of both
    caches; many rows of one prompt cost less time and memory on pages.
    """
    monkeypatch.setattr("sys.argv", ["demo", "--new", "16", "--calls", "1", "--shared", "320"])
    runpy.run_module("hf_paged.demo", run_name="__main__")
    out = capsys.readouterr().out
    assert re.search(r"tokens +identical", out)
    assert re.search(r"row 3 .*\dx4", out)
    assert re.search(r"^medians of 1 warm calls, CPU, \d+ thread\(s\)$", out, re.M)
    cost = re.findall(
        r"^(\S.*?) {2,}seconds +(\S+) +(\S+) +x \d+\.\d\d\n +cache bytes +(\S+) +(\S+) +x \d\.\d\d$",
        out,
        re.M,
    )
    assert [line[0] for line in cost] == [
        "16 samples, prompt of 320, 5.2M model",
        "8 beams, prompt of 320, 5.2M model",
        "4 beams above, 23 tokens, tiny model",
    ]
    seconds = [(float(line[1]), float(line[2])) for line in cost]
    assert all(paged < stock for stock, paged in seconds[:2])  # a third or less on an idle machine
    sizes = [tuple(int(number.replace(",", "")) for number in line[3:]) for line in cost]
    larger, tiny = 4 * 2 * 4 * 32 * 4, 3 * 2 * 2 * 32 * 4  # bytes of a token: layers, K and V, heads, width
    assert [before for before, _ in sizes] == [16 * 343 * larger, 8 * 343 * larger, 4 * 22 * tiny]
    assert all(after < before / 5 for before, after in sizes[:2])  # the prompt is held once
    assert all(after % (16 * larger) == 0 for _, after in sizes[:2])
    assert sizes[2][1] % (8 * tiny) == 0
