"""Adapters of another vocabulary than their model's: fine-tunes with new tokens, and with fewer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from adapter_answers import NEW, alone, ask, first, prompt, tokens
from adapters import lora, trained, with_a_tied_head
from captures import counts, policy, reasons
from cases import every_other
from families import BY_NAME, build
from kernel_cases import load
from tape import rerun
from torch import nn

import hf_paged
from hf_paged import Engine
from hf_paged.model.rehearsal import RECORDERS

GREEDY: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}
MORE = 104
FEWER = 92
ADDED = [96, *range(97, 104)]
CASES: dict[str, dict[str, Any]] = {
    "whole": {"modules_to_save": ["lm_head", "embed_tokens"]},
    "resized": {},
    "products": {"target_modules": ["q_proj", "embed_tokens", "lm_head"]},
    "dora": {"target_modules": ["v_proj", "embed_tokens", "lm_head"], "use_dora": True},
    "tokens": {"trainable_token_indices": [5, *ADDED]},
}


def plain(family: str = "llama") -> Any:
    return build(BY_NAME[family]).eval()


def fine_tuned(size: int = MORE, model: Any = None, **options: Any) -> Any:
    """A peft model over a base with so many tokens, whose adapters "one" and "two" know them all."""
    torch.manual_seed(0)
    base = model or build(BY_NAME["llama"])
    base.resize_token_embeddings(size)
    return trained(lora(**options), model=base)


def saved(model: Any, folder: Path, name: str = "one") -> Path:
    """The folder of an adapter with the embeddings and the head that it was trained with."""
    model.save_pretrained(folder, selected_adapters=[name], save_embedding_layers=True)
    return folder / name


def with_others(engine: Engine, folder: Path, **options: Any) -> Any:
    """An engine's adapter "plain" of its model's own vocabulary: the peft model with it."""
    torch.manual_seed(0)
    own = trained(lora(**options), third=options)
    own.save_pretrained(folder / "own", selected_adapters=["two"])
    engine.add_adapter("plain", folder / "own" / "two")
    return own


@pytest.mark.parametrize(("kind", "size"), every_other([*CASES], [MORE, FEWER]))
def test_beside_an_adapter_of_the_models_vocabulary_and_the_base(
    kind: str, size: int, tmp_path: Path
) -> None:
    options = dict(CASES[kind])
    if kind == "tokens" and size < MORE:
        options["trainable_token_indices"] = [5, 7]
    large = fine_tuned(size, **options)
    with Engine(plain(), block_size=4, num_blocks=200) as engine:
        engine.add_adapter("one", saved(large, tmp_path))
        own = with_others(engine, tmp_path)
        new = [size - 1, 4, size - 2, 5, 7, size - 1, 8, 9, 3, 5, 6]
        wanted = [(large, new, "one", "one"), (own, prompt(1), "two", "plain"), (own, prompt(2), None, None)]
        expected = [alone(model, ids, name) for model, ids, name, _ in wanted]
        for _ in range(2):  # the second time behind cached prefixes
            handles = [
                engine.submit(ids, **GREEDY, adapter=name, logprobs=3, prompt_logprobs=2)
                for _, ids, _, name in wanted
            ]
            assert [tokens(handle) for handle in handles] == expected
        for (model, ids, name, _), handle in zip(wanted, handles, strict=True):
            check_logprobs(model, ids, name, handle.result())
        assert engine.generate([new], **GREEDY, adapter="one")[0].cached_tokens >= 8
        engine.check()


def check_logprobs(model: Any, ids: list[int], name: str | None, output: Any) -> None:
    """Log-probabilities of the prompt and of the answer, and the top ones, are those of peft alone."""
    answer = first(output)
    model.set_adapter(name or "one")
    with torch.no_grad(), model.disable_adapter() if name is None else torch.no_grad():
        right = model(input_ids=torch.tensor([ids + answer])).logits[0].log_softmax(-1)
    found = [each.logprob for each in output.prompt_logprobs[1:]]
    found += [each.logprob for each in output.sequences[0].logprobs]
    chosen = right[:-1].gather(1, torch.tensor(ids[1:] + answer)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(found), chosen, atol=2e-4, rtol=0)
    for row, each in zip(right[len(ids) - 1 :], output.sequences[0].logprobs, strict=False):
        top = torch.tensor([logprob for _, logprob in each.top_logprobs])
        torch.testing.assert_close(top, row.topk(3).values, atol=2e-4, rtol=0)


def test_processors_beams_and_samples_have_the_scores_of_their_own_vocabulary(tmp_path: Path) -> None:
    large = fine_tuned()
    shapes: dict[str, int] = {}
    with Engine(plain(), block_size=4, num_blocks=200) as engine:
        engine.add_adapter("one", saved(large, tmp_path))
        own = with_others(engine, tmp_path)
        bias = {"sequence_bias": {(MORE - 1,): 50.0}, "repetition_penalty": 1.5}
        answers = {}

        def seen(name: str) -> Any:
            def look(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
                shapes[name] = scores.shape[1]
                return scores

            return look

        requests = {
            "biased": engine.submit(prompt(1), **GREEDY, adapter="one", logit_bias={MORE - 1: 50.0}, repetition_penalty=1.5),
            "beams": engine.submit(prompt(2), **GREEDY, adapter="one", num_beams=3),
            "one": engine.submit(prompt(3), **GREEDY, adapter="one", logits_processor=[seen("one")]),
            "base": engine.submit(prompt(4), **GREEDY, adapter=None, logits_processor=[seen("base")]),
            "beams of the base": engine.submit(prompt(5), **GREEDY, adapter=None, num_beams=3),
            "drawn": engine.submit(prompt(6), adapter="one", seed=3, max_new_tokens=NEW, do_sample=True, top_k=5, top_p=0.9, min_p=0.05),
        }  # fmt: skip
        answers = {name: tokens(handle) for name, handle in requests.items()}
        assert answers["biased"] == alone(large, prompt(1), "one", **bias)
        assert answers["biased"][0] == MORE - 1
        assert answers["beams"] == alone(large, prompt(2), "one", num_beams=3)
        assert answers["one"] == alone(large, prompt(3), "one")
        assert answers["base"] == alone(own, prompt(4), None)
        assert answers["beams of the base"] == alone(own, prompt(5), None, num_beams=3)
        drawn = {"seed": 3, "max_new_tokens": NEW, "do_sample": True, "top_k": 5, "top_p": 0.9, "min_p": 0.05}
        assert tokens(engine.submit(prompt(6), adapter="one", **drawn)) == answers["drawn"]
        assert shapes == {"one": MORE, "base": 96}


def test_what_a_request_does_not_know_is_refused(tmp_path: Path) -> None:
    with Engine(plain(), block_size=4, num_blocks=200) as engine:
        engine.add_adapter("one", saved(fine_tuned(**CASES["products"]), tmp_path))
        head = trained(lora(target_modules=["lm_head", "q_proj"]))
        engine.add_adapter("head", saved(head, tmp_path / "head"))
        engine.add_adapter("few", saved(fine_tuned(FEWER, **CASES["whole"]), tmp_path / "few"))
        for name, wrong in ((None, 96), ("one", MORE), ("few", FEWER)):
            with pytest.raises(ValueError, match=f"the prompt has the token id {wrong} and"):
                engine.submit([5, wrong], adapter=name)
            with pytest.raises(
                ValueError, match=f"token id {wrong} of logit_bias is not one of the {wrong} of"
            ):
                engine.submit([5], adapter=name, logit_bias={wrong: 1.0})
            with pytest.raises(ValueError, match=f"a number of top tokens from 0 to {wrong}"):
                engine.submit([5], adapter=name, logprobs=wrong + 1)
        with pytest.raises(
            ValueError, match=r"two vocabularies .*: 'one' \(104 tokens\), 'head' \(96 tokens\)"
        ):
            engine.submit([5], adapter=["one", "head"])
        engine.remove_adapter("one")
        engine.remove_adapter("few")
        assert ask(engine, prompt(1), adapter=None) == alone(trained(lora()), prompt(1), None)
        engine.check()


@pytest.mark.parametrize("kind", ["embeddings alone", "unknown rows", "another width"])
def test_a_part_of_a_vocabulary_is_refused(kind: str) -> None:
    options = {"trainable_token_indices": [5, 99]} if kind == "unknown rows" else CASES["whole"]
    large = fine_tuned(**options)
    state = peft.get_peft_model_state_dict(large, adapter_name="one")
    head = "base_model.model.lm_head.weight"
    if kind == "embeddings alone":
        del state[head]
    if kind == "another width":
        state[head] = state[head][:, :5]
    says = {
        "embeddings alone": r"embeddings of 104 tokens and a head of 96.*resize_token_embeddings\(104\)",
        "unknown rows": r"has 100 tokens at model.embed_tokens and the model 96",
        "another width": r"lm_head.weight is \[96, 32\], the adapter's \[104, 5\]",
    }
    with Engine(plain(), block_size=4) as engine:
        with pytest.raises(ValueError, match=says[kind]):
            engine.add_adapter("one", state, large.peft_config["one"])
        assert engine.adapters() == {}


def test_new_tokens_of_a_tied_head_need_no_whole_weight(tmp_path: Path) -> None:
    """Trained rows of all new tokens are the whole vocabulary."""
    large = fine_tuned(model=with_a_tied_head(), trainable_token_indices=[5, *ADDED])
    large.save_pretrained(tmp_path, selected_adapters=["one"], save_embedding_layers=False)
    with Engine(with_a_tied_head(), block_size=4, num_blocks=200) as engine:
        engine.add_adapter("one", tmp_path / "one")
        ids = [4, 103, 7, 99, 5, 6]
        handles = [
            engine.submit(ids, **GREEDY, adapter="one"),
            engine.submit(prompt(2), **GREEDY, adapter=None),
        ]
        assert [tokens(each) for each in handles] == [alone(large, ids, "one"), alone(large, prompt(2), None)]
        assert engine.adapters()["one"].bytes < 40_000


def test_an_adapter_that_pefts_modules_compute(tmp_path: Path) -> None:
    torch.manual_seed(0)
    base = build(BY_NAME["llama"])
    base.resize_token_embeddings(MORE)
    config = peft.IA3Config(
        target_modules=["q_proj", "down_proj"],
        feedforward_modules=["down_proj"],
        init_ia3_weights=False,
        modules_to_save=["lm_head", "embed_tokens"],
    )
    large = peft.get_peft_model(base, config, "one").eval()
    with Engine(plain(), block_size=4, num_blocks=200) as engine:
        engine.add_adapter("one", saved(large, tmp_path))
        assert engine.adapters()["one"].computed == "apart"
        own = with_others(engine, tmp_path)
        ids = [4, 103, 7, 99, 5, 6]
        wanted = [(large, ids, "one", "one"), (own, prompt(1), "two", "plain"), (own, prompt(2), None, None)]
        handles = [engine.submit(each, **GREEDY, adapter=name, logprobs=2) for _, each, _, name in wanted]
        assert [tokens(each) for each in handles] == [alone(*each[:3]) for each in wanted]
        with pytest.raises(ValueError, match="the token id 104 and its adapter knows those from 0 to 103"):
            engine.submit([104], adapter="one")
        with pytest.raises(ValueError, match="the token id 103 and"):
            engine.submit([103], adapter="plain")
        engine.check()


def test_a_peft_model_that_holds_one(tmp_path: Path) -> None:
    """Whole modules of another size, as a caller may put them into a peft model."""
    model = trained(lora(modules_to_save=["lm_head", "embed_tokens"]), lora())
    large = fine_tuned(modules_to_save=["lm_head", "embed_tokens"])
    ids = [4, 103, 7, 99, 5, 6]
    state = peft.get_peft_model_state_dict(large, adapter_name="one")
    whole = {path: state[f"base_model.model.{path}.weight"] for path in ("lm_head", "model.embed_tokens")}
    state |= {f"base_model.model.{path}.weight": weight[:96].clone() for path, weight in whole.items()}
    peft.set_peft_model_state_dict(model, state, adapter_name="one")
    for path, weight in whole.items():
        module: Any = model.get_base_model().get_submodule(path).modules_to_save["one"]
        module.weight = nn.Parameter(weight, requires_grad=False)
    model.set_adapter("two")
    with Engine(model, block_size=4, num_blocks=200) as engine:
        handles = [
            engine.submit(ids, **GREEDY, adapter="one"),
            engine.submit(prompt(2), **GREEDY, adapter="two"),
        ]
        assert [tokens(each) for each in handles] == [
            alone(large, ids, "one"),
            alone(model, prompt(2), "two"),
        ]


def test_captured_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are captured anew where a vocabulary grows, and those of the model alone stay."""
    monkeypatch.setattr("hf_paged.engine.worker.adapters.triton_package", lambda *_: load())
    monkeypatch.setitem(RECORDERS, "cpu", rerun)
    policy(monkeypatch, pairs=0)
    few = {"target_modules": ["q_proj", "down_proj"]}
    large = fine_tuned(**CASES["whole"], **few)
    options = {"block_size": 4, "num_blocks": 200, "max_batch_tokens": 12, "max_batch_sequences": 2}
    with Engine(plain(), **options) as engine:
        own = with_others(engine, tmp_path, **few)
        models = {"plain": (own, "two"), None: (own, None), "one": (large, "one")}

        def check(*names: Any) -> None:
            prompts = [[*prompt(i, 8), *([103] if name == "one" else [])] for i, name in enumerate(names)]
            handles = [
                engine.submit(ids, **GREEDY, adapter=name) for ids, name in zip(prompts, names, strict=True)
            ]
            for ids, name, handle in zip(prompts, names, handles, strict=True):
                assert tokens(handle) == alone(models[name][0], ids, models[name][1])

        check("plain", None)
        check(None, None)
        engine.add_adapter("one", saved(large, tmp_path))
        assert engine.adapters()["one"].computed == "kernels"
        for names in (("one", None), ("plain", "one"), (None, None), ("plain", None), ("one", "one")):
            before = counts(engine)["replayed"]
            check(*names)
            check(*names)
            assert counts(engine)["replayed"] > before, reasons(engine)
        engine.remove_adapter("one")
        check("plain", None)
        engine.check()


def test_in_batch_invariant_mode(tmp_path: Path) -> None:
    """Rows have the bits of one alone, whatever the vocabulary of the rows beside them."""
    folder = saved(fine_tuned(**CASES["whole"]), tmp_path)
    with hf_paged.batch_invariant(), Engine(plain(), block_size=4, num_blocks=200) as engine:
        bits = []
        for several in (False, True):
            if several:
                engine.add_adapter("one", folder)
            beside = [engine.submit(prompt(9), **GREEDY, adapter="one")] if several else []
            found = engine.submit(prompt(1), **GREEDY, logprobs=2, adapter=None).result()
            bits.append([(each.logprob, each.top_logprobs) for each in found.sequences[0].logprobs])
            [each.result() for each in beside]
        assert bits[0] == bits[1]
