"""`async_save`: a save in the background of a training loop.

::

    caller's thread   open group | state_dict() | copy |  training goes on ...
    thread of a save                                   | plan | write | agree | seal
                                                       ^ staged                    ^ durable
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import weakref
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any, TypeAlias

from torch.distributed.checkpoint.planner import SavePlanner as DcpSavePlanner
from torch.distributed.checkpoint.storage import StorageWriter

from dcpstore.config import WriteConfig
from dcpstore.errors import AbandonedError
from dcpstore.manager.staging import Frozen, Stager, Staging
from dcpstore.ranks import RankGroup
from dcpstore.ranks.agreement import Ranks, join_ranks
from dcpstore.report import ProgressCallback, SaveResult
from dcpstore.saving import save
from dcpstore.text import redact
from dcpstore.torch_private import async_save_response
from dcpstore.write.attached import Attachment
from dcpstore.write.cutoff import Cutoff

if TYPE_CHECKING:
    from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse
else:
    AsyncSaveResponse = async_save_response()

logger = logging.getLogger(__name__)


def async_save(
    state_dict: Mapping[str, Any],
    url: str | os.PathLike[str] | None = None,
    *,
    planner: DcpSavePlanner | None = None,
    process_group: Ranks = None,
    storage_options: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    config: WriteConfig | None = None,
    storage_writer: StorageWriter | None = None,
    coordinator_rank: int = 0,
    deadline_s: float = 1800.0,
    total_deadline_s: float | None = None,
    progress: ProgressCallback | bool | None = False,
    attachments: Mapping[str, Attachment] | None = None,
    metrics: Mapping[str, float] | None = None,
    user_metadata: Mapping[str, Any] | None = None,
    frozen: Frozen = (),
    stager: Stager | None = None,
    wait_staged: bool = True,
) -> AsyncSave:
    """Copy a state dict and save the copy in a thread of its own. All ranks of the group call it.

    It returns once the copy is made: training may change its tensors, and the save goes on. No
    collective of the trainer is used or waited for, then or later. Until the save is over the
    process group must not be destroyed. If several saves are begun, all ranks begin them in the
    same order. An interpreter that ends waits for the saves under way.

    Args:
        state_dict: Nested. Its ``Stateful`` values are asked for their state by the calling
            thread.
        url: Folder of the checkpoint.
        planner: As for `dcpstore.save`; keep it for the next save, and use it for one at a time.
        process_group: As for `dcpstore.save`. An open `RankGroup` belongs to the save until it is
            over.
        storage_options: As for `dcpstore.save`.
        overwrite: As for `dcpstore.save`.
        config: As for `dcpstore.save`.
        storage_writer: As for `dcpstore.save`; used by one save at a time.
        coordinator_rank: As for `dcpstore.save`.
        deadline_s: As for `dcpstore.save`.
        total_deadline_s: As for `dcpstore.save`; the copying counts.
        progress: As for `dcpstore.save`, but nothing is shown unless asked for.
        attachments: As for `dcpstore.save`; files must stay as they are until the save is over.
        metrics: As for `dcpstore.save`.
        user_metadata: As for `dcpstore.save`.
        frozen: What the loop does not change before the save is over, and need not be copied:
            names, each with all that is below it (``["model.embedding"]``), or a function of the
            flattened name.
        stager: Makes the copy, and keeps the memory for the next save. Pass the same one each
            time: a copy into fresh memory takes several times as long. While it is in use by
            another save, the call waits. None for memory that is given back after the save.
        wait_staged: Whether to return only when the copy is made; else the caller waits for it by
            `AsyncSave.wait_staged` before it changes a tensor.

    Raises:
        IncompatibleError: If the state cannot be copied; see `Stager.stage`. The other ranks'
            saves fail.
        AbandonedError: If the deadline passed before the stager was free.
        ConfigError: If the arguments do not fit together.
    """

    def work(group: RankGroup, state: dict[str, Any], cutoff: Cutoff) -> SaveResult:
        return save(
            state,
            url,
            planner=planner,
            process_group=group,
            storage_options=storage_options,
            overwrite=overwrite,
            config=config,
            storage_writer=storage_writer,
            cutoff=cutoff,
            progress=progress,
            attachments=attachments,
            metrics=metrics,
            user_metadata=user_metadata,
        )

    place = getattr(storage_writer, "checkpoint_id", "") if url is None else os.fspath(url)
    joining = join_ranks(process_group, coordinator_rank, deadline_s, action="async save", url=url)
    stager = Stager() if stager is None else stager
    cutoff = Cutoff(total_deadline_s)
    return begin(state_dict, work, str(place), joining, cutoff, stager, frozen, waits=wait_staged)


def begin(
    state_dict: Mapping[str, Any],
    work: Work,
    place: str,
    joining: AbstractContextManager[RankGroup],
    cutoff: Cutoff,
    stager: Stager,
    frozen: Frozen = (),
    *,
    waits: bool = True,
) -> AsyncSave:
    """Copy a state dict, and work on the copy in a thread of its own; see `async_save`.

    Args:
        state_dict: To be copied.
        work: Given the ranks, the copy and the cutoff; saves it, and returns what it did.
        place: Where to, for messages.
        joining: Opens the group of ranks, which is left when the work is done.
        cutoff: Of the save.
        stager: Makes the copy.
        frozen: What need not be copied.
        waits: Whether to return only when the copy is made.
    """
    with ExitStack() as held:
        group = held.enter_context(joining)
        left_s = cutoff.left_s()
        if not stager.in_use.acquire(timeout=min(left_s, threading.TIMEOUT_MAX)):
            raise AbandonedError(cutoff.lateness)
        held.callback(stager.in_use.release)
        staging = stager.begin(state_dict, frozen)
        if waits:
            staging.finish()
        handle = AsyncSave(redact(place), cutoff)
        handle.start(staging, lambda state: work(group, state, cutoff), held.pop_all())
    return handle


Work: TypeAlias = "Callable[[RankGroup, dict[str, Any], Cutoff], SaveResult]"
_Save: TypeAlias = "Callable[[dict[str, Any]], SaveResult]"


class AsyncSave(AsyncSaveResponse):
    """A save in the background. Thread-safe; awaitable.

    Its error is raised by `result`, by `exception` and by ``await``. If nobody asked for it when
    the object goes, it is logged.

    Attributes:
        url: Of the checkpoint, without secrets.
        staging_completion: Done once the tensors may be changed.
        upload_completion: Done once the checkpoint is sealed; gives the `SaveResult`.
    """

    staging_completion: Future[None]
    upload_completion: Future[Any]

    def __init__(self, url: str, cutoff: Cutoff) -> None:
        outcome: Future[Any] = _Outcome(url)
        super().__init__(staging_completion=Future(), upload_completion=outcome)
        self.url = url
        self._cutoff = cutoff
        self.staging_completion.set_running_or_notify_cancel()

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other

    def __repr__(self) -> str:
        what = "over" if self.done() else "writing" if self.staged() else "staging"
        return f"AsyncSave({self.url!r}, {what})"

    def start(self, staging: Staging, work: _Save, held: ExitStack) -> None:
        """Begin; called once, by `async_save`.

        Args:
            staging: Gives the state.
            work: Saves it.
            held: What to leave when the save is over.
        """
        if not staging.jobs and not staging.events:
            self.staging_completion.set_result(None)
        arguments = (self.staging_completion, self.upload_completion, self._cutoff)
        thread = threading.Thread(
            target=_run, args=(staging, work, held, *arguments), name="dcpstore-async-save"
        )
        _under_way.add(thread)
        thread.start()

    def staged(self) -> bool:
        """Tell whether the copy is made, so that the tensors may be changed."""
        return self.staging_completion.done() and self.staging_completion.exception() is None

    def wait_staged(self, timeout: float | None = None) -> None:
        """Wait until the tensors may be changed.

        Args:
            timeout: Most seconds to wait; None for as long as it takes.

        Raises:
            TimeoutError: If that takes longer (``concurrent.futures.TimeoutError``).
            CheckpointError: If the copy failed.
        """
        self.staging_completion.result(timeout)

    def done(self) -> bool:
        """Tell whether the save is over, well or not."""
        return self.upload_completion.done()

    def result(self, timeout: float | None = None) -> SaveResult:
        """Wait until the checkpoint is sealed, and return what `dcpstore.save` does.

        Args:
            timeout: Most seconds to wait; None for as long as it takes.

        Raises:
            TimeoutError: If that takes longer (``concurrent.futures.TimeoutError``).
            CheckpointError: What `dcpstore.save` raises, if the save failed.
        """
        result: SaveResult = self.upload_completion.result(timeout)
        return result

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait until the save is over, and return its error; None if it went well.

        Args:
            timeout: As for `result`.

        Raises:
            TimeoutError: As for `result`.
        """
        return self.upload_completion.exception(timeout)

    def cancel(self) -> bool:
        """Give the save up, on all ranks. Waits for nobody.

        The save then fails on every rank; its cause is an `AbandonedError` of this one. What was
        written is deleted. The other ranks hear of it once they have written their part.

        Returns:
            Whether it came in time: False once the ranks have agreed to seal, or the save is over.
        """
        return self._cutoff.cancel()

    def __await__(self) -> Generator[Any, None, SaveResult]:
        return asyncio.wrap_future(self.upload_completion).__await__()


class _Unheard:
    """An error that nobody has asked for yet. Holds its text: the error would hold the save."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.text: str | None = None

    def tell(self) -> None:
        if self.text is not None:
            logger.error("the save in the background to %s failed: %s", self._url, self.text)


class _Outcome(Future[SaveResult]):
    """What became of a save; tells the log of an error that nobody has asked for when it goes.

    The save's thread and the handle hold it, so that it goes when both have.
    """

    def __init__(self, url: str) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()
        self._unheard = _Unheard(url)
        weakref.finalize(self, self._unheard.tell)

    def set_exception(self, exception: BaseException | None) -> None:
        self._unheard.text = f"{type(exception).__name__}: {exception}"
        super().set_exception(exception)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        error = super().exception(timeout)
        self._unheard.text = None
        return error

    def result(self, timeout: float | None = None) -> SaveResult:
        self.exception(timeout)
        return super().result(timeout)


def _run(
    staging: Staging,
    work: _Save,
    held: ExitStack,
    staged: Future[None],
    outcome: Future[SaveResult],
    cutoff: Cutoff,
) -> None:
    """The thread of one save."""
    try:
        with held:
            staging.finish()
            if not staged.done():
                staged.set_result(None)
            result = work(staging.state)
    except BaseException as error:  # noqa: BLE001 - kept, and raised to whoever asks
        cutoff.end()
        if not staged.done():
            staged.set_exception(error)
        outcome.set_exception(error)
        # The error's traceback holds this frame, and the outcome the error.
        del staging, work, held, staged, outcome
    else:
        cutoff.end()
        outcome.set_result(result)


# --- the end of the interpreter --------------------------------------------------------

_under_way: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def _wait_for_saves() -> None:
    for thread in list(_under_way):
        thread.join()


# Threads are joined at exit only after the executors that a save needs have been shut down. What
# is registered here comes before that; where there is no such thing, the save fails and says so.
_register = getattr(threading, "_register_atexit", None)
if _register is not None:
    _register(_wait_for_saves)
