"""Answers that are the same up to rounding, and the sweep over a device that rests on them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from captures import policy
from families import BY_NAME, build
from router_ties import first_ties, judge_beams, router_margins, routers

from hf_paged.checking.ties import NOISE, judge, rounding
from hf_paged.model.rehearsal import RECORDERS

PROMPT = 2


def answer(logits: torch.Tensor, tokens: torch.Tensor | None = None) -> Any:
    """An answer of generate() with logits [rows, steps, words]: the best words behind a prompt, or the given
    ones.
    """
    tokens = logits.argmax(-1) if tokens is None else tokens
    prompt = torch.zeros(len(tokens), PROMPT, dtype=torch.long)
    return SimpleNamespace(sequences=torch.cat([prompt, tokens], 1), logits=tuple(logits.unbind(1)))


@pytest.fixture
def logits() -> torch.Tensor:
    """Two rows of five steps over nine words, whose best word leads by far: the largest is 4."""
    logits = torch.rand(2, 5, 9, generator=torch.Generator().manual_seed(0))
    logits[:, :, 3] = 4.0
    return logits


def test_the_same(logits: torch.Tensor) -> None:
    verdict = judge(answer(logits), answer(logits + 0.01), PROMPT, 0.01)
    assert verdict.mark == "="
    assert verdict.compared == 10
    assert verdict.apart == pytest.approx(0.01 / 4, rel=1e-3)


def test_tokens_that_part_at_a_tie(logits: torch.Tensor) -> None:
    """Tokens behind another token are another text, and not compared."""
    logits[0, 2, 5] = 3.99
    other = logits.clone()
    other[0, 2, 5] = 4.01
    other[0, 3:] = torch.rand(2, 9) * 7
    verdict = judge(answer(logits), answer(other), PROMPT, 0.01)
    assert (verdict.mark, verdict.compared) == ("~", 3 + 5)


def test_tokens_that_part_without_a_tie(logits: torch.Tensor) -> None:
    """Logits may agree, and still the paged answer say what is not best."""
    tokens = logits.argmax(-1)
    tokens[1, 4] = 6
    verdict = judge(answer(logits), answer(logits, tokens), PROMPT, 0.01)
    assert verdict.mark == "X"
    assert "row 1" in verdict.why
    assert "no tie" in verdict.why
    assert judge(answer(logits), answer(logits, tokens), PROMPT, 0.01, drawn=True).mark == "="


@pytest.mark.parametrize("wrong", [0.5, float("nan"), float("inf")])
def test_logits_that_rounding_does_not_explain(logits: torch.Tensor, wrong: float) -> None:
    other = logits.clone()
    other[1, 3, 0] = logits[1, 3, 0] + wrong
    verdict = judge(answer(logits), answer(other, logits.argmax(-1)), PROMPT, 0.01)
    assert verdict.mark == "X"
    assert "row 1" in verdict.why


def test_words_that_both_forbid_are_equal(logits: torch.Tensor) -> None:
    logits[:, :, 7] = -torch.inf
    assert judge(answer(logits), answer(logits.clone()), PROMPT, 0.01).mark == "="


def test_steps_behind_a_tie_of_experts_are_left_out(logits: torch.Tensor) -> None:
    other = logits.clone()
    other[0, 2:] += 3
    assert judge(answer(logits), answer(other), PROMPT, 0.01).mark == "X"
    verdict = judge(answer(logits), answer(other), PROMPT, 0.01, [2, torch.inf])
    assert (verdict.mark, verdict.compared) == ("=", 2 + 5)


def test_beams() -> None:
    """Other beams with the same scores are a tie."""
    one = SimpleNamespace(sequences=torch.tensor([[1, 2]]), sequences_scores=torch.tensor([-2.0]))
    other = SimpleNamespace(sequences=torch.tensor([[1, 3]]), sequences_scores=torch.tensor([-2.001]))
    assert judge_beams(one, one, 1e-3).mark == "="
    assert judge_beams(one, other, 1e-3).mark == "~"
    assert judge_beams(one, other, 1e-5).mark == "X"


def test_margins_of_experts() -> None:
    """A router whose two last candidates are made equal for one token has no margin there; padding does not
    matter.
    """
    model = build(BY_NAME["mixtral"])
    assert len(routers(model)) == 2
    ids = torch.randint(5, 90, (2, 6), generator=torch.Generator().manual_seed(1))
    with router_margins(model) as margins, torch.no_grad():
        model(ids)
        model(ids[:, :1])
    assert [margin.shape for margin in margins] == [(12,), (12,), (2,), (2,)]
    assert not any(router._forward_hooks for router in routers(model))
    steady = [torch.full_like(margin, 0.5) for margin in margins]
    mask = torch.ones_like(ids)
    assert first_ties(steady, 0.1, mask, 2, 2) == [torch.inf, torch.inf]
    steady[1][6 + 2] = 0.05  # the second row's third token, in the second layer
    steady[2][0] = 0.05
    assert first_ties(steady, 0.1, mask, 2, 2) == [1, 0]
    mask[1, :3] = 0
    assert first_ties(steady, 0.1, mask, 2, 2) == [1, torch.inf]
    with torch.no_grad():
        for router in routers(model):
            router.weight[1:] = router.weight[:1]
    with router_margins(model) as margins, torch.no_grad():
        model(ids)
    assert not any(margin.any() for margin in margins)


def test_what_rounding_explains(llama: Any) -> None:
    """A model's own rounding, against the same weights in a wider format that say the same tokens."""
    ids = torch.randint(5, 90, (2, 9), generator=torch.Generator().manual_seed(1))
    call = {
        "input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False,
        "return_dict_in_generate": True, "output_logits": True,
    }  # fmt: skip
    found = {}
    for dtype in (torch.bfloat16, torch.float32):
        model = llama.to(dtype)
        found[dtype] = rounding(model, call, model.generate(**call), 9)
        assert model.dtype == dtype
    assert 2**-10 < found[torch.bfloat16] < 4 * NOISE[torch.bfloat16]
    assert 0 < found[torch.float32] < NOISE[torch.float32]


# ---- the sweep


@pytest.fixture
def sweep(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """scripts/sweep_device.py, whose settings last as long as the test."""
    scripts = Path(__file__).parent.parent / "scripts"
    monkeypatch.syspath_prepend(str(scripts))
    policy(monkeypatch, least_steps=16)
    monkeypatch.setitem(RECORDERS, "cpu", RECORDERS.get("cpu"))
    spec = importlib.util.spec_from_file_location("sweep_device", scripts / "sweep_device.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("family", "beams"), [("llama", "=~"), ("mixtral", ".")])
def test_a_family_in_bfloat16(
    sweep: ModuleType, family: str, beams: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """All calls agree up to ties, and their steps are captured."""
    (row,) = sweep.run_family("causal", family, "cpu", [torch.bfloat16])
    assert set(row["marks"]) == set(sweep.CALLS)
    assert row["marks"]["beams"] in beams
    assert all(row["marks"][call] in "=~" for call in ("greedy", "padded"))
    assert row["steps"] > 8
    assert row["captured"].endswith("steps")
    assert sweep.summary([row]) == 0
    assert "different: none; failed: none" in capsys.readouterr().out


def test_a_family_that_says_something_else(
    sweep: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A paged call that chooses other tokens is found, and is the exit code."""
    monkeypatch.setitem(sweep.PAGED, "repetition_penalty", 3.0)
    (row,) = sweep.run_family("causal", "llama", "cpu", [torch.float32])
    assert row["marks"] == dict.fromkeys(sweep.CALLS, "X")
    assert "no tie" in row["notes"][0]
    assert sweep.summary([row]) == 1
    assert "different: llama" in capsys.readouterr().out


def test_a_family_that_cannot_be_run(sweep: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    row = {
        "kind": "causal",
        "family": "llama",
        "dtype": "float32",
        "marks": {},
        "notes": ["exit code -11: "],
        "failed": True,
    }
    assert sweep.summary([row]) == 1
    assert "failed: llama" in capsys.readouterr().out


def test_a_path_that_another_release_lays_out_otherwise_is_not_lost(
    sweep: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lost is what is read worse than it was, or in fewer layers."""
    import models_page

    monkeypatch.setattr(models_page, "expected_paths", lambda: {"causal some": "2 full paged, 1 state stock"})
    row = {"kind": "causal", "family": "some", "marks": {"greedy": "="}}
    for path, lost in (
        ("2 full paged, 1 state stock", False), ("1 full paged, 1 window paged, 3 state stock", False), ("2 full paged", False),
        ("1 full paged, 2 state stock", True), ("2 full paged, 1 full dense", True), ("", True),
    ):  # fmt: skip
        assert bool(models_page.lost({**row, "path": path})) is lost, path


@pytest.mark.usefixtures("sweep")
def test_rows_are_put_into_a_page_and_counted() -> None:
    import models_page

    row = {
        "kind": "causal", "family": "some", "path": "2 state in slots", "why": "", "captured": "yes", "dense": "",
        "apart": 0.0, "notes": [], "marks": {"greedy": "=", "beams": "=", "chunks": "-"},
    }  # fmt: skip
    before = {
        **row,
        "path": "",
        "why": "it keeps a state of its own",
        "captured": "",
        "marks": {"greedy": "="},
    }
    run = {"rows": [before], "date": "2026-11-27", "transformers": "5.23.0", "torch": "2.13.0"}
    page = models_page.page(run, None)
    made = models_page.renewed(page, {**run, "rows": [row]}).splitlines()
    whole = models_page.page({**run, "rows": [row]}, None).splitlines()
    assert [line for line in made if line not in whole] == [
        "Made anew on 2026-11-27 with transformers 5.23.0: some."
    ]
    assert [line for line in whole if line not in made] == []
    with pytest.raises(ValueError, match="is no row below '## Causal language models'; make the page anew"):
        models_page.renewed(page, {**run, "rows": [{**row, "family": "another"}]})
