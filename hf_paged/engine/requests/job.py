"""A request in progress: its parameters, its answers so far, and its readers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ...blocks import BlockTable
from ...model.adapters.virtual import NO_ADAPTERS, ChosenAdapters
from ...scheduling import AdapterNames, Request, Scheduler, SequenceGroup, TokenSequence
from ..outputs.output import FinishReason, Output, Timing, TokenLogprob
from ..outputs.queue import OutputQueue
from ..outputs.stream import Stream
from ..sampling.beams import BeamSearch, BeamStep
from ..sampling.scores import PromptLogprobs
from .callables import checked_scores, stops
from .own_code import own_code, reaches_driver
from .params import RequestParams, is_about_time

CPU = torch.device("cpu")
OWN = ("transformers.", "hf_paged.")
"""Where criteria come from that read token ids on the host."""


class Job:
    """A request in the engine. The engine writes it, its handle reads it.

    A job of samples grows its answers token by token; the answers of beams are known only at its end.
    """

    def __init__(
        self,
        params: RequestParams,
        group: SequenceGroup | None,
        tokenizer: Any,
        adapters: ChosenAdapters = NO_ADAPTERS,
    ) -> None:
        self.params = params if not adapters.start else params.renamed()
        self.group = group
        self.adapters = adapters
        """The adapters that were chosen for it."""
        self.active: tuple[str, ...] | None = None
        """Adapters active on the model when it came, if none of the model's adapters can be chosen."""
        self.tokenizer = tokenizer
        self.beams = BeamSearch(params) if params.beams > 1 else None
        self.streams = [
            Stream(i, tokenizer, self.beams is not None, params.top_logprobs or 0, params.stop)
            for i in range(params.answers)
        ]
        self.timing = Timing(time.monotonic())
        self.queue = OutputQueue(self.streams)
        self.number: int | None = None
        """Its place in the order of arrival; a request that was refused has none."""
        self.output: Output | None = None
        self.cancelled = False
        self._passed_on = False
        """True once its driver has been given the interrupt that it ended with."""
        self.trouble_with_scores: Exception | None = None
        """The error of a processor that runs for the rows of all requests at once."""
        self.grammar_states = [] if params.grammar is None else [params.grammar.begin() for _ in self.streams]
        """Where in its grammar each of its answers is."""
        self.routing_of: Callable[[Sequence[BlockTable], int], torch.Tensor] | None = None
        """Reads the routing of a sequence's first tokens by its tables, if it is returned."""
        self.prompt_scores = None
        if params.scored is not None:
            self.prompt_scores = PromptLogprobs(params.prompt, params.scored, params.virtual)
        """Known scores of the tokens of its prompt, if these are wanted."""

    @property
    def adapter(self) -> AdapterNames:
        """The names of those that change layers."""
        return self.adapters.names

    def request(self, number: int, priority: int, extra: bytes, source: int, tenant: str) -> Request:
        """It as the scheduler sees it. extra: what its cached blocks depend on beside tokens. source: the
        tokens that it attends to across.
        """
        params = self.params
        return Request(
            number,
            params.prompt,
            params.max_length,
            params.width,
            priority,
            extra,
            source,
            params.batchable,
            params.source_key,
            self.adapter,
            scored=0 if self.prompt_scores is None else self.prompt_scores.width,
            tenant=tenant,
            adapter_start=self.adapters.start,
            given=0 if params.past is None else params.virtual,
            task=self.adapters.task,
            whole=self.adapters.whole,
        )

    # ---- a step

    def rows(self, length: int) -> list[list[int]]:
        """The first `length` tokens of all its sequences; shorter ones are padded, as in generate()."""
        assert self.group is not None
        params = self.params
        pad = self._pad
        running = {sequence.index: params.seen(sequence.tokens[:length]) for sequence in self.group.sequences}
        ended = {
            stream.index: [*params.ids, *stream.tokens]
            for stream in self.streams
            if stream.finish_reason is not None
        }
        length += len(params.ids) - len(params.prompt)
        rows = [running[i] if i in running else ended[i] for i in range(self.params.width)]
        return [row[:length] + [pad] * (length - len(row)) for row in rows]

    @property
    def _known_length(self) -> int:
        """The tokens of each of its sequences that the host has."""
        assert self.group is not None
        return len(self.group.leader.tokens)

    @property
    def _pad(self) -> int:
        pad = self.params.config._pad_token_tensor
        return 0 if pad is None else int(pad.flatten()[0])

    @own_code
    def processed(self, scores: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Scores [its running sequences, vocabulary] after its processors, which see all its sequences, as in
        generate().
        """
        assert self.group is not None
        if not self.params.processors:
            return scores
        ids = torch.tensor(self.rows(self._known_length), dtype=torch.long, device=device)
        places = [sequence.index for sequence in self.group.sequences]
        whole = scores.new_zeros(ids.shape[0], scores.shape[1])
        whole[places] = scores
        rows, vocabulary = whole.shape
        with torch.no_grad():
            # Transformers names the legacy types.
            answer = self.params.processors(ids, whole)  # type: ignore[arg-type]
        single = self.beams is None and bool(self.params.ends)
        return checked_scores(answer, rows, vocabulary, self.params.sampled, single)[places]

    def append(
        self,
        scheduler: Scheduler,
        tokens: Mapping[TokenSequence, int],
        notes: Mapping[TokenSequence, TokenLogprob | None],
        device: torch.device,
    ) -> None:
        """Append the next tokens of running sequences, with notes if requested, and find which end."""
        scheduler.extend(tokens, tokens.values())
        stopped: dict[TokenSequence, FinishReason | None] = {}
        for length in {len(sequence.tokens) for sequence in tokens} if self.params.criteria else ():
            alike = [sequence for sequence in tokens if len(sequence.tokens) == length]
            places = [sequence.index for sequence in alike]
            stopped |= zip(alike, self._stopped(places, length, device), strict=True)
        for sequence, token in tokens.items():
            why = "stop" if self.streams[sequence.index].stops_with(token) else stopped.get(sequence)
            reason = self._reason(token, len(sequence.tokens), why)
            self._grow(sequence.index, token, notes.get(sequence), reason)
            if reason is not None:
                self._note_routing(sequence)
                scheduler.finish(sequence)

    def _grow(self, index: int, token: int, note: TokenLogprob | None, reason: FinishReason | None) -> None:
        self.timing.first_token = self.timing.first_token or time.monotonic()
        self.streams[index].add([token], [note] if note else [], reason)
        self.queue.put()

    def _note_routing(self, sequence: TokenSequence) -> None:
        """Read the routing of a sequence that ends, all but its last token's, while it has its blocks."""
        if self.routing_of is not None:
            routing = self.routing_of(sequence.tables, len(sequence.tokens) - 1)
            self.streams[sequence.index].routing = routing[self.params.virtual :]

    def _stopped(self, places: list[int], length: int, device: torch.device) -> list[FinishReason | None]:
        """The answers of the criteria on the first `length` tokens of its running sequences; they see all
        sequences, as in generate().
        """
        return self._judge(self.rows(length), places, device)

    @own_code
    def _judge(
        self, rows: list[list[int]], places: Sequence[int], device: torch.device
    ) -> list[FinishReason | None]:
        # What is computed on the device waits for the step that runs there; users' criteria find their rows
        # where generate() has them.
        known = all(type(each).__module__.startswith(OWN) for each in self.params.criteria)
        ids = torch.tensor(rows, device=CPU if known else device)
        reasons: list[FinishReason | None] = [None] * len(places)
        for criterion in self.params.criteria:
            says = stops(criterion, ids, self.beams is not None, bool(self.params.ends))
            for i, place in enumerate(places):
                if says[place] and reasons[i] != "stop":
                    reasons[i] = "length" if is_about_time(criterion) else "stop"
        return reasons

    def _reason(self, token: int, length: int, stopped: FinishReason | None) -> FinishReason | None:
        """Why a sequence ends with this token, if it does."""
        if token in self.params.ends or stopped == "stop":
            return "stop"
        return "length" if length >= self.params.max_length else stopped

    @property
    def trouble(self) -> BaseException | None:
        """Why an answer has no text, if one has none: what the tokenizer raised."""
        return next((stream.trouble for stream in self.streams if stream.trouble is not None), None)

    def interrupt(self) -> BaseException | None:
        """The error of its own code that its driver must get, too; once."""
        error = self.trouble if self.output is None else self.output.error
        if self._passed_on or not reaches_driver(error):
            return None
        self._passed_on = True
        return error

    @property
    def all_ended(self) -> bool:
        """True once all its answers have ended."""
        return all(stream.finish_reason is not None for stream in self.streams)

    @property
    def torn(self) -> bool:
        """True if a step broke off in the middle of its own part: some of its sequences have their tokens, or
        some of its books.
        """
        assert self.group is not None
        lengths = {len(sequence.tokens) for sequence in self.group.sequences}
        if self.beams is None:
            return len(lengths) > 1 or any(
                self.streams[sequence.index].finish_reason is not None for sequence in self.group.sequences
            )
        return (
            lengths != {len(self.params.prompt) + self.beams.state.new}
            or len(self.group.sequences) < self.params.width
        )

    def go_back(self) -> None:
        """A step broke off: its sequences keep the tokens of their streams, and no others."""
        if self.prompt_scores is not None:
            self.prompt_scores.forget()
        if self.group is None or self.beams is not None:
            return
        for stream in self.streams:
            stream.logprobs.crop(len(stream.tokens))
        for sequence in self.group.sequences:
            sequence.tokens = [*self.group.request.names, *self.streams[sequence.index].tokens]

    # ---- a step of beams

    def judged(
        self, beams: Sequence[int], tokens: Sequence[int], device: torch.device
    ) -> list[FinishReason | None]:
        """Why beams would end with these next tokens, if they would."""
        assert self.group is not None
        stopped: list[FinishReason | None] = [None] * len(beams)
        if self.params.criteria:
            sequences = self.group.sequences
            rows = [
                self.params.seen([*sequences[beam].tokens, token])
                for beam, token in zip(beams, tokens, strict=True)
            ]
            stopped = self._judge(rows, range(len(rows)), device)
        stop = self.params.stop
        if stop is not None:
            begin = len(self.params.prompt)
            answers = [sequence.tokens[begin:] for sequence in self.group.sequences]
            for i, (beam, token) in enumerate(zip(beams, tokens, strict=True)):
                if stop.automaton.ended([*answers[beam], token], stop.least):
                    stopped[i] = "stop"
        length = self._known_length + 1
        return [self._reason(token, length, why) for token, why in zip(tokens, stopped, strict=True)]

    def append_beams(self, scheduler: Scheduler, step: BeamStep) -> None:
        """Its beams take a step."""
        assert self.group is not None
        assert self.beams is not None
        self.timing.first_token = self.timing.first_token or time.monotonic()
        scheduler.reorder(self.group, step.sources, step.tokens)
        self.beams.state = step.state  # last: what broke off before is seen by it
        if step.state.done:
            self.conclude_beams()
            for sequence in list(self.group.sequences):
                scheduler.finish(sequence)

    def conclude_beams(self) -> None:
        """Enter the answers of a search that is over. What an interrupt has left out is done by doing it
        again.
        """
        assert self.beams is not None
        for stream, best in zip(self.streams, self.beams.answers(), strict=True):
            if stream.finish_reason is None:
                stream.score = best.score
                stream.logprobs.crop(0)
                stream.add(best.tokens, best.notes, best.reason or "length")
        self.queue.put()

    # ---- the end

    def close(self, reason: FinishReason | None = None, error: BaseException | None = None) -> Output:
        """Make the output; answers that have not ended end for `reason`, or because one could not be
        decoded.
        """
        self.timing.finished = time.monotonic()
        for stream in self.streams:
            if stream.finish_reason is None:
                stream.add([], [], reason if self.trouble is None else "error")
        group = self.group
        sequences = [stream.output(self.params.top_logprobs is not None) for stream in self.streams]
        self.output = Output(
            list(self.params.caller_ids),
            sequences,
            cached_tokens=max(0, group.cached_tokens - self.params.virtual) if group else 0,
            preemptions=group.preemptions if group else 0,
            timing=self.timing,
            error=error or self.trouble,
            prompt_logprobs=None if self.prompt_scores is None else self.prompt_scores.notes,
            block_size=group.block_size if group else 0,
        )
        self.group = None
        if self.params.media is not None:
            self.params.media.drop()
        self.queue.end()
        return self.output
