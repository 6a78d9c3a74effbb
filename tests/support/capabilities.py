"""Capabilities that must work together: how each is switched on, and which pairs are refused with what words.

Requests of a pair run in one engine, each beside those with one of the two and with none. Right are the tokens of
stock generate(), or of peft's, on the same prompt alone, and the routing of a forward without a cache.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import peft
import pytest
import torch
from quantized_layers import FourBit
from releases import prefixes_are_ignored
from routed import mixture, seen_routing
from torch import nn
from transformers import DynamicCache

from hf_paged.engine import Engine
from hf_paged.model.adapters.invocation import start_of

NEW = 6
CALL = [91, 92]
"""The invocation tokens of the aLoRA."""
COMMON = [17, 44, 8, 71, 23, 60, 35, 12]
"""Two blocks that both prompts begin with."""
PROMPTS = [[*COMMON, 50, *CALL, 9, 31], [*COMMON, 28, 66, *CALL, 14]]
SMALL: dict[str, Any] = {"block_size": 4, "num_blocks": 80, "max_batch_tokens": 16, "max_batch_sequences": 12}
FAMILIES = {
    frozenset(): "llama",
    frozenset({"states"}): "qwen3_5_text",
    frozenset({"experts"}): "mixtral",
    frozenset({"states", "experts"}): "qwen3_next",
}
"""A model that has layers of these kinds."""


@dataclass(frozen=True)
class Capability:
    """One thing that an engine, its model or a request can have, and how it is switched on."""

    name: str
    words: str
    """The way in which a user switches it on, in Markdown."""
    model: str = ""
    """The kind of layers that the model must have: "states", "experts" or "quantized"."""
    engine: dict[str, Any] = field(default_factory=dict)
    """Options of the engine."""
    request: dict[str, Any] = field(default_factory=dict)
    """Options of a request."""
    adapter: Callable[[], Any] | None = None
    """The config of an adapter that a request names."""
    ranks: bool = False


TASK = {"task_type": "CAUSAL_LM"}
LAYERS = {"target_modules": ["q_proj", "v_proj", "out_proj"]}
"""Of attention, and of mixers with states."""
CAPABILITIES = [
    Capability("states", "a model with recurrent states", model="states"),
    Capability("shared reads", '`shared_reads="always"`', engine={"shared_reads": "always"}),
    Capability(
        "kernels' adapters", "LoRA: `adapter=`",
        adapter=lambda: peft.LoraConfig(r=4, lora_alpha=16, init_lora_weights=False, **LAYERS, **TASK),
    ),
    Capability(
        "peft's adapters", "IA3, computed by peft's modules: `adapter=`",
        adapter=lambda: peft.IA3Config(
            target_modules=["k_proj", "v_proj"], feedforward_modules=[], init_ia3_weights=True, **TASK
        ),
    ),
    Capability(
        "virtual tokens", "prompt tuning: `adapter=`",
        adapter=lambda: peft.PromptTuningConfig(num_virtual_tokens=5, **TASK),
    ),
    Capability(
        "prefixes", "prefix tuning: `adapter=`",
        adapter=lambda: peft.PrefixTuningConfig(num_virtual_tokens=5, **TASK),
    ),
    Capability(
        "aLoRA", "`alora_invocation_tokens`: `adapter=`",
        adapter=lambda: peft.LoraConfig(
            r=4, lora_alpha=16, init_lora_weights=False, alora_invocation_tokens=CALL, **LAYERS, **TASK
        ),
    ),
    Capability("routing", "`return_routing=True`", model="experts", request={"return_routing": True}),
    Capability("batch-invariant", "`batch_invariant=True`", engine={"batch_invariant": True}),
    Capability("ranks", "a model with `tp_plan`, on two ranks", ranks=True),
    Capability("quantized", "a model with quantized layers", model="quantized"),
    Capability("beams", "`num_beams=3`", request={"num_beams": 3}),
]  # fmt: skip
Pair = tuple[Capability, Capability]
BY_NAME = {each.name: each for each in CAPABILITIES}
PAIRS: list[Pair] = list(itertools.combinations(CAPABILITIES, 2))
REFUSED = {
    ("states", "prefixes"): (
        "keeps more than keys and values, and the adapter's virtual tokens are nothing else; use generate()"
    ),
    ("states", "batch-invariant"): (
        "batch_invariant() has no fixed order for aten.convolution.default; run this model without it"
    ),
    ("peft's adapters", "ranks"): (
        "an adapter of the method IA3 is computed by peft's own modules, which have no forwards where ranks divide "
        "the model; use fewer ranks"
    ),
    ("prefixes", "ranks"): "a tensor-parallel engine takes no prefix tuning and Cartridge; use generate()",
    ("routing", "ranks"): (
        "return_routing=True: several ranks compute MixtralForCausalLM, and none records; use one rank"
    ),
    ("routing", "beams"): (
        "return_routing=True and num_beams=3: the blocks of beams that have ended are gone with their routing; "
        "sample or decode greedily"
    ),
    ("batch-invariant", "ranks"): (
        "batch_invariant=True is for one process and LlamaForCausalLM is on 2 ranks; leave it out"
    ),
}
"""The words of their errors."""
OFF = {
    ("shared reads", "batch-invariant"): (
        "batch_invariant=True: sums have one order, whatever is computed beside"
    )
}
"""Pairs whose first is off beside the second, and what `stats()["off"]` says of it."""
UNTRIED = {("ranks", "quantized"): "no library of quantized layers is installed where the suite runs"}
"""Pairs that no test has, and why."""


# ---- models


@functools.cache
def model_of(has: frozenset[str]) -> Any:
    """The tiny model that has this, the same one every time."""
    model = mixture(FAMILIES[has - {"quantized"}])
    if "quantized" in has:
        for parent in model.model.layers.modules():
            for name, module in list(parent.named_children()):
                if type(module) is nn.Linear and module.bias is None:
                    setattr(parent, name, _quantized(module))
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def _quantized(plain: nn.Linear) -> FourBit:
    """A layer of 15 levels."""
    made = FourBit(plain)
    state = made.weight.quant_state
    state.absmax = plain.weight.data.abs().amax(1, keepdim=True) / 7
    made.weight.data = (plain.weight.data / state.absmax).round()
    return made


@functools.cache
def tuned(has: frozenset[str], name: str) -> Any:
    """A peft model with the adapter of a capability."""
    make = BY_NAME[name].adapter
    assert make is not None
    return _adapted(has, make(), name)


def _adapted(has: frozenset[str], config: Any, name: str) -> Any:
    """The same weights for equal configs, large enough to matter."""
    base = copy.deepcopy(model_of(has))
    before = {id(each) for each in base.parameters()}
    torch.manual_seed(0)
    model = peft.get_peft_model(base, config, name).eval()
    with torch.no_grad():
        for each in model.parameters():
            if id(each) not in before:
                each += torch.randn_like(each) * 0.5
    return model


# ---- requests, and what is right


@dataclass(frozen=True)
class Asked:
    """A request: its prompt, and those of its pair's capabilities that it has."""

    prompt: int
    names: frozenset[str]

    @property
    def adapter(self) -> str | None:
        return next((name for name in self.names if BY_NAME[name].adapter is not None), None)

    def options(self) -> dict[str, Any]:
        """The keywords of submit()."""
        found: dict[str, Any] = {"adapter": self.adapter, "max_new_tokens": NEW, "do_sample": False}
        for name in self.names:
            found |= BY_NAME[name].request
        return found


def requests_of(pair: Iterable[Capability], few: bool = False) -> list[Asked]:
    """Requests with both, with one, and with none, as far as requests can differ. few: those with most alone."""
    own = [each.name for each in pair if each.request or each.adapter]
    one = [frozenset({name}) for name in own]
    adapters = sum(BY_NAME[name].adapter is not None for name in own)
    both = [frozenset(own)] if len(own) == 2 and adapters < 2 else []
    most = both or one or [frozenset()]
    every = most if few else [*most, *one, frozenset()]
    return [Asked(0, names) for names in dict.fromkeys(every)] + [Asked(1, names) for names in most]


@functools.cache
def right(has: frozenset[str], asked: Asked) -> list[int]:
    """The tokens of stock generate() on the prompt alone, or of peft's with the adapter."""
    ids = torch.tensor([PROMPTS[asked.prompt]])
    call = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": NEW,
        "do_sample": False,
    }
    call |= {name: value for name, value in asked.options().items() if name == "num_beams"}
    if asked.adapter == "virtual tokens" and prefixes_are_ignored():
        call["use_cache"] = False  # peft takes every step for the first one there
    model = model_of(has) if asked.adapter is None else tuned(has, asked.adapter)
    if asked.adapter == "aLoRA" and "num_beams" in call:
        return _beams_behind_the_model(has, call)
    tokens: list[int] = model.generate(**call)[0, ids.shape[1] :].tolist()
    return tokens


def _beams_behind_the_model(has: frozenset[str], call: dict[str, Any]) -> list[int]:
    """Beams of an aLoRA, which peft refuses: those of LoRA of the same weights, behind keys and values of the model
    alone.
    """
    config = tuned(has, "aLoRA").peft_config["aLoRA"]
    plain = _adapted(has, dataclasses.replace(config, alora_invocation_tokens=None), "aLoRA")
    ids = call["input_ids"]
    cache = DynamicCache(config=plain.config)
    with plain.disable_adapter(), torch.no_grad():
        plain(ids[:, : start_of(ids[0].tolist(), tuple(CALL))], past_key_values=cache)
    cache.batch_repeat_interleave(call["num_beams"])
    tokens: list[int] = plain.generate(**call, past_key_values=cache)[0, ids.shape[1] :].tolist()
    return tokens


def right_routing(has: frozenset[str], asked: Asked, tokens: list[int]) -> torch.Tensor:
    """The routing of a forward of the whole sequence, less that of virtual tokens."""
    model = model_of(has) if asked.adapter is None else tuned(has, asked.adapter)
    ids = [*PROMPTS[asked.prompt], *tokens]
    with seen_routing(model) as seen, torch.no_grad():
        model(torch.tensor([ids]), use_cache=False)
    return torch.stack(seen, 1)[-len(ids) : -1].to(torch.int16)


def has_of(pair: Iterable[Capability]) -> frozenset[str]:
    """The kinds of layers of a pair's model."""
    return frozenset(each.model for each in pair if each.model)


def options_of(pair: Iterable[Capability]) -> dict[str, Any]:
    """The options of the engine of a pair."""
    found = dict(SMALL)
    for each in pair:
        found |= each.engine
    return found


def require_right(engine: Engine, pair: Pair, requests: list[Asked]) -> None:
    """Hold requests of a pair to those alone: the first by itself, then all of them, whose prompts begin as its."""
    has = has_of(pair)
    for each in pair:
        if each.adapter is not None:
            engine.add_adapter(each.name, tuned(has, each.name))
    noted = []
    for several in (requests[:1], requests):
        handles = [engine.submit(PROMPTS[each.prompt], **each.options(), logprobs=True) for each in several]
        outputs = [handle.result() for handle in handles]
        for asked, output in zip(several, outputs, strict=True):
            if output.error is not None:
                raise output.error
            (answer,) = output.sequences
            assert list(answer.token_ids) == right(has, asked), f"{asked} has other tokens than alone"
            if "routing" in asked.names:
                expected = right_routing(has, asked, answer.token_ids)
                assert torch.equal(answer.routing, expected), f"{asked} has another routing than alone"
        noted.append([token.logprob for token in outputs[0].sequences[0].logprobs])
    if engine.config.batch_invariant:
        assert noted[0] == noted[1], "log-probabilities depend on what is computed beside"
    engine.check()


def key_of(pair: Pair) -> tuple[str, str]:
    """The names of a pair, as the tables have them."""
    return pair[0].name, pair[1].name


def refusal_of(pair: Pair) -> str | None:
    """The words with which a pair is refused."""
    return REFUSED.get(key_of(pair))


def refused(words: str | None) -> AbstractContextManager[Any]:
    """Inside it an error with these words must come; none if there are no words."""
    if words is None:
        return nullcontext()
    return pytest.raises((ValueError, NotImplementedError), match=re.escape(words))
