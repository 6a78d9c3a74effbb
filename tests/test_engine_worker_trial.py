"""How a model is tried out before it is served: in one flat row, row by row, or not at all."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import transformers as tf
from dropout import train_with_dropout
from engine_answers import PROMPTS, alone, answers
from families import BY_NAME, LONG, SMALL, TOKENS, build
from releases import DROPPED_WITHOUT_GRADIENTS

from hf_paged.engine import Engine, Unservable
from hf_paged.engine.worker import probe
from hf_paged.engine.worker.trial import Trial
from hf_paged.kv.group import LayerGroup
from hf_paged.model.cache_name import cache_in

GREEDY = {"max_new_tokens": 6, "do_sample": False}


def test_a_model_that_computes_with_its_keys_runs_row_by_row() -> None:
    """It would see other sequences' keys: found out in the trial, not looked up in a list."""
    torch.manual_seed(0)
    model = tf.DiffLlamaForCausalLM(
        tf.DiffLlamaConfig(**{**SMALL, **TOKENS, **LONG, "num_key_value_heads": 2})
    ).eval()
    with Engine(model, num_blocks=60, max_batch_tokens=11) as engine:
        assert engine.stats()["form"] == "rows"
        in_registry = hasattr(sys.modules[type(model).__module__], "ALL_ATTENTION_FUNCTIONS")
        off = "computes with keys or values" if in_registry else "attention registry"  # as in 5.9
        assert off in engine.stats()["off"]["flat"]
        assert [answers(output) for output in engine.generate(PROMPTS, **GREEDY)] == [
            alone(model, prompt, **GREEDY) for prompt in PROMPTS
        ]


def test_a_model_that_counts_by_itself_runs_row_by_row() -> None:
    """It takes positions and goes its own way from the first: nothing raises, the trial compares logits."""
    model = build(BY_NAME["llama"])
    turn = model.model.rotary_emb.forward
    model.model.rotary_emb.forward = lambda x, position_ids: turn(
        x, position_ids[:, :1] + torch.arange(x.shape[1])
    )
    with Engine(model, num_blocks=60) as engine:
        assert engine.stats()["form"] == "rows"
        assert "other logits" in engine.stats()["off"]["flat"]


class _CountsFromOne(tf.GPT2LMHeadModel):
    """generate() gives it no positions, as it does Kosmos-2.5."""

    def forward(
        self, input_ids: Any = None, past_key_values: Any = None, position_ids: Any = None, **kwargs: Any
    ) -> Any:
        if position_ids is None:
            begin = 1 + (0 if past_key_values is None else past_key_values.get_seq_length())
            position_ids = begin + torch.arange(input_ids.shape[1])[None]
        return super().forward(
            input_ids, past_key_values=past_key_values, position_ids=position_ids, **kwargs
        )

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        given = super().prepare_inputs_for_generation(*args, **kwargs)
        given.pop("position_ids", None)
        return given


def test_positions_that_generate_leaves_to_the_model() -> None:
    torch.manual_seed(0)
    config = tf.GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=64, vocab_size=99, **TOKENS)
    model = _CountsFromOne(config).eval()
    with Engine(model, num_blocks=60) as engine:
        assert engine.stats()["form"] == "rows"
        assert "generate() gives it none" in engine.stats()["off"]["flat"]
        for way in (GREEDY, {**GREEDY, "num_beams": 3}):
            found = [answers(output) for output in engine.generate(PROMPTS, **way)]
            assert found == [alone(model, prompt, **way) for prompt in PROMPTS]


def test_a_model_that_cannot_be_cut_is_refused() -> None:
    """A token that looks at later ones answers differently in pieces."""
    model = build(BY_NAME["llama"])
    model.model.embed_tokens.register_forward_hook(
        lambda module, inputs, out: out + out.mean(1, keepdim=True)
    )
    with pytest.raises(Unservable, match="gives other logits when its prompt is computed in chunks"):
        Engine(model)
    assert model.config._attn_implementation == "sdpa"


def test_a_model_in_half_precision_may_be_off_by_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """The deeper a model, the further apart two roundings of it are. How far is measured; what else is wrong
    is found all the same.
    """
    monkeypatch.setattr(probe, "CLOSE_IN_HALF", -1.0)  # some CPUs round all forms alike
    model = build(BY_NAME["llama"]).to(torch.bfloat16)
    params = []
    moved = Trial._moved
    monkeypatch.setattr(Trial, "_moved", lambda *given: params.append(moved(*given)) or params[-1])
    with Engine(model, num_blocks=60) as engine:
        assert engine.stats()["form"] == "flat"
    assert params
    assert all(0 < far < 0.05 for far in params)
    assert not model.get_input_embeddings()._forward_hooks
    model.model.embed_tokens.register_forward_hook(
        lambda module, inputs, out: out + out.mean(1, keepdim=True) / 4
    )
    with pytest.raises(Unservable, match="gives other logits when its prompt is computed in chunks"):
        Engine(model)


def test_a_model_under_autocast_may_be_off_by_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weights are float32, and its products are not."""
    monkeypatch.setattr(probe, "CLOSE", {torch.float32: -1.0})  # which no logits are
    model = build(BY_NAME["llama"])
    with torch.autocast("cpu", torch.bfloat16):
        Engine(model, num_blocks=8).close()


def test_a_model_that_fails_is_refused() -> None:
    model = build(BY_NAME["llama"])
    model.model.norm.register_forward_hook(lambda *arguments: 1 / 0)
    with pytest.raises(Unservable, match="ZeroDivisionError"):
        Engine(model)


@pytest.mark.parametrize(
    ("value", "where", "said"),
    [
        (
            torch.nan,
            "weight",
            r"answers with NaN .*without any cache: model\.layers\.1\.mlp\.up_proj\.weight is not finite",
        ),
        (torch.inf, "weight", r"without any cache: model\.layers\.1\.mlp\.up_proj\.weight is not finite"),
        (torch.inf, "hook", "answers with infinite logits .*its computation overflows"),
    ],
)
def test_weights_that_are_no_numbers_are_said_as_they_are(value: float, where: str, said: str) -> None:
    """Nothing that has to do with prompts in pieces."""
    model = build(BY_NAME["llama"])
    if where == "hook":
        model.lm_head.register_forward_hook(lambda module, inputs, logits: logits + value)
    else:
        model.model.layers[1].mlp.up_proj.weight.data[3, 2] = value
    with pytest.raises(Unservable, match=said) as error:
        Engine(model)
    assert "pieces" not in str(error.value)


def test_a_model_that_answers_at_random_is_said_to_do_so() -> None:
    """Dropout that is on outside of training makes all answers others, not those in pieces alone."""
    model = build(BY_NAME["llama"])
    model.model.layers[0].register_forward_hook(
        lambda module, inputs, out: torch.nn.functional.dropout(out, 0.5)
    )
    with pytest.raises(Unservable, match=r"the same tokens differently each time .*random or keeps a state"):
        Engine(model)


def test_a_forward_that_fails_by_itself_is_not_sent_to_generate() -> None:
    """generate() would fail as well; a forward that fails on pages alone would not."""
    model = build(BY_NAME["llama"])
    model.model.norm.register_forward_hook(lambda *arguments: 1 / 0)
    with pytest.raises(Unservable, match=r"fails without any cache.*ZeroDivisionError") as error:
        Engine(model)
    assert "use generate()" not in str(error.value)
    model = build(BY_NAME["llama"])

    def fails(module: Any, args: Any, keywords: dict[str, Any]) -> None:
        if cache_in(keywords) is not None:
            raise LookupError("no cache, please")

    model.model.register_forward_pre_hook(fails, with_kwargs=True)
    with pytest.raises(Unservable, match=r"on pages; use generate\(\) \(LookupError: no cache, please"):
        Engine(model)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there the kernels run")
def test_kernels_that_cannot_run_here_are_no_failed_forward() -> None:
    with pytest.raises(
        ValueError, match=r"kernels='triton' cannot run here: .*CUDA.*; use kernels='auto'"
    ) as error:
        Engine(build(BY_NAME["llama"]), kernels="triton")
    assert "forward" not in str(error.value)
    assert "generate()" not in str(error.value)


def test_a_generation_config_without_a_cache_is_named() -> None:
    model = build(BY_NAME["llama"])
    model.generation_config.use_cache = False
    with pytest.raises(Unservable, match=r"model\.generation_config\.use_cache=False, .*set it to True"):
        Engine(model)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_training_mode_is_said_as_it_is(checkpointed: bool) -> None:
    """Checkpointed layers drop a cache before transformers 5.24 only: from then on they serve in training mode."""
    model = build(BY_NAME["llama"]).train()
    reason = r"training mode, where its LlamaAttention has attention_dropout=0\.2"
    if checkpointed:
        model.gradient_checkpointing_enable()
        reason = "trains with gradient checkpointing"
        if not DROPPED_WITHOUT_GRADIENTS:
            with Engine(model, block_size=4, num_blocks=40) as engine:
                found = [answers(output) for output in engine.generate(PROMPTS, **GREEDY)]
            assert found == [alone(model, prompt, **GREEDY) for prompt in PROMPTS]
            train_with_dropout(model)
            reason = "attention_dropout"
    else:
        train_with_dropout(model)
    with pytest.raises(RuntimeError, match=rf"{reason}.*call model\.eval\(\)"):
        Engine(model)
    Engine(model.eval(), num_blocks=40).close()


def test_want_of_memory_is_said_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial that finds no memory says nothing about the model."""

    def nothing_left(*arguments: Any) -> None:
        raise MemoryError

    model = build(BY_NAME["llama"])
    monkeypatch.setattr(LayerGroup, "store", nothing_left)
    with pytest.raises(MemoryError):
        Engine(model)
