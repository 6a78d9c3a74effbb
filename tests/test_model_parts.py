"""Adapters that are more than products of linear layers, each chosen by its request: tokens and
log-probabilities of peft alone.
"""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import peft
import pytest
import tiny
import torch
from adapter_answers import NEW, alone, ask, first, prompt, tokens
from adapters import adapted, lora, trained, with_a_tied_head
from captures import counts, policy, reasons
from families import BY_NAME, build
from kernel_cases import load
from releases import FLAT_STATES
from tape import rerun

import hf_paged
from hf_paged import Engine
from hf_paged.model.parts import LowRank, TrainedTokens
from hf_paged.model.rehearsal import RECORDERS

GREEDY: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}
TOKENS = list(range(3, 60))
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tokens": ({"trainable_token_indices": [5, 7, 30]}, {"trainable_token_indices": TOKENS, "r": 4}),
    "embeddings": (
        {"target_modules": ["q_proj", "embed_tokens"]},
        {"target_modules": ["embed_tokens"], "r": 3},
    ),
    "modules": (
        {"modules_to_save": ["lm_head", "embed_tokens"]},
        {"modules_to_save": ["lm_head", "norm", "input_layernorm"]},
    ),
    "dora": (
        {"use_dora": True},
        {"use_dora": True, "r": 5, "target_modules": ["v_proj", "embed_tokens", "lm_head"]},
    ),
    "biases": ({"lora_bias": True}, {"lora_bias": True, "r": 3}),
}


def check_mixed(model: Any, engine: Engine, wanted: list[Any]) -> None:
    """Each request has the tokens of peft alone, in a mixed batch and again behind its cached prefix, and the
    log-probabilities.
    """
    prompts = [prompt(i, 12) for i in range(len(wanted))]
    expected = [alone(model, ids, each) for ids, each in zip(prompts, wanted, strict=True)]
    handles = [engine.submit(ids, **GREEDY, adapter=each) for ids, each in zip(prompts, wanted, strict=True)]
    assert [tokens(handle) for handle in handles] == expected
    assert len(set(map(tuple, expected))) > 2
    for ids, each, answer in zip(prompts, wanted, expected, strict=True):
        output = engine.generate([ids], **GREEDY, adapter=each, logprobs=1)[0]
        assert first(output) == answer
        assert output.cached_tokens >= 8
        found = torch.tensor([chosen.logprob for chosen in output.sequences[0].logprobs])
        torch.testing.assert_close(found, logprobs(model, ids, answer, each), atol=2e-4, rtol=0)


def logprobs(model: Any, ids: list[int], answer: list[int], adapter: str | None) -> torch.Tensor:
    """Those of peft alone."""
    if adapter is not None:
        model.set_adapter(adapter)
    with torch.no_grad():
        if adapter is None:
            with model.disable_adapter():
                logits = model(input_ids=torch.tensor([ids + answer])).logits
        else:
            logits = model(input_ids=torch.tensor([ids + answer])).logits
    model.set_adapter("one")
    found = logits[0, len(ids) - 1 : -1].log_softmax(-1)
    return found.gather(1, torch.tensor(answer)[:, None])[:, 0]


@pytest.mark.parametrize("kind", CASES)
def test_two_of_a_kind_beside_a_plain_one_and_the_base(kind: str) -> None:
    model = trained(*[lora(**options) for options in CASES[kind]])
    with Engine(model, block_size=4, num_blocks=200, max_adapters=3) as engine:
        check_mixed(model, engine, ["one", None, "two", "three", "one"])
        engine.check()


@pytest.mark.parametrize("kind", CASES)
def test_a_plain_model_takes_them_from_a_folder(kind: str, tmp_path: Path) -> None:
    model = trained(*[lora(**options) for options in CASES[kind]])
    model.save_pretrained(tmp_path, selected_adapters=["one", "two"])
    torch.manual_seed(0)
    with Engine(build(BY_NAME["llama"]).eval(), block_size=4, num_blocks=200, max_adapters=2) as engine:
        for name in ("one", "two"):
            engine.add_adapter(name, tmp_path / name)
        check_mixed(model, engine, ["one", None, "two", "one"])
        assert engine.adapters()["one"].bytes > 0
        engine.check()


def test_a_saved_module_that_the_model_has_twice(tmp_path: Path) -> None:
    """Peft saves it once, and both places have it."""
    plain = build(BY_NAME["llama"]).eval()
    first_layer, second_layer = plain.model.layers
    second_layer.mlp = first_layer.mlp
    options = {"target_modules": ["q_proj"], "modules_to_save": ["down_proj"]}
    third = {"target_modules": ["q_proj"]}
    model = trained(*[lora(**options)] * 2, third=third, model=deepcopy(plain))
    model.save_pretrained(tmp_path, selected_adapters=["one", "two"])
    for served in (model, plain):
        with Engine(served, block_size=4, num_blocks=200) as engine:
            for name in ("one", "two") if served is plain else ():
                engine.add_adapter(name, tmp_path / name)
            check_mixed(model, engine, ["one", None, "two"])
            engine.check()


FAMILIES = {
    "gemma3": (
        (
            {"target_modules": ["embed_tokens"], "use_dora": True},
            {"target_modules": ["q_proj", "embed_tokens"], "r": 3},
        ),
        (
            {"trainable_token_indices": TOKENS},
            {"modules_to_save": ["k_norm"], "trainable_token_indices": [5]},
        ),
    ),
    "gpt2": (
        ({"target_modules": ["c_attn", "wte"]}, {"modules_to_save": ["ln_f"], "use_dora": True}),
        ({"trainable_token_indices": {"wte": TOKENS}}, {"trainable_token_indices": {"wte": [5, 7]}}),
    ),
}


@pytest.mark.parametrize(
    ("family", "one", "two"), [(family, *case) for family, cases in FAMILIES.items() for case in cases]
)
def test_families(family: str, one: dict[str, Any], two: dict[str, Any]) -> None:
    """Scaled embeddings, norms of heads, Conv1D and a tied head; from the model and from state dicts."""
    fan = {"fan_in_fan_out": True} if family == "gpt2" else {}
    targets = {"target_modules": ["c_attn"]} if family == "gpt2" else {}
    model = trained(
        *[lora(**fan, **targets | each) for each in (one, two)], family=family, third=targets | fan
    )
    with Engine(model, block_size=4, num_blocks=200) as engine:
        check_mixed(model, engine, ["one", None, "two", "three"])
    torch.manual_seed(0)
    with Engine(build(BY_NAME[family]).eval(), block_size=4, num_blocks=200) as engine:
        for name in ("one", "two"):
            engine.add_adapter(name, model)
        check_mixed(model, engine, ["one", None, "two"])
        engine.check()


@pytest.mark.parametrize(
    "options",
    [
        {"trainable_token_indices": TOKENS},
        {"target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True},
        {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
        {"modules_to_save": ["embed_tokens"]},
    ],
)
def test_a_tied_head(options: dict[str, Any]) -> None:
    """It has what the embeddings have, or not, as peft says."""
    model = trained(lora(**options), lora(**options), model=with_a_tied_head())
    with Engine(model, block_size=4, num_blocks=200) as engine:
        check_mixed(model, engine, ["one", None, "two", "three"])
    with Engine(with_a_tied_head(), block_size=4, num_blocks=200) as engine:
        for name in ("one", "two"):
            engine.add_adapter(name, model)
        check_mixed(model, engine, ["one", None, "two"])


@pytest.mark.parametrize("kind", CASES)
def test_trained_in_place(kind: str) -> None:
    """New weights of a part, found by content, for its own requests alone (C24)."""
    model = trained(*[lora(**options) for options in CASES[kind]])
    ids = prompt(5, 17)
    with Engine(model, block_size=4, num_blocks=200) as engine:
        before = [ask(engine, ids, adapter=each) for each in ("one", "two")]
        for name, each in model.named_parameters():
            if (
                ".one" in name and "lora_" not in name.replace("lora_magnitude_vector", "")
            ) or ".one.bias" in name:
                each.data.mul_(-1.5)
            elif "lora_embedding_B.one" in name:
                each.data.mul_(-3)
        found = engine.generate([ids], **GREEDY, adapter="one")[0]
        assert first(found) == alone(model, ids, "one") != before[0]
        assert found.cached_tokens == 0
        kept = engine.generate([ids], **GREEDY, adapter="two")[0]
        assert first(kept) == before[1] == alone(model, ids, "two")
        assert kept.cached_tokens >= 16
        engine.check()


@pytest.mark.parametrize("owner", ["model", "engine"])
def test_a_norm_follows_the_weights_of_the_model(owner: str) -> None:
    """DoRA's scale is magnitude over the norm of what the layer and the product are together."""
    model = trained(lora(use_dora=True), lora())
    torch.manual_seed(0)
    served = model if owner == "model" else build(BY_NAME["llama"]).eval()
    with Engine(served, block_size=4, num_blocks=200) as engine:
        if owner == "engine":
            engine.add_adapter("one", model)
        ask(engine, prompt(3), adapter="one")
        for each in {model, served}:
            layers = (
                each.get_base_model().model.layers if hasattr(each, "get_base_model") else each.model.layers
            )
            for layer in layers:
                projection = layer.self_attn.v_proj
                getattr(projection, "base_layer", projection).weight.data[::2] *= 3
        assert ask(engine, prompt(3), adapter="one") == alone(model, prompt(3), "one")


def test_what_cannot_be_active_together_is_refused() -> None:
    options = {"modules_to_save": ["lm_head"]}
    model = trained(lora(**options), lora(**options))
    with Engine(model, block_size=4) as engine:
        with pytest.raises(ValueError, match="adapters 'one' and 'two' have modules_to_save at one Linear"):
            engine.submit(prompt(1), adapter=["one", "two"])
        assert ask(engine, prompt(1), adapter=["one", "three"]) == alone(model, prompt(1), ("one", "three"))
        engine.check()


def test_the_error_names_the_parts_of_both() -> None:
    whole = trained(lora(), lora(modules_to_save=["embed_tokens"]))
    with Engine(build(BY_NAME["llama"]), block_size=4) as engine:
        engine.add_adapter("one", trained(lora(trainable_token_indices=[1, 2])))
        engine.add_adapter("two", whole)
        both = "adapters 'one' and 'two' have trained tokens and modules_to_save at one Embedding"
        with pytest.raises(ValueError, match=both):
            engine.submit(prompt(1), adapter=["one", "two"])
        engine.check()


def test_own_biases_of_layers_are_an_adapters(tmp_path: Path) -> None:
    """`bias="lora_only"`: of a folder they belong to the adapter, and the model keeps its own."""
    torch.manual_seed(0)
    model = peft.get_peft_model(build(BY_NAME["qwen2"]), lora(bias="lora_only"), "one").eval()
    for name, each in model.named_parameters():
        if name.endswith("base_layer.bias"):
            each.data += 0.5
    model.save_pretrained(tmp_path)
    torch.manual_seed(0)
    plain = build(BY_NAME["qwen2"]).eval()
    base = peft.get_peft_model(plain, lora(), "none").eval()
    with Engine(plain, block_size=4, num_blocks=200) as engine:
        engine.add_adapter("one", tmp_path / "one")
        ids = prompt(2, 12)
        assert ask(engine, ids, adapter="one") == alone(model, ids, "one")
        assert ask(engine, ids, adapter=None) == alone(base, ids, None)


@pytest.mark.parametrize("kind", ["modules", "dora"])
def test_captured_steps(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that were captured with another adapter, or beside the model alone, serve these. Peft's modules
    compute whole norms, in a forward of their own beside them.
    """
    monkeypatch.setattr("hf_paged.engine.worker.adapters.triton_package", lambda *_: load())
    monkeypatch.setitem(RECORDERS, "cpu", rerun)
    policy(monkeypatch, pairs=0)
    few = {"target_modules": ["q_proj", "down_proj"]}
    model = trained(*[lora(**{**few, **options}) for options in CASES[kind]], third=few)
    options = {"block_size": 4, "num_blocks": 200, "max_batch_tokens": 12, "max_batch_sequences": 2}
    with Engine(model, **options) as engine:
        for names in (["three", None], ["one", "two"], [None, None]):
            prompts = [prompt(i, 9) for i in range(2)]
            handles = [
                engine.submit(ids, **GREEDY, adapter=name) for ids, name in zip(prompts, names, strict=True)
            ]
            expected = [alone(model, ids, name) for ids, name in zip(prompts, names, strict=True)]
            assert [tokens(handle) for handle in handles] == expected
        assert counts(engine)["replayed"] > 4, reasons(engine)
        computed = {name: info.computed for name, info in engine.adapters().items()}
        norms = kind == "modules"
        assert computed == {"one": "kernels", "two": "apart" if norms else "kernels", "three": "kernels"}
        assert (engine.stats()["adapters"]["forwards_apart"] > 0) == norms
        engine.check()


def test_a_head_that_the_device_has_no_memory_for(monkeypatch: pytest.MonkeyPatch) -> None:
    model = trained(lora(modules_to_save=["lm_head"]))
    with Engine(build(BY_NAME["llama"]).eval(), block_size=4) as engine:
        monkeypatch.setattr("hf_paged.engine.worker.adapters.free_bytes", lambda device: 1000)
        with pytest.raises(
            MemoryError, match=r"the adapter takes [\d,]+ bytes and cpu has 1,000 for adapters"
        ):
            engine.add_adapter("one", model)
        assert engine.adapters() == {}
        monkeypatch.undo()
        engine.add_adapter("one", model)
        assert engine.adapters()["one"].bytes > 96 * 32 * 4


def test_ranks_are_told_what_they_cannot_divide() -> None:
    """A part that is more than a product of a linear layer is refused by its kind and place, DoRA is not."""
    part = TrainedTokens((5,), torch.zeros(1, 32))
    assert not part.divides
    assert LowRank(torch.zeros(8, 4), torch.zeros(4, 8), 1.0).divides
    assert LowRank(torch.zeros(8, 4), torch.zeros(4, 8), 1.0, magnitude=torch.ones(4)).divides


@pytest.mark.parametrize(
    ("kind", "other"), [("tokens", "biases"), ("embeddings", "dora"), ("dora", "modules")]
)
def test_in_batch_invariant_mode(kind: str, other: str) -> None:
    """One, several and none in a batch have the bits of one alone."""
    model = trained(lora(**CASES[kind][0]), lora(**CASES[other][1]))
    ids = prompt(4, 12)
    with hf_paged.batch_invariant(), Engine(model, block_size=4, num_blocks=200) as engine:
        alone_in_it = engine.generate([ids], **GREEDY, logprobs=1, adapter="two")[0]
        handles = [
            engine.submit(each, **GREEDY, logprobs=1, adapter=name)
            for each, name in ((prompt(1), "one"), (ids, "two"), (prompt(2), None), (prompt(3), "three"))
        ]
        found = [handle.result() for handle in handles][1]
        assert [each.logprob for each in found.sequences[0].logprobs] == [
            each.logprob for each in alone_in_it.sequences[0].logprobs
        ]


def test_whole_norms_beside_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peft's modules compute them, for adapters of a folder too: all others stay in captured steps."""
    monkeypatch.setattr("hf_paged.engine.worker.adapters.triton_package", lambda *_: load())
    model = trained(lora(modules_to_save=["norm"]), lora())
    torch.manual_seed(0)
    with Engine(build(BY_NAME["llama"]).eval(), block_size=4, num_blocks=200) as engine:
        for name in ("one", "two"):
            state = peft.get_peft_model_state_dict(model, adapter_name=name)
            engine.add_adapter(name, state, model.peft_config[name])
        assert {name: info.computed for name, info in engine.adapters().items()} == {
            "one": "apart",
            "two": "kernels",
        }
        for name in ("one", "two", None):
            assert ask(engine, prompt(3), adapter=name) == alone(model, prompt(3), name)


def test_embeddings_as_prompts_beside_trained_tokens() -> None:
    """A step with a prompt of embeddings looks up the other rows' tokens itself: each as its adapter has it."""
    model = trained(*[lora(**options) for options in CASES["tokens"]])
    ids = prompt(3, 12)
    embeds = (
        model.get_base_model().get_input_embeddings().token_adapter.base_layer(torch.tensor(ids)).detach()
    )
    with Engine(model, block_size=4, num_blocks=200) as engine:
        names = ["two", None, "one"]
        handles = [engine.submit(prompt(i, 12), **GREEDY, adapter=name) for i, name in enumerate(names)]
        given = engine.submit(inputs_embeds=embeds, **GREEDY, adapter=None)
        assert [tokens(handle) for handle in handles] == [
            alone(model, prompt(i, 12), name) for i, name in enumerate(names)
        ]
        assert tokens(given) == alone(model, ids, None)
        engine.check()


def test_beams_and_preempted_requests() -> None:
    """Parts follow their rows through beams, samples, swaps and recomputation."""
    model = trained(lora(**CASES["tokens"][0]), lora(**CASES["dora"][0]))
    for mode in ("swap", "recompute"):
        with Engine(model, block_size=4, num_blocks=17, preemption=mode, watermark=0.0) as engine:
            wanted = ["one", "two", None, "three", "one", "two"]
            call = {"max_new_tokens": 14, "do_sample": False}
            handles = [engine.submit(prompt(i, 12), **call, adapter=each) for i, each in enumerate(wanted)]
            assert [tokens(each) for each in handles] == [
                alone(model, prompt(i, 12), each, max_new_tokens=14) for i, each in enumerate(wanted)
            ]
            assert engine.stats()["preemptions"] > 0
            beams = {"num_beams": 3, "num_return_sequences": 2}
            found = engine.generate([prompt(4)], **GREEDY, **beams, adapter="one")[0]
            assert first(found) == alone(model, prompt(4), "one", **beams)
            engine.check()


@FLAT_STATES
@pytest.mark.parametrize(("family", "saved", "target"), [
    ("jamba", "dt_proj", "in_proj"), ("qwen3_5_text", "conv1d", "in_proj_z"), ("mamba", "dt_proj", "in_proj"),
])  # fmt: skip
def test_a_module_whose_weight_a_forward_reads_itself(
    tmp_path: Path, family: str, saved: str, target: str
) -> None:
    """No request chooses among a peft model's adapters then, and one of a folder has forwards of its own."""

    def made() -> Any:
        return tiny.build("causal", tiny.config_class("causal", family)).eval()

    model = peft.get_peft_model(made(), lora(target_modules=[target], modules_to_save=[saved]), "one").eval()
    for name, each in model.named_parameters():
        if "modules_to_save" in name:
            each.data.mul_(-1)
    call = {"max_new_tokens": NEW, "do_sample": False}
    ids = torch.tensor([prompt(1)])
    wanted = model.generate(input_ids=ids, **call)[0, ids.shape[1] :].tolist()
    plain = made().generate(ids, **call)[0, ids.shape[1] :].tolist()
    assert wanted != plain
    model.save_pretrained(tmp_path)
    with Engine(model, block_size=4, num_blocks=200) as engine:
        assert ask(engine, prompt(1)) == wanted
        for name in ("one", None):
            with pytest.raises(
                ValueError, match=f"reads the weight of {saved}, which modules_to_save replaces"
            ):
                engine.submit(prompt(1), adapter=name)
        with model.disable_adapter():
            assert ask(engine, prompt(1)) == plain
    with Engine(made(), block_size=4, num_blocks=200) as engine:
        engine.add_adapter("one", tmp_path / "one")
        handles = [engine.submit(prompt(1), **call, adapter=name) for name in ("one", None)]
        assert [tokens(each) for each in handles] == [wanted, plain]
        engine.check()


def test_a_saved_head_that_is_still_the_models(tmp_path: Path) -> None:
    """It is the adapter's own: it stays as it was when the model is trained."""
    adapted(lora(modules_to_save=["lm_head"])).save_pretrained(tmp_path)
    model = build(BY_NAME["llama"]).eval()
    with Engine(model, block_size=4, num_blocks=200) as engine:
        engine.add_adapter("one", tmp_path / "one")
        before = ask(engine, prompt(1), adapter="one"), ask(engine, prompt(1), adapter=None)
        with torch.no_grad():
            model.lm_head.weight.add_(
                torch.randn(model.lm_head.weight.shape, generator=torch.Generator().manual_seed(9))
            )
        assert ask(engine, prompt(1), adapter="one") == before[0]
        assert ask(engine, prompt(1), adapter=None) != before[1]
