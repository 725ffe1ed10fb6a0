"""Which checkpoints lie below a URL, told from names alone: one LIST and no torch.

Objects are grouped by folder. A folder is a checkpoint if one of these lies right in it:

=====================================  ============  =======================
name                                   layout        what it says
=====================================  ============  =======================
``.dcpstore-{save_id}``                dcpstore      large manifest of a save
``__{rank}_{n}.{save_id}.distcp``      dcpstore      data of a save
``*.distcp``                           dcp           data of a stock writer
``.metadata``                          either        the checkpoint is sealed
``__{rank}.metadata``                  either        a rank's part is sealed
``*.safetensors``                      safetensors   there is no seal
=====================================  ============  =======================
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime

from dcpstore.errors import NotFoundError, StoreError
from dcpstore.format.seal import METADATA_KEY, save_id_of
from dcpstore.manager.policies import Layout, step_of_folder
from dcpstore.store.base import ObjectInfo, Store
from dcpstore.text import count_text
from dcpstore.write.commit import probe

_RANK_SEAL_NAME = re.compile(r"__\d+\.metadata")
_NUMBER = re.compile(r"(\d+)")


@dataclass(frozen=True, slots=True)
class ListedCheckpoint:
    """A folder with a checkpoint, or with what an interrupted save left.

    Attributes:
        name: Path below the listed URL; empty for the URL itself.
        url: Of the checkpoint.
        layout: Who wrote it.
        sealed: Whether it can be loaded; None for safetensors, which have no seal.
        step: That it is named for (`step_of_folder`), else the last number in its name; None if
            there is none.
        num_objects: Objects below the folder; None where the store refused to list.
        num_bytes: Their size; None likewise.
        modified: When it was sealed, else when its newest object was put; None if unknown.
        remark: What a reader should know; empty as a rule.
    """

    name: str
    url: str
    layout: Layout
    sealed: bool | None
    step: int | None
    num_objects: int | None
    num_bytes: int | None
    modified: datetime | None
    remark: str = ""


@dataclass(frozen=True, slots=True)
class Listing:
    """What lies below a URL.

    Attributes:
        url: That was listed.
        checkpoints: In the natural order of their names (step-9 before step-10).
        num_other_objects: Objects that belong to no checkpoint.
        was_refused: Whether the store refused to list, so that only the URL itself was
            looked at.
    """

    url: str
    checkpoints: tuple[ListedCheckpoint, ...]
    num_other_objects: int = 0
    was_refused: bool = False


def list_checkpoints(store: Store) -> Listing:
    """List the checkpoints below a store's root, the root included.

    One LIST. Where the store refuses it, one GET tells whether the root is a checkpoint.

    Raises:
        NotFoundError: If there is no checkpoint and no leftover of one.
        StoreError: If the store fails, or refuses both.
    """
    try:
        objects = list(store.list())
    except StoreError as error:
        if not error.denied:
            raise
        return _look_without_listing(store, error)
    except NotFoundError as error:
        raise NotFoundError(f"nothing lies at {store.url}: {error}") from error
    listing = _group(store.url, objects)
    if not listing.checkpoints:
        raise NotFoundError(_say_nothing_found(store.url, objects))
    return listing


def _look_without_listing(store: Store, refusal: StoreError) -> Listing:
    try:
        found = probe(store, METADATA_KEY, denied_is_absent=False)
    except StoreError:
        found = None
    if found is None:
        raise StoreError(
            f"{refusal}. Listing needs the permission to list the bucket (s3:ListBucket,"
            " storage.objects.list). Without it, give the URL of one checkpoint",
            denied=True,
        ) from refusal
    only = ListedCheckpoint(
        name="",
        url=store.url,
        layout="dcpstore" if found.seal is not None else "dcp",
        sealed=True,
        step=_step_of(store.url.rsplit("/", 1)[-1]),
        num_objects=None,
        num_bytes=None,
        modified=None,
        remark="the store refused to list",
    )
    return Listing(store.url, (only,), was_refused=True)


def _say_nothing_found(url: str, objects: list[ObjectInfo]) -> str:
    if not objects:
        return f"nothing lies at {url}: no object's key starts with it. Check the URL"
    more = f" and {len(objects) - 1} more" if len(objects) > 1 else ""
    return (
        f"no checkpoint lies at or below {url}: {objects[0].key}{more} belong to none."
        " A checkpoint is a folder with .metadata, *.distcp or *.safetensors"
    )


def _group(url: str, objects: Iterable[ObjectInfo]) -> Listing:
    """Tell the checkpoints of a listing apart."""
    folders: dict[str, list[ObjectInfo]] = {}
    for info in objects:
        folders.setdefault(info.key.rpartition("/")[0], []).append(info)
    layouts = {name: layout for name, inside in folders.items() if (layout := _layout_of(inside))}
    members: dict[str, list[ObjectInfo]] = {name: [] for name in layouts}
    num_other = 0
    for name, inside in folders.items():
        owner = next((parent for parent in _parents(name) if parent in layouts), None)
        if owner is None:
            num_other += len(inside)
        else:
            members[owner] += inside
    checkpoints = [
        _describe_folder(url, name, layout, folders[name], members[name])
        for name, layout in layouts.items()
    ]
    return Listing(
        url, tuple(sorted(checkpoints, key=lambda one: natural_order(one.name))), num_other
    )


def _parents(folder: str) -> Iterator[str]:
    """Yield a folder and those around it, from the inside out; the root is empty."""
    while folder:
        yield folder
        folder = folder.rpartition("/")[0]
    yield ""


def _layout_of(inside: Iterable[ObjectInfo]) -> Layout | None:
    names = [_base(info.key) for info in inside]
    if any(save_id_of(name) for name in names):
        return "dcpstore"
    if any(name == METADATA_KEY or name.endswith(".distcp") for name in names):
        return "dcp"
    if any(_RANK_SEAL_NAME.fullmatch(name) for name in names):
        return "dcp"
    return "safetensors" if any(name.endswith(".safetensors") for name in names) else None


def _describe_folder(
    url: str, name: str, layout: Layout, inside: list[ObjectInfo], members: list[ObjectInfo]
) -> ListedCheckpoint:
    seals = _seals(inside)
    is_sealed, remark = _judge(layout, seals)
    times = [info.modified for info in (seals.values() or members) if info.modified is not None]
    return ListedCheckpoint(
        name=name,
        url=f"{url.rstrip('/')}/{name}" if name else url,
        layout=layout,
        sealed=is_sealed,
        step=_step_of(name or url.rsplit("/", 1)[-1]),
        num_objects=len(members),
        num_bytes=sum(info.size_bytes for info in members),
        modified=max(times, default=None),
        remark=remark,
    )


def _seals(inside: Iterable[ObjectInfo]) -> Mapping[str, ObjectInfo]:
    """Return the metadata of the checkpoint, or of its ranks if it has none of its own."""
    found = {_base(info.key): info for info in inside}
    if METADATA_KEY in found:
        return {METADATA_KEY: found[METADATA_KEY]}
    return {name: info for name, info in found.items() if _RANK_SEAL_NAME.fullmatch(name)}


def _judge(layout: Layout, seals: Mapping[str, ObjectInfo]) -> tuple[bool | None, str]:
    if layout == "safetensors":
        return None, ""
    empty = [name for name, info in seals.items() if info.size_bytes == 0]
    if empty:
        return False, f"its {empty[0]} is empty"
    if METADATA_KEY in seals or not seals:
        return bool(seals), ""
    return True, f"sealed by {count_text(len(seals), 'rank')}, each for itself"


def _base(key: str) -> str:
    return key.rpartition("/")[2]


def _step_of(name: str) -> int | None:
    """Return the step of the innermost folder named for one, else its last number."""
    parts = name.split("/")
    # Inside checkpoint-100/pytorch_model_fsdp_0; but 2024/epoch-3 is of no step 2024.
    for part in reversed(parts):
        step = step_of_folder(part)
        if step is not None and (part is parts[-1] or not part.isdigit()):
            return step
    for part in reversed(parts):
        numbers: list[str] = _NUMBER.findall(part)
        if numbers:
            return int(numbers[-1])
    return None


def natural_order(name: str) -> tuple[tuple[str, int], ...]:
    """Return a sort key by which step-9 comes before step-10."""
    parts = _NUMBER.split(name)
    return tuple(("", int(part)) if at % 2 else (part, 0) for at, part in enumerate(parts))
