"""Removing the steps of a run that no policy keeps; no crash and no race loses another. No torch.

Nothing goes unless the newest step that stays is still there. For each step that goes:

1. read its metadata: which objects it consists of, and that it is still the save that was judged
2. list its folder: objects of another save that are younger than a day may be a save under way,
   and the step stays
3. put ``.dcpstore-run/deleting/{folder}/{token}`` with the keys, a note of this remover's own
4. list the pins: whoever pins a step puts the pin and looks for 3 then, so one sees the other
5. look at the metadata again, which a save may have replaced, and delete them: from here on the
   step is not there
6. delete the objects that it named and the metrics reported for it, then what step 3 put

A crash leaves the step whole, or not there and its keys in 3, with which the next removal carries
on. Only what the metadata named is deleted; what others put into the folder stays.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from dcpstore.errors import CheckpointError, ConflictError, CorruptError, NotFoundError
from dcpstore.format.seal import METADATA_KEY, check_relative, read_seal, save_id_of
from dcpstore.manager.policies import KeepPolicy, Verdict, decide
from dcpstore.manager.run import DELETING, Run, SealedStep, metrics_key
from dcpstore.store.base import ObjectInfo
from dcpstore.store.folder import parse_location
from dcpstore.text import parse_json
from dcpstore.write.commit import Proof, keys_named_in, probe, sweep

logger = logging.getLogger(__name__)

_IN_FLIGHT_S = 24 * 3600.0  # no save takes longer
_ABANDONED_S = 3600.0  # nor any removal
_GIVE_UP_S = _ABANDONED_S / 2  # so one that is late must not go on: its note may be gone
_MAX_REQUESTS = 8


@dataclass(frozen=True, slots=True)
class Retired:
    """What became of a step that no policy keeps.

    Attributes:
        step: Number of completed steps.
        folder: Its name below the run.
        url: Where it was.
        num_objects: Objects deleted.
        num_bytes: Their size.
        why_not: Why the step is still there; empty if it is gone.
    """

    step: int
    folder: str
    url: str
    num_objects: int = 0
    num_bytes: int = 0
    why_not: str = ""


def plan(
    run: Run,
    keep: KeepPolicy | Sequence[KeepPolicy],
    *,
    others: bool = False,
    protected: Mapping[int, str] | None = None,
) -> list[Verdict]:
    """Decide which steps of a run stay. Changes nothing.

    Args:
        run: The run.
        keep: Policies; a step stays if any of them keeps it.
        others: Whether they decide about steps of other runs and other writers, too.
        protected: More steps that must stay, each with the reason.

    Returns:
        One verdict per folder, the newest step first.

    Raises:
        StoreError: If the store refuses to list.
        CorruptError: If the run's claim is damaged.
        ConflictError: If another job took over the run that this one had claimed.
    """
    claim = run.claimed()
    if run.has_lost(claim):
        raise ConflictError(
            f"{run.url}: the run was taken over by {claim or 'somebody'}. This job removes nothing"
            " there any more"
        )
    records = run.records()
    facts, pins = run.facts(records), run.pins(records)
    stay = {one.step: "pinned" for one in facts if one.folder in pins}
    if claim is not None and claim.resumed is not None:
        stay.setdefault(claim.resumed, "a job resumed from it, and sealed no newer step")
    return decide(
        facts,
        keep,
        protected={**stay, **(protected or {})},
        run=None if claim is None else claim.run,
        others=others,
    )


def retire(
    run: Run, verdicts: Sequence[Verdict], *, clock: Callable[[], float] = time.time
) -> list[Retired]:
    """Remove the steps that do not stay, and what earlier removals left.

    A step that cannot be removed is told with the reason and logged as a warning, and so is an
    object that the store does not let go.

    Args:
        run: The run.
        verdicts: What `plan` decided.
        clock: Seconds since the epoch, to tell the ages of objects by.
    """
    _carry_on(run, clock)
    going = [one for one in verdicts if not one.stays]
    if not going:
        return []
    if lost := _lost(run, verdicts):
        logger.warning("%s: nothing is removed: %s", run.url, lost)
        return [Retired(v.step, v.folder, f"{run.url}/{v.folder}", why_not=lost) for v in going]
    with ThreadPoolExecutor(_MAX_REQUESTS, "dcpstore-retire") as executor:
        doomed = list(executor.map(partial(_announce, run, clock), going))
        ready = [one for one in doomed if isinstance(one, _Doomed)]
        pins = _pins_or_all(run, ready)
        done = list(executor.map(partial(_remove, run, pins), ready))
    found = {one.folder: one for one in (*(d for d in doomed if isinstance(d, Retired)), *done)}
    for one in found.values():
        if one.why_not:
            logger.warning("%s stays: %s", one.url, one.why_not)
        run.forget(one.step)  # even a delete that failed may have taken effect
    return [found[one.folder] for one in going]


def _lost(run: Run, verdicts: Sequence[Verdict]) -> str:
    """Return which step that was to stay is not there any more; empty if the newest ones are.

    A `Run` looks at each step once, and others may have removed one since: what goes may be all
    that there is. One small request for each run whose steps lie there.
    """
    newest: dict[str | None, SealedStep] = {}
    for verdict in verdicts:
        known = run.known(verdict.folder)
        if verdict.stays and known is not None and known.layout != "safetensors":
            newest.setdefault(known.facts.run, known)
    for one in newest.values():
        try:
            why = "" if run.look(one.folder) is not None else "it is not there any more"
        except CheckpointError as error:
            why = str(error)
        if why:
            run.forget(one.step)
            return f"{one.url} was to stay, and {why}. What stays is decided anew the next time"
    return ""


@dataclass(frozen=True, slots=True)
class _Doomed:
    """A step whose removal is announced."""

    step: int
    folder: str
    url: str
    known: SealedStep
    keys: Sequence[str]
    sizes: Mapping[str, int]
    note: str
    begun_s: float


def _announce(run: Run, clock: Callable[[], float], verdict: Verdict) -> _Doomed | Retired:
    """Find out what a step consists of, and put the note of its removal."""
    folder, url = verdict.folder, f"{run.url}/{verdict.folder}"
    stays = partial(Retired, verdict.step, folder, url)
    known = run.known(folder)
    if known is None:
        return stays(why_not="it is not there any more")
    if known.url != url or known.layout == "safetensors":
        return stays(why_not=f"{known.url} is laid out by another tool: delete it with that")
    try:
        found = probe(run.store, f"{folder}/{METADATA_KEY}", denied_is_absent=False)
        if found is None:
            return stays(why_not="it is not there any more")
        save_id = None if found.seal is None else found.seal.save_id
        if save_id != known.save_id:
            return stays(why_not="it was saved again meanwhile")
        read_seal(found.data)  # or it is damaged, and says nothing of its objects
        keys = keys_named_in(run.store, found.data, key=METADATA_KEY, folder=f"{folder}/")
        listed = {
            info.key.removeprefix(f"{folder}/"): info for info in run.store.list(f"{folder}/")
        }
        young = clock() - _IN_FLIGHT_S
        for key, info in listed.items():
            is_data = save_id_of(key) is not None or key.endswith(".distcp")
            is_other = is_data and key not in keys
            if is_other and (info.modified is None or info.modified.timestamp() > young):
                return stays(why_not=f"a save may be under way there: {key} belongs to another")
        sizes = {key: listed[key].size_bytes for key in keys if key in listed}
        note = f"{DELETING}{folder}/{run.token}"
        begun_s = time.monotonic()
        run.store.put(note, json.dumps({"keys": sorted(keys)}).encode())
    except CheckpointError as error:
        return stays(why_not=str(error))
    return _Doomed(verdict.step, folder, url, known, sorted(keys), sizes, note, begun_s)


def _pins_or_all(run: Run, doomed: Sequence[_Doomed]) -> Collection[str]:
    """Return the pinned folders; all, if that cannot be found out."""
    try:
        return run.pins() if doomed else ()
    except CheckpointError as error:
        logger.warning("%s: nothing is removed, as pins cannot be listed: %s", run.url, error)
        return {one.folder for one in doomed}


def _remove(run: Run, pins: Collection[str], doomed: _Doomed) -> Retired:
    """Delete the metadata, then what they named, then the note."""
    stays = partial(Retired, doomed.step, doomed.folder, doomed.url)
    metadata = f"{doomed.folder}/{METADATA_KEY}"
    try:
        if why_not := _why_not(run, pins, doomed):
            sweep(run.store, [doomed.note], Proof.NOT_BEGUN, why="a removal that was given up")
            return stays(why_not=why_not)
        run.store.delete_many([metadata])
    except CheckpointError as error:
        # It may be gone all the same; the next removal sees to it.
        if error.refused:
            sweep(run.store, [doomed.note], Proof.NOT_BEGUN, why="a removal that was refused")
        return stays(why_not=f"{metadata} could not be deleted: {error}")
    keys = [f"{doomed.folder}/{key}" for key in doomed.keys]
    all_keys = [*keys, metrics_key(doomed.folder)]
    left = sweep(run.store, all_keys, Proof.RETIRED, why=f"{doomed.url}, which is removed")
    if not left:  # else the note leads the next removal to it
        sweep(run.store, [doomed.note], Proof.RETIRED, why="a removed step")
    place = parse_location(run.url)
    if place.scheme == "file":
        with suppress(OSError):  # it holds something else, too
            Path(place.prefix, doomed.folder).rmdir()
    num_bytes = doomed.known.num_bytes + sum(doomed.sizes.values())
    return stays(num_objects=1 if left else len(keys) + 1, num_bytes=0 if left else num_bytes)


def _why_not(run: Run, pins: Collection[str], doomed: _Doomed) -> str:
    """Return why a step whose removal is announced stays; one request."""
    if doomed.folder in pins:
        return "it was pinned meanwhile"
    now = run.look(doomed.folder)
    if now is None or not _is_same(now, doomed.known):
        return "it was saved again, or removed by another, meanwhile"
    if time.monotonic() - doomed.begun_s > _GIVE_UP_S:
        return "its removal took too long; the next one tries again"
    return ""


def _carry_on(run: Run, clock: Callable[[], float]) -> None:
    """Finish removals that broke off."""
    if notes := list(run.store.list(DELETING)):
        with ThreadPoolExecutor(_MAX_REQUESTS, "dcpstore-retire") as executor:
            list(executor.map(partial(_carry_on_with, run, clock() - _ABANDONED_S), notes))


def _carry_on_with(run: Run, since: float, note: ObjectInfo) -> None:
    folder = note.key.removeprefix(DELETING).rpartition("/")[0]
    is_old = note.modified is None or note.modified.timestamp() < since
    try:
        # Twice, as a store may once answer that there is nothing.
        is_there = _is_there(run, folder) or _is_there(run, folder)
        if is_there and not is_old:
            return  # somebody may be about to delete it
        if not is_there:
            _finish(run, folder, note)
        run.store.delete_many([note.key])
    except NotFoundError:
        return  # somebody else has finished it
    except CheckpointError as error:
        logger.warning("%s: what is left of %s stays: %s", run.url, folder, error)


def _is_there(run: Run, folder: str) -> bool:
    try:
        run.store.head(f"{folder}/{METADATA_KEY}")
    except NotFoundError:
        return False
    return True


def _is_same(one: SealedStep, other: SealedStep) -> bool:
    mine = one.save_id, one.saved_at, one.num_bytes
    return mine == (other.save_id, other.saved_at, other.num_bytes)


def _read_note(data: bytes, key: str) -> list[str]:
    try:
        return [check_relative(one) for one in dict(parse_json(data))["keys"]]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CorruptError(f"{key} is damaged: {error!r:.200}", key=key) from error


def _finish(run: Run, folder: str, note: ObjectInfo) -> None:
    """Delete what a removed step left, and nothing that a later save may have put there."""
    named = _read_note(bytes(run.store.get(note.key).data), note.key)
    keys = [key for key in named if save_id_of(key) is not None]  # a name is never used twice
    if len(keys) < len(named):  # but other writers use theirs again
        below = {info.key.removeprefix(f"{folder}/"): info for info in run.store.list(f"{folder}/")}
        again = [below[key] for key in {*named} - {*keys} if key in below]
        keys += [info.key.removeprefix(f"{folder}/") for info in again if _is_older(info, note)]
    run.store.delete_many([*(f"{folder}/{key}" for key in keys), metrics_key(folder)])
    logger.info("%s: removed what was left of %s, %d object(s)", run.url, folder, len(keys))


def _is_older(one: ObjectInfo, other: ObjectInfo) -> bool:
    if one.modified is None or other.modified is None:
        return False
    return one.modified < other.modified
