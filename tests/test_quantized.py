"""Quantized linear layers, under adapters too: stock's tokens, and prefixes that a change of weights or
scales makes stale (C24).

    pip install .[quantized]

torchao's int8 weights are compared exactly. What rounds activations, or computes in bfloat16 inside, may part
at ties.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from compare import assert_clean, assert_same, both
from families import ALTERNATING, LONG, SMALL, TOKENS, Family, build
from prefix_reuse import ask, continued, counted, words
from router_ties import judge_beams
from seen_models import Seen

import hf_paged
from hf_paged.checking.ties import NOISE, judge

WIDE = {
    **SMALL,
    **TOKENS,
    **LONG,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
"""Wide enough for nf4's blocks of 64."""
MODELS = {
    "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**WIDE)),
    "gemma3": lambda: tf.Gemma3ForCausalLM(
        tf.Gemma3TextConfig(**{**WIDE, **ALTERNATING}, query_pre_attn_scalar=16)
    ),
}


ROUNDED = 0.1
"""How far logits may lie apart, relative to the largest, where activations are rounded to a 127th of theirs
in fourteen products.
"""


def _torchao(activations: bool) -> Any:
    quantization = pytest.importorskip(
        "torchao.quantization", reason="torchao is an extra: pip install .[quantized]"
    )
    kind = (
        quantization.Int8DynamicActivationInt8WeightConfig
        if activations
        else quantization.Int8WeightOnlyConfig
    )
    return tf.TorchAoConfig(kind())


def _bitsandbytes(**options: Any) -> Any:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is an extra: pip install .[quantized]")
    return tf.BitsAndBytesConfig(**options)


CONFIGS: dict[str, Callable[[], Any]] = {
    "torchao-int8": lambda: _torchao(False),
    "torchao-int8-activations": lambda: _torchao(True),
    "bitsandbytes-int8": lambda: _bitsandbytes(load_in_8bit=True, llm_int8_threshold=0.0),
    "bitsandbytes-int8-outliers": lambda: _bitsandbytes(load_in_8bit=True),
    "bitsandbytes-nf4": lambda: _bitsandbytes(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    ),
    "bitsandbytes-nf4-double": lambda: _bitsandbytes(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.float32,
        bnb_4bit_use_double_quant=True,
    ),
}


@pytest.fixture(params=CONFIGS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def quantized(kind: str, folder: Path, name: str = "llama") -> Any:
    """A model as a user gets it: quantized while it is loaded."""
    config = CONFIGS[kind]()
    plain = build(Family(name, MODELS[name]))
    plain.save_pretrained(folder)
    model = type(plain).from_pretrained(
        folder, quantization_config=config, device_map={"": "cpu"}, dtype=torch.float32
    )
    with torch.no_grad():
        model(words(1, 4))  # bitsandbytes moves scales, and packs weights, at the first forward
    return model.eval()


@pytest.mark.parametrize("adapter", [False, True], ids=["plain", "lora"])
@pytest.mark.parametrize("name", MODELS)
def test_the_same_tokens(kind: str, name: str, adapter: bool, tmp_path: Path) -> None:
    model = quantized(kind, tmp_path, name)
    whole = model
    if adapter:
        peft = pytest.importorskip("peft", reason="peft is an extra")
        torch.manual_seed(0)
        lora = peft.LoraConfig(
            r=4, lora_alpha=16, target_modules=["q_proj", "k_proj", "v_proj"], init_lora_weights=False
        )
        whole = peft.get_peft_model(model, lora).eval()
    ids = words(3, 13)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    call = {
        "input_ids": ids * mask,
        "attention_mask": mask,
        "max_new_tokens": 10,
        "min_new_tokens": 10,
        "do_sample": False,
    }
    call |= {"return_dict_in_generate": True, "output_logits": True, "output_scores": True}
    for beams in (1, 3):
        if kind == "torchao-int8":
            paged = assert_same(whole, **call, num_beams=beams)
        else:
            stock, paged = both(whole, **call, num_beams=beams)
            noise = NOISE[torch.bfloat16] if "nf4" in kind else ROUNDED
            verdict = judge_beams(stock, paged, noise) if beams > 1 else judge(stock, paged, 13, noise)
            assert verdict.mark != "X", verdict.why
        assert set(paged.past_key_values.paths) == {"paged"}
        del paged
    assert_clean(model, "sdpa")


def test_what_differs_is_explained(kind: str, tmp_path: Path) -> None:
    """Differences that rounding explains are measured on the model: its dtype does not say that it rounds to
    fewer bits inside.
    """
    report = hf_paged.check_mismatch(
        quantized(kind, tmp_path), words(8, 13), max_new_tokens=30, min_new_tokens=30, do_sample=False
    )
    assert report.ok, str(report)


def test_prefixes(kind: str, tmp_path: Path) -> None:
    """A common beginning is computed once, unless the layers round a token by its whole batch."""
    model = quantized(kind, tmp_path)
    first = words(1, 30)
    call = {"max_new_tokens": 2}
    assert ask(model, first, 4, **call)[1][0] == 30
    _, seen = ask(model, continued(first, 26, 4), 4, **call)
    if kind == "bitsandbytes-int8-outliers":
        assert seen[0] == 30
        assert (
            hf_paged.stats(model).reasons[
                "a quantized layer rounds a token depending on the rest of its batch"
            ]
            == 2
        )
    else:
        assert seen[0] == 4


def _weight(model: Any) -> Any:
    return model.model.layers[0].self_attn.v_proj


def edit_weights(model: Any) -> None:
    weight = _weight(model).weight
    numbers = getattr(weight, "qdata", weight)
    numbers.data.view(-1)[:64] ^= 5  # a nibble's level too is another one


def edit_scales(model: Any) -> None:
    module = _weight(model)
    state = getattr(module.weight, "quant_state", None)
    if hasattr(module.weight, "scale"):
        module.weight.scale.mul_(3)
    elif state is None:
        module.state.SCB.mul_(3)
    elif state.nested:
        state.state2.absmax.mul_(3)
    else:
        state.absmax.mul_(3)


def replace_scales(model: Any) -> None:
    """Another tensor where the old one was named."""
    module = _weight(model)
    state = getattr(module.weight, "quant_state", None)
    if hasattr(module.weight, "scale"):
        module.weight.scale = module.weight.scale * 3
    elif state is None:
        module.state.SCB = module.state.SCB * 3
    elif state.nested:
        state.state2.absmax = state.state2.absmax * 3
    else:
        state.absmax = state.absmax * 3


@pytest.mark.parametrize(
    "change", [edit_weights, edit_scales, replace_scales], ids=lambda change: change.__name__
)
@pytest.mark.parametrize(
    "kind", [kind for kind in CONFIGS if kind != "bitsandbytes-int8-outliers"], indirect=True
)
def test_c24_changed_weights_and_scales_are_noticed(
    kind: str, change: Callable[[Any], None], tmp_path: Path
) -> None:
    model = quantized(kind, tmp_path)
    before, _ = _scored(model)
    assert _scored(model)[1] == 1
    change(model)
    after, columns = _scored(model)
    assert columns == 29
    assert (before - after).abs().max() > 1e-2, "a change that changes nothing proves nothing"
    assert _scored(model)[1] == 1


def _scored(model: Any) -> tuple[torch.Tensor, int]:
    """Scores behind a prompt, and how many of its columns were computed. Rounded activations flip at ties, so
    that they are not compared with stock's.
    """
    ids = words(1, 29)
    with counted(model) as seen:
        found = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, do_sample=False,
            return_dict_in_generate=True, output_scores=True, cache_implementation="paged",
            cache_config={"block_size": 4, "prefix_caching": True},
        )  # fmt: skip
    return found.scores[0], seen[0]


@pytest.mark.parametrize("entry", ["prefixes", "open_engine", "released"])
def test_a_model_that_we_have_seen_is_moved(kind: str, entry: str, tmp_path: Path) -> None:
    """torch swaps the parts of torchao's weights, which it refuses where anything has a weak reference."""
    if kind == "bitsandbytes-int8-outliers" and entry != "prefixes":
        return  # the engine refuses layers that round a token by the others of its batch
    seen = Seen(quantized(kind, tmp_path))
    getattr(seen, entry)()
    if kind.startswith("torchao"):
        seen.model.to(torch.bfloat16)
        seen.model.to(torch.float32)
    else:
        seen.model.to("cpu")  # bitsandbytes refuses to cast
    expected = seen.unseen()
    assert torch.equal(getattr(seen, entry)(), expected)
    seen.close()
