"""From a checked request to its response."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ..http.context import Context
from ..http.errors import ApiError, invalid
from ..http.streams import ALIVE, EventStream, noticing
from ..link.engine_client import EngineRequest
from ..map.map_view import Owner
from .adapters import ServedAdapter
from .chat_format import ChatForm, CompletionForm, Form, best, joined
from .generation import Generation, Piece, Submission, Usage
from .images import ChatPrompt
from .protocol import OF_CHATS, OF_COMPLETIONS, ChatRequest, CompletionRequest, Generating, fields_of, parsed
from .responses import LOGPROBS, OF_RESPONSES, RENAMED, ResponsesRequest
from .responses_format import ResponseForm
from .service import Service

log = logging.getLogger("hf_paged.serve")
COMPLETION_TOKENS = 16
"""The length of a completion without max_tokens, as in OpenAI's API."""
Ids = list[tuple[int, ...]]


class EndpointCall(NamedTuple):
    """A request on its way to its response: what the client asked, and who it is."""

    service: Service
    http: Request
    context: Context
    request: Generating
    model: str


async def complete(service: Service, http: Request, body: bytes) -> Response:
    """POST /v1/completions: the texts that follow prompts."""
    request = parsed(CompletionRequest, fields_of(body, OF_COMPLETIONS))
    call = _call(service, http, request)
    prompts = request.prompt
    most = service.options.limits.prompts
    if len(prompts) > most:
        raise invalid(f"{len(prompts)} prompts are given and the limit is {most}; send them apart", "prompt")
    if request.silent and not request.echo and request.scored is None:
        raise invalid(
            "max_tokens=0 leaves no token to generate; give 1 or more, or echo=true, or prompt_logprobs",
            "max_tokens",
        )
    if request.silent and request.drawn > 1:
        raise invalid(f"max_tokens=0 makes {request.drawn} answers equal; leave n and best_of out", "n")
    if request.drawn < request.answers:
        raise invalid(f"best_of={request.best_of} is less than n={request.n}; raise best_of", "best_of")
    if request.drawn > 1 and request.best_of and (request.stream or request.use_beam_search):
        raise invalid("best_of ranks whole samples; leave stream and use_beam_search out", "best_of")

    echoes: list[str] = []

    async def read() -> list[ChatPrompt]:
        special = request.add_special_tokens is not False
        found = [ChatPrompt(await service.tokenizer.ids(each, special)) for each in prompts]
        _require_few_shown(call, found)
        if request.echo:
            pairs = zip(prompts, found, strict=True)
            echoes.extend(
                [
                    given if isinstance(given, str) else await service.tokenizer.decoded(each.ids)
                    for given, each in pairs
                ]
            )
        return found

    def form(number: str, found: Ids) -> Form:
        made = CompletionForm(number, call.model, service.tokenizer, found, request.answers)
        made.texts = [isinstance(each, str) for each in prompts]
        made.top_logprobs = request.logprobs or 0
        made.echoes = echoes
        return made

    return await _answered(call, len(prompts), read, form, request.max_tokens, COMPLETION_TOKENS, "cmpl-")


async def chat(service: Service, http: Request, body: bytes) -> Response:
    """POST /v1/chat/completions: the next message of a chat."""
    return await _chat(service, http, parsed(ChatRequest, fields_of(body, OF_CHATS)), ChatForm, "chatcmpl-")


async def respond(service: Service, http: Request, body: bytes) -> Response:
    """POST /v1/responses: a chat in OpenAI's newer form. Nothing is stored."""
    asked = parsed(ResponsesRequest, fields_of(body, OF_RESPONSES))
    try:
        request = asked.chat()
        if request.logprobs and service.replies.separates(request):
            raise invalid(f"{LOGPROBS}: parts of this answer are no text; leave it out", "include")
        return await _chat(service, http, request, partial(ResponseForm, asked), "resp_")
    except ApiError as error:
        first = (error.param or "").partition(".")[0]
        error.param = RENAMED.get(first, error.param)
        raise


async def _chat(
    service: Service, http: Request, request: ChatRequest, kind: Callable[..., ChatForm], prefix: str
) -> Response:
    """The answer to a chat. prefix: of its id."""
    call = _call(service, http, request)
    if request.top_logprobs is not None and not request.logprobs:
        raise invalid("top_logprobs needs logprobs=true; give it, or leave top_logprobs out", "top_logprobs")
    asked = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    if asked == 0:
        raise invalid("max_tokens=0 leaves no token to generate; give 1 or more", "max_tokens")
    service.replies.check(request, service.options.limits.tools)

    async def read() -> list[ChatPrompt]:
        found = [await service.tokenizer.chat(request)]
        _require_few_shown(call, found)
        return found

    def form(number: str, found: Ids) -> Form:
        made = kind(number, call.model, service.tokenizer, found, request.answers)
        made.replies = service.replies.of(request, lambda: service.tokenizer.text(list(found[0])))
        return made

    default = service.engine.facts.defaults.max_new_tokens
    return await _answered(call, 1, read, form, asked, default, prefix)


def _require_few_shown(call: EndpointCall, prompts: list[ChatPrompt]) -> None:
    """An answer must not be many times its request."""
    request = call.request
    if not request.shows_prompt:
        return
    tokens = sum(len(each.ids) for each in prompts)
    shown = tokens * request.answers * (1 + (request.scored or 0))
    most = call.service.options.limits.shown_tokens
    if shown > most:
        raise invalid(
            f"{tokens} tokens of prompts, {request.answers} answers and {request.scored or 0} alternatives "
            f"are {shown}, the limit is {most}; send fewer prompts, or lower n or logprobs",
            "prompt",
        )


def _call(service: Service, http: Request, request: Generating) -> EndpointCall:
    model = service.model(request.model)
    context = Context.of(http.scope)
    if service.spans is not None:
        service.spans.note_request(context, request, model)
    service.sampling.check(request, service.adapters.vocabulary(model))
    return EndpointCall(service, http, context, request, model)


async def _answered(
    call: EndpointCall,
    count: int,
    read: Callable[[], Awaitable[list[ChatPrompt]]],
    form_of: Callable[[str, Ids], Form],
    asked: int | None,
    default: int | None,
    kind: str,
) -> Response:
    """The response to `count` prompts. What it takes of the server is given back with its last byte.

    kind: what its id begins with.
    """
    service = call.service
    request = call.request
    with ExitStack() as stack:
        adapter = stack.enter_context(service.adapters.used(call.model))
        stack.enter_context(service.admission.place(count))
        given = await read()
        stack.enter_context(service.tokenizer.images.held(given))
        prompts = [each.ids for each in given]
        grammar = await service.structured.grammar(request, call.context.tenant.name)
        submissions = _submissions(call, given, asked, default, adapter, grammar)
        form = form_of(kind + call.context.request_id, prompts)
        form.with_logprobs = request.alternatives is not None
        form.scored = request.prompt_logprobs
        form.with_ids = bool(request.return_token_ids)
        if request.return_tokens_as_token_ids:
            form.name = "token_id:{}".format
        generation = Generation(
            service.engine,
            service.wakes,
            service.metrics,
            call.model if adapter else service.options.names[0],
            bool(request.stream),
            partial(_own, call),
            adapter,
        )
        form.prompt_notes = generation.prompt_notes
        if service.spans is not None:
            stack.callback(service.spans.note_answers, call.context, generation)
        stack.callback(_disown, call, generation)
        stack.callback(generation.close)
        stack.enter_context(service.admission.under_way(generation))
        deadline = asyncio.get_running_loop().call_later(
            service.options.limits.request_seconds, generation.cancel
        )
        stack.callback(deadline.cancel)
        if submissions:
            await generation.submit(submissions, service.turns)
        if not request.stream:
            with noticing(call.http.receive, generation.leave):
                return await _whole(call, generation, form, prompts)
        return EventStream(
            _chunks(call, generation, form, prompts),
            generation.leave,
            stack.pop_all().close,
        )


def _own(call: EndpointCall, handle: EngineRequest, ids: tuple[int, ...]) -> None:
    """Let the map know whose a request of the engine is."""
    assert handle.number is not None
    owner = Owner(call.context.tenant.name, call.context.request_id, ids)
    call.service.live.owners.add(handle.number, owner)


def _disown(call: EndpointCall, generation: Generation) -> None:
    call.service.live.owners.discard([each.handle.number for each in generation.answers])


def _submissions(
    call: EndpointCall,
    prompts: list[ChatPrompt],
    asked: int | None,
    default: int | None,
    adapter: ServedAdapter | None,
    grammar: str | None,
) -> list[Submission]:
    """Submissions to the engine; none for a prompt that is only to be shown."""
    service = call.service
    request = call.request
    tenant = call.context.tenant
    scored = request.scored
    made = []
    for ids, media in prompts:
        # The engine answers with one token at least; it is left out where none is asked for.
        new = service.new_tokens(asked or (1 if asked == 0 else None), default, len(ids))
        if asked == 0 and scored is None:
            continue
        keywords = service.keywords(request, tenant, new)
        if adapter is not None:
            keywords["adapter"] = (adapter.own,)
        if scored is not None:
            keywords["prompt_logprobs"] = scored or True
        if grammar is not None:
            keywords["grammar"] = grammar
        if media:
            keywords["media"] = media
        made.append(Submission(ids, keywords, service.texts(request)))
    return made


def _nothing_new(call: EndpointCall, prompts: Ids) -> list[Piece]:
    """The answers where no token is asked for."""
    return [_without_tokens(i, "length") for i in range(len(prompts) * call.request.answers)]


def _without_tokens(choice: int, reason: str | None) -> Piece:
    return Piece(choice, "", [], [], [], reason)


def _shown(call: EndpointCall, pieces: list[Piece]) -> list[Piece]:
    """Pieces as the client sees them: nothing of their tokens if it asked for none."""
    if not call.request.silent:
        return pieces
    reasons = {"stop": "length"}
    return [
        _without_tokens(each.choice, reasons.get(each.finish_reason or "", each.finish_reason))
        for each in pieces
    ]


def _usage(call: EndpointCall, generation: Generation, prompts: Ids) -> Usage:
    usage = generation.usage._replace(prompt_tokens=sum(map(len, prompts)))
    if call.request.silent:
        usage = usage._replace(completion_tokens=0)
    call.context.note(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
    )
    return usage


async def _whole(call: EndpointCall, generation: Generation, form: Form, prompts: Ids) -> Response:
    """The answer as one body."""
    pieces = [piece async for some in generation.pieces() for piece in some]
    usage = _usage(call, generation, prompts)
    request = call.request
    if generation.answers:
        answers = best(joined(_shown(call, pieces)), request.drawn, request.answers)
    else:
        answers = _nothing_new(call, prompts)
    reasons = {piece.finish_reason for piece in answers}
    if reasons == {"abort"} and not usage.completion_tokens:
        call.service.admission.require_ready()  # a drain is 503
        raise ApiError(
            504, "the request ran out of time before its first token; send it again", code="timeout"
        )
    if not request.shows_prompt:
        return JSONResponse(form.whole(answers, usage))
    # Of every token of the prompts there is something to write.
    return await asyncio.to_thread(lambda: JSONResponse(form.whole(answers, usage)))


def _written(form: Form, pieces: list[Piece]) -> bytes:
    return b"".join(map(form.chunk, joined(pieces)))


async def _chunks(
    call: EndpointCall, generation: Generation, form: Form, prompts: Ids
) -> AsyncIterator[bytes]:
    """The answer as events. An error behind the first byte is an event, too."""
    try:
        yield b"".join(form.opening()) or ALIVE
        if not generation.answers:
            yield b"".join(map(form.chunk, _nothing_new(call, prompts)))
        async for pieces in generation.pieces():
            if pieces and call.request.shows_prompt:
                chunk = await asyncio.to_thread(_written, form, _shown(call, pieces))
            else:
                chunk = _written(form, pieces) if pieces else ALIVE
            if chunk:
                yield chunk
        usage = _usage(call, generation, prompts)
        yield form.closing(usage, call.request.with_usage)
    except ApiError as error:
        yield form.failure(error)
    except Exception:
        log.exception("unexpected error", extra={"request_id": call.context.request_id})
        yield form.failure(ApiError(500, "the server failed; see its log"))
