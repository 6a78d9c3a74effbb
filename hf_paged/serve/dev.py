"""Routes for training loops, behind --dev: requests pause, weights change, memory is given back."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Literal

from fastapi import APIRouter, FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from . import ranks
from .context import Context
from .engine_client import CallError
from .errors import ApiError, invalid
from .openapi import OF_BODIES, body_of, errors
from .protocol import Part, fields_of, parsed, read_body
from .service import Service

WEIGHTS = "*.safetensors"
Asked = Callable[..., Awaitable[Any]]
"""Calls a function of the engine for a request that may."""


class LoadWeightsRequest(Part):
    """POST /load_weights. path: a folder of this machine, or a file."""

    path: str


def add_dev_routes(app: FastAPI, service: Service) -> None:
    """What vLLM's servers have for training loops, and the engine's own ways to change weights."""

    async def asked(http: Request, name: str, *arguments: Any) -> Any:
        if service.options.admin_api_keys and not Context.of(http.scope).tenant.admin:
            raise ApiError(403, "training loops use an admin key here; send that of --admin-api-key")
        return await _called(service, name, *arguments)

    async def load(http: Request) -> Response:
        request = parsed(LoadWeightsRequest, fields_of(await read_body(http, service.options.limits)))
        count = await asked(http, "load_weights", weight_files(request.path))
        return JSONResponse({"loaded": count})

    router = APIRouter(responses=errors(400, 409))
    router.add_api_route(
        "/load_weights",
        load,
        methods=["POST"],
        summary="Read weights from files in place",
        responses=OF_BODIES,
        openapi_extra=body_of(LoadWeightsRequest.model_json_schema()),
    )
    _add_pauses(router, asked)
    _add_changes(router, asked)
    app.include_router(router)


def _add_pauses(to: APIRouter, asked: Asked) -> None:
    """Routes that stop the engine for a while."""

    @to.post("/pause", summary="Let no request run until /resume")
    async def pause(
        http: Request, mode: Literal["abort", "wait", "keep", "recompute"] = "abort"
    ) -> dict[str, Any]:
        await asked(http, "pause", mode)
        return {"status": "paused"}

    @to.post("/resume", summary="Let requests run again")
    async def resume(http: Request) -> dict[str, Any]:
        await asked(http, "resume")
        return {"status": "resumed"}

    @to.get("/is_paused")
    async def is_paused(http: Request) -> dict[str, Any]:
        return {"is_paused": (await asked(http, "stats"))["paused"] is not None}

    @to.post("/sleep", summary="Give memory back until /wake_up: 1 the pools, 2 the weights, too")
    async def sleep(http: Request, level: Literal["1", "2"] = "1") -> dict[str, Any]:
        await asked(http, "sleep", int(level))
        return {"status": "asleep"}

    @to.post("/wake_up", summary="Bring it back, and let requests run")
    async def wake_up(http: Request) -> dict[str, Any]:
        await asked(http, "wake_up")
        return {"status": "awake"}


def _add_changes(to: APIRouter, asked: Asked) -> None:
    """Routes about weights that were changed."""

    @to.post("/reset_prefix_cache", summary="Forget cached blocks, while nothing runs")
    async def reset_prefix_cache(http: Request) -> dict[str, Any]:
        await asked(http, "weights_changed")
        return {"success": True}

    @to.post("/weights_changed", summary="Note that the weights are others, and drop or keep the blocks")
    async def weights_changed(http: Request, kv: Literal["drop", "keep"] = "drop") -> dict[str, Any]:
        await asked(http, "weights_changed", kv)
        return {"status": "noted"}

    @to.get("/get_world_size")
    async def get_world_size() -> dict[str, int]:
        return {"world_size": ranks.world_size()}


async def _called(service: Service, name: str, *arguments: Any) -> Any:
    """What the engine returns; 400 for wrong arguments, 409 where its state does not allow it."""
    try:
        return await service.engine.call(name, *arguments)
    except CallError as error:
        if error.wrong:
            raise invalid(str(error)) from error
        if error.kind == "RuntimeError":
            raise ApiError(409, str(error)) from error
        raise


def weight_files(path: str) -> list[str]:
    """The files of weights at a path, or 404."""
    place = Path(path)
    found = sorted(place.glob(WEIGHTS)) if place.is_dir() else [place]
    if not found or not all(each.is_file() and each.match(WEIGHTS) for each in found):
        raise ApiError(404, f"{path[:200]!r} has no {WEIGHTS}; give a folder or a file that has", "path")
    return [str(each) for each in found]
