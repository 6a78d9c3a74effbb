"""Stop strings: transformers' criterion at a cost that grows with the logarithm of their number, and an
automaton that reads answers token by token.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from transformers import StoppingCriteria, StopStringCriteria

from ...kv import fork_safe_lock

KEPT = 8
"""So many lists of stop strings are kept for later requests, those used last."""
MOST_MOVES = 1 << 16
"""Moves that an automaton keeps: some megabytes."""
Text = str | bytes


class Vocabulary(NamedTuple):
    """The tokens of a tokenizer.

    texts: of every token, as transformers' criterion reads it. hidden: those that a text leaves out. strips:
    whether a text leaves out the blank with which it begins.
    """

    texts: Mapping[int, Text]
    hidden: frozenset[int]
    strips: bool


class StopStrings(StoppingCriteria):
    """True for rows in whose last tokens a stop string ends within the very last one.

    StopStringCriteria computes that from a matrix of vocabulary times strings. Here the strings are sorted by
    their ends, without those that end with another one. Of the others at most one ends at a place of the
    text: a binary search finds it.
    """

    def __init__(self, strings: Sequence[Text], texts: Mapping[int, Text]) -> None:
        self._texts = texts
        self._always = any(len(string) == 0 for string in strings)
        self.longest = max(map(len, strings))
        """The most tokens that are compared, as in transformers, and the most characters of a string."""
        self.nothing = strings[0][:0]
        """The empty text."""
        self._ends: list[Text] = []
        for end in sorted([string[::-1] for string in strings]):
            if not self._ends or not _begins(end, self._ends[-1]):
                self._ends.append(end)
        self._begins = sorted(strings)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        rows = input_ids[:, -self.longest :].tolist()
        return torch.tensor([self.ended(row) for row in rows], dtype=torch.bool, device=input_ids.device)

    def ended(self, tokens: Sequence[int]) -> bool:
        """True if a stop string ends within the last of these tokens."""
        if self._always or not tokens:
            return self._always
        last = self._texts.get(tokens[-1])
        if not last:
            return False
        reverse = last[::-1]
        wanted = len(last) + self.longest - 1
        for token in islice(reversed(tokens), 1, self.longest):
            text = self._texts.get(token)
            if text is None or len(reverse) >= wanted:
                break  # no string extends past a token without text
            reverse += text[::-1]  # type: ignore[operator]  # both are str, or both bytes
        return self._found_within(reverse, len(last))

    def ends_within(self, begun: Text, text: Text) -> bool:
        """True if a stop string ends within `text`, which comes behind what it has begun with."""
        return self._found_within((begun + text)[::-1], len(text))  # type: ignore[operator]

    def ends_with_all(self, begun: Text, text: Text) -> bool:
        """True if a stop string ends with the whole of `text`."""
        whole = begun + text  # type: ignore[operator]
        return any(len(each) >= len(text) and whole[-len(each) :] == each for each in self._begins)

    def begun(self, text: Text) -> Text:
        """The longest end of a text with which a stop string begins."""
        for place in range(max(0, len(text) - self.longest + 1), len(text)):
            end = text[place:]
            found = bisect_left(self._begins, end)
            if found < len(self._begins) and _begins(self._begins[found], end):
                return end
        return self.nothing

    def _found_within(self, reverse: Text, count: int) -> bool:
        return any(self._found(reverse[place : place + self.longest]) for place in range(count))

    def _found(self, reverse: Text) -> bool:
        """True if some string ends where this text, read backwards, begins."""
        place = bisect_right(self._ends, reverse)
        return place > 0 and _begins(reverse, self._ends[place - 1])


class StopAutomaton:
    """Stop strings as an automaton that reads the tokens of answers. Its moves are made when they come, and
    kept: a token costs a look into a dict.

    A state is where in stop strings an answer may be. Special tokens, which a text leaves out, are read in
    two ways: as nothing between the tokens beside them, and as their own text in strings that have all of it.
    """

    def __init__(self, strings: StopStrings, vocabulary: Vocabulary) -> None:
        self._strings = strings
        self._vocabulary = vocabulary
        self._states: list[frozenset[Text]] = [frozenset()]
        """The beginnings of stop strings that have been read, of each state; state 0 has read nothing."""
        self._numbers: dict[frozenset[Text], int] = {}
        self.moves: list[dict[int, int]] = [{}]
        """Answers of `move`, as far as they are known: by state, by token."""
        self._made = 0

    def move(self, state: int, token: int) -> int:
        """The state behind a token, or ~state if a stop string has ended within the token."""
        found = self.moves[state].get(token)
        return self._make(state, token) if found is None else found

    def ended(self, answer: Sequence[int], least: int) -> bool:
        """True if a stop string ends within the last token of an answer, and not within its `least` first
        ones.
        """
        if len(answer) <= least:
            return False
        begin = self._begin(answer)
        state = 0 if begin == 0 else self._number(frozenset())
        found = 0
        for token in answer[begin:]:
            found = self.move(state, token)
            state = max(found, ~found)
        return found < 0

    def _begin(self, answer: Sequence[int]) -> int:
        """The first token that a stop string which ends with the answer can begin in."""
        texts, hidden, _ = self._vocabulary
        read = 0
        for place in range(len(answer) - 2, -1, -1):
            if read >= self._strings.longest:
                return place + 1
            read += 0 if answer[place] in hidden else len(texts.get(answer[place], ""))
        return 0

    def _make(self, state: int, token: int) -> int:
        """Find a move, and keep it."""
        strings = self._strings
        nothing = strings.nothing
        whole = text = self._vocabulary.texts.get(token, nothing)
        hidden = token in self._vocabulary.hidden
        if state == 0 and self._vocabulary.strips and not hidden and text[:1] in (" ", b" "):
            text = text[1:]
        before = self._states[state]
        begun = before or {nothing}
        within = strings.ends_with_all if hidden else strings.ends_within
        ended = any(within(each, text) for each in begun)
        after = {strings.begun(each + text) for each in begun}  # type: ignore[operator]
        if hidden:
            after = {*before, *[each for each in after if len(each) >= len(text)]}
        after -= {nothing}
        stays = after == before and (hidden or not whole)
        number = state if stays else self._number(frozenset(after))
        if self._made >= MOST_MOVES:
            self._made = 0
            for moves in self.moves:
                moves.clear()
        self._made += 1
        self.moves[state][token] = found = ~number if ended else number
        return found

    def _number(self, begun: frozenset[Text]) -> int:
        """The state that has read these beginnings."""
        if begun not in self._numbers:
            self._numbers[begun] = len(self._states)
            self._states.append(begun)
            self.moves.append({})
        return self._numbers[begun]


class Stop(NamedTuple):
    """The stop strings of a request's answers. least: how many tokens come before one in which a stop string
    can end.
    """

    strings: tuple[str, ...]
    least: int
    automaton: StopAutomaton


def _begins(text: Text, beginning: Text) -> bool:
    return text[: len(beginning)] == beginning


class StopLists:
    """Makes criteria and automata of stop strings, and keeps what it has made: most requests come with the
    same lists. Several threads may use it.
    """

    def __init__(self) -> None:
        self._known: tuple[tuple[Any, ...], Vocabulary] | None = None
        self._made: OrderedDict[tuple[Text, ...], tuple[StopStrings, StopAutomaton]] = OrderedDict()
        self._lock = fork_safe_lock()

    def criterion(self, tokenizer: Any, strings: Any) -> StopStrings:
        """The criterion of a string or a list of strings, as `stop_strings` of generate()."""
        return self._of(tokenizer, _listed("stop_strings", strings))[0]

    def automaton(self, tokenizer: Any, strings: Sequence[str]) -> StopAutomaton:
        """The automaton of strings that end answers."""
        return self._of(tokenizer, strings)[1]

    def stop(self, tokenizer: Any, strings: Any, least: int = 0) -> Stop | None:
        """The stop strings of a request's `stop`: None for None and an empty list. Those that were made
        already stay, but for `least`.
        """
        if isinstance(strings, Stop):
            return strings._replace(least=least)
        if strings is None or (isinstance(strings, list | tuple | set) and not strings):
            return None
        listed = _listed("stop", strings)
        if "" in listed:
            raise ValueError(
                f"stop={strings!r:.60} has an empty string, with which every text ends; leave it out"
            )
        if tokenizer is None:
            raise ValueError(
                f"stop={strings!r:.60} needs the model's tokenizer; make the engine with it, Engine(model, "
                "tokenizer)"
            )
        return Stop(tuple(listed), least, self.automaton(tokenizer, listed))

    def prepare(self, tokenizer: Any) -> None:
        """Read the vocabulary, for which the first request with stop strings would wait."""
        with self._lock:
            self._vocabulary(tokenizer, _mode_of(tokenizer))

    def _of(self, tokenizer: Any, strings: Sequence[str]) -> tuple[StopStrings, StopAutomaton]:
        mode = _mode_of(tokenizer)
        key = tuple(strings)
        if mode is not None:
            key = tuple(StopStringCriteria._get_stop_strings_for_matching(key, mode))
        with self._lock:
            vocabulary = self._vocabulary(tokenizer, mode)
            if key not in self._made:
                _require_an_end(key, vocabulary.texts)
                criterion = StopStrings(key, vocabulary.texts)
                self._made[key] = criterion, StopAutomaton(criterion, vocabulary)
            self._made.move_to_end(key)
            if len(self._made) > KEPT:
                self._made.popitem(last=False)
            return self._made[key]

    def _vocabulary(self, tokenizer: Any, mode: str | None) -> Vocabulary:
        """The texts of all tokens, kept while the vocabulary is the same."""
        # The objects themselves are kept: a new object may get the id of one that is gone.
        now = (tokenizer, getattr(tokenizer, "backend_tokenizer", None), len(tokenizer), mode)
        if self._known is None or not _same(self._known[0], now):
            in_bytes = {} if mode is None else {"stop_string_matching_mode": mode}
            texts, ids = StopStringCriteria.clean_tokenizer_vocab(tokenizer, **in_bytes)
            named: dict[int, Text] = dict(zip(ids, texts, strict=True))
            hidden = _hidden(tokenizer)
            self._known = now, Vocabulary(named, hidden, _strips(tokenizer, named, hidden))
            self._made.clear()
        return self._known[1]


def _listed(name: str, strings: Any) -> list[str]:
    """A string, or several, as a list."""
    listed = list(strings) if isinstance(strings, list | tuple | set) else [strings]
    wrong = [string for string in listed if not isinstance(string, str)]
    if wrong or not listed:
        got = f"{type(wrong[0]).__name__} {wrong[0]!r:.60}" if wrong else "an empty list"
        raise ValueError(f"{name} is a string or a list of strings, got {got}; leave it out for none")
    return listed


def _hidden(tokenizer: Any) -> frozenset[int]:
    """The special tokens of a tokenizer."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = [token for token, found in added.items() if getattr(found, "special", False)]
    return frozenset([*special, *(getattr(tokenizer, "all_special_ids", None) or ())])


def _strips(tokenizer: Any, texts: Mapping[int, Text], hidden: frozenset[int]) -> bool:
    """True if a text loses the blank of its first token."""
    for token, text in texts.items():
        if token not in hidden and len(text) > 1 and text[:1] in (" ", b" ") and text[1:2] not in (" ", b" "):
            return not tokenizer.decode([token], skip_special_tokens=True).startswith(" ")
    return False


def _mode_of(tokenizer: Any) -> str | None:
    """How transformers matches a tokenizer's stop strings: in bytes, or in text, which None stands for.
    Releases before 5.14 know text alone.
    """
    mode_of = getattr(StopStringCriteria, "_get_stop_string_matching_mode", None)
    return None if mode_of is None else mode_of(tokenizer)


def _same(before: tuple[Any, ...], now: tuple[Any, ...]) -> bool:
    pairs = zip(before, now, strict=True)
    return all(one is other or (isinstance(one, (int, str)) and one == other) for one, other in pairs)


def _require_an_end(strings: Sequence[Text], texts: Mapping[int, Text]) -> None:
    """Raise if no token can end any of the strings, as transformers does."""
    first = {text[:1] for text in texts.values()}
    if any(string[-1:] in first for string in strings):  # "" is in it only if there are tokens without a text
        return
    for string in strings:
        ends = {string[-count:] for count in range(1, len(string) + 1)}
        known: Any = texts.values()
        if any(string in text or not ends.isdisjoint(_beginnings(text)) for text in known):
            return
    raise ValueError(
        f"no token of the vocabulary can end one of the {len(strings)} stop strings; they have characters "
        "that the tokenizer does not know, leave them out"
    )


def _beginnings(text: Text) -> list[Text]:
    return [text[:count] for count in range(1, len(text) + 1)]
