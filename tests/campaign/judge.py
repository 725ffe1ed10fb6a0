"""The judge: says from the objects of a bucket which save lies there, and who broke a promise.

It imports nothing of dcpstore. Metadata are read with `pickle`, stored values with `torch.load`,
and errors are told by their names. Every value that a save stores encodes who saved it, in which
step, under which key and at which place, so a mix of two saves shows.

The promises:

1. what is sealed is whole: every object is there, long enough, and of one save
2. if a save returned, it lies there, or one that was sealed after it
3. if a save raised, it does not lie there; unless the error says that this is not known
4. once a checkpoint lies there, there always is one
5. of two savers that may not replace each other, one wins
6. a load gives one save, whole, or raises
7. a request that the store performs late changes none of this
8. after a prune of what is old enough, nothing is left that the checkpoint does not refer to
"""

from __future__ import annotations

import io
import json
import pickle
import re
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import crc32c
import torch

METADATA = ".metadata"
_OUR_KEY = re.compile(rb"__\d+_\d+\.[0-9a-f]{16}\.distcp")
_TAIL = struct.Struct("<I8s")
_BASE = 10_000  # values below it tell key and place, the rest which save


@dataclass(frozen=True, slots=True, order=True)
class Save:
    """One save: who, and of which step.

    Attributes:
        saver: ``A``, ``B``, or ``O`` for the one that was there before.
        step: At most 99.
    """

    saver: str
    step: int

    @property
    def code(self) -> int:
        """A number that stands for it in values."""
        return (ord(self.saver) - ord("A") + 1) * 100 + self.step

    @classmethod
    def of(cls, code: int) -> Save:
        """Return the save that a number stands for."""
        return cls(chr(ord("A") + code // 100 - 1), code % 100)


def _values(code: int, key: str, num: int) -> torch.Tensor:
    places = torch.arange(num, dtype=torch.float64) % 89
    return places + (code * _BASE + zlib.crc32(key.encode()) % 97 * 100)


def tensor_of(save: Save, key: str, shape: Sequence[int]) -> torch.Tensor:
    """Return the whole tensor that a save stores under a key."""
    num = 1
    for size in shape:
        num *= size
    return _values(save.code, key, num).reshape(tuple(shape))


Shapes = dict[str, tuple[int, ...]]
BIG_SHAPE = (5 * (1 << 20) // 8 + 5000,)
"""Of a float64 tensor that needs a multipart upload."""


def shapes_of(num_ranks: int, flags: Iterable[str] = ()) -> Shapes:
    """Return the shapes of all tensors of a save. Each rank saves its own; see `rank_keys`."""
    flags = set(flags)
    shapes: Shapes = {"shared": (40,)}
    for rank in range(num_ranks):
        shapes[f"own.{rank}.a"] = (300,)
        shapes[f"own.{rank}.b"] = (5, 7)
    if "parts" in flags:
        shapes["own.0.big"] = BIG_SHAPE
    if "sharded" in flags:
        shapes["split"] = (24, 3)
    if "fsdp" in flags:
        shapes["fsdp.weight"] = (24, 6)
    return shapes


SPLIT = ("split", "fsdp.weight")
"""Keys of tensors that are split among the ranks."""


def rank_state(
    save: Save, rank: int, num_ranks: int, flags: Iterable[str] = (), *, whole: bool = False
) -> dict[str, Any]:
    """Return what one rank saves.

    Args:
        save: Which.
        rank: Whose.
        num_ranks: Of how many.
        flags: Of the schedule.
        whole: Whether rank 0 saves the tensors that are otherwise split among the ranks.
    """
    shapes = shapes_of(num_ranks, flags)
    mine = {key for key in shapes if key == "shared" or key.startswith(f"own.{rank}.")}
    if whole and rank == 0:
        mine |= shapes.keys() & set(SPLIT)
    state: dict[str, Any] = {key: tensor_of(save, key, shapes[key]) for key in sorted(mine)}
    state["code"] = save.code
    return state


@dataclass(frozen=True, slots=True)
class Reading:
    """What lies in a folder.

    Attributes:
        is_there: Whether there is a checkpoint.
        save: Which one; None if there is none, or it is broken.
        problems: Why it is broken.
        referenced: Keys that it needs, its metadata included.
    """

    is_there: bool
    save: Save | None = None
    problems: tuple[str, ...] = ()
    referenced: frozenset[str] = frozenset()

    def __str__(self) -> str:
        if not self.is_there:
            return "no checkpoint"
        return f"BROKEN: {'; '.join(self.problems)}" if self.problems else f"{self.save} whole"


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module.split(".")[0] == "dcpstore":
            raise pickle.UnpicklingError(f"stock readers have no {module}.{name}")
        return super().find_class(module, name)


def read_checkpoint(objects: Mapping[str, bytes], shapes: Shapes) -> Reading:
    """Read the checkpoint among the objects of a folder.

    Args:
        objects: By key, relative to the folder.
        shapes: Of the tensors that each save stores.
    """
    data = objects.get(METADATA)
    if data is None:
        return Reading(False)
    problems: list[str] = []
    referenced = {METADATA}
    try:
        metadata = _Unpickler(io.BytesIO(data)).load()
        _check_footer(data, objects, referenced)
        values, chunks = _read_values(metadata, objects, referenced, problems)
    except Exception as error:
        problems.append(f"the metadata cannot be read: {error!r}")
        return Reading(True, None, tuple(problems), frozenset(referenced))
    if problems:
        return Reading(True, None, tuple(problems), frozenset(referenced))
    codes = {int(code) for code in values.values() if isinstance(code, int)}
    for key, shape in shapes.items():
        codes |= _check_tensor(key, shape, chunks.pop(key, []), problems)
    problems += [f"{key!r} is nobody's" for key in chunks]
    if set(values) != {"code"}:
        problems.append(f"values {sorted(values)} instead of 'code'")
    if len(codes) > 1:
        problems.append(f"a mix of {[str(Save.of(code)) for code in sorted(codes)]}")
    save = Save.of(min(codes)) if len(codes) == 1 and not problems else None
    return Reading(True, save, tuple(problems), frozenset(referenced))


def _check_footer(data: bytes, objects: Mapping[str, bytes], referenced: set[str]) -> None:
    """Check the manifest behind the pickle, or in the object that the footer names."""
    num_bytes, magic = _TAIL.unpack(data[-_TAIL.size :])
    if magic != b"DCPSSEAL":
        if b".distcp" in data and _OUR_KEY.search(data):
            raise ValueError("the footer of a save of dcpstore is gone")
        return  # a stock writer's
    seal = json.loads(data[-_TAIL.size - num_bytes : -_TAIL.size])
    if (key := seal.get("manifest_key")) is not None:
        referenced.add(key)
        manifest = objects[key]
    else:
        manifest = data[seal["pickle_bytes"] :][: seal["manifest_bytes"]]
    if len(manifest) != seal["manifest_bytes"]:
        raise ValueError(f"the manifest has {len(manifest)} bytes, not {seal['manifest_bytes']}")
    if crc32c.crc32c(manifest) != seal["manifest_crc32c"]:
        raise ValueError("the manifest's checksum is another")


@lru_cache(maxsize=4096)
def _value_of(record: bytes) -> Any:
    """Return what a record holds; nobody changes it. Most schedules store the same ones."""
    return torch.load(io.BytesIO(record), weights_only=True, map_location="cpu")


_Chunk = tuple[tuple[int, ...], torch.Tensor]


def _read_values(
    metadata: Any, objects: Mapping[str, bytes], referenced: set[str], problems: list[str]
) -> tuple[dict[str, Any], dict[str, list[_Chunk]]]:
    values: dict[str, Any] = {}
    chunks: dict[str, list[_Chunk]] = {}
    gone = {one.relative_path for one in metadata.storage_data.values()} - set(objects)
    problems += [f"{key} is gone" for key in sorted(gone)]
    for index, place in metadata.storage_data.items():
        referenced.add(place.relative_path)
        whole = objects.get(place.relative_path)
        if whole is None:
            continue
        part = whole[place.offset : place.offset + place.length]
        if len(part) != place.length:
            problems.append(f"{place.relative_path} ends before {index.fqn!r}")
            continue
        value = _value_of(part)
        if isinstance(value, torch.Tensor):
            at = tuple(index.offset) if index.offset is not None else (0,) * value.dim()
            chunks.setdefault(index.fqn, []).append((at, value))
        else:
            values[index.fqn] = value
    missing = [
        key for key in metadata.state_dict_metadata if key not in values and key not in chunks
    ]
    problems += [f"nothing is stored of {key!r}" for key in missing if not problems]
    return values, chunks


def _check_tensor(
    key: str, shape: tuple[int, ...], chunks: Sequence[_Chunk], problems: list[str]
) -> set[int]:
    """Return which saves the elements of a tensor belong to."""
    whole = torch.full(shape, -1.0, dtype=torch.float64)
    for at, value in chunks:
        box = tuple(slice(o, o + n) for o, n in zip(at, value.shape, strict=True))
        whole[box] = value.to(torch.float64)
    return check_values(key, whole, problems)


def check_values(key: str, whole: torch.Tensor, problems: list[str]) -> set[int]:
    """Return the codes of the saves that a tensor's elements belong to.

    Args:
        key: Of the tensor.
        whole: All of it.
        problems: Gets what is wrong with elements that are no save's.
    """
    flat = whole.reshape(-1)
    code = int(flat[0].item()) // _BASE if flat.numel() else 0
    if torch.equal(flat, _values(code, key, flat.numel())):
        return {code}
    codes = {int(one) for one in torch.unique(torch.floor(flat / _BASE)).tolist()}
    for one in codes:
        mine = torch.floor(flat / _BASE) == one
        if not torch.equal(flat[mine], _values(one, key, flat.numel())[mine]):
            problems.append(f"{key!r} has values that nobody saved")
    return codes


# Who promised what -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Report:
    """What one rank of a save, or whoever did something else, says in the end.

    Attributes:
        actor: Such as ``A0``.
        outcome: ``ok``; ``definite`` and ``unknown`` for what an error says of the seal;
            ``raw`` for an error that is none of dcpstore's; ``died`` for who was killed; ``hung``.
        text: The error.
        save: What it saved; None for who did not save.
    """

    actor: str
    outcome: str
    text: str = ""
    save: Save | None = None


def report_of(actor: str, error: BaseException | None, save: Save | None = None) -> Report:
    """Say what an error promises."""
    if error is None:
        return Report(actor, "ok", "", save)
    return Report(actor, outcome_of(error), f"{type(error).__name__}: {error}", save)


def outcome_of(error: BaseException) -> str:
    """Tell what an error says of the seal, as `Report.outcome`."""
    text = f"{type(error).__name__}: {error}"
    if "CommitUnknownError" in text or "may be sealed" in text:
        return "unknown"
    inner = getattr(error, "failures", None)  # of torch's CheckpointException
    if isinstance(inner, Mapping):
        outcomes = {outcome_of(one[0]) for one in inner.values()}
        for outcome in ("unknown", "raw"):
            if outcome in outcomes:
                return outcome
        return "definite"
    inner = getattr(error, "exceptions", None)  # of RankFailures
    if isinstance(inner, Mapping) and "unknown" in {outcome_of(one) for one in inner.values()}:
        return "unknown"
    is_ours = any(one.__module__ == "dcpstore.errors" for one in type(error).__mro__)
    return "definite" if is_ours else "raw"


@dataclass(slots=True)
class Evidence:
    """All that a schedule left.

    Attributes:
        shapes: Of the tensors of each save.
        old: The save that was there before.
        reports: Of every actor.
        objects: What lies in the folder in the end, late requests done.
        may_replace: Whether savers may replace each other.
        loads: What each load gave that returned.
        pruned: What lies there after a last prune that nothing disturbed; None if there was none.
        open_uploads: Uploads that were neither completed nor aborted after that prune.
        had_none: Whether the folder was once without a checkpoint after it had one.
    """

    shapes: Shapes
    old: Save | None
    reports: list[Report]
    objects: dict[str, bytes]
    may_replace: bool = True
    loads: list[tuple[str, Mapping[str, Any]]] = field(default_factory=list)
    pruned: dict[str, bytes] | None = None
    open_uploads: Sequence[str] = ()
    had_none: bool = False


def judge(evidence: Evidence) -> list[str]:
    """Return every broken promise, in words."""
    problems: list[str] = []
    reading = read_checkpoint(evidence.objects, evidence.shapes)
    problems += [f"(1) broken checkpoint: {one}" for one in reading.problems]
    saves = {one.save for one in evidence.reports if one.save is not None}
    if evidence.old is not None and (not reading.is_there or evidence.had_none):
        problems.append("(4) the old checkpoint is gone and there is no other")
    if reading.save is not None and reading.save not in saves | {evidence.old}:
        problems.append(f"(1) {reading.save} lies there, which nobody saved")
    problems += _judge_saves(evidence, reading)
    for actor, loaded in evidence.loads:
        problems += _judge_load(evidence, actor, loaded, saves)
    if evidence.pruned is not None:
        problems += _judge_prune(evidence, reading)
    return problems


def _judge_saves(evidence: Evidence, reading: Reading) -> list[str]:
    problems: list[str] = []
    there = reading.save
    succeeded = {one.save for one in evidence.reports if one.save and one.outcome == "ok"}
    maybe = {
        one.save for one in evidence.reports if one.save and one.outcome in ("unknown", "died")
    }
    if succeeded and not reading.problems and there not in succeeded | maybe:
        problems.append(f"(2) {succeeded} returned, and {there or 'no checkpoint'} lies there")
    if len(succeeded) > 1 and not evidence.may_replace:
        problems.append("(5) two saves that may not replace each other both returned")
    for one in evidence.reports:
        if one.outcome == "hung":
            problems.append(f"{one.actor} hung: {one.text}")
        if one.save is None or one.outcome in ("ok", "died", "unknown", "hung"):
            continue
        if one.outcome == "raw":
            problems.append(f"{one.actor} raised what is no error of dcpstore: {one.text}")
        if there == one.save:
            problems.append(f"(3) {one.actor} said that it was not sealed, but it is: {one.text}")
    return problems


def _judge_load(
    evidence: Evidence, actor: str, loaded: Mapping[str, Any], saves: set[Save]
) -> list[str]:
    problems: list[str] = []
    codes = {loaded["code"]} if isinstance(loaded.get("code"), int) else {-1}
    for key in evidence.shapes:
        if key in loaded:
            codes |= check_values(key, loaded[key], problems)
    known = {one.code for one in saves} | ({evidence.old.code} if evidence.old else set())
    if len(codes) > 1 or not codes <= known:
        problems.append(f"values of {sorted(codes)}, of which {sorted(known)} are saves")
    return [f"(6) {actor} loaded {one}" for one in problems]


def _judge_prune(evidence: Evidence, reading: Reading) -> list[str]:
    assert evidence.pruned is not None
    problems: list[str] = []
    after = read_checkpoint(evidence.pruned, evidence.shapes)
    if (after.is_there, after.save, after.problems) != (
        reading.is_there,
        reading.save,
        reading.problems,
    ):
        problems.append(f"(8) before the prune: {reading}; after it: {after}")
    if not reading.problems:
        left = sorted(set(evidence.pruned) - reading.referenced)
        problems += [f"(8) prune left {key}" for key in left]
    problems += [f"(8) prune left the upload {key}" for key in evidence.open_uploads]
    return problems
