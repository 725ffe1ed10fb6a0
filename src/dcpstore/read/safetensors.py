"""The safetensors files of a folder: which they are, their headers, and whether they are whole.

A file from a hub is untrusted: its header says which bytes are which tensor. What the safetensors
package refuses is refused by `dcpstore.format.safetensors`; what only the folder tells (sizes of
files, the index) is checked here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from typing import Literal, NamedTuple

from dcpstore.config import ReadConfig
from dcpstore.errors import CorruptError, NotFoundError, StoreError
from dcpstore.format.safetensors import (
    LENGTH_BYTES,
    FileHeader,
    TensorInFile,
    header_length,
    parse_file,
)
from dcpstore.format.seal import check_relative
from dcpstore.store.base import ByteRange, Store
from dcpstore.text import parse_json

_SINGLE_FILE = "model.safetensors"
_NUMBERED = re.compile(
    r"(?:shard-\d+-)?(?P<name>.+)-(?P<number>\d{1,9})-of-(?P<total>\d{1,9})\.safetensors"
)
INDEX_FILE = "model.safetensors.index.json"
"""The key of a Hugging Face folder's index."""


@dataclass(frozen=True, slots=True)
class Files:
    """The files of a Hugging Face folder.

    Attributes:
        keys: Those that its index names, whether they are there or not; without an index those
            that are there, and the first that their names say is missing.
        weight_map: The index's map from tensor to file; None where there is no index.
    """

    keys: Sequence[str]
    weight_map: Mapping[str, str] | None = None


class Flaw(NamedTuple):
    """What is wrong with a file, beside its header.

    Attributes:
        kind: As in `dcpstore.audit.scan.Finding`.
        message: What was found.
        key: The file.
        fqn: The tensor, where one is concerned.
        span: Bytes of the file, where some are.
    """

    kind: Literal["truncated", "resized", "missing", "metadata"]
    message: str
    key: str
    fqn: str | None = None
    span: ByteRange | None = None

    def as_error(self) -> CorruptError:
        """Return the error of someone who needs the file whole."""
        start, end = self.span or (None, None)
        of = "" if self.fqn is None else f"{self.fqn!r} "
        message = f"{self.key}: {of}{self.message}"
        return CorruptError(message, key=self.key, start=start, end=end, fqn=self.fqn)


def find_files(store: Store) -> Files:
    """Name the files of a Hugging Face folder; none if it is no such folder.

    Raises:
        CorruptError: If its index is damaged, or names a file outside the folder.
    """
    weight_map = read_index(store)
    if weight_map is not None:
        return Files(sorted(set(weight_map.values())), weight_map)
    try:
        store.get_range(_SINGLE_FILE, 0, LENGTH_BYTES)
    except NotFoundError:
        pass
    else:
        return Files([_SINGLE_FILE])
    try:
        names = (info.key for info in store.list())
        found = [name for name in names if name.endswith(".safetensors") and "/" not in name]
        return Files(sorted([*found, *_missing(found)]))
    except NotFoundError:
        return Files([])
    except StoreError as error:
        if error.denied:
            return Files([])
        raise


def read_index(store: Store) -> Mapping[str, str] | None:
    """Return a Hugging Face folder's map from tensor to file; None where it has no index.

    Raises:
        CorruptError: If it is damaged, or names a file outside the folder.
    """
    try:
        data = store.get(INDEX_FILE).data
    except NotFoundError:
        return None
    try:
        index = parse_json(data)
        weight_map = index.get("weight_map") if type(index) is dict else None
        if type(weight_map) is not dict:
            raise ValueError("it has no weight_map from names to files")
        for fqn, name in weight_map.items():
            if type(name) is not str:
                raise ValueError(f"the file of {fqn!r:.200} is {name!r:.60}")
    except ValueError as error:
        raise CorruptError(f"{INDEX_FILE} is damaged: {error!s:.500}", key=INDEX_FILE) from error
    for name in set(weight_map.values()):
        check_relative(name)
    return weight_map


def _missing(names: Sequence[str]) -> Iterator[str]:
    """Yield the first file that is missing of each ``model-00002-of-00003.safetensors``.

    A file that each rank wrote its part of (``shard-00001-model-...``) is there if one part is:
    which ranks had one is not written down.
    """
    found: dict[tuple[str, str], set[int]] = {}
    for name in names:
        match = _NUMBERED.fullmatch(name)
        if match:
            found.setdefault((match["name"], match["total"]), set()).add(int(match["number"]))
    for (name, total), numbers in found.items():
        first = next(number for number in count(1) if number not in numbers)
        if first <= int(total):
            yield f"{name}-{first:0{len(total)}}-of-{total}.safetensors"


def read_header(store: Store, key: str, size_bytes: int | None = None) -> FileHeader:
    """Read the header of one file, by two requests.

    Args:
        store: Rooted at the folder.
        key: The file.
        size_bytes: Its length, to compare the header with; None not to.

    Raises:
        NotFoundError: If there is no such file.
        CorruptError: If it is damaged.
    """
    if size_bytes is not None and size_bytes < LENGTH_BYTES:
        raise CorruptError(
            f"{store.url}: {key} has {size_bytes} bytes, no safetensors file", key=key
        )
    length = header_length(store.get_range(key, 0, LENGTH_BYTES), key)
    if size_bytes is not None and LENGTH_BYTES + length > size_bytes:
        raise CorruptError(
            f"{store.url}: {key} promises a header of {length} bytes and has {size_bytes} in all",
            key=key,
        )
    header = parse_file(store.get_range(key, LENGTH_BYTES, LENGTH_BYTES + length), key)
    for flaw in () if size_bytes is None else flaws_of_file(key, header, size_bytes):
        raise flaw.as_error()
    return header


def read_headers(
    store: Store, files: Files, config: ReadConfig, *, check_sizes: bool = False
) -> dict[str, FileHeader]:
    """Read the headers of files, many at a time.

    Args:
        store: Rooted at the folder.
        files: What `find_files` found.
        config: Bounds the requests.
        check_sizes: Compare each header with the size of its file, which takes a HEAD.

    Raises:
        CorruptError: If a header is damaged or a file is missing.
    """

    def read(key: str) -> FileHeader:
        try:
            return read_header(store, key, store.head(key).size_bytes if check_sizes else None)
        except NotFoundError as error:
            raise CorruptError(
                f"{store.url}: {key} is missing, which {INDEX_FILE} or the names of other files"
                " promise; nothing was loaded. Copy it there. To use what the others hold, put an"
                " index that names only them",
                key=key,
            ) from error

    if not files.keys:
        return {}
    with ThreadPoolExecutor(min(config.max_requests, len(files.keys))) as executor:
        return dict(zip(files.keys, executor.map(read, files.keys), strict=True))


def flaws_of_file(key: str, header: FileHeader, size_bytes: int) -> Iterator[Flaw]:
    """Compare a header with the size of its file, which its tensors have to fill."""
    for one in header.tensors:
        if one.payload.end > size_bytes:
            lost = ByteRange(max(one.payload.start, size_bytes), one.payload.end)
            message = f"lies outside: the file ends at byte {size_bytes}, cut short"
            yield Flaw("truncated", message, key, one.fqn, lost)
    end = max((one.payload.end for one in header.tensors), default=header.end)
    if end < size_bytes:
        yield Flaw("resized", "bytes behind its last tensor", key, span=ByteRange(end, size_bytes))


def flaws_of_index(
    weight_map: Mapping[str, str] | None, tensors: Mapping[str, Iterable[TensorInFile]]
) -> Iterator[Flaw]:
    """Compare the index, if there is one, with the files that could be read."""
    if weight_map is None:
        return
    held = {name: {one.fqn for one in found} for name, found in tensors.items()}
    for fqn, name in weight_map.items():
        if name in held and fqn not in held[name]:
            yield Flaw(
                "missing", f"is in {name} by the index, and not in the file", INDEX_FILE, fqn
            )
    for name, fqns in held.items():
        for fqn in sorted(fqns - weight_map.keys()):
            yield Flaw("metadata", "the index does not name this tensor", name, fqn)
