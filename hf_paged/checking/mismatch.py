"""Compare stock and paged generate() on a user's model and inputs, or a sampler's log-probabilities with a
trainer's.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn
from transformers import GenerationMixin

from ..model.offloaded import input_device
from ..model.registry import base_model
from .logprobs import compare_logprobs, of_outputs
from .report import Mismatch, RowMismatch
from .runs import Runs, expected_noise, measured_noise
from .ties import BEAMS, is_tie, lead, relative_difference, scores_apart, size_of

Mode = Literal["greedy", "samples", "beams", "beam samples"]


def check_mismatch(
    model: nn.Module,
    inputs: torch.Tensor | Mapping[str, Any] | Sequence[Any],
    *,
    completions: Sequence[Sequence[int]] | torch.Tensor | None = None,
    logprobs: Sequence[Sequence[float]] | torch.Tensor | None = None,
    **generate_kwargs: Any,
) -> Mismatch:
    """Say whether the paged cache answers as stock does for this model and these inputs, and whether rounding
    explains what differs.

        inputs = tokenizer(prompts, return_tensors="pt", padding=True)
        print(hf_paged.check_mismatch(model, inputs, max_new_tokens=200))

    inputs: token ids, or the keywords of `model.generate()`; the rest of them in `generate_kwargs`,
    `cache_config` for the paged call among them. Both calls begin with the same random state, so samples are
    comparable, and the state is put back at the end. The model runs in evaluation mode, and its modules'
    modes are put back.

    Greedy and samples are compared token by token. At a row's first difference both computations are made to
    follow stock's tokens up to there, and their logits are compared: rounding explains the difference if
    logits agree within it, and, without sampling, if the two tokens lie within twice of it (a tie). A draw
    has no tie: it falls on one side of a rounded probability. What follows a difference is another text and
    is not compared.
    Beams: a search that keeps another branch at a tie ends in other hypotheses. Equal scores at every rank
    are explained by rounding; other scores are "unknown", and so are other beam samples: compare those in
    float32, or with num_beams=1.

    With `completions`, token ids behind the prompts of `inputs`, log-probabilities are compared instead:
    `logprobs` as a sampler reported them (raw: before temperature and truncation), or without it those of
    paged decoding, with a forward without a cache as a trainer makes it. A prompt may have several
    completions, next to each other. Outputs of an engine in the place of `inputs` bring all of that.
    """
    if isinstance(inputs, Sequence):
        if completions is not None or logprobs is not None:
            raise TypeError(
                "outputs bring their completions and logprobs; leave completions= and logprobs= out"
            )
        inputs, completions, logprobs = of_outputs(inputs, input_device(model))
    with torch.no_grad(), Runs(model, inputs, generate_kwargs) as runs:
        if completions is not None:
            return compare_logprobs(runs, completions, logprobs)
        if logprobs is not None:
            raise ValueError("logprobs belong to tokens; pass these as completions=")
        return _compare_answers(runs)


def _compare_answers(runs: Runs) -> Mismatch:
    """Both answers to one call, token by token."""
    mode = _mode(runs)
    stock = runs.answer(paged=False, scores="beam" in mode)
    paged = runs.answer(paged=True, scores="beam" in mode)
    one, other = _aligned(stock.sequences, paged.sequences, runs.padding)
    begin = min(stock.begin, one.shape[1])
    places = {
        row: int((one[row] != other[row]).nonzero()[0]) - begin
        for row in range(one.shape[0])
        if not torch.equal(one[row], other[row])
    }
    compared = sum(places.get(row, one.shape[1] - begin) for row in range(one.shape[0]))
    noise = expected_noise(runs.dtype)
    measured = False
    different: list[RowMismatch] = []
    if places and "beam" in mode:
        different = _judge_beams(places, stock.scores, paged.scores, noise, mode)
    elif places and _generates_alone(runs.model):
        name = type(base_model(runs.model)).__name__
        reason = f"{name} has a generate() of its own, whose steps cannot be followed"
        different = [RowMismatch(row, None, None, None, None, None, "unknown", reason) for row in places]
    elif places:
        tokens = one[:, begin:]
        logits = [runs.follow(tokens, places, paged=paged) for paged in (False, True)]
        chosen = {
            row: (int(one[row, begin + step]), int(other[row, begin + step])) for row, step in places.items()
        }
        different = _judge(places, chosen, logits, noise, mode)
        if any(row.verdict == "mismatch" for row in different):
            noise = measured_noise(runs, lambda: runs.follow(tokens, places, paged=False))
            measured = True
            different = _judge(places, chosen, logits, noise, mode)
    name = type(base_model(runs.model)).__name__
    return Mismatch(name, runs.dtype_name, mode, one.shape[0], compared, noise, measured, tuple(different))


def _mode(runs: Runs) -> Mode:
    sampled = bool(runs.option("do_sample"))
    if (runs.option("num_beams") or 1) > 1:
        return "beam samples" if sampled else "beams"
    return "samples" if sampled else "greedy"


def _generates_alone(model: nn.Module) -> bool:
    kind: Any = type(base_model(model))
    return inspect.unwrap(kind.generate) is not inspect.unwrap(GenerationMixin.generate)


def _aligned(one: torch.Tensor, other: torch.Tensor, padding: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two answers [rows, columns] of the same width: the shorter one ended in every row, and padding
    follows.
    """
    width = max(one.shape[1], other.shape[1])
    first, second = (
        nn.functional.pad(each.cpu(), (0, width - each.shape[1]), value=padding) for each in (one, other)
    )
    return first, second


def _judge(
    places: Mapping[int, int],
    chosen: Mapping[int, tuple[int, int]],
    logits: Sequence[Mapping[int, torch.Tensor]],
    noise: float,
    mode: Mode,
) -> list[RowMismatch]:
    """The rows that differ, each by its logits [vocabulary] after the common prefix."""
    found = []
    for row, step in places.items():
        one, other = (each[row] for each in logits)
        tokens = chosen[row]
        far = relative_difference(one, other)
        gap = lead(one, *tokens, size_of(one))
        if not far <= noise:  # which a NaN is not, either
            verdict = "mismatch"
            reason = f"logits differ by {far:.1e}, rounding explains {noise:.1e}"
        elif mode == "samples":
            verdict = "rounding"
            reason = f"logits agree ({far:.1e}); the draw fell on the other side of a rounded probability"
        elif is_tie(gap, noise):
            verdict = "rounding"
            reason = f"a tie: {gap:.1e} apart, rounding explains {2 * noise:.1e}"
        else:
            verdict = "mismatch"
            reason = f"no tie: {gap:.1e} apart, rounding explains {2 * noise:.1e}"
        # One of the verdicts.
        found.append(RowMismatch(row, step, *tokens, gap, far, verdict, reason))  # type: ignore[arg-type]
    return found


def _judge_beams(
    places: Mapping[int, int], one: torch.Tensor, other: torch.Tensor, noise: float, mode: Mode
) -> list[RowMismatch]:
    """The hypotheses that differ, each by its score."""
    found = []
    for row in places:
        far = scores_apart(one[row : row + 1], other[row : row + 1])
        scores = f"scores {one[row]:.4f} (stock) and {other[row]:.4f} (paged)"
        if mode == "beams" and far <= BEAMS * noise:
            found.append(
                RowMismatch(
                    row, None, None, None, None, far, "rounding", f"another hypothesis as good: {scores}"
                )
            )
        else:
            reason = (
                f"{scores}: another branch was kept or drawn before, at a tie or not; "
                "compare in float32 or with num_beams=1"
            )
            found.append(RowMismatch(row, None, None, None, None, far, "unknown", reason))
    return found
