"""Routers that count what is computed together: prompts are shared only where nobody's tokens are dropped for
it (trap 18).
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers as tf
from cases import pairwise
from compare import assert_equal
from families import BY_NAME, LONG, TOKENS, build
from tape import record

import hf_paged
from hf_paged import Engine
from hf_paged.model.rehearsal import RECORDERS
from hf_paged.model.routers import WHY, routers_of
from hf_paged.model.servable import Unservable

WORDS = 96
MODES = {
    "beams": {"num_beams": 4, "num_return_sequences": 3, "do_sample": False},
    "samples": {"do_sample": True, "num_return_sequences": 4, "num_beams": 1},
}


def _filled(model: Any, start: int) -> Any:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.25, generator=generator)
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "decoder_start_token_id": start}
    model.generation_config = tf.GenerationConfig(**special)
    return model.eval()


def nllb(**settings: Any) -> Any:
    """NLLB-MoE whose layers are all sparse: its routers count the tokens of all rows."""
    config = tf.NllbMoeConfig(
        d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=48,
        decoder_ffn_dim=48, vocab_size=WORDS, encoder_sparse_step=1, decoder_sparse_step=1, num_experts=4, decoder_start_token_id=1,
        **LONG, **TOKENS,
    )  # fmt: skip
    model = _filled(tf.NllbMoeForConditionalGeneration(config), 1)
    for module in model.modules():
        if hasattr(module, "moe_eval_capacity_token_fraction"):
            for name, value in settings.items():
                setattr(module, name, value)
    return model


def switch(capacity: int) -> Any:
    """Switch Transformers whose layers are all sparse: its routers count the tokens of each row."""
    config = tf.SwitchTransformersConfig(
        d_model=32, d_kv=8, d_ff=48, num_layers=2, num_decoder_layers=2, num_heads=4, vocab_size=WORDS, num_experts=4,
        expert_capacity=capacity, num_sparse_encoder_layers=2, num_sparse_decoder_layers=2, decoder_start_token_id=0, eos_token_id=2,
        pad_token_id=0,
    )  # fmt: skip
    return _filled(tf.SwitchTransformersForConditionalGeneration(config), 0)


MODELS = {
    "all-tokens": (lambda: nllb(), True),
    "half-the-tokens": (lambda: nllb(moe_eval_capacity_token_fraction=0.5), False),
    "two-tokens": (lambda: nllb(moe_eval_capacity_token_fraction=0.0, expert_capacity=2), False),
    "as-the-first-call": (lambda: nllb(moe_eval_capacity_token_fraction=0.0, expert_capacity=None), False),
    "at-random": (lambda: nllb(second_expert_policy="random"), False),
    "in-each-row": (lambda: switch(1), True),
}
"""Each with whether equal rows come out as one of them does."""


@pytest.fixture
def prompts() -> dict[str, torch.Tensor]:
    """Two prompts of an encoder, and six tokens that its decoder begins with."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(5, 80, (2, 9), generator=generator)
    return {"input_ids": ids, "decoder_input_ids": torch.randint(5, 80, (2, 6), generator=generator)}


def _rows(model: Any) -> list[int]:
    seen: list[int] = []
    layer = getattr(model.get_decoder(), "layers", None) or model.get_decoder().block
    layer[0].register_forward_pre_hook(
        lambda module, args, kwargs: seen.append((*args, *kwargs.values())[0].shape[0]), with_kwargs=True
    )
    return seen


@pytest.mark.parametrize(
    ("name", "mode", "begins"), pairwise([*MODELS], [*MODES], ["start", "decoder-prompt"])
)
def test_the_same_as_stock(name: str, mode: str, begins: str, prompts: dict[str, torch.Tensor]) -> None:
    """The first call learns how routers are called, the second may share: both are stock's, to the logits."""
    make, shares = MODELS[name]
    model = make()
    if begins == "start":
        del prompts["decoder_input_ids"]
    call = {
        **prompts,
        **MODES[mode],
        "max_new_tokens": 6,
        "min_new_tokens": 6,
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    torch.manual_seed(0)
    stock = copy.deepcopy(model).generate(**call)
    paged = copy.deepcopy(model)
    seen = _rows(paged)
    for _ in range(2):
        del seen[:]
        if name == "as-the-first-call":  # its routers keep a capacity, in stock as well
            for mine, own in zip(paged.modules(), model.modules(), strict=True):
                if hasattr(own, "moe_eval_capacity_token_fraction"):
                    mine.expert_capacity = own.expert_capacity
        torch.manual_seed(0)
        answer = paged.generate(**call, cache_implementation="paged", cache_config={"block_size": 4})
        assert torch.equal(stock.sequences, answer.sequences)
        assert_equal(stock.logits, answer.logits)
    if begins == "decoder-prompt":
        assert seen[0] == (2 if shares else 8)


@pytest.mark.parametrize("name", ["two-tokens", "at-random"])
def test_trying_a_router_changes_nothing(name: str, prompts: dict[str, torch.Tensor]) -> None:
    model = MODELS[name][0]()
    model.generate(**prompts, **MODES["beams"], max_new_tokens=2, cache_implementation="paged")
    routers = routers_of(model)
    before = [
        {name: value for name, value in vars(module).items() if not name.startswith("_")}
        for module in routers.modules
    ]
    state = torch.get_rng_state()
    assert not routers.keep_rows_apart(2, torch.arange(8) // 4, 6)
    assert [
        {name: value for name, value in vars(module).items() if not name.startswith("_")}
        for module in routers.modules
    ] == before
    assert torch.equal(state, torch.get_rng_state())


def test_few_tokens_fit_anyway(prompts: dict[str, torch.Tensor]) -> None:
    """A capacity that so many tokens cannot reach drops none."""
    model = nllb(moe_eval_capacity_token_fraction=0.0, expert_capacity=40)
    model.generate(**prompts, **MODES["beams"], max_new_tokens=2, cache_implementation="paged")
    routers = routers_of(model)
    assert routers.keep_rows_apart(2, torch.arange(6) // 3, 6)
    assert not routers.keep_rows_apart(2, torch.arange(8) // 4, 6)


@pytest.mark.parametrize("name", ["llama", "mixtral", "qwen3-moe", "gpt-oss", "opt", "bart"])
def test_models_without_a_capacity_are_not_tried(name: str) -> None:
    assert routers_of(build(BY_NAME[name])).modules == []


class CappedGate(torch.nn.Module):
    """A gate of somebody's own code: a sum over what the whole batch may hold."""

    def __init__(self, linear: torch.nn.Module, capacity: int) -> None:
        super().__init__()
        self.linear, self.capacity = linear, capacity

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = torch.arange(x.shape[:-1].numel()).view(*x.shape[:-1], 1)
        return self.linear(x) * (tokens < self.capacity)


def capped(capacity: int) -> Any:
    model = build(BY_NAME["llama"])
    model.model.layers[1].mlp = CappedGate(model.model.layers[1].mlp, capacity)
    return model


def test_a_decoder_of_another_s_code(ids: torch.Tensor) -> None:
    """Beams of a prompt, prefixes, and the engine: none takes it for a model of independent tokens."""
    model = capped(20)
    call = {"input_ids": ids, "max_new_tokens": 5, "num_beams": 3, "do_sample": False}
    for _ in range(2):
        assert torch.equal(model.generate(**call, cache_implementation="paged"), model.generate(**call))
    once = {"input_ids": ids[:1], "max_new_tokens": 5, "do_sample": False}
    for _ in range(2):
        paged = model.generate(**once, cache_implementation="paged", cache_config={"prefix_caching": True})
        assert torch.equal(paged, model.generate(**once))
    assert hf_paged.stats(model).reasons[WHY] == 2
    with pytest.raises(Unservable, match="capacity"):
        Engine(model, num_blocks=40)


def _drops(model: Any) -> bool:
    """True if a hundred equal tokens come out of a sparse layer as different ones."""
    layer = next(
        module for module in model.get_decoder().modules() if type(module).__name__.endswith("SparseMLP")
    )
    with torch.no_grad():
        made = layer(torch.ones(1, 100, 32))
    return not torch.allclose(made, made[:, :1].expand_as(made), atol=1e-5)


@pytest.mark.parametrize(("make", "served"), [
    (lambda: nllb(), True), (lambda: nllb(moe_eval_capacity_token_fraction=0.5), False),
    (lambda: switch(64), False), (lambda: switch(600), True),
])  # fmt: skip
def test_the_engine_serves_what_it_can_cut_and_join(
    make: Any, served: bool, prompts: dict[str, torch.Tensor]
) -> None:
    """A prompt that is computed again after a preemption comes in one piece: Switch would count its tokens
    together then.
    """
    model = make()
    if not served and not _drops(model):
        pytest.skip("this transformers' router takes one token at a time, and drops none")
    if not served:
        with pytest.raises(Unservable, match=r"up to (256|512) tokens"):
            Engine(model, num_blocks=40, max_batch_tokens=128, max_batch_sequences=4)
        return
    engine = Engine(model, num_blocks=40, max_batch_tokens=128, max_batch_sequences=4)
    outputs = engine.generate(
        [ids.tolist() for ids in prompts["input_ids"]], max_new_tokens=5, do_sample=False
    )
    for ids, output in zip(prompts["input_ids"], outputs, strict=True):
        stock = model.generate(ids[None], max_new_tokens=5, do_sample=False)[0, 1:]
        assert output.sequences[0].token_ids == stock.tolist()
    engine.check()
    engine.close()


def test_the_engine_serves_no_router_that_draws() -> None:
    with pytest.raises(Unservable, match="capacity"):
        Engine(nllb(second_expert_policy="random"), num_blocks=40)


def test_steps_of_counting_models_are_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured step has rows beyond the call's, which a router would count."""
    from hf_paged.generate.forward import _step

    monkeypatch.setitem(RECORDERS, "cpu", record)
    model = capped(20)
    cache = hf_paged.PagedCache(model)
    with torch.no_grad():
        model(torch.randint(5, 90, (2, 4)), past_key_values=cache)
        arguments = {"input_ids": torch.randint(5, 90, (2, 1)), "past_key_values": cache}
        assert _step(model, model.forward, arguments, [cache]) is None
        plain = build(BY_NAME["llama"])
        cache = hf_paged.PagedCache(plain)
        plain(torch.randint(5, 90, (2, 4)), past_key_values=cache)
        assert _step(plain, plain.forward, {**arguments, "past_key_values": cache}, [cache]) is not None
