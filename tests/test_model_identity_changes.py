"""Changes while a call runs, undone perhaps, are in nobody's cache afterwards (contract C22, C24).

Every case runs a call in whose middle the model is another one. A later call, on the model as it was, must
not begin with what the other one computed: without the looks in between, or with a cache keyed by tokens
alone, it does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from changed_models import PROMPT, Steer, scored, tuned_ask, two_adapters
from model_checks import blind_keys
from prefix_reuse import ask, continued
from transformers import LogitsProcessor, LogitsProcessorList, MinNewTokensLengthLogitsProcessor

import hf_paged
from hf_paged.generate import prefix_reuse as reuse
from hf_paged.model import hooks

CHANGED = "the model changed while it was used"
STEPS = 12


class Meddle(LogitsProcessor):
    """Somebody's code between the steps: changes the model after the second step, and has it back before the
    last ones.
    """

    def __init__(self, change: Callable[[], None], back: Callable[[], None], until: int = 6) -> None:
        self.plan = {2: change, until: back}
        self.step = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.plan.get(self.step, lambda: None)()
        self.step += 1
        return scores


def call_with(model: Any, meddle: Meddle) -> torch.Tensor:
    """The answer of a call with prefix caching, with somebody in its middle."""
    call = {
        "attention_mask": torch.ones_like(PROMPT),
        "max_new_tokens": STEPS,
        "min_new_tokens": STEPS,
        "do_sample": False,
    }
    return model.generate(
        input_ids=PROMPT, **call, logits_processor=LogitsProcessorList([meddle]), cache_implementation="paged",
        cache_config={"block_size": 4, "prefix_caching": True},
    )  # fmt: skip


def scale(model: Any, factor: float) -> None:
    model.model.layers[0].self_attn.scaling *= factor


def hook(model: Any, held: list[Any]) -> None:
    held.append(model.model.layers[0].mlp.register_forward_hook(Steer("answers")))


def patch(model: Any) -> None:
    mlp = model.model.layers[0].mlp
    mlp.forward = lambda x: type(mlp).forward(mlp, x) * 2


def edit(model: Any, factor: float) -> None:
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(factor)


def meddlers(model: Any) -> dict[str, tuple[Callable[[], None], Callable[[], None]]]:
    """A change, and how to undo it."""
    held: list[Any] = []
    return {
        "setting": (lambda: scale(model, 4), lambda: scale(model, 0.25)),
        "hook": (lambda: hook(model, held), lambda: held.pop().remove()),
        "code": (lambda: patch(model), lambda: model.model.layers[0].mlp.__dict__.pop("forward")),
        "weights": (lambda: edit(model, 2.0), lambda: edit(model, 0.5)),
    }


@pytest.mark.parametrize("until", [6, STEPS - 1], ids=["and back", "until the end"])
@pytest.mark.parametrize("what", ["setting", "hook", "code", "weights"])
def test_c24_a_change_in_the_middle(llama: Any, what: str, until: int) -> None:
    """Blocks computed meanwhile are not found when the model is what it was."""
    change, back = meddlers(llama)[what]
    answer = call_with(llama, Meddle(change, back, until))
    assert hf_paged.stats(llama).reasons[CHANGED] == 1
    longer = continued(answer, answer.shape[1], 3)
    assert scored(llama, longer)[0] >= longer.shape[1] - PROMPT.shape[1]


@pytest.mark.parametrize("what", ["setting", "hook", "code", "weights"])
def test_without_looking_it_would_be_found(llama: Any, what: str) -> None:
    """The same with nobody looking in between: these changes do matter."""
    change, back = meddlers(llama)[what]
    with pytest.MonkeyPatch.context() as patched:
        blind_keys(patched)
        patched.setattr(hooks.HookMonitor, "know", lambda self, modules: True, raising=False)
        answer = call_with(llama, Meddle(change, back))
        with pytest.raises(AssertionError, match="answer"):
            scored(llama, continued(answer, answer.shape[1], 3))


def test_a_hook_that_stays_is_noticed_by_calls_without_meddlers(llama: Any) -> None:
    """Nobody looks between the steps of an ordinary call, but at its end the hook is there."""
    handles: list[Any] = []

    def hang(module: Any, args: Any, output: Any) -> None:
        if len(handles) < 1:
            hook(llama, handles)

    watcher = llama.model.layers[1].register_forward_hook(hang)
    ask(llama, PROMPT, 4)
    watcher.remove()
    handles.pop().remove()
    assert hf_paged.stats(llama).reasons[CHANGED] == 1
    assert scored(llama)[0] in (1, 45)


def test_c24_another_call_that_switches_adapters_meanwhile() -> None:
    """A thread that takes another adapter and puts the first one back, between two steps of a call."""
    model = two_adapters()
    assert tuned_ask(model) == 45

    def switch() -> None:
        model.set_adapter("two")

    def back() -> None:
        model.set_adapter("one")

    answer = call_with(model, Meddle(switch, back))
    assert hf_paged.stats(model).reasons[CHANGED] == 1
    longer = continued(answer, answer.shape[1], 3)
    assert tuned_ask(model, longer) >= longer.shape[1] - 48


def in_another_thread(what: Callable[[], Any]) -> None:
    """Run something in another thread, to its end."""
    thread = threading.Thread(target=what)
    thread.start()
    thread.join()


def test_c24_calls_of_other_threads_in_other_states(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread's calls, one under a changed setting and one with it back, between two forwards: the
    first call's answer is private.

    Nothing runs between its steps that its call knows of: it is the other calls' looks that tell.
    """
    kind, steps = MinNewTokensLengthLogitsProcessor, 0
    original = kind.__call__

    def interrupted(self: Any, *args: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps in (3, 6):
            scale(llama, 4 if steps == 3 else 0.25)
            in_another_thread(lambda: ask(llama, PROMPT[:, :9], 4))
        return original(self, *args)

    monkeypatch.setattr(kind, "__call__", interrupted)
    call = {
        "attention_mask": torch.ones_like(PROMPT),
        "max_new_tokens": STEPS,
        "min_new_tokens": STEPS,
        "do_sample": False,
    }
    options = {"block_size": 4, "prefix_caching": True}
    answer = llama.generate(input_ids=PROMPT, **call, cache_implementation="paged", cache_config=options)
    assert steps == STEPS
    assert hf_paged.stats(llama).reasons[CHANGED] == 1
    longer = continued(answer, answer.shape[1], 3)
    assert scored(llama, longer)[0] >= longer.shape[1] - PROMPT.shape[1]


@pytest.mark.parametrize("ends", ["by length", "by a token"])
def test_the_last_look_is_taken_while_the_last_step_is_computed(
    llama: Any, ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One look behind the last forward, before its token is waited for; where nobody knew that it was the
    last, one at the end.
    """
    looks: list[tuple[str, int]] = []
    commit, see = reuse.Reuse.commit, reuse.Reuse._see_that_nothing_changed
    where = ["step"]

    def committing(self: Any, model: Any) -> None:
        where[0] = "end"
        commit(self, model)

    def seeing(self: Any, *args: Any) -> None:
        looks.append((where[0], self.sequences.columns))
        see(self, *args)

    monkeypatch.setattr(reuse.Reuse, "commit", committing)
    monkeypatch.setattr(reuse.Reuse, "_see_that_nothing_changed", seeing)
    call = {"attention_mask": torch.ones_like(PROMPT), "max_new_tokens": STEPS, "do_sample": False}
    options = {"cache_implementation": "paged", "cache_config": {"block_size": 4, "prefix_caching": True}}
    plain = llama.generate(PROMPT, **call, min_new_tokens=STEPS)
    fifth = int(plain[0, PROMPT.shape[1] + 4])
    call |= {"min_new_tokens": STEPS} if ends == "by length" else {"eos_token_id": fifth, "pad_token_id": 0}
    answer = llama.generate(PROMPT, **call, **options)
    columns = answer.shape[1] - 1
    assert looks == [("step" if ends == "by length" else "end", columns)]
    hits = hf_paged.stats(llama)
    llama.generate(
        answer, max_new_tokens=1, do_sample=False, attention_mask=torch.ones_like(answer), **options
    )
    assert hf_paged.stats(llama).reused - hits.reused >= columns - PROMPT.shape[1]


def test_a_change_before_the_last_step_is_seen_behind_it(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread's, say, whom nobody knows of."""
    run, steps = reuse.Reuse.run, []

    def running(self: Any, *args: Any) -> Any:
        steps.append(None)
        if len(steps) == STEPS:
            scale(llama, 3.0)
        answer = run(self, *args)
        if len(steps) == STEPS:
            scale(llama, 1 / 3.0)
        return answer

    monkeypatch.setattr(reuse.Reuse, "run", running)
    call = {
        "attention_mask": torch.ones_like(PROMPT),
        "max_new_tokens": STEPS,
        "min_new_tokens": STEPS,
        "do_sample": False,
    }
    llama.generate(
        PROMPT, **call, cache_implementation="paged", cache_config={"block_size": 4, "prefix_caching": True}
    )
    assert len(steps) == STEPS
    assert hf_paged.stats(llama).reasons[CHANGED] == 1
