"""What every `Store` must do, as functions that take one. Use them on stores of your own.

```python
@pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__)
def test_my_store_conforms(check):
    check(MyStore("some/empty/prefix"))
```

Each check writes below a folder of its own name and expects that folder to be empty.
Violations are `AssertionError`s that say what the store did.
"""

from __future__ import annotations

import contextlib
import itertools
import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from dcpstore.errors import (
    AlreadyExistsError,
    CheckpointError,
    ConfigError,
    ConflictError,
    CorruptError,
    NotFoundError,
)
from dcpstore.store.base import IfMatch, Part, Store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dcpstore.store.uploads import OpenUpload, OpenUploads


PART_BYTES = 5 * 2**20  # the least that S3 takes
ODD_KEYS = (
    "with space",
    "plus+and&",
    "percent%",
    "percent%41",
    "hash#tag",
    "question?mark",
    "ünïcödé/ключ/鍵",
    "tilde~dot.-_",
    "quotes'\"",
    "semi;colon:at@",
    "[brackets]{braces}",
    "a" * 200,
    ".metadata",
    "__0_0.0123abcd.distcp",
)


def _check(is_right: bool, said: str) -> None:
    if not is_right:
        raise AssertionError(said)


@contextlib.contextmanager
def _expect(kind: type[CheckpointError], what: str) -> Iterator[list[CheckpointError]]:
    """Fail unless the block raises an error of a kind; gives a list that will hold it."""
    caught: list[CheckpointError] = []
    try:
        yield caught
    except kind as error:
        caught.append(error)
    except Exception as error:
        raise AssertionError(f"{what}: {type(error).__name__}, not {kind.__name__}") from error
    else:
        raise AssertionError(f"{what}: succeeded, where {kind.__name__} is due")


def a_put_can_be_read_back(store: Store) -> None:
    """Put bytes of several kinds and fetch them; a put replaces what was there."""
    key = "read_back/object"
    for data in (b"", b"first", bytearray(b"second"), memoryview(b"3210")[::1], b"x" * 100_000):
        etag = store.put(key, data)
        fetched = store.get(key)
        _check(bytes(fetched.data) == bytes(data), f"put {bytes(data)[:9]!r}, got another")
        _check(isinstance(fetched.data, memoryview), "get answers with a memoryview")
        _check(fetched.data.readonly, "an answer is read-only")
        if store.capabilities.acknowledges_puts:
            _check(etag is not None, "a store that acknowledges puts returns an ETag")
            _check(etag == fetched.etag, f"put said {etag}, get says {fetched.etag}")


def a_buffer_of_any_item_type_is_stored_as_bytes(store: Store) -> None:
    """Put a view of 8-byte items and a view of two dimensions."""
    whole = memoryview(bytes(range(64)))
    for view in (whole.cast("q"), whole.cast("B", (8, 8))):
        store.put("views/object", view)
        _check(bytes(store.get("views/object").data) == bytes(whole), f"{view.format} view")


def ranges_are_exact_at_every_edge(store: Store) -> None:
    """Fetch ranges at the start, in the middle, at the end, and empty ones."""
    data = bytes(range(256)) * 4
    store.put("ranges/object", data)
    edges = (0, 1, 2, 511, 512, 1022, 1023, 1024)
    for start, end in itertools.combinations_with_replacement(edges, 2):
        got = store.get_range("ranges/object", start, end)
        _check(bytes(got) == data[start:end], f"[{start}, {end}) brought {len(got)} bytes")
        _check(got.readonly, "an answer is read-only")


def an_empty_range_makes_no_request(store: Store) -> None:
    """Ask for nothing of what does not exist."""
    _check(len(store.get_range("nowhere/object", 7, 7)) == 0, "an empty range is empty")


def a_range_past_the_end_is_corruption(store: Store) -> None:
    """Ask for more than there is, in part and in whole, also of an empty object."""
    store.put("past/object", b"0123456789")
    store.put("past/empty", b"")
    for key, start, end in (("object", 5, 11), ("object", 10, 11), ("object", 20, 30)):
        with _expect(CorruptError, f"[{start}, {end}) of 10 bytes") as caught:
            store.get_range(f"past/{key}", start, end)
        told = getattr(caught[0], "start", 0), getattr(caught[0], "end", 0)
        _check(told == (start, end), "its range")
    with _expect(CorruptError, "[0, 1) of nothing"):
        store.get_range("past/empty", 0, 1)


def what_is_absent_is_not_found(store: Store) -> None:
    """Look for an object that nobody put."""
    asking: tuple[tuple[str, tuple[int, ...]], ...]
    asking = ("get", ()), ("get_range", (0, 1)), ("get_tail", (1,)), ("head", ())
    for verb, more in asking:
        with _expect(NotFoundError, f"{verb} of an absent key") as caught:
            getattr(store, verb)("absent/object", *more)
        _check("absent/object" in caught[0].message, "the message names the key")


def a_folder_is_no_object(store: Store) -> None:
    """Look at the folder of an object."""
    store.put("folder/below/object", b"1")
    with _expect(NotFoundError, "head of a folder"):
        store.head("folder/below")


def head_tells_size_and_mark(store: Store) -> None:
    """Compare what head says with what put and get say."""
    store.put("head/object", b"12345")
    info = store.head("head/object")
    _check(info.key == "head/object", f"the key is relative to the root: {info.key}")
    _check(info.size_bytes == 5, f"size {info.size_bytes}")
    _check(info.etag == store.get("head/object").etag, "one mark for head and get")
    _check(info.modified is None or info.modified.tzinfo is not None, "times have a zone")


def a_create_succeeds_once(store: Store) -> None:
    """Create twice; the first content stays."""
    store.put("create/object", b"first", mode="create")
    with _expect(AlreadyExistsError, "a second create"):
        store.put("create/object", b"second", mode="create")
    _check(bytes(store.get("create/object").data) == b"first", "the first create stays")


def one_of_many_creates_wins(store: Store) -> None:
    """Let eight threads create the same key at once."""
    if not store.capabilities.atomic_create:
        return

    def create(number: int) -> bool:
        try:
            store.put("race/object", str(number).encode(), mode="create")
        except (AlreadyExistsError, ConflictError):
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        wins = [n for n, won in enumerate(pool.map(create, range(8))) if won]
    _check(len(wins) == 1, f"{len(wins)} creates won")
    _check(bytes(store.get("race/object").data) == str(wins[0]).encode(), "the winner's content")


def compare_and_swap_needs_the_right_mark(store: Store) -> None:
    """Swap with the current, a stale and a foreign mark, and on an absent key."""
    store.put("swap/object", b"one")
    first = store.get("swap/object").etag
    if first is None:
        return
    store.put("swap/object", b"two!", mode=IfMatch(first))
    _check(bytes(store.get("swap/object").data) == b"two!", "the right mark swaps")
    for mark, what in ((first, "a stale mark"), ('"0123"', "a foreign mark")):
        with _expect(ConflictError, what):
            store.put("swap/object", b"three", mode=IfMatch(mark))
    with _expect(ConflictError, "a swap of nothing"):
        store.put("swap/absent", b"three", mode=IfMatch(first))
    _check(bytes(store.get("swap/object").data) == b"two!", "a refused swap changes nothing")


def parts_become_one_object(store: Store) -> None:
    """Put streams of no, one short, one whole, and several parts."""
    part = bytes(range(256)) * (PART_BYTES // 256)
    streams: tuple[list[bytes], ...] = ([], [b"short"], [part], [part, part], [part, part, b"tail"])
    for stream in streams:
        etag = store.put_parts(
            "parts/object", iter(stream), part_bytes=PART_BYTES, max_concurrency=3
        )
        info = store.head("parts/object")
        _check(info.size_bytes == sum(map(len, stream)), f"{len(stream)} parts: {info}")
        _check(etag in (None, info.etag), f"put_parts said {etag}, head says {info.etag}")
    end = 2 * PART_BYTES
    joint = bytes(store.get_range("parts/object", PART_BYTES - 3, PART_BYTES + 3))
    _check(joint == part[-3:] + part[:3], "bytes around a joint")
    _check(bytes(store.get_range("parts/object", end, end + 4)) == b"tail", "the last part")
    pieces: list[Part] = [(part[:100], part[100:1000], part[1000:]), part, (b"ta", b"il")]
    store.put_parts("parts/object", iter(pieces), part_bytes=PART_BYTES, max_concurrency=3)
    whole = bytes(store.get("parts/object").data)
    _check(whole == part + part + b"tail", "parts in pieces are their bytes one after the other")


def a_failing_stream_publishes_nothing(store: Store) -> None:
    """Let the iterator of parts raise: at once, early, and after several parts."""

    class Mine(Exception):
        pass

    def failing(num_parts: int) -> Iterator[bytes]:
        for _ in range(num_parts):
            yield b"p" * PART_BYTES
        raise Mine(f"after {num_parts}")

    for num_parts in (0, 1, 3):
        key = f"failing/{num_parts}"
        try:
            store.put_parts(key, failing(num_parts), part_bytes=PART_BYTES, max_concurrency=2)
        except Mine:
            pass
        else:
            raise AssertionError("the stream's own exception comes through")
        with _expect(NotFoundError, "after a failure"):
            store.head(key)
    _check(not list(store.list("failing/")), "nothing is listed after a failure")


def a_wrong_part_size_is_refused(store: Store) -> None:
    """Put a short part before another, and one that is too long."""
    for stream in ([b"s", b"p" * PART_BYTES], [b"p" * (PART_BYTES + 1)]):
        with _expect(ConfigError, "parts of a wrong size"):
            store.put_parts("sizes/object", iter(stream), part_bytes=PART_BYTES, max_concurrency=2)
    with _expect(NotFoundError, "nothing is published"):
        store.head("sizes/object")


def a_list_shows_keys_below_a_folder(store: Store) -> None:
    """List a folder at every depth, its neighbours left out."""
    for key in ("tree/a", "tree/b/c", "tree/b/d/e", "tree2/f", "trees"):
        store.put(f"list/{key}", b"12")
    found = {info.key: info for info in store.list("list/tree/")}
    _check(sorted(found) == ["list/tree/a", "list/tree/b/c", "list/tree/b/d/e"], f"{sorted(found)}")
    _check(all(info.size_bytes == 2 for info in found.values()), "sizes")
    a = found["list/tree/a"]
    _check(a.etag in (None, store.head(a.key).etag), "a list's mark is the head's")
    _check(len(list(store.list("list/"))) == 5, "a folder holds its sub-folders")
    _check(not list(store.list("list/nowhere/")), "an absent folder is empty")


def folders_are_what_objects_lie_below(store: Store) -> None:
    """Ask for the folders of nested keys, of the root, of an object's name and of nothing."""
    keys = ("object", "one/a", "one/b", "two/deep/er/c", "with space/d", "percent%41/e", "鍵/f")
    for key in keys:
        store.put(f"folders/{key}", b"1")
    found = sorted(store.folders("folders/"))
    due = sorted({key.partition("/")[0] for key in keys if "/" in key})
    _check(found == due, f"the folders are {found}, not {due}")
    _check(list(store.folders("folders/two/")) == ["deep"], "the next folder only")
    _check("folders" in store.folders(), "the root has folders")
    for absent in ("folders/one/", "folders/object/", "folders/none/", "folders/on/"):
        _check(not store.folders(absent), f"{absent} has no folders")
    store.delete_many([f"folders/{key}" for key in keys if not key.startswith("one")])
    _check(list(store.folders("folders/")) == ["one"], "what has no object is no folder")


def an_object_may_have_the_name_of_a_folder(store: Store) -> None:
    """Put an object, and others below its name, where the store can."""
    store.put("both/name/below/object", b"1")
    try:
        store.put("both/name", b"1")
    except CheckpointError:
        return  # it keeps files
    _check(list(store.folders("both/")) == ["name"], "a folder by the name of an object")
    _check(list(store.folders("both/name/")) == ["below"], "below an object's name")
    store.delete_many(["both/name/below/object"])
    _check(not store.folders("both/"), "an object is no folder")


def what_is_no_folder_is_refused(store: Store) -> None:
    """Ask for the folders of what is not the prefix of a folder."""
    for prefix in ("a", "/", "/a/", "a//", "../", "a/../"):
        with _expect(ConfigError, f"prefix {prefix!r}"):
            store.folders(prefix)


def a_tail_is_the_end_of_an_object(store: Store) -> None:
    """Fetch less than there is, just that, and more; also of an empty object."""
    for data in (b"0123456789", b"1", b""):
        etag = store.put("tail/object", data)
        for num_bytes in (1, 9, 10, 11, 1 << 20):
            tail = store.get_tail("tail/object", num_bytes)
            what = f"the last {num_bytes} bytes of {len(data)}"
            _check(bytes(tail.data) == data[-num_bytes:], f"{what}: {bytes(tail.data)!r}")
            _check(tail.data.readonly, "an answer is read-only")
            _check(tail.size_bytes == len(data), f"{what}: of {tail.size_bytes}")
            _check(etag in (None, tail.etag), f"{what}: put said {etag}, the tail {tail.etag}")
    for num_bytes in (0, -1):
        with _expect(ConfigError, f"a tail of {num_bytes} bytes"):
            store.get_tail("tail/object", num_bytes)


def odd_keys_keep_their_names(store: Store) -> None:
    """Store, list, fetch and delete keys that need quoting somewhere."""
    keys = [f"odd/{key}" for key in ODD_KEYS]
    for key in keys:
        store.put(key, key.encode())
    _check(sorted(info.key for info in store.list("odd/")) == sorted(keys), "listed by their names")
    for key in keys:
        _check(bytes(store.get(key).data) == key.encode(), f"content of {key!r}")
        _check(bytes(store.get_range(key, 1, 3)) == key.encode()[1:3], f"range of {key!r}")
        _check(store.head(key).key == key, f"head of {key!r}")
    store.delete_many(keys)
    _check(not list(store.list("odd/")), "deleted by their names")


def what_is_no_key_is_refused(store: Store) -> None:
    """Use keys that would leave the root or mean a folder."""
    for key in ("", "/a", "a/", "a//b", "../a", "a/../b", "./a"):
        with _expect(ConfigError, f"key {key!r}"):
            store.put(key, b"")
        with _expect(ConfigError, f"key {key!r}"):
            store.get(key)
        with _expect(ConfigError, f"key {key!r}"):
            store.get_tail(key, 1)


def deletes_forgive_what_is_absent(store: Store) -> None:
    """Delete some that exist, some that do not, and none."""
    store.put("delete/a", b"1")
    store.put("delete/b", b"1")
    store.delete_many([])
    store.delete_many(["delete/absent", "delete/a", "delete/none"])
    _check([info.key for info in store.list("delete/")] == ["delete/b"], "only those named")
    with _expect(NotFoundError, "what was deleted"):
        store.get("delete/a")


def many_threads_may_use_one_store(store: Store) -> None:
    """Put and fetch from eight threads at once."""

    def work(number: int) -> bool:
        key, data = f"threads/{number}", bytes([number]) * 1000
        store.put(key, data)
        return bytes(store.get_range(key, 0, 1000)) == data == bytes(store.get(key).data)

    with ThreadPoolExecutor(8) as pool:
        _check(all(pool.map(work, range(32))), "every thread reads what it wrote")


def a_store_pickles_without_its_connections(store: Store) -> None:
    """Use a store, pickle it, and compare the copy."""
    store.put("pickle/object", b"1")
    copy = pickle.loads(pickle.dumps(store))  # noqa: S301 - our own bytes
    _check(copy.url == store.url, f"{copy.url} is not {store.url}")
    _check(copy.capabilities == store.capabilities, "the same promises")
    _check(isinstance(copy, Store), "a copy is a store")
    copy.close()


def a_closed_store_may_be_closed_again(store: Store) -> None:
    """Close twice."""
    store.put("close/object", b"1")
    store.close()
    store.close()


def an_upload_under_way_is_listed(store: Store, uploads: OpenUploads) -> None:
    """List the open uploads while parts are being sent, and after they failed."""
    seen: list[OpenUpload] = []

    class Mine(Exception):
        pass

    def parts() -> Iterator[bytes]:
        yield b"p" * PART_BYTES
        yield b"q" * PART_BYTES
        seen.extend(uploads.list())
        raise Mine

    _check(not list(uploads.list()), "nothing is under way at first")
    with contextlib.suppress(Mine):
        store.put_parts("listed/object", parts(), part_bytes=PART_BYTES, max_concurrency=1)
    _check(len(seen) == 1, f"one upload is under way: {seen}")
    begun = seen[0].modified
    _check(begun is None or begun.tzinfo is not None, "times have a zone")
    _check(not list(uploads.list()), "a failed upload is gone")


def an_upload_may_be_aborted_by_another(store: Store, uploads: OpenUploads) -> None:
    """Abort an upload while its parts are being sent, twice."""

    def parts() -> Iterator[bytes]:
        yield b"p" * PART_BYTES
        yield b"q" * PART_BYTES
        for one in list(uploads.list()):
            uploads.abort(one)
            uploads.abort(one)
        yield b"r" * PART_BYTES

    with _expect(CheckpointError, "an upload that was aborted"):
        store.put_parts("gone/object", parts(), part_bytes=PART_BYTES, max_concurrency=1)
    _check(not list(uploads.list()), "an aborted upload is gone")
    with _expect(NotFoundError, "nothing is published"):
        store.head("gone/object")


UPLOAD_CHECKS: tuple[Callable[[Store, OpenUploads], None], ...] = (
    an_upload_under_way_is_listed,
    an_upload_may_be_aborted_by_another,
)

CHECKS: tuple[Callable[[Store], None], ...] = (
    a_put_can_be_read_back,
    a_buffer_of_any_item_type_is_stored_as_bytes,
    ranges_are_exact_at_every_edge,
    an_empty_range_makes_no_request,
    a_range_past_the_end_is_corruption,
    what_is_absent_is_not_found,
    a_folder_is_no_object,
    head_tells_size_and_mark,
    a_create_succeeds_once,
    one_of_many_creates_wins,
    compare_and_swap_needs_the_right_mark,
    parts_become_one_object,
    a_failing_stream_publishes_nothing,
    a_wrong_part_size_is_refused,
    a_list_shows_keys_below_a_folder,
    folders_are_what_objects_lie_below,
    an_object_may_have_the_name_of_a_folder,
    what_is_no_folder_is_refused,
    a_tail_is_the_end_of_an_object,
    odd_keys_keep_their_names,
    what_is_no_key_is_refused,
    deletes_forgive_what_is_absent,
    many_threads_may_use_one_store,
    a_store_pickles_without_its_connections,
    a_closed_store_may_be_closed_again,
)
