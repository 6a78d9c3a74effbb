"""Outputs beside logits are repeated along the dimension that carries the rows, wherever that is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import every_other
from compare import assert_equal, assert_same, both
from families import BY_NAME, VOCABULARY
from families import build as build_family
from tiny import build, config_class, mappings
from transformers.modeling_outputs import CausalLMOutputWithPast

from hf_paged import PagedCache
from hf_paged.generate.forward import wrap
from hf_paged.model.cache_name import NAMES
from hf_paged.model.outputs import Unlike, asked_fields, known_layout, layout_of, repeat_fields

ALL = {
    "return_dict_in_generate": True,
    "output_scores": True,
    "output_logits": True,
    "output_hidden_states": True,
    "output_attentions": True,
}
FAMILIES = [
    "causal gemma3n_text",
    "causal gemma4_text",
    "causal qwen3_next",
    "causal gpt_oss",
    "causal deepseek_v3",
    "seq2seq t5",
]
MODES = {
    "beams": {"num_beams": 3, "num_return_sequences": 2, "do_sample": False},
    "samples": {"num_return_sequences": 3, "do_sample": True, "num_beams": 1},
}


def _prompts(prompts: int) -> torch.Tensor:
    return torch.randint(5, 80, (prompts, 7), generator=torch.Generator().manual_seed(3))


def _model(family: str) -> Any:
    kind, name = family.split()
    if all(config.model_type != name for config in mappings()[kind]):
        pytest.skip(f"this transformers has no {name}")
    model = build(kind, config_class(kind, name))
    model.set_attn_implementation("eager")  # the one that answers with attentions
    return model


def _rows_of_prompts(model: Any) -> list[int]:
    """How many rows each forward of the model computes from now on, as its head sees them."""
    seen: list[int] = []
    model.get_output_embeddings().register_forward_hook(
        lambda module, args, output: seen.append(output.shape[0])
    )
    return seen


def _fields(answer: Any) -> dict[str, Any]:
    return {name: value for name, value in answer.items() if name not in (*NAMES, "cache_params")}


@pytest.mark.parametrize(("family", "mode"), every_other([*FAMILIES], [*MODES]))
def test_every_field_of_a_prompt(family: str, mode: str) -> None:
    """The first call learns where the rows are, the next ones repeat them there: shapes and values as
    stock's, both times.
    """
    model = _model(family)
    for prompts in (2, 4, 1):
        call = {
            "input_ids": _prompts(prompts),
            "max_new_tokens": 4,
            "min_new_tokens": 4,
            **ALL,
            **MODES[mode],
        }
        stock, paged = both(model, **call)
        assert_equal(_fields(stock), _fields(paged))


def test_a_prompt_is_computed_once_when_its_fields_are_known() -> None:
    """Gemma3n stacks its hidden states [4, rows, tokens, hidden]: with 4 rows dimension 0 fits as well."""
    model = _model("causal gemma3n_text")
    call = {"input_ids": _prompts(4), "max_new_tokens": 3, "min_new_tokens": 3, **ALL, **MODES["beams"]}
    assert_same(model, **call)
    seen = _rows_of_prompts(model)
    answer = model.generate(**call, cache_implementation="paged")
    assert seen[0] == 4
    assert answer.hidden_states[0][0].shape[:2] == (4, 12)


def test_router_logits() -> None:
    """A router's logits are [rows * tokens, experts]: all rows must be there, in their order."""
    model = build_family(BY_NAME["mixtral"])
    ids = torch.randint(5, VOCABULARY, (2, 9)).repeat_interleave(3, 0)
    seen = _rows_of_prompts(model)
    with torch.no_grad():
        stock = model(input_ids=ids, output_router_logits=True)
        for rows in (6, 2):
            del seen[:]
            cache = PagedCache(model)
            cache.sequences.copies = 3
            paged = wrap(model, model.forward)(
                input_ids=ids, past_key_values=cache, output_router_logits=True
            )
            assert seen[-1] == rows
            assert_equal(stock.logits, paged.logits)
            assert_equal(stock.router_logits, paged.router_logits)


# ---- layouts


def _answer(rows: int) -> CausalLMOutputWithPast:
    row = torch.arange(1.0, rows + 1)
    return CausalLMOutputWithPast(
        loss=torch.tensor(2.0),
        logits=row[:, None, None].expand(rows, 5, 7),
        hidden_states=(row[None, :, None].expand(3, rows, 2), None),
        attentions=(row.repeat_interleave(5)[:, None].expand(rows * 5, 4),),
    )


def test_rows_are_found_where_they_are() -> None:
    few, many = _answer(3), repeat_fields(_answer(3), LAYOUT, 3, TWICE)
    assert many.hidden_states[0].shape == (3, 6, 2)
    assert many.hidden_states[0][0, :, 0].tolist() == [1, 1, 2, 2, 3, 3]
    assert many.attentions[0][:, 0].tolist() == [row for row in (1, 1, 2, 2, 3, 3) for _ in range(5)]
    assert layout_of(few, many, 3, TWICE) == LAYOUT


TWICE = torch.tensor([0, 0, 1, 1, 2, 2])
LAYOUT = {"loss": None, "logits": 0, "hidden_states": [1, None], "attentions": [0]}


def test_rows_in_another_order_are_not_repeated() -> None:
    """[layers, rows] flattened into one dimension is as long, and is not rows in order."""
    few, many = torch.arange(6.0), torch.arange(6.0).repeat(2)
    with pytest.raises(Unlike):
        layout_of(few, many, 3, TWICE)
    assert known_layout(few, many, 3, TWICE) is None
    assert known_layout(few, few.unflatten(0, (3, 2))[TWICE].flatten(), 3, TWICE) == 0


def test_a_field_that_was_never_there_is_an_error() -> None:
    with pytest.raises(Unlike, match="did not answer"):
        repeat_fields(_answer(2), {"logits": 0, "hidden_states": [1, None]}, 2, TWICE[:4])


def test_what_is_asked_for_is_the_key(llama: Any, ids: torch.Tensor) -> None:
    assert asked_fields(llama, {"input_ids": ids, "output_hidden_states": None, "use_cache": True}) is None
    asked = asked_fields(llama, {"input_ids": ids, "output_hidden_states": True})
    assert asked != asked_fields(llama, {"input_ids": ids, "output_attentions": True})
    llama.config.output_hidden_states = True
    assert asked_fields(llama, {"input_ids": ids}) is not None
