"""Log-probabilities of a sampler, compared with those of a trainer's forward on the same tokens."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import numpy
import torch

from ..model.registry import base_model
from .report import LogprobGap, Mismatch, Verdict
from .runs import Runs, expected_noise, measured_noise
from .ties import Follow, size_of

FAR = 0.1
"""Importance ratios further from 1 are counted."""


def of_outputs(outputs: Sequence[Any], device: torch.device) -> tuple[dict[str, Any], list[list[int]], Any]:
    """The prompt of each answer of an engine, the answers, and log-probabilities if all have some."""
    if not all(hasattr(each, "prompt_token_ids") for each in outputs):
        raise TypeError(f"inputs must be tensors or an engine's outputs, got {outputs!r:.30}; tokenize texts")
    answers = [(each.prompt_token_ids, answer) for each in outputs for answer in each.sequences]
    width = max((len(prompt) for prompt, _ in answers), default=0)
    padded = [[0] * (width - len(prompt)) + prompt for prompt, _ in answers]
    shown = [[int(i >= width - len(prompt)) for i in range(width)] for prompt, _ in answers]
    ids, mask = (torch.tensor(each, device=device) for each in (padded, shown))
    notes = [answer.logprobs for _, answer in answers]
    logprobs = None if None in notes else [each.raw for each in notes]
    tokens = [answer.token_ids for _, answer in answers]
    return {"input_ids": ids, "attention_mask": mask}, tokens, logprobs


def compare_logprobs(
    runs: Runs, completions: Sequence[Sequence[int]] | torch.Tensor, logprobs: Any
) -> Mismatch:
    """Compare what a sampler reported, or paged decoding computes, with a forward without a cache."""
    if runs.options:
        raise TypeError(
            f"completions are scored as they are; {sorted(runs.options)} would change nothing, leave them out"
        )
    answers = [[int(token) for token in each] for each in completions]
    _spread_prompts(runs, len(answers))
    _pad_on_the_left(runs)
    tokens, mask = _padded(answers, runs)
    trainer = _logits(runs, tokens, mask)
    theirs = _of_tokens(trainer, tokens)
    ours = _by_pages(runs, tokens) if logprobs is None else _reported(logprobs, answers, tokens)
    gap = _gap(ours[mask.cpu()], theirs[mask.cpu()])
    sizes = [size_of(row) for row in trainer]
    noise = expected_noise(runs.dtype)
    measured = not gap.largest <= 2 * noise * max(sizes)
    if measured:
        noise = measured_noise(
            runs,
            lambda: {i: row[mask[i]] for i, row in enumerate(_logits(runs, tokens, mask)) if mask[i].any()},
        )
    verdict: Verdict = "rounding" if gap.largest <= 2 * noise * max(sizes) else "mismatch"
    if gap.largest == 0:
        verdict = "identical"
    name = type(base_model(runs.model)).__name__
    counts = (len(answers), gap.tokens)
    return Mismatch(name, runs.dtype_name, "log-probabilities", *counts, noise, measured, (), gap, verdict)


def _spread_prompts(runs: Runs, answers: int) -> None:
    """Repeat prompts that have several completions."""
    if "inputs" in runs.inputs:
        base: Any = base_model(runs.model)
        runs.inputs[base.main_input_name] = runs.inputs.pop("inputs")
    prompts = next((len(value) for value in runs.inputs.values() if isinstance(value, torch.Tensor)), 0)
    if not prompts or answers % prompts:
        raise ValueError(
            f"expected as many completions as prompts, or a multiple of them: got {answers} for {prompts} "
            "prompts"
        )
    for name, value in runs.inputs.items():
        if isinstance(value, torch.Tensor) and len(value) == prompts:
            runs.inputs[name] = value.repeat_interleave(answers // prompts, 0)


def _pad_on_the_left(runs: Runs) -> None:
    """Let the completions of a decoder begin right behind their prompts: tokens that are not shown go to the
    front.
    """
    mask = runs.inputs.get("attention_mask")
    config: Any = base_model(runs.model).config
    if not isinstance(mask, torch.Tensor) or mask.ndim != 2 or config.is_encoder_decoder:
        return
    order = mask.bool().long().argsort(dim=1, stable=True)
    for name, value in runs.inputs.items():
        if isinstance(value, torch.Tensor) and value.shape == mask.shape:
            runs.inputs[name] = value.gather(1, order.to(value.device))


def _padded(answers: list[list[int]], runs: Runs) -> tuple[torch.Tensor, torch.Tensor]:
    """Completions [rows, longest], and which of the places are theirs."""
    longest = max((len(each) for each in answers), default=0)
    if not longest:
        raise ValueError("completions are empty; there is nothing to compare")
    config: Any = base_model(runs.model).config
    size = config.get_text_config(decoder=True).vocab_size
    for i, each in enumerate(answers):
        if each and not 0 <= min(each) <= max(each) < size:
            raise ValueError(
                f"completion {i} has token ids from {min(each)} to {max(each)}, expected 0 to {size - 1}; "
                "leave out padding"
            )
    device = runs.model.device
    tokens = torch.tensor([each + [runs.padding] * (longest - len(each)) for each in answers], device=device)
    mask = torch.tensor([[i < len(each) for i in range(longest)] for each in answers], device=device)
    return tokens, mask


def _logits(runs: Runs, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The logits [rows, new, vocabulary] of a forward without a cache at the places of `tokens`, in
    float32.
    """
    model: Any = base_model(runs.model)
    count = tokens.shape[1]
    arguments = dict(runs.inputs)
    if model.config.is_encoder_decoder:
        begin = runs.option("decoder_start_token_id")
        begin = model.config.decoder_start_token_id if begin is None else begin
        first = torch.full_like(tokens[:, :1], begin)
        arguments["decoder_input_ids"] = torch.cat(
            [arguments.pop("decoder_input_ids", first), tokens[:, :-1]], 1
        )
    else:
        if "input_ids" not in arguments:
            raise ValueError(
                f"log-probabilities are compared behind token ids; got {sorted(arguments)}, expected "
                "input_ids among them"
            )
        ids = arguments["input_ids"]
        shown = arguments.get("attention_mask", torch.ones_like(ids))
        arguments["input_ids"] = torch.cat([ids, tokens[:, :-1]], 1)
        arguments["attention_mask"] = torch.cat([shown, mask[:, :-1].to(shown.dtype)], 1)
        parameters = inspect.signature(model.forward).parameters
        if "position_ids" in parameters:
            arguments["position_ids"] = (arguments["attention_mask"].cumsum(1) - 1).clamp(min=0)
        if "logits_to_keep" in parameters:
            arguments["logits_to_keep"] = count
    logits: torch.Tensor = runs.model(**arguments, use_cache=False, return_dict=True).logits[:, -count:]
    return logits.float()


def _of_tokens(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The log-probability [rows, new] of each token, on the host. Row by row: a softmax is as large as its
    logits.
    """
    rows = zip(logits, tokens.to(logits.device), strict=True)
    return torch.stack([row.log_softmax(-1).gather(1, of_row[:, None])[:, 0] for row, of_row in rows]).cpu()


def _by_pages(runs: Runs, tokens: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of the tokens by paged decoding, one step at a time."""
    count = tokens.shape[1]
    options: dict[str, Any] = {
        "max_new_tokens": count,
        "do_sample": False,
        "num_beams": 1,
        "output_logits": True,
    }
    options |= {
        "pad_token_id": runs.padding,
        "eos_token_id": -1,
    }  # an end of sequence within the completions ends nothing
    answer = runs.generate(True, Follow(tokens), **options)
    return _of_tokens(torch.stack(answer.logits, 1).float(), tokens)


def _reported(logprobs: Any, answers: list[list[int]], tokens: torch.Tensor) -> torch.Tensor:
    """A sampler's log-probabilities [rows, new] as they were given."""
    rows = [[float(each) for each in row] for row in logprobs]
    found = torch.zeros(tokens.shape, dtype=torch.float32, device="cpu")
    if len(rows) != len(answers):
        raise ValueError(f"got logprobs of {len(rows)} completions, expected {len(answers)}")
    for i, (row, answer) in enumerate(zip(rows, answers, strict=True)):
        if len(row) < len(answer):
            raise ValueError(f"got {len(row)} logprobs for the {len(answer)} tokens of completion {i}")
        found[i, : len(answer)] = torch.tensor(row[: len(answer)], dtype=torch.float32, device="cpu")
    return found


def _gap(sampler: torch.Tensor, trainer: torch.Tensor) -> LogprobGap:
    """The differences of log-probabilities [tokens]. NaN in one of them is NaN in what is reported."""
    differences = (trainer - sampler).double().numpy()  # which batch_invariant() does not touch
    with numpy.errstate(over="ignore"):
        ratios = numpy.exp(differences)
    sizes = abs(differences)
    return LogprobGap(
        len(sizes),
        float(sizes.max()),
        float(sizes.mean()),
        float(ratios.min()),
        float(ratios.max()),
        float((abs(ratios - 1) > FAR).mean()),
    )
