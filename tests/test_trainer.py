"""hf_paged.trainer: answers of a model while transformers' Trainer trains it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments

from hf_paged import demo
from hf_paged.trainer import SampleCallback


def _trained(folder: Path, callbacks: list[Any]) -> Any:
    torch.manual_seed(1)
    model, tokenizer = demo.model().float(), demo.tokenizer()
    ids = tokenizer(demo.prompts()[:4], padding=True, return_tensors="pt")["input_ids"]
    rows = [{"input_ids": row, "labels": row} for row in ids]
    arguments = TrainingArguments(
        str(folder),
        max_steps=4,
        per_device_train_batch_size=2,
        learning_rate=1e-3,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    Trainer(
        model=model, args=arguments, train_dataset=rows, processing_class=tokenizer, callbacks=callbacks
    ).train()
    return model


def test_samples_are_shown_and_change_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = demo.prompts()[:2]
    callback = SampleCallback(prompts, every=2, max_new_tokens=5, do_sample=True)
    model = _trained(tmp_path, [callback])
    assert [step for step, _ in callback.samples] == [2, 4]
    printed = capsys.readouterr().out
    for step, answers in callback.samples:
        assert all(answers)
        for prompt, answer in zip(prompts, answers, strict=True):
            assert f"step {step}  {prompt!r} -> {answer!r}" in printed
    assert model.training
    plain = _trained(tmp_path, [])
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


def test_a_part_in_another_mode_keeps_it() -> None:
    model = demo.model().train()
    frozen = model.model.layers[0].eval()
    callback = SampleCallback(demo.prompts()[:1], every=1, tokenizer=demo.tokenizer(), max_new_tokens=2)
    state = SimpleNamespace(global_step=1, is_world_process_zero=True)
    callback.on_step_end(None, state, None, model=model)
    assert model.training
    assert not any(module.training for module in frozen.modules())


def test_what_it_cannot_use_is_refused() -> None:
    with pytest.raises(ValueError, match="list of texts"):
        SampleCallback([])
    with pytest.raises(ValueError, match="1 or more"):
        SampleCallback(["a"], every=0)
