"""Routing that is replayed: in a forward of stock's each token goes to the experts that were recorded for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_answers import PROMPTS, small_engine
from routed import mixture, routing_of, seen_routing

import hf_paged

FAMILIES = ["mixtral", "qwen3-moe", "gpt-oss", "deepseek_v3", "qwen3_next", "lfm2_moe", "granitemoe", "gemma4_text"]  # fmt: skip
"""Softmax before and behind the choice, sigmoids with biases and groups, routers that call a tensor's topk."""
IDS = torch.tensor([PROMPTS[3][:12], PROMPTS[1][:12]])


@pytest.fixture
def mixtral() -> Any:
    return mixture("mixtral")


def loss_of(model: Any, ids: torch.Tensor = IDS, **keywords: Any) -> torch.Tensor:
    found: torch.Tensor = model(ids, labels=ids, use_cache=False, **keywords).loss
    return found


def gradients(model: Any, loss: torch.Tensor) -> list[torch.Tensor]:
    """The gradients of all parameters that have one."""
    model.zero_grad()
    loss.backward()
    return [each.grad.clone() for each in model.parameters() if each.grad is not None]


def other_routing(model: Any, ids: torch.Tensor = IDS) -> torch.Tensor:
    """Other experts for some tokens of each layer than the model would choose."""
    routing = routing_of(model, ids)
    experts = int(routing.max()) + 1
    chance = torch.Generator().manual_seed(1)
    rows, columns, layers, k = routing.shape
    drawn = torch.rand(rows, columns, layers, experts, generator=chance).topk(k).indices.to(torch.int16)
    moved = torch.rand(rows, columns, layers, 1, generator=chance) < 0.5
    return torch.where(moved, drawn, routing)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_models_own_routing_changes_nothing(name: str) -> None:
    """Not one bit of the loss or of a gradient."""
    model = mixture(name).train()
    expected = loss_of(model)
    right = gradients(model, expected)
    with hf_paged.replay_routing(routing_of(model, IDS)):
        loss = loss_of(model)
    assert torch.equal(loss, expected)
    for own, other in zip(gradients(model, loss), right, strict=True):
        assert torch.equal(own, other)


@pytest.mark.parametrize("name", FAMILIES)
def test_other_routing_is_followed(name: str) -> None:
    """By the experts, and by weights that are the model's own and have gradients."""
    model = mixture(name).train()
    plain = loss_of(model)
    routing = other_routing(model)
    with seen_routing(model) as seen, hf_paged.replay_routing(routing):
        loss = loss_of(model)
    taken = torch.stack(seen, 1).unflatten(0, tuple(IDS.shape)).to(torch.int16)
    assert torch.equal(taken, routing)
    assert not torch.equal(loss, plain)
    assert gradients(model, loss)
    assert torch.equal(loss_of(model), plain)  # outside, nothing has changed


def test_weights_are_the_routers_at_the_recorded_experts(mixtral: Any) -> None:
    """Renormalised as Mixtral does: softmax over all, then divided by the sum of those that were taken."""
    routing = other_routing(mixtral)
    got: list[tuple[Any, ...]] = []
    block = mixtral.model.layers[0].mlp
    hook = block.gate.register_forward_hook(lambda module, inputs, answer: got.append(answer))
    with hf_paged.replay_routing(routing):
        loss_of(mixtral)
    hook.remove()
    logits, weights, chosen = got[0]
    taken = routing[:, :, 0].flatten(0, 1).long()
    expected = logits.float().softmax(-1).gather(-1, taken)
    assert torch.equal(chosen, taken)
    torch.testing.assert_close(weights, expected / expected.sum(-1, keepdim=True))


def test_the_router_chooses_where_nothing_was_recorded(mixtral: Any) -> None:
    """At padding, and for the last column, which a sampler never computes."""
    plain = routing_of(mixtral, IDS)
    routing = other_routing(mixtral)
    routing[0, :5] = -1
    with seen_routing(mixtral) as seen, hf_paged.replay_routing(routing[:, :-1]):
        loss_of(mixtral)
    first = seen[0].unflatten(0, tuple(IDS.shape)).to(torch.int16)
    assert torch.equal(first[0, :5], plain[0, :5, 0])
    assert torch.equal(first[0, 5:-1], routing[0, 5:-1, 0])
    assert torch.equal(first[1, :-1], routing[1, :-1, 0])


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(
    ("name", "reentrant"), [("mixtral", False), ("mixtral", True), ("gemma4_text", False)]
)
def test_checkpointed_layers_compute_the_same_again(name: str, reentrant: bool, inside: bool) -> None:
    """Also in a backward behind the block, and before another forward in it."""
    model = mixture(name).train()
    routing = other_routing(model)
    with hf_paged.replay_routing(routing):
        expected = loss_of(model)
    right = gradients(model, expected)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    kept = [each.__dict__.get("_gradient_checkpointing_func") for each in model.modules()]
    with hf_paged.replay_routing(routing):
        loss = loss_of(model)
        if inside:
            found = gradients(model, loss)
            assert torch.equal(loss_of(model), expected)
    if not inside:
        found = gradients(model, loss)
    assert torch.equal(loss, expected)
    for own, other in zip(found, right, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-6, atol=1e-7)
    assert [each.__dict__.get("_gradient_checkpointing_func") for each in model.modules()] == kept
    assert not any(each._forward_pre_hooks for each in model.modules() if hasattr(each, "num_experts"))


def test_an_engines_routing_is_replayed(mixtral: Any) -> None:
    """As it comes: one row, without the routing of the last token."""
    with small_engine(mixtral) as engine:
        output = engine.submit(PROMPTS[1], max_new_tokens=9, return_routing=True).result()
    ids = torch.tensor([output.prompt_token_ids + output.sequences[0].token_ids])
    expected = loss_of(mixtral, ids)
    with hf_paged.replay_routing(output.sequences[0].routing):
        assert torch.equal(loss_of(mixtral, ids), expected)


def test_generates_routing_is_replayed(mixtral: Any) -> None:
    ids = IDS.clone()
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    output = mixtral.generate(
        ids, attention_mask=mask, max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0,
        return_dict_in_generate=True, cache_implementation="paged", cache_config={"return_routing": True},
    )  # fmt: skip
    mask = torch.cat([mask, torch.ones_like(output.sequences[:, 12:])], 1)
    expected = mixtral(output.sequences, attention_mask=mask).logits
    with hf_paged.replay_routing(output.routing):
        assert torch.equal(mixtral(output.sequences, attention_mask=mask).logits, expected)


def test_two_models_take_the_same_routing(mixtral: Any) -> None:
    """A trainer's model and its reference."""
    reference = mixture("mixtral")
    routing = other_routing(mixtral)
    with hf_paged.replay_routing(routing):
        losses = [loss_of(model) for model in (mixtral, reference, mixtral)]
    assert losses[0] == losses[1] == losses[2]


def test_the_routers_own_loss_counts_its_own_choice(mixtral: Any) -> None:
    """The auxiliary loss is of all layers' logits: no routing of tokens."""
    with hf_paged.replay_routing(other_routing(mixtral)):
        answer = mixtral(IDS, labels=IDS, output_router_logits=True, use_cache=False)
    assert torch.isfinite(answer.aux_loss)


def test_adapters_at_experts(mixtral: Any) -> None:
    peft = pytest.importorskip("peft")
    routing = other_routing(mixtral)
    config = peft.LoraConfig(target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj"])
    model = peft.get_peft_model(mixtral, config)
    with seen_routing(mixtral) as seen, hf_paged.replay_routing(routing):
        loss = loss_of(model)
    assert torch.equal(torch.stack(seen, 1).unflatten(0, tuple(IDS.shape)).to(torch.int16), routing)
    assert gradients(model, loss)


def test_another_models_routing_is_refused(mixtral: Any) -> None:
    routing = routing_of(mixtral, IDS)
    cases = {
        "has 1 layers, expected the 2 layers of MixtralForCausalLM": routing[:, :, :1],
        "has k=1 experts of a token, expected k=2": routing[..., :1],
        "names expert 9, expected one of 4": torch.full_like(routing, 9),
        "2 rows of 9 columns, expected those of the forward of 24 tokens": routing[:, :9],
    }
    for message, wrong in cases.items():
        with pytest.raises(ValueError, match=message), hf_paged.replay_routing(wrong):
            loss_of(mixtral)
    llama, phimoe = mixture("llama"), mixture("phimoe")
    with pytest.raises(ValueError, match="LlamaForCausalLM was called"), hf_paged.replay_routing(routing):
        loss_of(llama)
    with pytest.raises(ValueError, match="no model was called"), hf_paged.replay_routing(routing):
        pass
    found = other_routing(phimoe)
    with (
        pytest.raises(ValueError, match="layer 0 of PhimoeForCausalLM finds"),
        hf_paged.replay_routing(found),
    ):
        loss_of(phimoe)
    with pytest.raises(TypeError, match=r"got torch\.float32"), hf_paged.replay_routing(routing.float()):
        pass
    with pytest.raises(ValueError, match=r"got \[2, 12\]"), hf_paged.replay_routing(routing[:, :, 0, 0]):
        pass
    assert torch.equal(routing_of(mixtral, IDS), routing)  # nothing is left behind
