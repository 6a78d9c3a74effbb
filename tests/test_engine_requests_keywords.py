"""IDEs, type checkers and help() know the keywords that an engine takes."""

from __future__ import annotations

import ast
import inspect
import pydoc
import re
import subprocess
import sys
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
import transformers
from families import BY_NAME, build
from generation_fields import HONOURED_HERE, REFUSED_HERE
from transformers import GenerationConfig

import hf_paged
from hf_paged import Engine, EngineConfig, Handle, Increment, Output
from hf_paged.engine import EngineOptions, EngineStats, RequestKeywords
from hf_paged.engine.multimodal.media import SHOWN
from hf_paged.engine.requests import keywords
from hf_paged.engine.requests import params as asking
from hf_paged.engine.requests.fields import BESIDE_AN_ASSISTANT, HONOURED, REFUSED, generation_fields
from hf_paged.engine.requests.keywords import UNNAMED, GenerateKeywords, NeutralOptions, OpenAIOptions
from hf_paged.engine.requests.prompts import RAW
from hf_paged.engine.worker import config
from hf_paged.kv.config import KERNELS
from hf_paged.model.cache_name import CACHE
from hf_paged.scheduling import ADMISSIONS, POLICIES

PROMPT = [5, 6, 7, 8]
METHODS = ("submit", "generate", "chat", "map", "stream", "agenerate", "astream")
ROOT = Path(__file__).parent.parent

EXAMPLES: dict[str, Any] = {
    **{name: value for case in HONOURED_HERE.values() for name, value in case.items()},
    "adapter": "active",
    "prompt_logprobs": 1,
    "return_routing": False,
    "tenant": "one",
    "max_new_tokens": 2,
    "max_time": 60.0,
    "do_sample": False,
    "num_beams": 2,
    "num_return_sequences": 1,
    "early_stopping": "never",
    "length_penalty": 0.5,
    "temperature": 0.5,
    "top_k": 3,
    "top_p": 0.5,
    "min_p": 0.1,
    "top_h": 0.5,
    "typical_p": 0.5,
    "epsilon_cutoff": 0.02,
    "eta_cutoff": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "decoder_start_token_id": 1,
    "negative_prompt_ids": torch.tensor([[5, 6]]),
    "negative_prompt_attention_mask": torch.ones(1, 2, dtype=torch.long),
    "seed": 3,
    "logprobs": 2,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "logit_bias": {5: 2.0},
    "priority": 1,
    "salt": "one",
    **dict.fromkeys(BESIDE_AN_ASSISTANT, 3),
    "num_assistant_tokens_schedule": "constant",
    "assistant_confidence_threshold": 0.5,
    "assistant_ensemble_weight": 0.5,
}
"""A value of each keyword beside a prompt of ids."""
ELSEWHERE = {
    "stop_strings",
    "stop",
    "inputs_embeds",
    "input_ids",
    "attention_mask",
    "decoder_input_ids",
    *RAW,
}
"""Keywords that need another prompt, a tokenizer or a processor; their own tests use them."""


def accepted_as_neutral() -> dict[str, Any]:
    """The options that change no answer, with a value other than None that the engine takes."""
    found = {name: [value for value in values if value is not None] for name, (values, _) in REFUSED.items()}
    assistants = {name: [EXAMPLES[name]] for name in BESIDE_AN_ASSISTANT}
    return {
        name: values[0]
        for name, values in {**found, **assistants, "return_dict_in_generate": [True]}.items()
        if values
    }


@pytest.fixture(scope="module")
def engine() -> Engine:
    """For requests that are cancelled or refused."""
    return Engine(build(BY_NAME["llama"]), block_size=4, num_blocks=60)


def test_the_types_name_what_submit_takes() -> None:
    """Every option of GenerationConfig, what asking and prompts read beside them, and nothing else."""
    own = set(inspect.signature(Engine.submit).parameters) - {
        "self",
        "prompt",
        "generation_config",
        "generate_keywords",
    }
    beside = {
        *asking.PASSED_ON,
        *asking.PROMPTS,
        *RAW,
        "logits_processor",
        "stopping_criteria",
        "input_ids",
        "attention_mask",
    }
    shown = {name for name in RequestKeywords.__annotations__ if SHOWN.search(name)}
    openais = OpenAIOptions.__annotations__.keys()
    requests = {"seed", "logprobs", "prompt_logprobs", "priority", "salt", "tenant", "adapter", "task_ids"}
    requests |= {"return_routing"}
    assert (
        RequestKeywords.__annotations__.keys()
        == HONOURED | accepted_as_neutral().keys() | beside | shown | requests | openais
    )
    assert NeutralOptions.__annotations__.keys() == accepted_as_neutral().keys()
    assert own == RequestKeywords.__annotations__.keys() - UNNAMED


def test_every_option_of_transformers_has_its_place() -> None:
    """A field of GenerationConfig is typed unless no value of it says anything to an engine."""
    fields = {name for name, _ in generation_fields(GenerationConfig())} - {"transformers_version"}
    assert fields & RequestKeywords.__annotations__.keys() == fields & (
        HONOURED | accepted_as_neutral().keys()
    )


@pytest.mark.parametrize("name", sorted(RequestKeywords.__annotations__.keys() - ELSEWHERE))
def test_submit_takes_every_typed_keyword(engine: Engine, name: str) -> None:
    """Or refuses it for the model's sake, by name, as this Llama sees no pictures."""
    value = EXAMPLES.get(name, accepted_as_neutral().get(name))
    if SHOWN.search(name):
        with pytest.raises(ValueError, match=rf"takes no \['{name}'\]"):
            engine.submit(PROMPT, **{name: torch.zeros(1, 3, 4, 4)})
        return
    if name == "task_ids":
        with pytest.raises(ValueError, match="task_ids=1: only a multitask prompt and Poly have tasks"):
            engine.submit(PROMPT, task_ids=1)
        return
    assert value is not None, f"a value for {name} is missing here"
    if name in NeutralOptions.__annotations__ and not hasattr(GenerationConfig(), name):
        pytest.skip("an option of later releases of transformers, or of earlier ones")
    engine.submit(PROMPT, **{name: value}).cancel()


@pytest.mark.parametrize("name", sorted(REFUSED_HERE.keys() - NeutralOptions.__annotations__.keys()))
def test_what_has_no_type_is_refused(engine: Engine, name: str) -> None:
    assert name not in RequestKeywords.__annotations__
    with pytest.raises(ValueError, match=name):
        engine.submit(PROMPT, **{name: REFUSED_HERE[name]})


def test_pictures_and_recordings_have_their_names() -> None:
    """Every keyword that brings some to a model of the installed transformers with a language model's head is
    typed.
    """
    found = set()
    for file in (Path(transformers.__file__).parent / "models").glob("*/modeling_*.py"):
        for parameters in re.findall(r"def forward\(\s*self,(.*?)\)\s*->", file.read_text(), re.S):
            if CACHE in parameters and "labels" in parameters:
                found |= {
                    name for name in re.findall(r"^\s*(\w+)\s*:", parameters, re.M) if SHOWN.search(name)
                }
    assert len(found) > 5
    assert found - RequestKeywords.__annotations__.keys() == set()


def test_an_engines_options_are_its_config() -> None:
    """Names, types and defaults, in the order of the config."""
    assert get_type_hints(EngineOptions) == get_type_hints(EngineConfig)
    parameters = list(inspect.signature(Engine).parameters.values())
    assert [each.name for each in parameters[:3]] == ["model", "tokenizer", "config"]
    assert {each.name: each.default for each in parameters[3:]} == asdict(EngineConfig())
    assert {each.name: each.annotation for each in parameters[3:]} == EngineConfig.__annotations__
    assert "MISSING" not in str(inspect.signature(Engine))
    assert set(get_args(config.Policy)) == set(POLICIES)
    assert set(get_args(config.Admission)) == set(ADMISSIONS)
    assert set(get_args(config.Kernels)) == set(KERNELS)
    for mode in get_args(config.PreemptionMode):
        assert EngineConfig(preemption=mode).preemption == mode


@pytest.mark.parametrize("method", METHODS)
def test_signatures_name_the_options(method: str) -> None:
    """As completion in notebooks reads them; what they do not name still passes."""
    signature = inspect.signature(getattr(Engine, method))
    assert RequestKeywords.__annotations__.keys() - UNNAMED <= signature.parameters.keys()
    assert signature.parameters["priority"].default == 0
    assert all(signature.parameters[name].default is None for name in ("max_new_tokens", "do_sample", "seed"))
    signature.bind(None, PROMPT, max_new_tokens=3, use_cache=True)
    assert "object at" not in str(signature)
    assert "MISSING" not in str(signature)
    assert signature.parameters["max_new_tokens"].annotation == "int | None"
    assert all(
        each.annotation is not each.empty for name, each in signature.parameters.items() if name != "self"
    )


def test_every_named_keyword_is_described() -> None:
    """A docstring stands below each field, as IDEs show it, and `submit()` explains those of its own."""
    described: set[str] = set()
    tree = ast.parse(inspect.getsource(keywords))
    for node in (each for each in tree.body if isinstance(each, ast.ClassDef)):
        for field, text in pairwise(node.body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                described.add(ast.unparse(field.target))
    assert described == keywords.ChatKeywords.__annotations__.keys() - UNNAMED
    submit = inspect.getdoc(Engine.submit) or ""
    for name in RequestKeywords.__annotations__.keys() - GenerateKeywords.__annotations__.keys():
        assert re.search(rf"^ +{name}: ", submit, re.M), name
    for name in OpenAIOptions.__annotations__:
        assert re.search(rf"\b{name}\b", submit), name


def test_annotations_resolve() -> None:
    """A type checker, or a notebook, finds the type of an answer."""
    for function, found in {
        Engine.submit: Handle,
        Engine.generate: Output | list[Output],
        Engine.stats: EngineStats,
        Handle.result: Output,
        Handle.read: list[Increment],
    }.items():
        assert get_type_hints(function)["return"] == found
    assert get_type_hints(Increment)["text"] is str


def test_help_shows_options_and_no_internals() -> None:
    text = pydoc.render_doc(Engine, renderer=pydoc.plaintext)
    for option in (*EngineOptions.__annotations__, "max_new_tokens", "top_p", "seed", "logprobs", "salt"):
        assert re.search(rf"\b{option}: '.+' = ", text), option
    for internal in ("Job", "CheckPolicy", "FinishReason", "Handles call it", "thread calls it"):
        assert internal not in text, internal
    methods = set(re.findall(r"^ \|  (?:async )?(\w+)\(self", text, re.M))
    assert {name for name in methods if not name.startswith("__")} == {
        *METHODS, "start", "stop", "step", "pause", "resume", "stats", "trace", "watch", "check", "close",
        "adapters", "add_adapter", "remove_adapter", "weights_changed", "load_weights", "sleep", "wake_up",
        "warm_up", "follow", "broadcast",
    }  # fmt: skip


def test_the_front_door_has_the_types_of_answers() -> None:
    for name in ("Handle", "Output", "SequenceOutput", "Increment"):
        assert name in hf_paged.__all__
        assert getattr(hf_paged, name) is getattr(hf_paged.engine, name)


USER = """
from typing import assert_type

import hf_paged
from hf_paged import Engine, EngineConfig, Handle, Increment, Output, SequenceOutput
from hf_paged.engine import Answers, EngineStats

def ended(done: int, total: int) -> None: ...
def ended_of_any(done: int, total: int | None) -> None: ...

engine = Engine(object(), block_size=16, policy="priority", run_ahead=None)
Engine(object(), config=EngineConfig(num_blocks=100))
outputs: list[Output] = engine.generate(["The fox"], max_new_tokens=4, do_sample=True, seed=1, progress=False)
output: Output = engine.generate("The fox", strict=True)
output = engine.chat([{"role": "user", "content": "Hello"}], tools=[], max_new_tokens=4)
loaded: Engine = Engine.from_pretrained("demo", adapters={"poet": "poet"}, dtype="auto", num_blocks=100)
handle: Handle = engine.submit("The owl", top_p=0.9, stop_strings=["."], logprobs=True, use_cache=True)
sequence: SequenceOutput = handle.result(timeout=1.0).sequences[0]
for increment in engine.stream("The moon", eos_token_id=[1, 2]):
    piece: Increment = increment
    text: str = piece.text
running: int = engine.stats()["running"]
held: int = engine.stats()["blocks"]["full"]["held"]
assert_type(engine.stats(), EngineStats)
assert_type(engine.stats()["off"], dict[str, str])
assert_type(hf_paged.stats(engine.model), hf_paged.Stats)
assert_type(handle.result(), Output)
assert_type([each.text for each in handle], list[str])
assert_type(engine.generate([[5, 6]], progress=ended), list[Output])
assert_type(engine.generate([5, 6], progress=ended_of_any), Output)
assert_type(engine.chat([[{"role": "user", "content": "Hello"}]], progress=True), list[Output])
assert_type(engine.map(["The fox"], progress=ended_of_any), Answers)
assert_type([output for index, output in engine.map(["The fox"])], list[Output])

async def main() -> None:
    several: list[Output] = await engine.agenerate(["The fox"], min_p=0.1)
    one: Output = await engine.agenerate([5, 6], min_p=0.1)
    async for increment in engine.astream("The fox", salt="one"):
        piece: Increment = increment
    assert_type(await handle, Output)
"""
MISTAKES = {
    "Engine(object(), blocksize=16)": 'Unexpected keyword argument "blocksize"',
    'Engine(object(), policy="fifo")': 'expected "Literal',
    'engine.submit("a", max_new_token=4)': 'Unexpected keyword argument "max_new_token"',
    'engine.submit("a", max_new_tokens="4")': 'expected "int | None"',
    'engine.submit("a", use_cache=False)': "Literal[True]",
    'engine.generate(["a"], temprature=0.5)': "No overload variant",
    'engine.map(["a"], progress=ended)': 'expected "bool | Callable[[int, int | None], object] | None"',
    'engine.stream("a", beam_size=4)': 'Unexpected keyword argument "beam_size"',
    'engine.stream("a", priority="high")': 'expected "int"',
    'engine.astream("a", seeds=1)': 'Unexpected keyword argument "seeds"',
}


def test_a_type_checker_knows_the_keywords(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: Path
) -> None:
    """mypy accepts a user's script, and finds each mistake in the line where it is. It keeps what it has found out
    about modules that have not changed, for the next run.
    """
    pytest.importorskip("mypy")
    script, settings = tmp_path / "user.py", tmp_path / "mypy.ini"
    script.write_text(USER + "\n".join(MISTAKES) + "\n")
    settings.write_text(
        "[mypy]\nstrict = True\n[mypy-torch.*,transformers.*,triton.*]\nfollow_imports = "
        "skip\n[mypy-hf_paged.*]\nfollow_imports = silent\n"
    )
    monkeypatch.setenv("MYPYPATH", f"{ROOT}:{ROOT / 'kernels'}")
    words = [
        "--config-file",
        str(settings),
        "--cache-dir",
        str(kept / "mypy"),
        "--no-pretty",
        str(script),
    ]
    # Here it would leave a million objects, which every full collection of later tests looks at.
    done = subprocess.run([sys.executable, "-m", "mypy", *words], capture_output=True, text=True)
    assert not done.stderr
    out = done.stdout
    first = USER.count("\n") + 1
    found = {int(line): message for line, message in re.findall(r"user\.py:(\d+): error: (.*)", out)}
    assert found.keys() == set(range(first, first + len(MISTAKES))), out
    for line, (code, message) in enumerate(MISTAKES.items(), first):
        assert message in found[line], f"{code}: {found[line]}"
