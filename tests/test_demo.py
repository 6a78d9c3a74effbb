"""The demo model: its files, its words, its tokenizer."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast, pipeline
from transformers.utils import logging as progress

from hf_paged import demo

ROOT = Path(__file__).resolve().parent.parent
DATA = Path(demo.__file__).resolve().parent / "data"


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return demo.model()


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return demo.tokenizer()


@pytest.fixture(scope="module")
def trainer() -> ModuleType:
    """The training script as a module; it owns what the words of the corpus are."""
    spec = importlib.util.spec_from_file_location("train_demo", ROOT / "scripts" / "train_demo.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up by name
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def vocabulary(trainer: ModuleType) -> set[str]:
    return trainer.vocabulary(trainer.read_corpus())


def continuations(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, **options: object
) -> list[list[int]]:
    """The new tokens for each of the demo's prompts, generated in one padded batch, with eos and without
    padding.
    """
    inputs = tokenizer(demo.prompts(), return_tensors="pt", padding=True)
    ids = model.generate(**inputs, max_new_tokens=220, **options)[:, inputs["input_ids"].shape[1] :]
    return [[token for token in row if token != tokenizer.pad_token_id] for row in ids.tolist()]


@pytest.fixture(scope="module")
def greedy(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> list[list[int]]:
    return continuations(model, tokenizer, do_sample=False)


def test_the_files_are_under_one_megabyte_together() -> None:
    assert (DATA / "model.safetensors").is_file()
    assert sum(file.stat().st_size for file in DATA.iterdir()) < 1_000_000


def test_the_model_is_a_llama_with_grouped_query_attention(model: LlamaForCausalLM) -> None:
    assert type(model) is LlamaForCausalLM
    assert model.config.num_key_value_heads < model.config.num_attention_heads
    assert model.dtype == torch.float32
    assert not model.training


def test_each_call_gives_a_new_model_with_the_same_weights(model: LlamaForCausalLM) -> None:
    other = demo.model()
    assert other is not model
    for (name, weight), (other_name, same) in zip(
        model.named_parameters(), other.named_parameters(), strict=True
    ):
        assert name == other_name
        assert weight.data_ptr() != same.data_ptr()
        assert torch.equal(weight, same)


@pytest.mark.parametrize("terminal", [False, True])
def test_its_weights_are_read_without_a_bar(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    """They are there at once; others' bars stay as they were."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    monkeypatch.setattr(progress, "_tqdm_active", True)
    demo.model()
    assert "".join(capsys.readouterr()) == ""
    assert progress.is_progress_bar_enabled()


def test_bfloat16_holds_the_weights_exactly(model: LlamaForCausalLM) -> None:
    assert all(torch.equal(weight, weight.bfloat16().float()) for weight in model.parameters())


def assert_words_of_the_corpus(texts: list[str], trainer: ModuleType, vocabulary: set[str]) -> None:
    for prompt, text in zip(demo.prompts(), texts, strict=True):
        words = trainer.words(prompt + text)
        assert len(words) > 30
        assert sum(word in vocabulary for word in words) >= 0.95 * len(words), sorted(set(words) - vocabulary)


def test_greedy_it_writes_words_of_its_corpus(
    tokenizer: PreTrainedTokenizerFast, greedy: list[list[int]], trainer: ModuleType, vocabulary: set[str]
) -> None:
    assert_words_of_the_corpus(tokenizer.batch_decode(greedy, skip_special_tokens=True), trainer, vocabulary)


@pytest.mark.parametrize("seed", range(2))
def test_sampled_it_writes_words_of_its_corpus(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    trainer: ModuleType,
    vocabulary: set[str],
    seed: int,
) -> None:
    torch.manual_seed(seed)
    sampled = continuations(model, tokenizer, do_sample=True, top_p=0.9)
    assert_words_of_the_corpus(tokenizer.batch_decode(sampled, skip_special_tokens=True), trainer, vocabulary)


def test_its_stories_end(tokenizer: PreTrainedTokenizerFast, greedy: list[list[int]]) -> None:
    assert all(tokens[-1] == tokenizer.eos_token_id for tokens in greedy)


def test_padding_on_the_left_changes_no_story(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, greedy: list[list[int]]
) -> None:
    shortest = min(range(len(greedy)), key=lambda index: len(tokenizer(demo.prompts()[index])["input_ids"]))
    inputs = tokenizer(demo.prompts()[shortest], return_tensors="pt")
    alone = model.generate(**inputs, max_new_tokens=220, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert alone.tolist() == greedy[shortest]


def test_beams_differ(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    inputs = tokenizer(demo.prompts()[0], return_tensors="pt")
    ids = model.generate(**inputs, max_new_tokens=40, do_sample=False, num_beams=4, num_return_sequences=4)
    assert len(set(tokenizer.batch_decode(ids, skip_special_tokens=True))) == 4


@pytest.mark.parametrize(
    "text",
    ["The fox sat by the river.", "  two  spaces\n\tand 123!", "Gr\u00fc\u00dfe \u4f60\u597d \U0001f98a", ""],
)
def test_the_tokenizer_gives_every_text_back(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    ids = tokenizer(text)["input_ids"]
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_the_tokenizer_pads_on_the_left(tokenizer: PreTrainedTokenizerFast) -> None:
    batch = tokenizer(["The fox", "The fox sat by the river."], padding=True)
    assert batch["input_ids"][0][0] == tokenizer.pad_token_id
    assert batch["attention_mask"][0][0] == 0
    assert len({tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}) == 3


def test_the_chat_template_is_the_form_it_was_trained_on(tokenizer: PreTrainedTokenizerFast) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello."},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "Thank you."},
    ]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == (
        "<|bos|><|system|>Be brief.<|eos|><|user|>Hello.<|eos|><|assistant|>Hello!<|eos|><|user|>Thank "
        "you.<|eos|><|assistant|>"
    )
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert ids.count(tokenizer.bos_token_id) == 1


def test_it_answers_a_chat(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, trainer: ModuleType, vocabulary: set[str]
) -> None:
    chat = pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")
    for question in ("Who are you?", "Tell me a story about the fox."):
        answer = chat([{"role": "user", "content": question}], max_new_tokens=200, do_sample=False)
        reply = answer[0]["generated_text"][-1]
        assert reply["role"] == "assistant"
        assert len(trainer.words(reply["content"])) > 10
        assert vocabulary.issuperset(trainer.words(reply["content"]))
        assert "<|" not in reply["content"]
