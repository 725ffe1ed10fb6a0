from __future__ import annotations

import errno
import socket
import ssl

import pytest
from obstore.exceptions import GenericError

from dcpstore.errors import (
    AlreadyExistsError,
    ConfigError,
    ConflictError,
    NotFoundError,
    StoreError,
)
from dcpstore.store.base import IfMatch
from dcpstore.store.engine import (
    Answer,
    Asked,
    WrongRegionError,
    from_answer,
    from_transport,
)
from dcpstore.store.fsspec_clients import from_fsspec
from dcpstore.store.obstore_engine import from_obstore

PLAIN = Asked("get", "a", "s3://b")


def flags(error):
    return error.retryable, error.throttled, error.denied


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (Answer(429), (True, True, False)),
        (Answer(503, "SlowDown"), (True, True, False)),
        (Answer(200, "SlowDown"), (True, True, False)),
        (Answer(500, "InternalError"), (True, False, False)),
        (Answer(504), (True, False, False)),
        (Answer(501), (False, False, False)),
        (Answer(400, "RequestTimeout"), (True, False, False)),
        (Answer(400, "InvalidRequest"), (False, False, False)),
        (Answer(401), (False, False, True)),
        (Answer(403, "AccessDenied"), (False, False, True)),
        (Answer(400, "ExpiredToken"), (False, False, True)),
        (Answer(no_credentials=True), (False, False, True)),
        (Answer(text="reset", is_transport=True), (True, False, False)),
        (Answer(), (False, False, False)),
    ],
)
def test_answers_become_flags(answer, expected):
    error = from_answer(PLAIN, answer)
    assert isinstance(error, StoreError)
    assert flags(error) == expected
    assert error.key == "a"


@pytest.mark.parametrize(
    ("mode", "answer", "kind"),
    [
        ("overwrite", Answer(404, "NoSuchKey"), NotFoundError),
        ("overwrite", Answer(404, "NoSuchBucket"), NotFoundError),
        ("overwrite", Answer(404, "ContainerNotFound"), NotFoundError),
        ("overwrite", Answer(412), StoreError),
        ("create", Answer(412), AlreadyExistsError),
        ("create", Answer(409, "ConditionalRequestConflict"), ConflictError),
        ("create", Answer(404, "NoSuchBucket"), NotFoundError),
        (IfMatch("x"), Answer(412), ConflictError),
        (IfMatch("x"), Answer(404, "NoSuchKey"), ConflictError),
        (IfMatch("x"), Answer(404, "NoSuchBucket"), NotFoundError),
        (IfMatch("x"), Answer(501), ConfigError),
        (IfMatch("x"), Answer(503), StoreError),
        ("overwrite", Answer(301), WrongRegionError),
    ],
)
def test_answers_become_kinds(mode, answer, kind):
    assert type(from_answer(PLAIN.under(mode), answer)) is kind


def test_a_message_says_what_was_asked_and_answered_and_what_to_do():
    error = from_answer(PLAIN, Answer(403, "AccessDenied", "no"))
    assert "get 'a' in s3://b" in error.message
    assert "403 AccessDenied: no" in error.message
    assert "ListBucket" in error.message


@pytest.mark.parametrize(
    ("error", "kind", "expected"),
    [
        (FileNotFoundError("a"), NotFoundError, None),
        (IsADirectoryError("a"), NotFoundError, None),
        (PermissionError("a"), StoreError, (False, False, True)),
        (TimeoutError("a"), StoreError, (True, False, False)),
        (ConnectionResetError("a"), StoreError, (True, False, False)),
        (OSError(errno.EBUSY, "a"), StoreError, (True, False, False)),
        (OSError(errno.ENOSPC, "disk full"), StoreError, (False, False, False)),
        (RuntimeError("a"), StoreError, (False, False, False)),
    ],
)
def test_python_errors_are_mapped(error, kind, expected):
    mapped = from_fsspec(PLAIN, error)
    assert type(mapped) is kind
    assert expected is None or flags(mapped) == expected


def test_a_create_over_a_file_exists_already():
    assert type(from_fsspec(PLAIN.under("create"), FileExistsError("a"))) is AlreadyExistsError


def test_an_http_code_on_the_error_is_read():
    class HttpError(Exception):
        code = 429
        message = "slow, please"

    assert flags(from_fsspec(PLAIN, HttpError())) == (True, True, False)


def test_what_botocore_keeps_is_read():
    cause = Exception("botocore's")
    cause.response = {
        "Error": {"Code": "SlowDown", "Message": "x" * 1000},
        "ResponseMetadata": {"HTTPStatusCode": 503, "HTTPHeaders": {"retry-after": "4"}},
    }

    outer = OSError(errno.EBUSY, "translated")
    outer.__cause__ = cause
    error = from_fsspec(PLAIN, outer)
    assert error.retry_after_s == 4
    assert error.throttled
    assert len(error.message) < 400


OBSTORE_TEXT = """Generic S3 error: Error performing GET http://h/b/k in 1ms - HTTP error: error \
sending request

Debug source:
Generic { source: RetryError( RetryErrorImpl { inner: Http( HttpError { kind: Connect, source: X(
%s
) } ) } ) }"""


@pytest.mark.parametrize(
    ("debug", "said", "unreachable", "retryable"),
    [
        (
            'ConnectError("tcp connect error", Os { kind: ConnectionRefused })',
            "refused",
            True,
            True,
        ),
        ("Os { kind: NetworkUnreachable }", "no route", True, True),
        (
            '"dns error", Custom { error: "failed to lookup: Name or service not known" }',
            "could not be resolved (failed to lookup: Name or service not known)",
            True,
            True,
        ),
        (
            '"dns error", Custom { error: "Temporary failure in name resolution" }',
            "could not be resolved",
            False,
            True,
        ),
        ("InvalidCertificate(\n UnknownIssuer )", "refused (UnknownIssuer)", False, False),
        ("Something else", "error sending request", True, True),
        ("HttpError {\n kind: Timeout }", "no answer in time", False, True),
    ],
)
def test_obstore_tells_why_there_is_no_connection(debug, said, unreachable, retryable):
    error = from_obstore(Asked("get", "k", "s3://b"), GenericError(OBSTORE_TEXT % debug))
    assert isinstance(error, StoreError)
    assert said in error.message
    assert (error.unreachable, error.retryable) == (unreachable, retryable)


@pytest.mark.parametrize(
    ("cause", "said", "unreachable", "retryable"),
    [
        (ConnectionRefusedError(111, "x"), "the connection was refused", True, True),
        (OSError(errno.EHOSTUNREACH, "x"), "no route", True, True),
        (socket.gaierror(-2, "Name or service not known"), "could not be resolved", True, True),
        (
            socket.gaierror(-3, "Temporary failure in name resolution"),
            "could not be resolved",
            False,
            True,
        ),
        (ssl.SSLCertVerificationError(1, "self-signed"), "certificate was refused", False, False),
    ],
)
def test_the_cause_of_an_error_tells_why_there_is_no_connection(
    cause, said, unreachable, retryable
):
    error = ConnectionError("Could not connect to the endpoint URL")
    error.__cause__ = cause
    for mapped in (from_fsspec(PLAIN, error), from_transport(PLAIN, error)):
        assert isinstance(mapped, StoreError)
        assert said in mapped.message
        assert (mapped.unreachable, mapped.retryable) == (unreachable, retryable)


def test_an_error_of_ours_stays_itself():
    error = NotFoundError("mine")
    assert from_fsspec(PLAIN, error) is error


def test_no_signed_address_gets_into_a_message():
    error = from_fsspec(PLAIN, RuntimeError("GET https://h/b?X-Amz-Signature=hush&x=1 failed"))
    assert "hush" not in error.message
