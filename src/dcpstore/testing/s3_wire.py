"""What the embedded S3 server and the tests tell each other."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LoggedRequest:
    """One request as the server saw it.

    Attributes:
        operation: S3's name for it, such as ``GetObject``.
        bucket: Bucket, or empty.
        key: Object key, or empty.
        range: The ``Range`` header as sent; None without one.
        status: HTTP status of the answer.
        num_bytes_in: Length of the request's body.
        num_bytes_out: Length of the answer's body.
        start_s: When it came, on the server's monotonic clock.
        end_s: When its answer was ready.
        num_in_flight: Requests being served when it came, itself included.
        is_conditional: Whether it carried ``If-Match`` or ``If-None-Match``.
    """

    operation: str
    bucket: str
    key: str
    range: str | None
    status: int
    num_bytes_in: int
    num_bytes_out: int
    start_s: float
    end_s: float
    num_in_flight: int
    is_conditional: bool


@dataclass(slots=True)
class Fault:
    """What to do to the next requests of one operation.

    Attributes:
        operation: S3's name for the operation; ``*`` for any.
        kind: ``error`` answers with `status` and `code` and does nothing; ``lost_ack``
            does what was asked and then answers so; ``short`` cuts `num_bytes` off the
            answer's body and ``long`` adds as many, both with a matching length;
            ``flip`` turns one bit of the body; ``drop`` closes the connection halfway
            through the body.
        times: How many requests it takes; -1 for all.
        skip: How many of them to let pass first.
        key: Only requests for this key; empty for any.
        status: HTTP status of ``error`` and ``lost_ack``.
        code: S3's error code.
        retry_after_s: ``Retry-After`` header; None for none.
        num_bytes: For ``short`` and ``long``.
    """

    operation: str = "*"
    kind: str = "error"
    times: int = 1
    skip: int = 0
    key: str = ""
    status: int = 503
    code: str = "SlowDown"
    retry_after_s: float | None = None
    num_bytes: int = 1

    def takes(self, operation: str, key: str) -> bool:
        """Whether this fault applies to a request, counting it if so."""
        if self.times == 0 or self.operation not in ("*", operation):
            return False
        if self.key and self.key != key:
            return False
        if self.skip > 0:
            self.skip -= 1
            return False
        if self.times > 0:
            self.times -= 1
        return True
