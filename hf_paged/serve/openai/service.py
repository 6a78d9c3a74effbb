"""Shared state of a server's routes."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...engine.outputs.text import AnswerText
from ...engine.requests.prompts import words_of
from ..http.admission import QueueLimit
from ..http.bodies import Bodies
from ..http.errors import ApiError, invalid
from ..http.keys import Keys, Tenant
from ..http.metrics import Metrics
from ..http.options import ServerOptions
from ..http.throttle import BODIES, EVENTS, Turns
from ..link.engine_client import EngineClient
from ..map.live import LiveMap
from .adapters import Adapters
from .images import Images
from .protocol import ChatRequest, Generating
from .reply_parser import Replies
from .sampling import Sampling
from .structured import StructuredOutput
from .tokens import Tokenizer

if TYPE_CHECKING:
    from .spans import RequestSpans


@dataclass(frozen=True)
class Service:
    """A served model: its engine and tokenizer, who may ask, how much, and what is counted.

    longest: the most tokens of a sequence here. spans: None unless the options name a collector.
    """

    engine: EngineClient
    tokenizer: Tokenizer
    options: ServerOptions
    sampling: Sampling
    admission: QueueLimit
    bodies: Bodies
    metrics: Metrics
    keys: Keys
    wakes: Turns
    turns: Turns
    live: LiveMap
    adapters: Adapters
    structured: StructuredOutput
    replies: Replies
    longest: int
    spans: RequestSpans | None
    created: float = field(default_factory=time.time)

    @classmethod
    def of(
        cls,
        engine: EngineClient,
        tokenizer: Any,
        options: ServerOptions,
        template: str | None = None,
        response_template: dict[str, Any] | None = None,
    ) -> Service:
        """The service of an engine.

        tokenizer: the model's, or its processor. template: how chats are written, instead of its chat
        template. response_template: how answers are read, instead of its response template.
        """
        facts = engine.facts
        limits = options.limits
        words = words_of(tokenizer)
        processor = None if words is tokenizer else tokenizer
        images = Images(processor, limits, options.allowed_media_domains, facts.refusal_of_images(processor))
        longest = min(facts.longest, options.max_model_len or facts.longest)
        budget = facts.sequences
        metrics = Metrics(options.names[0], options.vllm_metric_names)
        adapters = Adapters(engine, options.names, limits.adapters)
        sampling = Sampling(facts.defaults, facts.ends, limits, budget, facts.priorities)
        return cls(
            engine,
            Tokenizer(words, images, adapters.most_tokens, longest, limits.chars_per_token, template),
            options,
            sampling,
            QueueLimit(budget + limits.waiting, lambda: not engine.driven, lambda: metrics.end_to_end.mean),
            Bodies(limits),
            metrics,
            Keys(options.api_keys, options.share_prefixes, options.admin_api_keys),
            Turns(EVENTS),
            Turns(BODIES),
            LiveMap(engine, metrics, limits.viewers, options.names[0]),
            adapters,
            StructuredOutput(engine, limits),
            Replies(response_template or facts.response_template),
            longest,
            _spans(options.otlp_traces_endpoint),
        )

    def model(self, name: str | None) -> str:
        """The name by which an answer calls the model, or 404."""
        if name is None:
            return self.options.names[0]
        if name not in self.options.names and self.adapters.get(name) is None:
            known = [*self.options.names, *(each.name for each in self.adapters)]
            raise ApiError(
                404,
                f"the model {name[:80]!r} is not served here; expected one of {', '.join(known)[:500]}",
                "model",
                "model_not_found",
            )
        return name

    def new_tokens(self, asked: int | None, default: int | None, prompt: int) -> int:
        """The length of an answer to a prompt; one that does not fit is refused, not shortened."""
        room = self.longest - prompt
        if room < 1 or (asked is not None and asked > room):
            wish = "an answer" if asked is None else f"{asked} new tokens"
            raise invalid(
                f"the prompt has {prompt} tokens and a sequence at most {self.longest}, which leaves no room "
                f"for {wish}; shorten the prompt or lower max_tokens",
                "max_tokens",
                "context_length_exceeded",
            )
        if asked is not None:
            return asked
        return min(room, room if default is None else default)

    def keywords(self, request: Generating, tenant: Tenant, new: int) -> dict[str, Any]:
        """The keywords of `submit()` for one prompt of a request."""
        if (request.min_tokens or 0) > new:
            raise invalid(
                f"min_tokens={request.min_tokens} is more than the {new} new tokens; lower it", "min_tokens"
            )
        found = {**self.sampling.keywords(request, new), "tenant": tenant.name}
        salt = tenant.salted(request.cache_salt)
        return found if salt is None else {**found, "salt": salt}

    def texts(self, request: Generating) -> list[AnswerText]:
        """The texts of the answers to one prompt."""
        read = isinstance(request, ChatRequest) and self.replies.reads(request)
        whole = read or request.skip_special_tokens is False
        decode = self.tokenizer.whole if whole else self.tokenizer.shown
        keep = bool(request.include_stop_str_in_output)
        hidden = frozenset(() if keep else request.stop_token_ids or ())
        if read:
            hidden |= frozenset(self.sampling.ends)
        stops = request.stop or ()
        least = request.min_tokens or self.engine.facts.defaults.min_new_tokens or 0
        return [AnswerText(decode, stops, keep, hidden, least) for _ in range(request.drawn)]


def _spans(endpoint: str | None) -> RequestSpans | None:
    """The maker of spans; its packages are imported here, for servers that have a collector."""
    if endpoint is None:
        return None
    from .spans import RequestSpans

    return RequestSpans(endpoint)
