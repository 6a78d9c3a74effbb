"""lm-evaluation-harness' own `hf` model class on local tasks: the same scores and the same answers from
pages.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hf_paged import demo
from hf_paged.model.registry import memory_of

lm_eval = pytest.importorskip("lm_eval", reason="needs lm-evaluation-harness: pip install lm-eval")

ANIMALS = ["fox", "bear", "owl", "mouse", "frog", "cat", "duck", "rabbit"]


def tasks(folder: Path) -> list[dict[str, Any]]:
    """Go on with a story, word for word as the demo's own greedy answer does; and choose the likelier end."""
    rows = [
        {"prompt": f"Once upon a time a little {animal}", "good": " was happy.", "bad": " happy was."}
        for animal in ANIMALS
    ]
    data = folder / "stories.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
    }
    told = {
        "task": "told", "output_type": "generate_until", "doc_to_text": "{{prompt}}", "doc_to_target": " was",
        "generation_kwargs": {"until": ["."], "do_sample": False, "max_gen_toks": 16},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }  # fmt: skip
    ends = {
        "task": "ends", "output_type": "multiple_choice", "doc_to_text": "{{prompt}}", "doc_to_choice": ["{{good}}", "{{bad}}"],
        "doc_to_target": 0, "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }  # fmt: skip
    return [{**source, **task} for task in (told, ends)]


def evaluate(folder: Path, paged: bool, **generation: Any) -> tuple[Any, Any, Any]:
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    model = demo.model()
    if paged:
        model.generation_config.cache_implementation = "paged"
    answer = lm_eval.simple_evaluate(
        model=HFLM(pretrained=model, tokenizer=demo.tokenizer(), batch_size=3),
        tasks=tasks(folder),
        task_manager=TaskManager(include_defaults=False),
        gen_kwargs=generation,
        bootstrap_iters=0,
        log_samples=True,
    )
    told = {name: [sample["resps"] for sample in samples] for name, samples in answer["samples"].items()}
    return answer["results"], told, model


@pytest.mark.parametrize("generation", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_same_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, generation: dict[str, Any]) -> None:
    """Prompts of different lengths in padded batches, stop strings as stopping criteria, and likelihoods
    without a cache.
    """
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    stock, said, _ = evaluate(tmp_path, paged=False, **generation)
    paged, says, model = evaluate(tmp_path, paged=True, **generation)
    assert stock == paged
    assert said == says
    assert memory_of(model).bytes
    assert {"told", "ends"} <= set(paged)
    assert len({str(answer) for answer in says["told"]}) > 1
