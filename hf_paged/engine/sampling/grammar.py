"""Answers that match a grammar: which tokens may come next, by llguidance, for all rows of a step at once."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from functools import cache
from typing import Any, NamedTuple

import torch
from transformers import LogitsProcessor

from ...kv import in_forked_process
from ...kv.upload import upload
from .grammar_trials import GrammarError, GrammarTrials, compile_grammar, trouble_of, with_deep_stack

KEPT = 64
"""Grammars that are kept for further requests."""
KEPT_BYTES = 2**30
"""Most bytes of them together."""
WORD = 32
"""Bits of a word of a mask."""


def json_grammar(schema: Mapping[str, Any] | bool, **options: Any) -> str:
    """The grammar of the JSON texts that fit a schema, without blanks between their words. options:
    llguidance's; `whitespace_pattern`, or `whitespace_flexible=True`, allows blanks.
    """
    found = {"allOf": [schema]} if isinstance(schema, bool) else schema
    if "whitespace_pattern" not in options:
        options.setdefault("whitespace_flexible", False)
    return str(_library().LLMatcher.grammar_from_json_schema(json.dumps(found), overrides=options))


def regex_grammar(pattern: str) -> str:
    """The grammar of the texts that a regular expression matches as a whole."""
    return str(_library().LLMatcher.grammar_from_regex(pattern))


def choice_grammar(choices: Sequence[str]) -> str:
    """The grammar of some texts. They are one terminal: thousands of rules would pass a limit of llguidance's
    in the middle of an answer.
    """
    return lark_grammar("start: CHOICE\nCHOICE: " + " | ".join(json.dumps(each) for each in choices))


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
    size: in bytes.
    """

    start: Any
    vocabulary: int
    ends: frozenset[int]
    size: int

    def processor(self, prompt: int) -> GrammarProcessor:
        """A logits processor for one request. prompt: the length of its prompt, which is no answer."""
        return GrammarProcessor(self, prompt)


class Grammars:
    """Compiles grammars for a tokenizer. The last ones are kept, and why the last refused ones were.

    Each is tried in another process first, so what it takes is bounded; other threads wait for none of it.
    """

    def __init__(self, tokenizer: Any, vocabulary: int, ends: Collection[int]) -> None:
        """vocabulary: how many tokens the model has scores for. ends: its ends of sequence, by which answers
        end where the grammar does.
        """
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._ends = sorted(ends)
        self._kept: OrderedDict[str, Grammar | GrammarError] = OrderedDict()
        self._lock = threading.Lock()
        self._preparing = threading.Lock()
        self._made: tuple[Any, GrammarTrials] | None = None

    def compiled(self, grammar: str) -> Grammar:
        """A grammar for these tokens; raises GrammarError if no text can be made by it, or it takes too
        much.
        """
        found = self.kept(grammar)
        if found is None:
            try:
                found = self._compile(grammar)
            except GrammarError as error:
                self._keep(grammar, error)
                raise
            self._keep(grammar, found)
        return found

    def kept(self, grammar: str) -> Grammar | None:
        """A grammar that was compiled lately. This waits for no compilation."""
        with self._lock:
            found = self._kept.get(grammar)
            if found is not None:
                self._kept.move_to_end(grammar)
        if isinstance(found, GrammarError):
            raise GrammarError(str(found))
        return found

    def _keep(self, grammar: str, found: Grammar | GrammarError) -> None:
        with self._lock:
            self._kept[grammar] = found
            total = sum(each.size for each in self._kept.values() if isinstance(each, Grammar))
            while len(self._kept) > KEPT or (total > KEPT_BYTES and len(self._kept) > 1):
                _, oldest = self._kept.popitem(last=False)
                total -= oldest.size if isinstance(oldest, Grammar) else 0

    def _compile(self, grammar: str) -> Grammar:
        known, trials = self._prepared()
        size = trials.cost(grammar)
        start = with_deep_stack(lambda: compile_grammar(known, grammar))
        return Grammar(start, self._vocabulary, frozenset(self._ends), size)

    def _prepared(self) -> tuple[Any, GrammarTrials]:
        """llguidance's tokenizer, and the trials; made once."""
        if not self._ends:
            raise GrammarError("the model has no end of sequence, with which an answer could end")
        with self._preparing:
            if self._made is None:
                library = _library()
                text = _in_json(self._tokenizer)
                known = library.LLTokenizer(text, n_vocab=self._vocabulary, eos_token=self._ends)
                self._made = known, GrammarTrials(text, self._vocabulary, self._ends)
            return self._made


def _in_json(tokenizer: Any) -> str:
    """A tokenizer as tokenizers writes it."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(
            f"structured output needs a fast tokenizer, got {type(tokenizer).__name__}; load one with "
            "AutoTokenizer"
        )
    found = copy(backend)
    found.no_padding()
    found.no_truncation()
    return str(found.to_str())


class GrammarState:
    """Where in its grammar one answer is."""

    def __init__(self, start: Any) -> None:
        self._start = start
        self._matcher: Any = None
        self._seen: list[int] = []

    def matcher_after(self, answer: list[int]) -> Any:
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

    def __init__(self, grammar: Grammar, prompt: int, most: int | None = None) -> None:
        """most: how many tokens there are scores for, if an adapter's scores may be of fewer."""
        self._grammar = grammar
        self._prompt = prompt
        self._most = most
        self._states: dict[int, GrammarState] = {}

    def of_request(self, most: int | None) -> GrammarProcessor:
        """The same for a request of a model, or of its adapters, with scores for so many tokens at most."""
        return GrammarProcessor(self._grammar, self._prompt, most)

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
                matchers.append(state.matcher_after(answer))
                rows.append(row)
        if not rows:
            return scores
        self.require_known(scores.shape[1])
        bits = next_token_bitmasks(matchers, max(scores.shape[1], self.vocabulary), scores.device)
        for each in matchers:
            if each.is_error():
                raise unfollowed(each)
        return scores.index_copy(0, upload(rows, scores.device), masked(scores[rows], bits))

    @property
    def vocabulary(self) -> int:
        """How many tokens the grammar knows. It forbids all others, as those that an adapter has added."""
        return self._grammar.vocabulary

    def require_known(self, scores: int | None = None) -> None:
        """Raise if the grammar knows tokens that do not exist. scores: how many there are of a row."""
        most = self._most or scores
        if most is not None and self.vocabulary > most:
            raise GrammarError(
                f"the grammar was compiled for {self.vocabulary} tokens and the model has {most} "
                "scores; give Grammars that number as its vocabulary"
            )


def unfollowed(matcher: Any) -> GrammarError:
    """Why a matcher is of no more use: it has met a token that it forbids, or a limit."""
    return GrammarError(f"the grammar cannot be followed further: {trouble_of(matcher)}")


def next_token_bitmasks(matchers: Sequence[Any], vocabulary: int, device: torch.device) -> torch.Tensor:
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
