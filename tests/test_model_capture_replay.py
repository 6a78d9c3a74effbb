"""The fate of captured steps: pools move, models change in the middle of a call, captures fail, models and
threads come and go.
"""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from captures import counts, drop, kept, policy, reasons
from cases import every_other
from compare import assert_clean, assert_same, both
from dropout import stop_dropout, train_with_dropout
from families import BY_NAME, VOCABULARY, build
from peft import LoraConfig, get_peft_model
from releases import takes_as
from tape import record
from torch import nn
from transformers import BartForConditionalGeneration, LogitsProcessor, StoppingCriteria
from transformers.modeling_outputs import BaseModelOutput

import hf_paged
from hf_paged.kv import Memory
from hf_paged.model.capture.graph import Graph
from hf_paged.model.capture.pool import CapturePool, Outcome, Unsteady, outcome_of
from hf_paged.model.capture.step import CapturedStep, Size
from hf_paged.model.ranks.votes import Votes, before_groups_end
from hf_paged.model.rehearsal import RECORDERS

NEW = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}


@pytest.fixture(autouse=True)
def _tape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RECORDERS, "cpu", record)
    policy(monkeypatch, least_steps=4)


def replayed(model: Any) -> int:
    return counts(model)["replayed"]


def random_ids(rows: int, columns: int = 13) -> torch.Tensor:
    return torch.randint(5, VOCABULARY, (rows, columns), generator=torch.Generator().manual_seed(2))


# ---- whose step it is


def test_a_second_call_replays_from_its_first_step(llama: Any, ids: torch.Tensor) -> None:
    assert_same(llama, input_ids=ids, **NEW)
    first = replayed(llama)
    assert_same(llama, input_ids=ids.flip(0), **NEW)
    assert counts(llama)["captured"] == 1
    assert replayed(llama) - first == NEW["max_new_tokens"] - 1


def test_rows_of_a_bucket_share_a_graph_and_filler_rows_write_nothing(llama: Any) -> None:
    assert_same(llama, input_ids=random_ids(20), **NEW)
    assert_same(llama, input_ids=random_ids(19), **NEW)
    assert counts(llama)["captured"] == 1
    assert replayed(llama) == 19


def test_graphs_can_be_turned_off(llama: Any, ids: torch.Tensor) -> None:
    llama.generate(ids, **NEW, cache_implementation="paged", cache_config={"graphs": False})
    assert not counts(llama)


def test_a_short_call_pays_for_no_capture(
    llama: Any, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy(monkeypatch, least_steps=16)
    for _ in range(2):
        assert_same(llama, input_ids=ids, max_new_tokens=6, min_new_tokens=6, do_sample=False)
        assert not counts(llama)["captured"]


def test_what_comes_out_is_the_callers_own(llama: Any, ids: torch.Tensor) -> None:
    """Kept logits and hidden states of one step are not written over by the next."""
    assert_same(
        llama,
        input_ids=ids,
        **NEW,
        return_dict_in_generate=True,
        output_logits=True,
        output_hidden_states=True,
    )
    assert replayed(llama), reasons(llama)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_under_every_way_of_not_training(mode: Callable[[], Any], llama: Any, ids: torch.Tensor) -> None:
    with mode():
        assert_same(llama, input_ids=ids, **NEW)
    assert_same(llama, input_ids=ids, **NEW)
    assert replayed(llama), reasons(llama)


# ---- pools that move


def test_a_pool_that_moves_between_a_graph_s_check_and_its_replay(
    llama: Any, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph is fetched, the forward grows the pool, and the graph would write to memory that is gone."""
    used: list[tuple[Graph, int]] = []
    stage = Graph.stage

    def note(self: Graph, step: Any) -> None:
        rows = next(iter(step.parts[0].sequences.rows.values()))
        used.append((self, rows.group.tensors[0].data_ptr()))
        stage(self, step)

    monkeypatch.setattr(Graph, "stage", note)
    policy(monkeypatch, agree=6)
    cache = hf_paged.PagedCache(llama, block_size=4)
    other = hf_paged.PagedCache(llama, block_size=4)
    stock = llama.generate(ids, **NEW)
    seen = []

    class Filler(LogitsProcessor):
        """Fill the pool from outside, so that the next step must move it."""

        def __call__(self, tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if tokens.shape[1] in (16, 19, 22):
                llama(
                    tokens[:, : 40 * (tokens.shape[1] - 15)].repeat(1, 4),
                    past_key_values=other,
                    use_cache=True,
                )
                seen.append(next(iter(other.sequences.rows.values())).group.tensors[0].data_ptr())
            return scores

    paged = llama.generate(ids, **NEW, past_key_values=cache, logits_processor=[Filler()])
    assert torch.equal(stock, paged)
    assert len(set(seen)) > 1, "the pool never moved"
    places: dict[int, set[int]] = {}
    for graph, place in used:
        places.setdefault(id(graph), set()).add(place)
    assert all(len(each) == 1 for each in places.values()), (
        "a graph was used over a pool that it was not captured for"
    )
    cache.reset()
    other.reset()


@pytest.mark.parametrize("how", [hf_paged.release, drop])
def test_graphs_that_are_gone_are_captured_anew(
    how: Callable[[Any], Any], llama: Any, ids: torch.Tensor
) -> None:
    setting = llama.config._attn_implementation
    assert_same(llama, input_ids=ids, **NEW)
    how(llama)
    assert not kept(llama)
    assert_same(llama, input_ids=ids, **NEW)
    assert counts(llama)["captured"] == 2
    assert_clean(llama, setting)


def test_uninstalling_drops_graphs(llama: Any, ids: torch.Tensor) -> None:
    assert_same(llama, input_ids=ids, **NEW)
    try:
        hf_paged.uninstall()
        assert not kept(llama)
    finally:
        hf_paged.install()


@pytest.mark.parametrize(("name", "value"), [("most", 2), ("most_bytes", 1)])
def test_the_least_recently_used_goes_first(
    name: str, value: int, llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy(monkeypatch, **{name: value}, spare=0)
    for rows in (1, 2, 3, 1):
        assert_same(llama, input_ids=random_ids(rows), **NEW)
        assert kept(llama) <= (2 if name == "most" else 1)
    assert counts(llama)["captured"] == 4


def test_a_larger_step_stands_in_for_a_call_of_fewer_rows(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From its first step on; its own is captured when the rows in vain have cost as much."""
    policy(monkeypatch, padded=30)
    assert_same(llama, input_ids=random_ids(6), **NEW)
    first = replayed(llama)
    assert_same(llama, input_ids=random_ids(4), **NEW)
    assert replayed(llama) - first == NEW["max_new_tokens"] - 1
    assert counts(llama)["captured"] == 1
    assert_same(llama, input_ids=random_ids(4), **NEW)
    assert counts(llama)["captured"] == 2
    assert_same(llama, input_ids=random_ids(4), **NEW)
    assert replayed(llama) - first == 3 * (NEW["max_new_tokens"] - 1)


def test_what_else_is_answered_is_of_the_rows_asked(llama: Any) -> None:
    """Where an answer has more than logits, no larger step stands in: which dimension has rows is unknown."""
    more = {"return_dict_in_generate": True, "output_hidden_states": True}
    for rows in (4, 2):
        assert_same(llama, input_ids=random_ids(rows), **NEW, **more)
    assert counts(llama)["captured"] == 2


# ---- a model that changes


def test_an_optimizer_step_and_new_weights_in_place_are_seen(llama: Any, ids: torch.Tensor) -> None:
    assert_same(llama, input_ids=ids, **NEW)
    with torch.no_grad():
        for parameter in llama.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    assert_same(llama, input_ids=ids, **NEW)
    assert counts(llama)["captured"] == 1
    llama.train()
    llama(ids, labels=ids).loss.backward()
    torch.optim.SGD(llama.parameters(), 0.5).step()
    llama.eval()
    assert_same(llama, input_ids=ids, **NEW)


class Meddler(LogitsProcessor):
    """A user's processor that changes the model in the middle of a call."""

    def __init__(self, change: Callable[[], Any], at: int) -> None:
        self.change, self.at, self.calls = change, at, 0

    def __call__(self, tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == self.at:
            self.change()
        return scores


@pytest.mark.parametrize("how", ["processor", "criterion", "streamer", "prefix"])
def test_a_model_that_changes_in_the_middle_of_a_call(how: str, llama: Any, ids: torch.Tensor) -> None:
    """The user's own code scales every attention from the ninth step on: a graph that was captured before
    must not be replayed.
    """

    def call(paged: dict[str, Any]) -> torch.Tensor:
        for layer in llama.model.layers:
            layer.self_attn.scaling = 0.35
        steps = iter(range(99))

        def change(*_: Any) -> None:
            if next(steps) == 9:
                for layer in llama.model.layers:
                    layer.self_attn.scaling = 4.0

        class Processor(LogitsProcessor):
            def __call__(self, tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
                change()
                return scores

        class Criterion(StoppingCriteria):
            def __call__(self, tokens: torch.Tensor, scores: Any, **_: Any) -> Any:
                change()
                return torch.zeros(len(tokens), dtype=torch.bool)

        class Streamer:
            def put(self, _: Any) -> None:
                change()

            def end(self) -> None: ...

        def prefix(row: int, tokens: torch.Tensor) -> list[int]:
            change()
            return list(range(VOCABULARY))

        own = {
            "processor": {"logits_processor": [Processor()]},
            "criterion": {"stopping_criteria": [Criterion()]},
            "streamer": {"streamer": Streamer()},
            "prefix": {"prefix_allowed_tokens_fn": prefix},
        }[how]
        answer: torch.Tensor = llama.generate(
            ids[:1], **{**NEW, "max_new_tokens": 24, "min_new_tokens": 24}, **own, **paged
        )
        return answer

    word = {"cache_implementation": "paged"}
    stock = call({})
    assert torch.equal(stock, call(word))
    assert torch.equal(stock, call(word))
    assert replayed(llama), reasons(llama)


class _ReadsEncoder(BartForConditionalGeneration):
    """A model whose every step reads what its encoder answered."""

    @takes_as(BartForConditionalGeneration.forward)
    def forward(self, *, encoder_outputs: Any = None, **given: Any) -> Any:
        answer = super().forward(encoder_outputs=encoder_outputs, **given)
        answer.logits = answer.logits + 30 * self.lm_head(encoder_outputs[0].mean(1, keepdim=True).tanh())
        return answer


class _Writes(LogitsProcessor):
    """Writes to a tensor in the middle of a call."""

    def __init__(self, write: Callable[[], object]) -> None:
        self._write = write

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] == 6:
            self._write()
        return scores


@pytest.mark.parametrize(("how", "inference"), every_other(["copy_", "data", "another"], [False, True]))
def test_an_encoder_s_answer_that_changes_in_place(how: str, inference: bool) -> None:
    """Between two calls or in the middle of one, seen by torch or not."""
    model = _ReadsEncoder(build(BY_NAME["bart"]).config).eval()
    before, after = torch.randn(2, 2, 7, model.config.d_model, generator=torch.Generator().manual_seed(3))

    def write(x: torch.Tensor) -> None:
        (x.data if how == "data" else x).copy_(after)

    def called(states: torch.Tensor, middle: bool, **word: Any) -> list[list[int]]:
        own = [_Writes(lambda: write(states))] if middle else []
        outputs = BaseModelOutput(last_hidden_state=states)
        tokens = model.generate(encoder_outputs=outputs, logits_processor=own, **NEW, **word)
        return tokens.tolist()

    with torch.inference_mode(inference):
        states = before.clone()
        for _ in range(3):
            called(states, False, cache_implementation="paged")
        expected = [called(before.clone(), True), called(after.clone(), False)]
        found = [called(states, True, cache_implementation="paged")]
        if how == "another":
            states = after.clone()
        found.append(called(states, False, cache_implementation="paged"))
    assert found == expected
    assert expected[0] != expected[1]
    assert replayed(model) > 40, reasons(model)


def test_a_processor_that_only_looks_costs_no_replay(llama: Any, ids: torch.Tensor) -> None:
    for _ in range(2):
        assert_same(llama, input_ids=ids, **NEW, logits_processor=[Meddler(lambda: None, 0)])
    assert replayed(llama) >= 18


def test_hooks_and_dropout_pass_through(llama: Any, ids: torch.Tensor) -> None:
    assert_same(llama, input_ids=ids, **NEW)
    before, called = replayed(llama), []
    handle = llama.model.layers[0].register_forward_hook(lambda *_: called.append(1))
    assert_same(llama, input_ids=ids, **NEW)
    assert len(called) == 2 * NEW["max_new_tokens"]
    handle.remove()
    train_with_dropout(llama)
    torch.manual_seed(0)
    llama.generate(ids, past_key_values=hf_paged.PagedCache(llama), **NEW)
    stop_dropout(llama)
    assert replayed(llama) == before
    assert_same(llama, input_ids=ids, **NEW)
    assert replayed(llama) > before


def test_training_mode_without_dropout_is_replayed(llama: Any, ids: torch.Tensor) -> None:
    """Trap 19: a trainer generates in training mode; a forward that keeps gradients is never a replay."""
    llama.train()
    for _ in range(2):
        assert_same(llama, input_ids=ids, **NEW)
        llama(ids, labels=ids).loss.backward()
        torch.optim.SGD(llama.parameters(), 0.5).step()
    assert replayed(llama) > 0
    assert llama.training


def test_adapters_switched_disabled_and_scaled(llama: Any, ids: torch.Tensor) -> None:
    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model: Any = get_peft_model(llama, config).eval()
    model.add_adapter("other", config)
    changes: list[Callable[[], Any]] = [
        lambda: None,
        lambda: model.set_adapter("other"),
        model.base_model.disable_adapter_layers,
    ]
    changes += [
        model.base_model.enable_adapter_layers,
        lambda: model.base_model.model.model.layers[0].self_attn.q_proj.scale_layer(3.0),
    ]
    for change in [*changes, model.merge_adapter]:
        change()
        assert_same(model, input_ids=ids, **NEW)
    assert replayed(model.get_base_model())


def test_a_weight_that_lies_there_in_another_way(llama: Any, ids: torch.Tensor) -> None:
    """Its address is the same, its content is not."""
    weight = llama.model.layers[0].self_attn.o_proj.weight
    for _ in range(4):
        assert_same(llama, input_ids=ids, **NEW)
        before = replayed(llama)
        weight.data = weight.data.t()
    assert before


def test_an_adapter_of_other_layers_where_the_last_one_lay(llama: Any, ids: torch.Tensor) -> None:
    """An allocator hands out the same memory again, and names come again, too."""

    def config(*layers: str) -> LoraConfig:
        return LoraConfig(r=4, lora_alpha=64, target_modules=[*layers], init_lora_weights=False)

    def weights() -> list[nn.Parameter]:
        return [weight for name, weight in model.named_parameters() if ".other." in name]

    model: Any = get_peft_model(llama, config("q_proj", "o_proj")).eval()
    memory: list[torch.Tensor] = []
    for layer in ("q_proj", "o_proj"):
        model.add_adapter("other", config(layer))
        memory = memory or [weight.data for weight in weights()]
        for weight, here in zip(weights(), memory, strict=True):
            weight.data = here.copy_(weight.data)
        model.set_adapter("other")
        for _ in range(3):
            assert_same(model, input_ids=ids, **NEW)
        assert replayed(model.get_base_model())
        model.set_adapter("default")
        model.delete_adapter("other")


OUTSIDE = torch.full((1,), 0.5)
"""In no model: nobody could say when it is another one."""


class Changeling(nn.Module):
    """A feed-forward layer with something in it that no graph may hold, or only just may."""

    def __init__(self, inner: nn.Module, how: str) -> None:
        super().__init__()
        self.inner, self.how, self.calls = inner, how, 0
        self.listed = [torch.full((1,), 0.5)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "counts":
            self.calls += 1
            return self.inner(x) * (1 + self.calls % 2)
        if self.how == "reads":
            return self.inner(x) * OUTSIDE
        if self.how == "lists":
            return self.inner(x) * self.listed[0]
        if self.how == "draws":
            return self.inner(x) + 0 * torch.rand_like(x)
        if self.how == "waits":
            return self.inner(x) * float(x.sum().sign().abs())
        return self.inner(x)


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("counts", "changes the model"),
        ("reads", "neither a weight"),
        ("draws", "at random"),
        ("waits", "host wait"),
    ],
)
def test_what_no_graph_may_hold_passes_through(how: str, why: str, llama: Any, ids: torch.Tensor) -> None:
    llama.model.layers[1].mlp = Changeling(llama.model.layers[1].mlp, how)
    if how == "counts":
        llama.generate(ids, **NEW, cache_implementation="paged")
    else:
        assert_same(llama, input_ids=ids, **NEW)
    assert not replayed(llama)
    assert why in reasons(llama)


def test_a_tensor_in_a_modules_settings_is_followed(llama: Any, ids: torch.Tensor) -> None:
    """Captured, and read anew when it is written to and when another one takes its place."""
    layer = llama.model.layers[1].mlp = Changeling(llama.model.layers[1].mlp, "lists")
    assert_same(llama, input_ids=ids, **NEW)
    assert replayed(llama)
    layer.listed[0].fill_(-3.0)
    assert_same(llama, input_ids=ids, **NEW)
    layer.listed[0] = torch.full((1,), 4.0)
    assert_same(llama, input_ids=ids, **NEW)
    layer.listed = [torch.full((1,), -2.0)]
    assert_same(llama, input_ids=ids, **NEW)


def test_a_forward_that_changes_the_model_is_tried_once(llama: Any, ids: torch.Tensor) -> None:
    llama.model.layers[1].mlp = Changeling(llama.model.layers[1].mlp, "counts")
    for _ in range(3):
        llama.generate(ids, **NEW, cache_implementation="paged")
    assert counts(llama) == {"refused": 1}


# ---- captures that fail


# ---- several callers


def test_two_caches_share_a_graph_turn_by_turn(llama: Any, ids: torch.Tensor) -> None:
    first, second = (hf_paged.PagedCache(llama, block_size=4) for _ in range(2))
    one, other = ids[:1], ids[1:2]
    for _ in range(3):
        one = llama.generate(one, past_key_values=first, **NEW)
        other = llama.generate(other, past_key_values=second, **NEW)
    assert counts(llama)["captured"] <= 3  # the pool grows for the second cache
    assert replayed(llama) > 40
    long = {**NEW, "max_new_tokens": 36, "min_new_tokens": 36}
    assert torch.equal(torch.cat([one, other]), llama.generate(ids[:2], **long))
    fork = copy.deepcopy(first)
    a = llama.generate(one, past_key_values=first, **NEW)
    b = llama.generate(one, past_key_values=fork, **NEW)
    assert torch.equal(a, b)
    for cache in (first, second, fork):
        cache.reset()


def test_threads(llama: Any) -> None:
    """Several threads generate at once with one model; each gets the tokens that it gets alone."""
    prompts = [random_ids(rows, 7 + rows) for rows in (1, 2, 3, 1)]
    alone = [llama.generate(prompt, **NEW) for prompt in prompts]
    answers: dict[int, torch.Tensor] = {}

    def call(number: int) -> None:
        answers[number] = llama.generate(prompts[number], **NEW, cache_implementation="paged")

    for _ in range(2):
        threads = [threading.Thread(target=call, args=(number,)) for number in range(len(prompts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(torch.equal(answers[number], alone[number]) for number in range(len(prompts)))
    assert replayed(llama), reasons(llama)


def test_a_model_with_graphs_is_freed_with_its_last_reference(ids: torch.Tensor) -> None:
    model: Any = build(BY_NAME["llama"])
    model.model.layers[0].mlp.also = model.forward
    both(model, input_ids=ids, **NEW)
    assert replayed(model)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


class Int8Linear(nn.Module):
    """Weights in eight bits with a scale for each output, as quantized models keep them."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("scale", scale)
        self.register_buffer("weight", (linear.weight.detach() / scale).round().to(torch.int8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.weight.to(x.dtype) * self.scale).t()


def test_quantized_linear_layers(llama: Any, ids: torch.Tensor) -> None:
    for layer in llama.model.layers:
        layer.mlp.down_proj = Int8Linear(layer.mlp.down_proj)
        layer.self_attn.o_proj = Int8Linear(layer.self_attn.o_proj)
    assert_same(llama, input_ids=ids, **NEW)
    assert replayed(llama)


class _Source:
    """A step of some size of one code. trouble: what its comparison raises; differs: what it shows."""

    comparable = True
    repeatable = True
    holders = ("single",)
    code = "single"
    model = nn.Linear(1, 1)

    def __init__(self, rows: int, trouble: Exception | None = None, differs: bool = False) -> None:
        self.size = Size("single", rows)
        self.trouble = trouble
        self.differs = differs
        self.recomputed = 0

    @property
    def outcome(self) -> Outcome:
        return Outcome.DIFFERS if self.differs else outcome_of(self.trouble)

    def load(self, step: CapturedStep) -> None:
        if self.trouble is not None:
            raise self.trouble

    def agrees(self, step: CapturedStep, answer: Any) -> bool:
        return not self.differs

    def recompute(self) -> None:
        self.recomputed += 1

    def is_worth_it(self, seen: int) -> bool:
        return True


class _Captured(CapturePool):
    """Captures without a model."""

    def _capture(self, key: Any, source: Any) -> CapturedStep:
        step = CapturedStep()
        step.size = key.size
        self._steps[key] = step
        return step


class _Votes(Votes):
    """Votes of two ranks in one process. others: the numbers of the other one; group: the model's."""

    alone = False

    def __init__(self, others: list[Outcome], group: Any) -> None:
        self.others = others
        self.group = group

    def model_group(self) -> Any:
        return self.group

    def least(self, number: int, computed: bool = True, place: str = "") -> int:
        return min(number, *self.others)


def test_captured_steps_end_before_their_process_group() -> None:
    """NCCL would wait for them for ever; those of other groups stay."""
    groups: list[Any] = [Memory(), Memory()]
    pools = [_Captured(Memory()) for _ in groups]
    for pool, group in zip(pools, groups, strict=True):
        pool.join(_Votes([], group))
    for ends, drops in ((groups[1], [0, 1]), (groups[0], [1, 1])):
        for act in before_groups_end:
            act(ends)
        assert [pool.drops for pool in pools] == drops


def test_ranks_trust_a_size_together() -> None:
    """A comparison that fails on one rank alone proves nothing on the others: else one rank would go on to
    compare the next size, and wait for the answers of ranks that replay it already.
    """
    pools = [_Captured(Memory()) for _ in range(2)]
    votes: list[Outcome] = []
    for pool in pools:
        pool.join(_Votes(votes, Memory()))
    state: Any = object()

    def step(*sources: _Source) -> list[bool]:
        votes[:] = [Outcome.DONE]  # what they launch is compiled on all
        due = [pool.is_due(state, source) for pool, source in zip(pools, sources, strict=True)]
        votes[:] = [source.outcome for source in sources]
        for pool, source in zip(pools, sources, strict=True):
            if all(due):
                pool.capture_or_compare(state, source, None)
        return due

    assert step(_Source(4), _Source(4)) == [False, False]
    assert step(_Source(4), _Source(4)) == [True, True]
    assert step(_Source(4), _Source(4, torch.OutOfMemoryError())) == [True, True]
    for _ in range(250):  # all ranks wait with what found no memory on one
        dues = step(_Source(4), _Source(4)), step(_Source(8), _Source(8))
        assert all(one == other for one, other in dues)
    assert [pool.sizes() for pool in pools] == [[Size("single", 8), Size("single", 4)]] * 2
    assert step(_Source(2), _Source(2)) == [False, False]
    assert step(_Source(2), _Source(2, KeyError())) == [True, True]
    assert [list(pool.reasons) for pool in pools] == [[(state, Size("single", 2))]] * 2
    assert step(_Source(16), _Source(16)) == [False, False]
    both = _Source(16, differs=True), _Source(16)
    assert step(*both) == [True, True]
    assert [each.recomputed for each in both] == [1, 1], "a forward of ranks is computed by all"
    assert step(_Source(32), _Source(32)) == [False, False]
    assert step(_Source(32, Unsteady("moves")), _Source(32)) == [True, True]
    assert [pool.unsteady for pool in pools] == [True, True]
