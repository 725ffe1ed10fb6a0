"""The names of a checkpoint's objects, and the footer that makes its ``.metadata`` ours.

A ``.metadata`` is torch's pickle followed by what stock readers ignore, since a pickle ends
at its STOP opcode::

    | pickle of torch's Metadata | manifest | seal (JSON) | u32 seal_bytes | "DCPSSEAL" |

A manifest that is larger than ``WriteConfig.embed_manifest_bytes`` lies in an object of its
own, which the seal names; so did every manifest before that knob was there. The seal has the
CRC32C of the pickle, of the manifest and, where it names no object or holds facts, of itself. A
reader of ours never opens the pickle. Names are relative to the checkpoint's folder. See
``docs/design/001-bucket-layout.md`` and ``docs/design/003-commit-protocol.md``.
"""

from __future__ import annotations

import json
import math
import re
import secrets
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import lru_cache
from typing import Any
from unicodedata import category

import crc32c

from dcpstore.errors import CorruptError, NotFoundError
from dcpstore.store.base import ByteRange, Store
from dcpstore.text import check_natural, parse_json

METADATA_KEY = ".metadata"
_MOST_NAME_BYTES = 1024  # of S3 and Google; Azure takes as many characters
_CONTROL = frozenset(("Cc", "Cf", "Cs", "Zl", "Zp"))
_SAVE_ID = re.compile(r"[0-9a-f]{16}")
_DATA_KEY = re.compile(r"__\d+_\d+\.([0-9a-f]{16})\.distcp")
_RANK = re.compile(r"__(\d+)(?:_\d+\..*|\.metadata)")
_MANIFEST_KEY = re.compile(r"\.dcpstore-([0-9a-f]{16})")
_MAGIC = b"DCPSSEAL"
_TAIL = struct.Struct("<I8s")
_OWN_CRC = "seal_crc32c"
_FACTS = "facts"
_MOST_FACTS_BYTES = 16 << 10
_NO_NUMBERS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}  # which JSON has no form for


def new_save_id() -> str:
    """Draw the mark of one rank's part in one save: 16 hex digits, never used twice."""
    return secrets.token_hex(8)


def is_save_id(value: object) -> bool:
    """Tell whether a value that was read is what `new_save_id` draws."""
    return isinstance(value, str) and _SAVE_ID.fullmatch(value) is not None


def data_key(rank: int, number: int, save_id: str) -> str:
    """Name the ``number``-th data object of a rank."""
    return f"__{rank}_{number}.{save_id}.distcp"


def manifest_key(save_id: str) -> str:
    """Name the manifest of a save, where it is an object of its own."""
    return f".dcpstore-{save_id}"


def metadata_key(rank: int | None = None) -> str:
    """Name torch's metadata: of the checkpoint, or of one rank (``use_collectives=False``)."""
    return METADATA_KEY if rank is None else f"__{rank}{METADATA_KEY}"


def save_id_of(key: str) -> str | None:
    """Return the save id in the name of one of our objects; None for any other name."""
    match = _DATA_KEY.fullmatch(key) or _MANIFEST_KEY.fullmatch(key)
    return match[1] if match else None


@lru_cache(maxsize=4096)  # thousands of chunks lie in one object
def rank_of(key: str) -> int | None:
    """Return the rank in the name of any writer's data or metadata; None if there is none."""
    match = _RANK.fullmatch(key.rpartition("/")[2])
    return int(match[1]) if match else None


def check_relative(path: str) -> str:
    """Return ``path`` if it stays inside the checkpoint's folder.

    Raises:
        CorruptError: If it is absolute, climbs out with ``..``, is a URL, is longer than stores
            take, or has a control character, which no writer puts there and stores and file
            systems treat as they like.
    """
    parts = path.split("/")
    if len(path.encode("utf-8", "surrogatepass")) > _MOST_NAME_BYTES:
        problem = f"is cut from a name of {len(path)} characters, longer than any store takes"
    elif not path.isprintable() and any(category(char) in _CONTROL for char in path):
        problem = "has a control character"
    elif not path or path.startswith("/") or "\\" in path or ".." in parts or ":" in parts[0]:
        problem = "lies outside the checkpoint's folder"
    else:
        return path
    shown = path[:_MOST_NAME_BYTES]
    raise CorruptError(
        f"the checkpoint's metadata names the object {shown!r}, which {problem};"
        " refusing to read it",
        key=shown,
    )


@dataclass(frozen=True, slots=True)
class Facts:
    """What a footer tells of the moment of a save, for whoever chooses among many checkpoints.

    Takes at most 16 KiB as JSON, so that the last 64 KiB of a metadata object hold all of it.

    Attributes:
        step: Number of completed steps; None if it was not told.
        run: Id of the run that the save belongs to; None if it belongs to none.
        metrics: Numbers by name; NaN and infinity too.

    Raises:
        ValueError: If a field is of another type, or all together are too long.
    """

    step: int | None = None
    run: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.step is not None:
            check_natural(self.step)
        if self.run is not None and type(self.run) is not str:
            raise ValueError(f"the run {self.run!r:.60} is no text")
        for name, value in self.metrics.items():
            if type(name) is not str or type(value) is not float:
                raise ValueError(f"the metric {name!r:.60} is {value!r:.60}, not a float")
        num_bytes = len(_as_text(self.as_json()))
        if num_bytes > _MOST_FACTS_BYTES:
            raise ValueError(
                f"step, run and metrics take {num_bytes} bytes as JSON, and {_MOST_FACTS_BYTES} is"
                " the most"
            )

    def __bool__(self) -> bool:
        return self != Facts()

    def as_json(self) -> dict[str, Any]:
        """Return the form that stands in a footer."""
        metrics = {
            name: value if math.isfinite(value) else str(value)
            for name, value in self.metrics.items()
        }
        return {"step": self.step, "run": self.run, "metrics": metrics}

    @staticmethod
    def of_json(told: Any) -> Facts:
        """Return what `as_json` made; fields of later releases are passed over.

        Raises:
            ValueError: If it is anything else.
            TypeError: Likewise.
        """
        metrics = {
            name: _NO_NUMBERS[value] if value in _NO_NUMBERS else _as_float(value)
            for name, value in dict(told.get("metrics", {})).items()
        }
        return Facts(told.get("step"), told.get("run"), metrics)


def _as_float(value: object) -> float:
    if type(value) not in (int, float):
        raise ValueError(f"{value!r:.60} is no number")
    try:
        return float(value)  # type: ignore[arg-type]
    except OverflowError as error:
        raise ValueError("a number is beyond those of a float") from error


@dataclass(frozen=True, slots=True)
class Seal:
    """The footer of a ``.metadata`` of ours.

    Attributes:
        save_id: Of the save.
        manifest_bytes: Length of the manifest.
        manifest_crc32c: Its CRC32C.
        pickle_bytes: Length of the pickle, which comes first.
        pickle_crc32c: Its CRC32C.
        manifest_key: The object that is the manifest; None if it lies behind the pickle.
        facts: Step, run and metrics; None where none were sealed.
    """

    save_id: str
    manifest_bytes: int
    manifest_crc32c: int
    pickle_bytes: int
    pickle_crc32c: int
    manifest_key: str | None = None
    facts: Facts | None = None

    def __post_init__(self) -> None:
        for name in ("manifest_bytes", "manifest_crc32c", "pickle_bytes", "pickle_crc32c"):
            check_natural(getattr(self, name))
        if self.manifest_key not in (None, manifest_key(self.save_id)):
            raise ValueError(f"{self.manifest_key} is no manifest of save {self.save_id}")

    @property
    def pickle_span(self) -> ByteRange:
        """Where the pickle lies in the metadata object."""
        return ByteRange(0, self.pickle_bytes)

    @property
    def manifest_span(self) -> ByteRange:
        """Where the manifest lies in the metadata object; empty if it is not there."""
        num_bytes = self.manifest_bytes if self.manifest_key is None else 0
        return ByteRange(self.pickle_bytes, self.pickle_bytes + num_bytes)


def make_metadata(
    save_id: str,
    pickled: bytes,
    manifest: bytes,
    *,
    embed_manifest_bytes: int,
    facts: Facts | None = None,
) -> tuple[Seal, bytes]:
    """Return the seal of a save and the bytes of its metadata object.

    Args:
        save_id: Of the save.
        pickled: Torch's metadata.
        manifest: The encoded manifest. Unless it lies in the bytes that are returned, the
            caller has to put it under ``Seal.manifest_key`` first.
        embed_manifest_bytes: Largest manifest that does.
        facts: Step, run and metrics, where there are any.
    """
    is_embedded = len(manifest) <= embed_manifest_bytes
    seal = Seal(
        save_id=save_id,
        manifest_bytes=len(manifest),
        manifest_crc32c=crc32c.crc32c(manifest),
        pickle_bytes=len(pickled),
        pickle_crc32c=crc32c.crc32c(pickled),
        manifest_key=None if is_embedded else manifest_key(save_id),
        facts=facts or None,
    )
    told = asdict(replace(seal, facts=None))
    del told[_FACTS]
    if is_embedded:
        del told["manifest_key"]
    if seal.facts is not None:
        told[_FACTS] = seal.facts.as_json()
    if is_embedded or seal.facts is not None:
        told[_OWN_CRC] = crc32c.crc32c(_as_text(told))
    text, inside = _as_text(told), manifest if is_embedded else b""
    return seal, b"".join([pickled, inside, text, _TAIL.pack(len(text), _MAGIC)])


def _as_text(fields: Mapping[str, Any]) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode()


def read_seal(data: memoryview) -> Seal | None:
    """Return the footer of a ``.metadata``, or None if there is none. Copies no more than it.

    Raises:
        CorruptError: If the footer is there but does not fit the bytes before it.
    """
    seal = read_tail(data, len(data))
    if seal is None:
        return None
    _check(data, "pickle", seal.pickle_span, seal.pickle_crc32c)
    if seal.manifest_key is None:
        _check(data, "manifest", seal.manifest_span, seal.manifest_crc32c)
    return seal


def read_tail(data: memoryview, object_bytes: int) -> Seal | None:
    """Return the footer out of the end of a ``.metadata``, or None if there is none.

    The footer's own CRC32C is checked, and that it fits the object's length. Pickle and manifest
    are not looked at: who reads them compares them as `read_seal` does.

    Args:
        data: The last bytes of the object, or all of it. 64 KiB hold every footer.
        object_bytes: Length of the object.

    Raises:
        CorruptError: If the footer is there but damaged, or does not fit the object.
    """
    if len(data) < _TAIL.size:
        return None
    num_bytes, magic = _TAIL.unpack(data[-_TAIL.size :])
    if magic != _MAGIC:
        return None
    start = object_bytes - _TAIL.size - num_bytes
    text = data[max(len(data) - _TAIL.size - num_bytes, 0) : -_TAIL.size]
    try:
        seal = _parse(text)
    except (ValueError, TypeError, AttributeError) as error:
        raise CorruptError(
            f"the footer of the metadata is damaged: {error!r}",
            start=max(start, 0),
            end=object_bytes,
        ) from error
    if seal.manifest_span.end != start:
        raise CorruptError(
            f"the metadata was cut short or changed after it was sealed: {start} bytes lie before"
            f" its footer, which tells of {seal.manifest_span.end}",
            start=0,
            end=object_bytes,
        )
    return seal


def _parse(text: memoryview) -> Seal:
    told = dict(parse_json(text))
    own_crc = told.pop(_OWN_CRC, None)
    names = [one.name for one in fields(Seal) if one.name != _FACTS]
    facts = Facts.of_json(told[_FACTS]) if _FACTS in told else None
    seal = Seal(**{name: told[name] for name in names if name in told}, facts=facts)
    if not is_save_id(seal.save_id):
        raise ValueError(f"the save id {seal.save_id!r:.60} is not 16 hex digits")
    # A name that is not known may be that of the CRC32C, with a bit flipped.
    has_crc = seal.manifest_key is None or own_crc is not None or not told.keys() <= {*names}
    if has_crc and own_crc != crc32c.crc32c(_as_text(told)):
        raise ValueError("it has another CRC32C")
    return seal


def _check(data: memoryview, what: str, span: ByteRange, expected: int) -> None:
    if crc32c.crc32c(data[span.start : span.end]) != expected:
        raise CorruptError(
            f"the metadata was changed after it was sealed: the {what} in it, bytes"
            f" [{span.start}, {span.end}), has another CRC32C",
            start=span.start,
            end=span.end,
        )


def get_manifest(store: Store, data: memoryview, seal: Seal, *, folder: str = "") -> bytes:
    """Return the manifest that a metadata object leads to: out of it, or by one request.

    Args:
        store: Rooted at the checkpoint's folder, or above it.
        data: The metadata object.
        seal: What `read_seal` returned of it.
        folder: The checkpoint's, below the store's root; empty, or with a slash at its end.

    Raises:
        CorruptError: If the manifest is gone, or is not the one that was sealed.
        StoreError: If the store refuses.
    """
    if seal.manifest_key is None:
        return bytes(data[seal.manifest_span.start : seal.manifest_span.end])
    key = check_relative(seal.manifest_key)
    try:
        found = store.get(folder + key).data
    except NotFoundError as error:
        raise CorruptError(f"its manifest {key} is gone", key=key) from error
    if len(found) != seal.manifest_bytes or crc32c.crc32c(found) != seal.manifest_crc32c:
        raise CorruptError(
            f"its manifest {key} has {len(found)} bytes that are not the {seal.manifest_bytes}"
            " sealed with it",
            key=key,
            start=0,
            end=len(found),
        )
    return bytes(found)
