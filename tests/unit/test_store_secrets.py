"""What a server repeats of a request stays out of errors, of their causes and of their text."""

from __future__ import annotations

import pickle
import threading
import traceback
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from dcpstore.errors import CheckpointError, RankFailures
from dcpstore.ranks.group import describe
from dcpstore.store import Store, open_store
from dcpstore.store.base import Destination
from dcpstore.store.engine import Asked, scrubbed
from dcpstore.store.fsspec_clients import from_fsspec
from dcpstore.store.obstore_engine import from_obstore
from dcpstore.store.retry import RetryPolicy

ACCESS = "AKIAIOSFODNN7EXAMPLE"
SECRET = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"
TOKEN = "FwoGZXIvYXdzEJr3" + "aB3/xY9+Qw7Zr5Tp1LkM8nVc" * 8 + "=="


@pytest.fixture
def echo() -> Iterator[tuple[str, list[int]]]:
    """A server that answers everything with what it was sent; its address, and its answers."""
    statuses = [403]

    class Echo(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"  # clients wait for "100 Continue"

        def answer(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            self.rfile.read(length)
            sent = f"{self.command} {self.path}\n{self.headers}"
            escaped = sent.replace("&", "&amp;").replace("<", "&lt;")
            token = self.headers.get("x-amz-security-token", "")
            body = (
                "<Error><Code>InvalidToken</Code>"
                f"<Message>The provided token {token} is malformed: {escaped}</Message>"
                f"<Token-0>{token}</Token-0><CanonicalRequest>{escaped}</CanonicalRequest></Error>"
            ).encode()
            self.send_response(statuses[0])
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Connection", "close")
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = answer

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Echo) as server:
        server.daemon_threads, server.block_on_close = True, False
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}", statuses
        server.shutdown()
        thread.join()


def everything_in(error: BaseException) -> str:
    """All text that a log, a traceback or another rank may show of an error."""
    texts = ["".join(traceback.format_exception(type(error), error, error.__traceback__))]
    seen: list[BaseException] = []
    left: list[BaseException | None] = [error]
    while left:
        one = left.pop()
        if one is None or one in seen:
            continue
        seen.append(one)
        texts += [str(one), repr(one), repr(one.args), repr(vars(one))]
        left += [one.__cause__, one.__context__]
    cause = describe(error)
    assert cause.pickled is not None
    failures = RankFailures(
        "step", {0: cause.text}, tracebacks={0: cause.traceback}, pickled={0: cause.pickled}
    )
    texts += [str(failures), repr(pickle.dumps(failures))]
    return "\n".join(texts)


VERBS: dict[str, Callable[[Store], object]] = {
    "get": lambda store: store.get("a"),
    "get_range": lambda store: store.get_range("a", 0, 5),
    "fill": lambda store: store.fill("a", 0, Destination([memoryview(np.empty(9, np.uint8))])),
    "put": lambda store: store.put("a", b"1"),
    "create": lambda store: store.put("a", b"1", mode="create"),
    "list": lambda store: list(store.list()),
    "delete": lambda store: store.delete_many(["a"]),
}


@pytest.mark.parametrize("status", [400, 403, 500])
@pytest.mark.parametrize("engine", ["obstore", "fsspec"])
@pytest.mark.parametrize("verb", VERBS)
def test_an_answer_that_repeats_the_request_gives_no_secret_away(
    echo: tuple[str, list[int]], engine: str, verb: str, status: int
) -> None:
    url, statuses = echo
    statuses[0] = status
    options = {
        "key": ACCESS,
        "secret": SECRET,
        "token": TOKEN,
        "client_kwargs": {"endpoint_url": url, "region_name": "us-east-1"},
    }
    store = open_store(
        "s3://bucket/run", storage_options=options, engine=engine, retry=RetryPolicy(1)
    )
    if verb == "fill" and not store.capabilities.fills_memory:
        return
    with pytest.raises(CheckpointError) as caught:
        VERBS[verb](store)
    text = everything_in(caught.value)
    assert str(status) in text or verb in ("delete", "list")
    for secret in (SECRET, TOKEN, TOKEN[:40], TOKEN[-40:]):
        assert secret not in text
    assert "X-Amz-Signature=" not in text.replace("X-Amz-Signature=***", "")
    assert "Signature=" not in text.replace("Signature=***", "")


ASKED = Asked("get", "a", "s3://bucket/run")


@pytest.mark.parametrize(
    "text",
    [
        "Authorization: Bearer ya29.a0AfH6SMBx",
        "'authorization': 'AWS4-HMAC-SHA256 Credential=AKIA/x, Signature=ya29.a0AfH6SMBx'",
        '{"access_token": "ya29.a0AfH6SMBx", "expires_in": 5}',
        "x-amz-security-token:ya29.a0AfH6SMBx",
        "performing PUT https://host/b/k?X-Amz-Signature=ya29.a0AfH6SMBx&uploadId=7 failed",
        "http://user:ya29.a0AfH6SMBx@host/b",
        "the signature is ya29.a0AfH6SMBx",
        "https://a.blob.core.windows.net/c?sv=1&sig=ya29.a0AfH6SMBx",
    ],
)
def test_secrets_are_known_by_their_names(text: str) -> None:
    for error in (from_fsspec(ASKED, OSError(text)), from_obstore(ASKED, OSError(text))):
        assert "ya29" not in str(error)
    cause = scrubbed(OSError(text))
    assert "ya29" not in str(cause)
    assert "OSError" in str(cause)
    assert ("uploadId=7" in str(cause)) == ("uploadId" in text)


@pytest.mark.parametrize(
    "text",
    [
        "no such object run/2026/Llama-3-70B-Instruct/step-00001000/__12_0.0123456789abcdef.distcp",
        "model.layers.11.self_attn.q_proj.weight is missing",
        "the digest is 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
        "<Code>NoSuchKey</Code><Key>run/step-1</Key>",
    ],
)
def test_names_keys_and_digests_stay_readable(text: str) -> None:
    assert text in str(scrubbed(OSError(text)))
