"""Files under their final names: written front to back in bounded memory, whole or not at all.

1. `file_location` splits the URL of a file into the folder that a `Store` is opened on, and a key
2. `reject_existing`: before anything is read, find out whether a file is in the way
3. `Outputs.write`: the caller writes bytes and tensors; full parts upload meanwhile
4. the object appears when its last part is in: one put, or the completion of a multipart upload

An error or Ctrl-C before that aborts the upload and leaves nothing under the name. What was
published earlier under the same `Outputs` is deleted again, unless it replaced a file.

How a converter's byte budget is shared among what it holds at a time.

::

    | fetched, not yet copied | block being written | block being read | parts on their way | rest |
           1/4                       1/8                   1/8                 3/8            1/8
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace

from typing_extensions import Buffer

from dcpstore.config import ReadConfig, WriteConfig
from dcpstore.errors import (
    AlreadyExistsError,
    CheckpointError,
    ConfigError,
    NotFoundError,
    RankFailures,
    StoreError,
)
from dcpstore.format.manifest import DataObject
from dcpstore.ranks import RankGroup, steps
from dcpstore.ranks.transport import BoardLostError
from dcpstore.report import Meter
from dcpstore.store.base import Capabilities, ObjectInfo, Part, Store, StoreLimits, limits_of
from dcpstore.write.commit import ConditionalPut, Proof, sweep
from dcpstore.write.upload import ObjectStream, Uploads

_MIB = 1 << 20
_LEAST_PART_BYTES = 5 * _MIB  # S3's
_USUAL_PART_BYTES = 16 * _MIB

MIN_OUTPUT_BYTES = 2 * _LEAST_PART_BYTES
"""The smallest budget that can upload anything: one part to fill while another uploads."""


def part_bytes_for(largest_bytes: int, budget_bytes: int, limits: StoreLimits) -> int:
    """Return the part size with which objects of up to ``largest_bytes`` upload in a budget.

    Raises:
        ConfigError: If the store takes no object that large, or the budget does not hold two
            parts, of which it takes no more than the store allows.
    """
    least = limits.part_bytes_for(largest_bytes, _LEAST_PART_BYTES)
    if budget_bytes < 2 * least:
        raise ConfigError(
            f"a budget of {budget_bytes} bytes for uploads is too small for an object of"
            f" {largest_bytes} bytes: it takes at least {2 * least}. Raise budget_bytes"
        )
    # Four parts, so that two upload while one is filled and one is on its way back.
    usual = min(_USUAL_PART_BYTES, budget_bytes // 4 // 4096 * 4096)
    return max(least, usual)


class Outputs:
    """Files being written to one folder, one after another. One thread.

    Use as a context manager: leaving it waits for every upload.

    Args:
        store: Rooted at the folder.
        budget_bytes: Memory for bytes on their way, whatever the size of the files.
        largest_bytes: The largest file to come, or a little more; decides the size of parts.
        overwrite: Replace files that exist. Otherwise a file is created if it is absent:
            decided by the store in one step for a file of one part; for a larger one, looked
            up once more before the upload is completed.
        meter: Counts the bytes handed to the store.

    Raises:
        ConfigError: If the budget is too small for files that large.
    """

    def __init__(
        self,
        store: Store,
        *,
        budget_bytes: int,
        largest_bytes: int,
        overwrite: bool = False,
        meter: Meter | None = None,
    ) -> None:
        part_bytes = part_bytes_for(largest_bytes, budget_bytes, store.capabilities.limits)
        num_parts = budget_bytes // part_bytes
        config = WriteConfig(
            budget_bytes=budget_bytes, part_bytes=part_bytes, max_uploads=min(16, num_parts)
        )
        self._store = store
        self._overwrite = overwrite
        self._publisher = _Publisher(store, creates=not overwrite)
        self._uploads = Uploads(self._publisher, config, pin=False, meter=meter, lends=False)

    def __enter__(self) -> Outputs:
        self._uploads.__enter__()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self._uploads.__exit__(kind, error, trace)
        except BaseException:
            self._take_back()
            raise
        if error is not None:
            self._take_back()

    @property
    def stored(self) -> Mapping[str, DataObject]:
        """Each file as the store acknowledged it; complete when the context manager was left."""
        return self._uploads.objects

    @property
    def objects(self) -> dict[str, int]:
        """Size in bytes of each file; complete when the context manager was left."""
        return {key: stored.size_bytes for key, stored in self.stored.items()}

    @property
    def peak_bytes(self) -> int:
        """Memory that the parts took."""
        return self._uploads.pool.peak_bytes

    @contextmanager
    def write(self, key: str) -> Iterator[ObjectStream]:
        """Write one file, front to back; it is complete when the block ends without an error.

        The stream takes bytes (`ObjectStream.write`) and plain tensors, row-major
        (`ObjectStream.write_tensor`; they must start at a multiple of their element size), and
        copies both: the caller may fill their memory again. The upload may still be under way
        when the block ends.
        """
        stream = self._uploads.open(key)
        yield stream
        stream.finish()

    def _take_back(self) -> None:
        """Delete what was published although the whole failed; what replaced a file stays."""
        if not self._overwrite:
            doomed = self._publisher.published
            sweep(self._store, doomed, Proof.NOT_BEGUN, why="this failed conversion")


def put_file(store: Store, key: str, data: bytes, *, overwrite: bool = False) -> None:
    """Write one small file; see `Outputs`."""
    with (
        Outputs(
            store, budget_bytes=MIN_OUTPUT_BYTES, largest_bytes=len(data), overwrite=overwrite
        ) as outputs,
        outputs.write(key) as stream,
    ):
        stream.write(data)


class _Publisher:
    """An `ObjectSink` that creates, where that is wanted, and remembers what it published."""

    def __init__(self, store: Store, *, creates: bool) -> None:
        self._store = store
        self._creates = creates
        self.published: list[str] = []

    @property
    def capabilities(self) -> Capabilities:
        return self._store.capabilities

    def head(self, key: str) -> ObjectInfo:
        return self._store.head(key)

    def put(self, key: str, data: Buffer) -> str | None:
        if not self._creates:
            etag = self._store.put(key, data)
            self.published.append(key)
            return etag
        creation = ConditionalPut(self._store, key, None)
        try:
            etag = creation.put(data)
        except AlreadyExistsError as error:
            raise _exists(self._store, key) from error
        if creation.was_acknowledged:  # else another writer may have put the same bytes there
            self.published.append(key)
        return etag

    def put_parts(
        self, key: str, parts: Iterable[Part], *, part_bytes: int, max_concurrency: int
    ) -> str | None:
        if self._creates:
            parts = self._then_look(key, parts)
        etag = self._store.put_parts(
            key, parts, part_bytes=part_bytes, max_concurrency=max_concurrency
        )
        self.published.append(key)
        return etag

    def _then_look(self, key: str, parts: Iterable[Part]) -> Iterator[Part]:
        """No store's multipart upload takes a condition through its engine: look before it ends."""
        yield from parts
        # obstore takes the parts inside its own event loop, where no other request may begin.
        with ThreadPoolExecutor(1, "dcpstore-look") as executor:
            executor.submit(reject_existing, self._store, key).result()


def reject_existing(store: Store, key: str) -> None:
    """Look whether an object is in the way; a refusal to tell counts as absence.

    Raises:
        AlreadyExistsError: If it is.
    """
    try:
        store.head(key)
    except NotFoundError:
        return
    except StoreError as error:
        if error.denied:  # without permission to list, S3 answers 403 for a missing object
            return
        raise
    raise _exists(store, key)


def _exists(store: Store, key: str) -> AlreadyExistsError:
    return AlreadyExistsError(
        f"{store.url} already holds {key}. Convert to another place, or pass overwrite=True to"
        " replace it. It was left as it is"
    )


def is_surely_unpublished(error: BaseException, group: RankGroup, last_step: str) -> bool:
    """Tell whether what the coordinator puts last cannot be there: its files may be deleted.

    Args:
        error: What ended the conversion on this rank.
        group: The ranks.
        last_step: The step in which the coordinator puts it.
    """
    if not isinstance(error, RankFailures) or isinstance(error.__cause__, BoardLostError):
        return False
    if error.step != last_step:
        return True
    cause = error.exceptions.get(group.coordinator)
    return isinstance(cause, CheckpointError) and cause.refused


def fetched_by_all(group: RankGroup, own_bytes: int) -> int:
    """All ranks: add up the bytes that each asked of the source. The last step."""

    def total(parts: list[int]) -> int:
        return sum(parts)

    return steps.all_reduce(group, "finish", lambda: own_bytes, total)


_MIN_BUDGET_BYTES = 32 * _MIB  # 3/8 of it holds two of the smallest parts


@dataclass(frozen=True, slots=True)
class Shares:
    """What each stage may hold.

    Attributes:
        read_bytes: Fetched bytes not yet copied.
        block_bytes: One block of tensors; there are two.
        output_bytes: Parts of objects on their way to the store.
    """

    read_bytes: int
    block_bytes: int
    output_bytes: int

    def read_config(self) -> ReadConfig:
        """Return how to read within the share; every cast is allowed, being asked for."""
        config = ReadConfig()
        return replace(
            config,
            budget_bytes=self.read_bytes,
            request_bytes=min(config.request_bytes, self.read_bytes // 4),
            casts="any",
        )

    def write_config(self, object_bytes: int) -> WriteConfig:
        """Return how to write checkpoints within the share."""
        config = WriteConfig()
        largest_bytes = max(object_bytes, self.block_bytes)
        # The strictest limits: the store is not open yet.
        part_bytes = part_bytes_for(2 * largest_bytes, self.output_bytes, limits_of("s3"))
        return replace(
            config,
            budget_bytes=self.output_bytes,
            part_bytes=part_bytes,
            object_bytes=object_bytes,
            max_uploads=min(config.max_uploads, self.output_bytes // part_bytes),
        )


def share_budget(budget_bytes: int) -> Shares:
    """Divide a budget.

    Raises:
        ConfigError: If it is too small to do anything with.
    """
    if budget_bytes < _MIN_BUDGET_BYTES:
        raise ConfigError(
            f"budget_bytes={budget_bytes} is too small: a converter needs {_MIN_BUDGET_BYTES}"
        )
    eighth = budget_bytes // 8 // 4096 * 4096
    return Shares(2 * eighth, eighth, 3 * eighth)
