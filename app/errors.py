"""Every failure this project names, grouped by who must act. Knows nothing of HTTP.

SplitpoolError
├── RequestRefused          the caller must change the request
│   ├── MalformedRequest    a field is missing, of the wrong type or out of bounds
│   ├── UnsupportedMedia    the body is not declared as JSON
│   ├── BodyTooLarge        more bytes than the configured bound
│   └── UnknownModel        no such model is served here
├── Overloaded              nobody: try again after `retry_after_s`
│   ├── PoolBusy            the pool is up and will not take one more now
│   └── WaitedTooLong       the request's own wait limit passed before a slot was free
├── ServiceFailed           the operator must look
│   ├── PoolUnavailable     no replica of the pool can take work
│   └── StreamBroken        the answer stopped after its first byte
├── ConfigInvalid           the start is refused; names the path of the bad key
├── FactsInvalid            a recorded line is not a request
├── ModelInvalid            the model source cannot be served; names the field
└── ProofFailed             an engine answered known prompts wrongly
"""


class SplitpoolError(Exception):
    """Root of the tree; never raised itself."""


class RequestRefused(SplitpoolError):
    """The caller must change the request. `param` is the JSON path of the field at fault."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class MalformedRequest(RequestRefused):
    """A field is missing, of the wrong type or out of bounds."""


class UnsupportedMedia(RequestRefused):
    """The body is not declared as JSON."""


class BodyTooLarge(RequestRefused):
    """The body has more bytes than the configured bound."""


class UnknownModel(RequestRefused):
    """No such model is served here."""


class Overloaded(SplitpoolError):
    """Capacity exists and is contended: try again after `retry_after_s` seconds."""

    def __init__(self, message: str, pool: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.message = message
        self.pool = pool
        self.retry_after_s = retry_after_s


class PoolBusy(Overloaded):
    """The pool is up and will not take one more request now."""


class WaitedTooLong(Overloaded):
    """The request's own wait limit passed before a slot was free."""


class ServiceFailed(SplitpoolError):
    """The operator must look; the caller may try again after `retry_after_s` seconds."""

    def __init__(self, message: str, pool: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.message = message
        self.pool = pool
        self.retry_after_s = retry_after_s


class PoolUnavailable(ServiceFailed):
    """No replica of the pool can take work."""


class StreamBroken(ServiceFailed):
    """The answer stopped after its first byte."""


class ConfigInvalid(SplitpoolError):
    """The configuration is refused; each line names the path of a bad key."""


class FactsInvalid(SplitpoolError):
    """A file of recorded facts cannot be read; names the line."""


class ModelInvalid(SplitpoolError):
    """The model source cannot be served; the message names the configuration field."""


class ProofFailed(SplitpoolError):
    """An engine answered known prompts wrongly and must not take traffic."""
