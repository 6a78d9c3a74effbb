"""The ingress: it names a prompt's blocks for the router, and asks another replica if one dies."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from ray import exceptions
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..blocks import extra_key
from ..blocks.prefix_lookup import Prompt
from ..cli import serve as cli
from ..cli.arguments import source_of
from ..serve.guard import REQUEST_ID
from ..serve.http import logs
from ..serve.http.bodies import Bodies
from ..serve.http.errors import ApiError, unavailable
from ..serve.http.keys import Keys, bearer
from ..serve.openai.images import Images
from ..serve.openai.protocol import (
    OF_CHATS,
    OF_COMPLETIONS,
    ChatRequest,
    CompletionRequest,
    fields_of,
    parsed,
)
from ..serve.openai.responses import OF_RESPONSES, ResponsesRequest
from ..serve.openai.tokens import Tokenizer
from .flags import namespace
from .relay import HeldAnswer, ReplicaFailed
from .replica import HttpCall

log = logging.getLogger("hf_paged.ray")
Prompted = ChatRequest | CompletionRequest
PROMPTED: dict[str, Callable[[bytes], Prompted]] = {
    "/v1/completions": lambda body: parsed(CompletionRequest, fields_of(body, OF_COMPLETIONS)),
    "/v1/chat/completions": lambda body: parsed(ChatRequest, fields_of(body, OF_CHATS)),
    "/v1/responses": lambda body: parsed(ResponsesRequest, fields_of(body, OF_RESPONSES)).chat(),
}
"""How the body of a request with a prompt is read."""
PATHS = frozenset(
    {
        *PROMPTED, "/tokenize", "/detokenize", "/v1/models", "/version", "/openapi.json",
        "/health", "/live", "/ready",
    }
)  # fmt: skip
"""Paths that all replicas answer alike."""
TRIES = 3
"""Replicas that are asked. A request that ends its replicas must not end them all."""
ANY_ID = 1 << 62
"""More than any vocabulary: replicas refuse ids that their model does not have."""
GRACE = 5.0
"""Seconds that a replica has to end a request beyond its own limit."""
DIED = "replica_died"
"""The code of errors about replicas that were lost."""
LEFT = 499
"""The status that logs have for a client that left before its answer."""


class Gateway:
    """The ingress deployment: without a model, with the tokenizer."""

    def __init__(self, replicas: Any, options: Mapping[str, Any]) -> None:
        """replicas: the handle of the Replica deployment. options: what the replicas are made with."""
        given = namespace(options)
        logs.set_up(given.log_level, given.log_format)
        source = source_of(given)
        self._options = cli.server_options(given, source.name)
        self._replicas = replicas.options(stream=True).answer
        self._keys = Keys(self._options.api_keys, self._options.share_prefixes, self._options.admin_api_keys)
        self._bodies = Bodies(self._options.limits)
        self._block_size: int = given.block_size
        tokenizer = source.load_tokenizer()
        self._tokenizer = Tokenizer(
            tokenizer,
            Images(None, self._options.limits, refusal="their blocks are not named"),
            ANY_ID,
            self._options.limits.body_bytes,
            1,
            cli.chat_template_of(given, tokenizer),
        )

    async def __call__(self, request: Request) -> Response:
        """Answer an HTTP request."""
        return _Relayed(self, request)

    async def relay(self, request: Request, answer: HeldAnswer) -> None:
        """Have a request answered, by another replica if one fails before the first token."""
        try:
            call = await self._call(request)
            async with asyncio.timeout(self._options.limits.request_seconds + GRACE):
                await self._answered(call, answer)
        except ApiError as error:
            await answer.fail(error)
        except TimeoutError:
            await answer.fail(ApiError(504, "no replica has answered in time; send it again", code="timeout"))
        except (BackPressureError, DeploymentUnavailableError) as error:
            await answer.fail(unavailable(f"no replica takes requests now: {error}", 5, "no_replica"))
        except exceptions.RayError:
            log.exception("a replica raised an error")
            await answer.fail(ApiError(500, "a replica failed; see its log"))

    async def _answered(self, call: HttpCall, answer: HeldAnswer) -> None:
        for tried in range(1, TRIES + 1):
            stream = self._replicas.remote(call)
            try:
                async for messages in stream:
                    for message in messages:
                        await answer.take(message)
                return
            except (exceptions.RayActorError, exceptions.WorkerCrashedError, ReplicaFailed) as error:
                log.warning("a replica has failed", extra={"tried": tried, "streamed": answer.streamed})
                if answer.streamed or tried == TRIES:
                    raise _died(answer.streamed, tried) from error
                answer.begin()
            finally:
                stream.cancel()  # nothing once it has ended

    async def _call(self, request: Request) -> HttpCall:
        root = request.scope.get("root_path", "").rstrip("/")
        path = request.scope["path"].removeprefix(root) or "/"
        if path not in PATHS and not path.startswith("/v1/models/"):
            raise ApiError(
                404,
                f"{path[:80]!r} belongs to one server, and behind this address there are several; send chats "
                "to /v1/chat/completions, and change weights and adapters by user_config",
            )
        body = await self._bodies.read(request) if request.method == "POST" else b""
        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": request.method,
            "scheme": request.scope["scheme"],
            "path": path,
            "query_string": request.scope["query_string"],
            "headers": _with_number(request),
        }
        return HttpCall(scope, body, await self._digests(request, PROMPTED.get(path), body))

    async def _digests(
        self, request: Request, read: Callable[[bytes], Prompted] | None, body: bytes
    ) -> tuple[bytes, ...]:
        """The names of the prompt's blocks; none of a request that a replica is going to refuse."""
        tenant = self._keys.tenant(bearer(request.headers.get("authorization")))
        if read is None or tenant is None:
            return ()
        try:
            asked = read(body)
            if isinstance(asked, ChatRequest):
                ids = (await self._tokenizer.chat(asked)).ids
            else:
                ids = await self._tokenizer.ids(asked.prompt[0], asked.add_special_tokens is not False)
        except (ApiError, IndexError):
            return ()
        adapter = None if asked.model in self._options.names else asked.model
        extra = extra_key(adapter, tenant.salted(asked.cache_salt))
        return tuple(Prompt(ids, self._block_size, extra).digests)


class _Relayed(Response):
    """The response to a request that a replica answers."""

    def __init__(self, gateway: Gateway, request: Request) -> None:
        self._gateway = gateway
        self._request = request
        self.background = None
        self.status_code = LEFT
        self.raw_headers = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._gateway.relay(self._request, HeldAnswer(scope, send))


def _with_number(request: Request) -> list[tuple[bytes, bytes]]:
    """The headers with a request id, which is one for all replicas that are asked."""
    headers = [(name, value) for name, value in request.headers.raw if name != b"x-request-id"]
    given = request.headers.get("x-request-id", "")
    number = given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
    return [*headers, (b"x-request-id", number.encode())]


def _died(streamed: bool, tried: int) -> ApiError:
    if streamed:
        return unavailable("the replica died, and its answer ends here; send the request again", 1, DIED)
    return unavailable(f"{tried} replicas have died while they computed this; see their logs", 30, DIED)
