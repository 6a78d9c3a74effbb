"""pipeline("text-generation"): single, batched, chat; and a folder that was saved, loaded in the ways there
are.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

from hf_paged import demo
from hf_paged.generate.cache import paged_parts


@pytest.fixture(scope="module")
def generator() -> Any:
    return pipeline("text-generation", model=demo.model(), tokenizer=demo.tokenizer())


@pytest.mark.parametrize(
    ("mode", "batch_size"),
    [
        ({"do_sample": False}, 1),
        ({"do_sample": False}, 4),
        ({"num_beams": 4, "do_sample": False}, 4),
        ({"do_sample": True, "num_return_sequences": 2}, 4),
    ],
)
def test_prompts(generator: Any, mode: dict[str, Any], batch_size: int) -> None:
    """The same texts; batches are padded on the left."""
    answers = []
    for word in ({}, {"cache_implementation": "paged"}):
        torch.manual_seed(0)
        answers.append(generator(demo.prompts(), batch_size=batch_size, max_new_tokens=16, **mode, **word))
    assert answers[0] == answers[1]
    assert all(
        text["generated_text"] != prompt
        for prompt, texts in zip(demo.prompts(), answers[1], strict=True)
        for text in texts
    )


def test_chat(generator: Any) -> None:
    """Messages in, messages out."""
    chat = [{"role": "user", "content": "Tell me about the fox."}]
    answers = [
        generator(chat, max_new_tokens=16, do_sample=False, **word)
        for word in ({}, {"cache_implementation": "paged"})
    ]
    assert answers[0] == answers[1]
    assert answers[1][0]["generated_text"][-1]["role"] == "assistant"


def test_saved_folder(tmp_path: Path) -> None:
    """AutoModel from a folder, and a generation config that asks for pages."""
    model, tokenizer = demo.model(), demo.tokenizer()
    inputs = tokenizer(demo.prompts()[:2], return_tensors="pt", padding=True)
    stock = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    model.generation_config.cache_implementation = "paged"
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    inputs = AutoTokenizer.from_pretrained(tmp_path)(demo.prompts()[:2], return_tensors="pt", padding=True)
    answer = loaded.generate(**inputs, max_new_tokens=12, do_sample=False, return_dict_in_generate=True)
    assert torch.equal(answer.sequences, stock)
    assert type(answer.past_key_values).__name__ == "PagedCache"


@pytest.mark.parametrize("hooks", [False, True], ids=["one-device", "hooks-on-every-module"])
@pytest.mark.parametrize("mode", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_device_map(tmp_path: Path, mode: dict[str, Any], hooks: bool) -> None:
    """device_map="auto", and accelerate's hooks around every module, as a map over several devices puts them
    there.
    """
    demo.model().save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, device_map="auto")
    if hooks:
        places = {
            name: "cpu"
            for name, module in model.named_modules()
            if not list(module.children()) and list(module.parameters())
        }
        model = dispatch_model(
            model.cpu(), {**places, "model.rotary_emb": "cpu"}, main_device="cpu", force_hooks=True
        )
        assert hasattr(model.model.layers[0].self_attn.q_proj, "_hf_hook")
    inputs = demo.tokenizer()(demo.prompts()[:2], return_tensors="pt", padding=True).to(model.device)
    answers = [
        model.generate(
            **inputs, max_new_tokens=12, do_sample=False, **mode, **word, return_dict_in_generate=True
        )
        for word in ({}, {"cache_implementation": "paged"})
    ]
    assert torch.equal(answers[0].sequences, answers[1].sequences)
    assert set(paged_parts(answers[1].past_key_values)[0].paths) == {"paged"}
