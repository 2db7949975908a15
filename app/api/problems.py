"""The one table from this project's failures to HTTP: status, OpenAI error object, headers."""

import json

from app import errors

# status, OpenAI's `type`, `code`
PROBLEMS: dict[type[errors.SplitpoolError], tuple[int, str, str]] = {
    errors.MalformedRequest: (400, "invalid_request_error", "invalid_request"),
    errors.UnsupportedMedia: (415, "invalid_request_error", "unsupported_media_type"),
    errors.BodyTooLarge: (413, "invalid_request_error", "request_too_large"),
    errors.UnknownModel: (404, "invalid_request_error", "model_not_found"),
    errors.PoolBusy: (429, "rate_limit_error", "pool_busy"),
    errors.WaitedTooLong: (408, "timeout_error", "wait_limit_exceeded"),
    errors.PoolUnavailable: (503, "service_unavailable_error", "pool_unavailable"),
    errors.StreamBroken: (502, "server_error", "stream_broken"),
}
# An error body stays below a few kilobytes whatever the input was.
MAX_MESSAGE_CHARS = 600


def status_of(error: errors.SplitpoolError) -> int:
    return PROBLEMS[type(error)][0]


def code_of(error: errors.SplitpoolError) -> str:
    return PROBLEMS[type(error)][2]


def headers_of(error: errors.SplitpoolError) -> dict[str, str]:
    """Which pool it is about, and when to come back, where the failure says so."""
    if not isinstance(error, errors.Overloaded | errors.ServiceFailed):
        return {}
    return {"x-pool": error.pool, "retry-after": str(error.retry_after_s)}


def body_of(error: errors.SplitpoolError) -> bytes:
    """OpenAI's error object."""
    _, kind, code = PROBLEMS[type(error)]
    return problem(str(error), kind, code, getattr(error, "param", None))


def problem(message: str, kind: str, code: str | int, param: str | None = None) -> bytes:
    """An OpenAI error object of bounded size."""
    if len(message) > MAX_MESSAGE_CHARS:
        message = message[:MAX_MESSAGE_CHARS] + "…"
    content = {"message": message, "type": kind, "param": param and param[:200], "code": code}
    return json.dumps({"error": content}, ensure_ascii=False).encode(errors="replace")


def bounded(body: bytes) -> bytes:
    """An engine's error body, cut down if it is large; engines quote the client's input in them."""
    if len(body) <= 4 * MAX_MESSAGE_CHARS:
        return body
    try:
        error = json.loads(body)["error"]
        return problem(str(error["message"]), str(error["type"]), error["code"], error.get("param"))
    except (ValueError, KeyError, TypeError):
        return problem("the engine refused the request", "invalid_request_error", "invalid_request")
