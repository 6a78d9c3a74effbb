"""Logits processors of many requests at once: functions of a row's scores, length and ids.

Such processors are transformers' own and are called as they are. Rows with the same processor and parameters
go through one call, whatever requests they belong to.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from transformers.generation import logits_process as stock

from ...kv.upload import upload
from .parameters import CUTS, NO_WARP, PENALTIES, Warp, is_of, warp_of

Phase = Callable[[int], Hashable]
Read = tuple[Hashable, Phase] | tuple[Hashable, Phase, Callable[[int], int]]
"""Fields of a rule beside its processor."""
Ids = Callable[[list[int], int, int], torch.Tensor]
"""The last ids of some rows, so many of each, with a number in front of rows that have fewer: [rows, ids]."""


class ProcessorRule(NamedTuple):
    """One processor of a request.

    alike: equal for processors that treat equal rows of one phase alike. phase: the effect of a row's length
    on it; None if there is none. window: how many of the last ids of a row of some length it reads; None if
    it reads none. Rows of one phase have windows of one length, or the processor ignores leading numbers that
    are no ids.
    """

    processor: Any
    alike: Hashable
    phase: Phase
    window: Callable[[int], int] | None = None


class ProcessorPlan(NamedTuple):
    """The processors of a request in the order in which they run.

    Penalties run between `before` and `between`, the rest of the warp between that and `after`.
    """

    warp: Warp = NO_WARP
    before: tuple[ProcessorRule, ...] = ()
    between: tuple[ProcessorRule, ...] = ()
    after: tuple[ProcessorRule, ...] = ()

    @property
    def reads(self) -> bool:
        """True if it reads the ids of a row."""
        return any(rule.window is not None for rule in (*self.before, *self.between, *self.after))


def _always(length: int) -> Hashable:
    return True


def _numbers(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(tensor.flatten().tolist())


def _min_length(own: Any) -> tuple[Hashable, Phase]:
    return _numbers(own.eos_token_id), lambda length: length < own.min_length or None


def _min_new_tokens(own: Any) -> tuple[Hashable, Phase]:
    first = own.prompt_length_to_skip + own.min_new_tokens
    return _numbers(own.eos_token_id), lambda length: length < first or None


def _forced_bos(own: Any) -> tuple[Hashable, Phase]:
    return own.bos_token_id, lambda length: length == 1 or None


def _forced_eos(own: Any) -> tuple[Hashable, Phase]:
    return _numbers(own.eos_token_id), lambda length: length == own.max_length - 1 or None


def _decay(own: Any) -> tuple[Hashable, Phase]:
    start = own.regulation_start
    alike = own.regulation_factor, _numbers(own.eos_token_id)
    return alike, lambda length: length - start if length > start else None


def _suppress_begin(own: Any) -> tuple[Hashable, Phase]:
    return _numbers(own.begin_suppress_tokens), lambda length: length == own.begin_index or None


def _bias(own: Any) -> Read:
    longest = max(map(len, own.sequence_bias), default=1)
    if longest == 1:
        return tuple(own.sequence_bias.items()), _always

    def window(length: int) -> int:
        return min(length, longest)

    return tuple(own.sequence_bias.items()), window, window


def _ngrams(own: Any) -> Read | None:
    size = own.ngram_size
    if size == 1:
        return None  # it would ban what comes before a row
    return size, lambda length: length >= size or None, lambda length: length


def _with(*names: str) -> Callable[[Any], tuple[Hashable, Phase]]:
    """The parameters of a processor that does not depend on the length."""
    return lambda own: (tuple([float(getattr(own, name)) for name in names]), _always)


READERS: dict[type, Callable[[Any], Read | None]] = {
    stock.MinLengthLogitsProcessor: _min_length,
    stock.MinNewTokensLengthLogitsProcessor: _min_new_tokens,
    stock.ForcedBOSTokenLogitsProcessor: _forced_bos,
    stock.ForcedEOSTokenLogitsProcessor: _forced_eos,
    stock.ExponentialDecayLengthPenalty: _decay,
    stock.SuppressTokensLogitsProcessor: lambda own: (_numbers(own.suppress_tokens), _always),
    stock.SuppressTokensAtBeginLogitsProcessor: _suppress_begin,
    stock.SequenceBiasLogitsProcessor: _bias,
    stock.NoBadWordsLogitsProcessor: _bias,
    stock.NoRepeatNGramLogitsProcessor: _ngrams,
    stock.InfNanRemoveLogitsProcessor: _with(),
    stock.LogitNormalization: _with(),
    stock.TemperatureLogitsWarper: _with("temperature"),
    stock.TopHLogitsWarper: _with("top_h", "top_n", "filter_value"),
    stock.TopKLogitsWarper: _with("top_k", "filter_value"),
    stock.TopPLogitsWarper: _with("top_p", "filter_value", "min_tokens_to_keep"),
    stock.MinPLogitsWarper: _with("min_p", "filter_value", "min_tokens_to_keep"),
    stock.TypicalLogitsWarper: _with("mass", "filter_value", "min_tokens_to_keep"),
    stock.EpsilonLogitsWarper: _with("epsilon", "filter_value", "min_tokens_to_keep"),
    stock.EtaLogitsWarper: _with("epsilon", "filter_value", "min_tokens_to_keep"),
}
"""How the parameters and the phases of each kind of processor are read."""

NEEDS_FINITE = frozenset({stock.TopHLogitsWarper, stock.EtaLogitsWarper})
"""Those that raise for rows without a finite maximum."""


def processor_rule_of(processor: Any) -> ProcessorRule | None:
    """The processor as a rule; None if it reads more of a row than its scores and its length."""
    read = READERS.get(type(processor))
    found = None if read is None else read(processor)
    return None if found is None else ProcessorRule(processor, (type(processor), found[0]), *found[1:])


def processor_plan_of(processors: Sequence[Any], sampled: bool) -> tuple[ProcessorPlan | None, list[str]]:
    """The processors as a plan, or None; and the names of those that prevent one."""
    begin = next((place for place, own in enumerate(processors) if is_of(own, PENALTIES)), 0)
    behind = begin
    while behind < len(processors) and warp_of(processors[begin : behind + 1], sampled=False) is not None:
        behind += 1
    penalties, rest = list(processors[begin:behind]), list(processors[behind:])
    # Cuts in transformers' order have operations that take other numbers for every row.
    first = next((place for place, own in enumerate(rest) if sampled and is_of(own, CUTS)), len(rest))
    end = first
    while end < len(rest) and is_of(rest[end], CUTS) and warp_of(rest[first : end + 1], sampled) is not None:
        end += 1
    warp = warp_of([*penalties, *rest[first:end]], sampled)
    parts = [processors[:begin], rest[:first], rest[end:]]
    rules = [[(own, processor_rule_of(own)) for own in part] for part in parts]
    slow = [type(own).__name__ for part in rules for own, rule in part if rule is None]
    if slow or warp is None:
        return None, slow
    return ProcessorPlan(warp, *[tuple([rule for _, rule in part if rule is not None]) for part in rules]), []


def processed(
    scores: torch.Tensor,
    rules: Sequence[tuple[ProcessorRule, ...]],
    lengths: Sequence[int],
    fail: Callable[[int, Exception], None],
    read: Ids | None = None,
) -> torch.Tensor:
    """Scores [rows, vocabulary] after each row's rules; lengths: of the rows as processors see them.

    Where a processor raises for a row, that row becomes NaN and `fail` is called for it. Other rows are
    processed.
    """
    for place in range(max(map(len, rules), default=0)):
        alike: dict[Hashable, list[int]] = {}
        for row, (own, length) in enumerate(zip(rules, lengths, strict=True)):
            phase = own[place].phase(length) if place < len(own) else None
            if phase is not None:
                alike.setdefault((own[place].alike, phase), []).append(row)
        for rows in alike.values():
            try:
                scores = _with_rows(scores, rows, rules[rows[0]][place], lengths, read)
            except Exception:
                scores = _one_by_one(scores, rows, [own[place:] for own in rules], lengths, fail, read)
    return scores


def _one_by_one(
    scores: torch.Tensor,
    rows: list[int],
    rules: Sequence[tuple[ProcessorRule, ...]],
    lengths: Sequence[int],
    fail: Callable[[int, Exception], None],
    read: Ids | None,
) -> torch.Tensor:
    """Scores after the first rule of each of these rows, row by row: the rule raised for some of them."""
    for row in rows:
        try:
            scores = _with_rows(scores, [row], rules[row][0], lengths, read)
        except Exception as error:
            scores = scores.index_fill(0, upload([row], scores.device), torch.nan)
            fail(row, error)
    return scores


def _with_rows(
    scores: torch.Tensor, rows: list[int], rule: ProcessorRule, lengths: Sequence[int], read: Ids | None
) -> torch.Tensor:
    """Scores of which some rows were processed."""
    places = None if len(rows) == scores.shape[0] else upload(rows, scores.device)
    part = scores if places is None else scores[places]
    part = _applied(part, rule.processor, _ids(scores, rows, rule, lengths, read))
    return part if places is None else scores.index_copy(0, places, part)


def _ids(
    scores: torch.Tensor, rows: list[int], rule: ProcessorRule, lengths: Sequence[int], read: Ids | None
) -> torch.Tensor:
    """The ids that a rule reads; a tensor of the right shape if it reads none."""
    if rule.window is None or read is None:
        return torch.zeros((), dtype=torch.long, device=scores.device).expand(len(rows), lengths[rows[0]])
    return read(rows, max([rule.window(lengths[row]) for row in rows]), scores.shape[1])


def _applied(scores: torch.Tensor, processor: Any, ids: torch.Tensor) -> torch.Tensor:
    """Scores [rows, vocabulary] after a processor."""
    with torch.no_grad():
        if type(processor) not in NEEDS_FINITE:
            return processor(ids, scores)  # type: ignore[no-any-return]
        # A row without a finite maximum would be an error of all rows; it stays as it is.
        sound = scores.amax(-1, keepdim=True).isfinite()
        return torch.where(sound, processor(ids, scores.where(sound, 0.0)), scores)
