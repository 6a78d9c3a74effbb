"""Captured steps step states in their slots, by the functions that the models' own files call."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import state_spans_in_torch
import torch
from captures import counts, policy, pool_of, reasons, sizes
from poison import poison_free_slots
from releases import FLAT_STATES
from state_step_cases import jamba, noise
from tape import record
from tiny import build, config_class

from hf_paged import Engine
from hf_paged.kv import state_steps
from hf_paged.kv.layout import StateLayout
from hf_paged.kv.state_store import StateStore
from hf_paged.model.lazy import NotCapturable
from hf_paged.model.registry import memory_of
from hf_paged.model.rehearsal import RECORDERS
from hf_paged.model.source import STANDS_FOR
from hf_paged.model.state_functions import KNOWN, SlotState, StateFunctions

FAMILIES = {
    "qwen3_5_text": {"conv_step", "delta_step"},
    "kimi_linear": {"conv_step", "delta_step"},
    "nemotron_h": {"conv_step", "ssm_step"},
    "falcon_h1": {"conv_step", "ssm_step"},
    "bamba": {"conv_step", "ssm_step"},
    "jamba": {"conv_step", "scan_step"},
    "zamba": {"conv_step", "scan_step"},
    "mamba": {"conv_step", "scan_step"},
    "falcon_mamba": {"conv_step", "scan_step"},
    "mamba2": {"conv_step", "ssm_step"},
    "lfm2": {"conv_step"},
    "zaya": set(),
}
"""The kernels that step each family's states. Zaya's layers call no function that is known."""


class Counted:
    """The kernels in plain torch, and which have run."""

    def __init__(self) -> None:
        self.run: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        step = getattr(state_spans_in_torch, name)
        self.run.add(name)
        return step


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Counted:
    """Captured steps on a CPU have kernels for states, in plain torch."""
    counted = Counted()
    monkeypatch.setitem(RECORDERS, "cpu", record)
    monkeypatch.setattr(StateStore, "steps", counted)
    poison_free_slots(monkeypatch)
    policy(monkeypatch, least_steps=4)
    return counted


def check_answers_as_stock(model: Any, beams: int = 1, replayed: bool = True) -> None:
    ids = torch.randint(5, 60, (3, 11), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    given = {
        "input_ids": ids * mask, "attention_mask": mask, "max_new_tokens": 14, "min_new_tokens": 14,
        "do_sample": False, "num_beams": beams,
    }  # fmt: skip
    stock = model.generate(**given)
    assert torch.equal(model.generate(cache_implementation="paged", **given), stock)
    assert (counts(model)["replayed"] >= 8) is replayed, reasons(model)
    memory_of(model).check()


LATER = ("jamba", "zamba", "mamba", "falcon_mamba", "mamba2")
OTHERS = [(family, 1) for family in FAMILIES if family not in LATER]
SCANS = [pytest.param(family, 1, marks=FLAT_STATES) for family in LATER]


@pytest.mark.parametrize(("family", "beams"), [*OTHERS, *SCANS, ("qwen3_5_text", 3), ("nemotron_h", 3)])
def test_captured_steps_answer_as_stock(family: str, beams: int, steps: Counted) -> None:
    model = build("causal", config_class("causal", family))
    check_answers_as_stock(model, beams)
    assert steps.run == FAMILIES[family]
    assert not pool_of(model).gathered
    file = sys.modules[type(model).__module__]
    assert not any(hasattr(getattr(file, name, None), STANDS_FOR) for name in KNOWN)


@FLAT_STATES
def test_steps_of_an_engine_answer_as_each_prompt_alone(
    steps: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They write where they read. Steps with prompts in them are another test's."""
    policy(monkeypatch, after=1, agree=1)
    model = build("causal", config_class("causal", "jamba"))
    model.generation_config.eos_token_id = None
    chance = torch.Generator().manual_seed(0)
    prompts = [torch.randint(5, 60, (length,), generator=chance).tolist() for length in (3, 11, 7)]
    with Engine(model, num_blocks=60, max_batch_tokens=24, max_batch_sequences=4) as engine:
        handles = [engine.submit(prompt, max_new_tokens=10) for prompt in prompts]
        for prompt, handle in zip(prompts, handles, strict=True):
            stock = model.generate(torch.tensor([prompt]), max_new_tokens=10, do_sample=False)
            assert handle.result().sequences[0].token_ids == stock[0, len(prompt) :].tolist()
        assert counts(engine)["replayed"], reasons(engine)
        assert {name for name in steps.run if name.endswith("_step")} == FAMILIES["jamba"]
        engine.check()


@pytest.mark.parametrize(
    "family",
    ["qwen3_5_text", "kimi_linear", "lfm2", "nemotron_h", "falcon_mamba"],
)
@FLAT_STATES
def test_steps_with_prompts_in_them_are_captured(
    family: str, steps: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beginnings, chunks behind others and decoding rows, in steps that pad both."""
    policy(monkeypatch, after=1, agree=1)
    model = build("causal", config_class("causal", family))
    for each in model.modules():
        if hasattr(each, "time_step_limit"):  # of prompts alone
            each.time_step_limit = 0.05, 0.4
    model.generation_config.eos_token_id = None
    chance = torch.Generator().manual_seed(0)
    prompts = [torch.randint(5, 60, (length,), generator=chance).tolist() for length in (3, 14, 1, 20, 7)]
    with Engine(model, max_batch_tokens=12, max_batch_sequences=4, prefix_caching=False) as engine:
        stock: list[list[int]] = []
        for _ in range(2):
            handles = []
            for prompt in prompts:
                handles.append(engine.submit(prompt, max_new_tokens=7))
                engine.step()
            found = [handle.result().sequences[0].token_ids for handle in handles]
            stock = stock or [
                model.generate(torch.tensor([prompt]), max_new_tokens=7, do_sample=False)[
                    0, len(prompt) :
                ].tolist()
                for prompt in prompts
            ]
            assert found == stock
            engine.check()
        assert sizes(engine, "spans"), reasons(engine)
        assert steps.run == {
            name.replace("step", kind) for name in FAMILIES[family] for kind in ("step", "spans")
        }
        assert counts(engine)["replayed"] > 12


def test_layers_that_compute_with_states_of_several_tokens_are_not_captured() -> None:
    state = in_slots()
    several = SlotState(
        StateLayout.of(torch.zeros(1, 3, 4)), state_steps, state.states, state.source, state.target,
        torch.tensor([0, 1, 5]),
    )  # fmt: skip
    with pytest.raises(NotCapturable, match="rows that take several tokens"):
        several.sum()


def test_functions_with_other_parameters_are_given_tensors(
    steps: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build("causal", config_class("causal", "nemotron_h"))
    file = sys.modules[type(model).__module__]
    stock = file.mamba2_selective_state_update

    def other(state: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        return stock(state, x, *args, **kwargs)

    monkeypatch.setattr(file, "mamba2_selective_state_update", other)
    check_answers_as_stock(model)
    assert steps.run == {"conv_step"}
    assert any(
        "mamba2_selective_state_update has other parameters" in each for each in pool_of(model).gathered
    )


def add_hook(mixer: Any) -> None:
    mixer.register_forward_hook(lambda module, given, answer: answer * 1.5)


def add_pre_hook(mixer: Any) -> None:
    def change(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, {**kwargs, "hidden_states": kwargs["hidden_states"] * 1.1}

    mixer.register_forward_pre_hook(change, with_kwargs=True)


def replace_forward(mixer: Any) -> None:
    forward = mixer.forward
    mixer.forward = lambda *args, **kwargs: forward(*args, **kwargs) * 1.5


def derive(mixer: Any) -> None:
    class Derived(type(mixer)):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs) * 1.5

    mixer.__class__ = Derived


def sum_up(mixer: Any) -> None:
    """A mixer of other code: the sum of all inputs, and of the last one again."""

    class Sums(type(mixer)):
        def forward(self, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
            cache = kwargs.get("cache", kwargs.get("cache_params"))
            sums = hidden_states.cumsum(1)
            before = torch.zeros_like(hidden_states[:, :1])
            if cache is not None:
                if cache.has_previous_state(self.layer_idx):
                    sums = sums + cache.layers[self.layer_idx].recurrent_states[0]
                    before = cache.layers[self.layer_idx].conv_states[0].transpose(1, 2).clone()
                cache.update_conv_state(hidden_states[:, -1:].transpose(1, 2), self.layer_idx)
                cache.update_recurrent_state(sums[:, -1:], self.layer_idx)
            return 0.1 * sums + torch.cat([before, hidden_states[:, :-1]], 1)

    mixer.__class__ = Sums


@pytest.mark.parametrize("change", [add_hook, add_pre_hook, replace_forward, derive, sum_up])
def test_a_mixer_that_is_changed_or_replaced(change: Any, steps: Counted) -> None:
    """In captured steps of generate() and in the engine, flat where the functions are still its own."""
    model = build("causal", config_class("causal", "qwen3_5_text"))
    model.generation_config.eos_token_id = None
    change(next(layer.linear_attn for layer in model.model.layers if hasattr(layer, "linear_attn")))
    check_answers_as_stock(
        model, replayed=change not in (add_hook, add_pre_hook)
    )  # a hook's code runs each time
    prompts = torch.randint(5, 60, (3, 9), generator=torch.Generator().manual_seed(1))
    given = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    with Engine(model, block_size=4, num_blocks=60, max_batch_tokens=8) as engine:
        answers = engine.generate(prompts.tolist(), progress=False, strict=True, **given)
        found = [output.sequences[0].token_ids for output in answers]
        assert found == model.generate(prompts, **given)[:, 9:].tolist()
        if change in (derive, sum_up):
            assert "advances its states by code that is not known" in engine.stats()["off"]["flat"]
        engine.check()


def in_slots() -> SlotState:
    """States [2, 3, 4] read from slots 1 and 0, and written to slots 2 and 3."""
    states = torch.arange(60.0).view(5, 3, 4)
    layout = StateLayout.of(states[:1])
    return SlotState(layout, state_steps, states, torch.tensor([1, 0]), torch.tensor([2, 3]))


def test_states_in_slots_survive_a_cast_to_their_own_type() -> None:
    """Kimi's layers cast what a function answers before they hand it to the cache."""
    state = in_slots()
    with torch.inference_mode():
        assert state.to(torch.float32) is state
    assert state.to(torch.float32) is state
    assert state.copy_(state) is state
    assert state.in_slots


def test_states_in_slots_are_tensors_for_other_code() -> None:
    state = in_slots()
    assert torch.equal(state + 0, state.states[[1, 0]])
    state.copy_(torch.zeros(2, 3, 4))
    assert not state.in_slots
    assert not state.dense().any()
    assert state.states[:2].any()


def in_heads() -> SlotState:
    """States [2, 3, 2, 4] of three heads, likewise."""
    states = noise(5, 3, 2, 4)
    layout = StateLayout.of(states[:1])
    return SlotState(layout, state_steps, states, torch.tensor([1, 0]), torch.tensor([2, 3]))


def scanned(states: torch.Tensor) -> None:
    """A token through the scan of a head, states [2, 2, 4]."""
    x, b = noise(2, 2, seed=1), noise(2, 4, seed=2)
    functions = StateFunctions(torch.nn.Module())
    stock = jamba.mamba_selective_state_update
    given = states, x, x.abs(), -noise(2, 4, seed=3).abs(), b, b
    functions.call("mamba_selective_state_update", stock, given, {})


def test_heads_are_stepped_one_by_one() -> None:
    """As Zamba's layers do: behind the last the states are whole, before it some are behind the token."""
    state = in_heads()
    wanted = state.states[[1, 0]]
    before = state.states.clone()
    heads = [state[:, number] for number in range(3)]
    for number, head in enumerate(heads):
        scanned(head)
        scanned(wanted[:, number])
        torch.testing.assert_close(state._make(), wanted)
    assert state.stepped
    assert state.in_slots
    assert torch.stack(heads, dim=1) is state
    assert torch.stack(heads[::-1], dim=1) is not state
    assert torch.equal(state.states[[0, 1, 4]], before[[0, 1, 4]])


def test_a_head_that_is_changed_as_a_tensor_changes_all() -> None:
    state = in_heads()
    other = state[:, 0]
    state[:, 1].copy_(torch.full((2, 2, 4), 7.0))
    assert not state.in_slots
    assert state.dense()[:, 1].eq(7).all()
    wanted = state.dense().clone()
    scanned(other)
    scanned(wanted[:, 0])
    assert torch.equal(state.dense(), wanted)


def test_arguments_that_a_kernel_does_not_know_go_to_the_function() -> None:
    functions = StateFunctions(torch.nn.Module())
    given: list[Any] = []

    def convolve(*args: Any) -> None:
        functions.call("causal_conv1d_update", lambda *args: given.append(args), args, {})

    state = in_slots()
    convolve(torch.ones(2, 3, 1), state, torch.ones(3, 4), None, "gelu")
    assert given[0][1] is state.dense()
    assert functions.reasons == {"causal_conv1d_update: the activation is 'gelu'": 1}
    plain = torch.ones(2, 3, 4)
    convolve(torch.ones(2, 3, 1), plain, torch.ones(3, 4), None, "gelu")
    assert given[1][1] is plain


def test_what_is_read_after_a_step_is_what_it_wrote() -> None:
    state = in_slots()
    functions = StateFunctions(torch.nn.Module())
    before = state.states.clone()
    given = torch.full((2, 3, 1), 7.0), state, torch.ones(3, 4)
    answer = functions.call("causal_conv1d_update", lambda *_: None, given, {})
    wanted = torch.cat([before[[1, 0], :, 1:], torch.full((2, 3, 1), 7.0)], -1)
    assert torch.equal(answer[..., 0], wanted.sum(-1))
    assert torch.equal(state.states[[2, 3]], wanted)
    assert torch.equal(state.dense(), wanted)
    assert torch.equal(state.states[:2], before[:2])
