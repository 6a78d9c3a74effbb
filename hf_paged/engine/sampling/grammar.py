"""Answers that match a grammar: which tokens may come next, by llguidance, for all rows of a step at once."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from transformers import LogitsProcessor

from ...kv import in_forked_process
from ...kv.upload import upload

KEPT = 64
"""Compiled grammars that are kept for further requests."""
STACK = 256 * 2**20
"""Bytes of the stack of a thread that compiles: llguidance recurses as deep as a grammar is long."""
WORD = 32
"""Bits of a word of a mask."""


class GrammarError(ValueError):
    """A grammar that cannot be read, or that no text matches."""


def json_grammar(schema: Mapping[str, Any] | bool, **options: Any) -> str:
    """The grammar of the JSON texts that fit a schema. options: llguidance's, `whitespace_flexible` and
    others.
    """
    found = {"allOf": [schema]} if isinstance(schema, bool) else schema
    return str(_library().LLMatcher.grammar_from_json_schema(json.dumps(found), overrides=options or None))


def regex_grammar(pattern: str) -> str:
    """The grammar of the texts that a regular expression matches as a whole."""
    return str(_library().LLMatcher.grammar_from_regex(pattern))


def choice_grammar(choices: Sequence[str]) -> str:
    """The grammar of some texts."""
    return lark_grammar("start: " + " | ".join(json.dumps(each) for each in choices))


def lark_grammar(grammar: str) -> str:
    """A grammar in Lark's form."""
    return str(_library().LLMatcher.grammar_from_lark(grammar))


def _library() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise ImportError("structured output needs llguidance: pip install 'hf_paged[structured]'") from error
    return llguidance


class Grammar(NamedTuple):
    """A compiled grammar.

    start: the matcher at its beginning. vocabulary: how many tokens it knows. ends: those that end an answer.
    """

    start: Any
    vocabulary: int
    ends: frozenset[int]

    def processor(self, prompt: int) -> GrammarProcessor:
        """A logits processor for one request. prompt: the length of its prompt, which is no answer."""
        return GrammarProcessor(self, prompt)


class Grammars:
    """Compiles grammars for a tokenizer. The last ones are kept."""

    def __init__(self, tokenizer: Any, vocabulary: int, ends: Collection[int]) -> None:
        """vocabulary: how many tokens the model has scores for. ends: its ends of sequence, by which answers
        end where the grammar does.
        """
        if not ends:
            raise GrammarError("the model has no end of sequence, with which an answer could end")
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._ends = sorted(ends)
        self._known: Any = None
        self._kept: OrderedDict[str, Grammar] = OrderedDict()
        self._lock = threading.Lock()

    def compiled(self, grammar: str) -> Grammar:
        """A grammar for these tokens; raises GrammarError if no text can be made by it."""
        with self._lock:
            if grammar in self._kept:
                self._kept.move_to_end(grammar)
                return self._kept[grammar]
            start = _with_deep_stack(lambda: self._compile(grammar))
            found = Grammar(start, self._vocabulary, frozenset(self._ends))
            self._kept[grammar] = found
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
            return found

    def _compile(self, grammar: str) -> Any:
        library = _library()
        if self._known is None:
            from llguidance.hf import from_tokenizer

            self._known = from_tokenizer(self._tokenizer, n_vocab=self._vocabulary, eos_token=self._ends)
        limits = library.LLParserLimits(verbose_errors=False)
        matcher = library.LLMatcher(self._known, grammar, log_level=0, limits=limits)
        for each in (matcher, matcher.deep_copy()):
            if each.is_error():
                raise GrammarError(f"the grammar cannot be used: {_trouble(each)}")
            # Some trouble shows with the first mask. The matcher that is kept stays at its beginning.
            if not any(each.compute_bitmask()) and not each.is_error():
                raise GrammarError("no token of the model can begin an answer that matches the grammar")
            if each.is_error():
                raise GrammarError(f"the grammar cannot be used: {_trouble(each)}")
        return matcher


def _trouble(matcher: Any) -> str:
    return " ".join(matcher.get_error().replace("<non-verbose/>", "").split())[:500]


def _with_deep_stack(act: Any) -> Any:
    """What `act` returns or raises, called in a thread with a large stack."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append((act(), None))
        except BaseException as error:
            found.append((None, error))

    before = threading.stack_size(STACK)
    try:
        thread = threading.Thread(target=run, name="hf_paged grammar")
        thread.start()
    finally:
        threading.stack_size(before)
    thread.join()
    value, error = found[0]
    if error is not None:
        raise error
    return value


class GrammarState:
    """Where in its grammar one answer is."""

    def __init__(self, start: Any) -> None:
        self._start = start
        self._matcher: Any = None
        self._seen: list[int] = []

    def behind(self, answer: list[int]) -> Any:
        """The matcher behind these tokens. It has seen most of them, unless they are another beam's."""
        count = len(self._seen)
        if self._matcher is None or answer[:count] != self._seen:
            self._matcher = self._start.deep_copy()
            count = 0
        self._matcher.consume_tokens(answer[count:])
        self._seen = list(answer)
        return self._matcher


class GrammarProcessor(LogitsProcessor):
    """Lets through only tokens with which an answer can match a grammar.

    The engine fills the masks of all requests together and calls no processor for that. In a beam search,
    beside processors of one's own, and in generate() it is a processor as others are.
    """

    def __init__(self, grammar: Grammar, prompt: int) -> None:
        self._grammar = grammar
        self._prompt = prompt
        self._states: dict[int, GrammarState] = {}

    def begin(self) -> GrammarState:
        """The state of a further answer."""
        return GrammarState(self._grammar.start)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Scores [rows, vocabulary] after ids [rows, tokens]."""
        rows = []
        matchers = []
        for row, answer in enumerate(input_ids[:, self._prompt :].tolist()):
            if self._grammar.ends.isdisjoint(answer):  # the others are over, and padded
                state = self._states.setdefault(row, self.begin())
                matchers.append(state.behind(answer))
                rows.append(row)
        if not rows:
            return scores
        self.require_scores(scores.shape[1])
        bits = filled(matchers, scores.shape[1], scores.device)
        for each in matchers:
            if each.is_error():
                raise unfollowed(each)
        return scores.index_copy(0, upload(rows, scores.device), masked(scores[rows], bits))

    def require_scores(self, vocabulary: int) -> None:
        """Raise if there are other tokens than the grammar knows."""
        known = self._grammar.vocabulary
        if vocabulary != known:
            raise GrammarError(
                f"the grammar was compiled for {known} tokens and the model has {vocabulary} "
                "scores; give Grammars that number as its vocabulary"
            )


def unfollowed(matcher: Any) -> GrammarError:
    """Why a matcher is of no more use: it has met a token that it forbids, or a limit."""
    return GrammarError(f"the grammar cannot be followed further: {_trouble(matcher)}")


def filled(matchers: Sequence[Any], vocabulary: int, device: torch.device) -> torch.Tensor:
    """Which tokens may come next behind each matcher: bits [matchers, words] on the host, in int32.

    This needs nothing of the device, which may compute meanwhile.
    """
    words = -(-vocabulary // WORD)
    pinned = device.type == "cuda"
    bits = torch.zeros(len(matchers), words, dtype=torch.int32, device="cpu", pin_memory=pinned)
    entries = list(zip(matchers, range(len(matchers)), strict=True))
    _executor().unsafe_compute_mask_ptr(entries, bits.data_ptr(), words * 4, len(matchers))
    return bits


def masked(scores: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """Scores [rows, vocabulary], minus infinity where bits [rows, words] say that a token may not come."""
    there = bits.to(scores.device, non_blocking=True)
    places = torch.arange(WORD, dtype=torch.int32, device=scores.device)
    allowed = (there[:, :, None] >> places & 1).flatten(1)[:, : scores.shape[1]]
    return scores.masked_fill(allowed == 0, -torch.inf)


@cache
def _executor() -> Any:
    """The threads that fill masks, for the whole process."""
    return _library().LLExecutor()


in_forked_process(_executor.cache_clear)
