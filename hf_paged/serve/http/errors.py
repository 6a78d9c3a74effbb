"""Errors as clients of OpenAI's API expect them: a status, and a body that names the field and the remedy."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
"""OpenAI's `type` by status; others are invalid_request_error below 500 and server_error from there on."""

ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
"""Addresses of the process's memory, as Python shows objects; errors of libraries have them."""


class ApiError(Exception):
    """A request that is refused or has failed: `message` has what was got, what was expected and the remedy.

    param: the field of the request that is at fault. code: a word for programs.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.message = ADDRESS.sub("", message)
        super().__init__(self.message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """The JSON body in OpenAI's form."""
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A request that cannot be served as it is: 400."""
    return ApiError(400, message, param, code)


def too_large(message: str, param: str | None = None) -> ApiError:
    """A request beyond a limit of size: 413."""
    return ApiError(413, message, param, "too_large")


def unavailable(message: str, retry_after: int = 1, code: str | None = None) -> ApiError:
    """A server that takes no request now: 503 with Retry-After."""
    return ApiError(503, message, code=code, headers={"retry-after": str(retry_after)})
