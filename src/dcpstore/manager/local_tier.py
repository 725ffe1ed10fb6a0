"""The nodes' disks as the first tier of a run: what a manager does with them, on one rank.

::

    thread of a save    | save to the disk | spread the seal |
    thread of copies                                         | copy every k-th to the bucket |

One copy is under way at a time. What comes due meanwhile waits; if several wait, the newest is
copied and the others are not, since the bucket is slower than the disks then. See
``docs/design/016-two-tiers.md``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

from dcpstore.config import WriteConfig
from dcpstore.errors import CheckpointError
from dcpstore.manager.tiers import copy_up, retire_local, spread_seal
from dcpstore.ranks import RankGroup, steps
from dcpstore.store.folder import Folder


@dataclass(frozen=True, slots=True, kw_only=True)
class TierHooks:
    """What a manager wants to hear.

    Attributes:
        before_seal: Called on the coordinator before a copy is sealed.
        copied: Called on every rank: step, URL of the copy, seconds and bytes.
        failed: Called on every rank: step, URL of the copy, seconds and error.
    """

    before_seal: Callable[[int], None]
    copied: Callable[[int, str, float, int], None]
    failed: Callable[[int, str, float, BaseException], None]


class LocalTier:
    """A rank's disk, and the copies from it to the bucket.

    Args:
        disk: The run's folder on this rank's disk.
        bucket: The run's folder in the bucket.
        group: For copies, and for nothing else; closed by `close`.
        config: Of the copies.
        copy_every: Copy every so many-th step that is saved.
        num_kept: Steps that stay on the disk.
        max_bytes_per_s: How fast a rank copies at most; None for no limit.
        hooks: What the manager wants to hear.
    """

    def __init__(
        self,
        disk: Folder,
        bucket: Folder,
        group: RankGroup,
        config: WriteConfig | None,
        *,
        copy_every: int,
        num_kept: int,
        max_bytes_per_s: float | None,
        hooks: TierHooks,
    ) -> None:
        self.disk = disk
        self._bucket = bucket
        self._group = group
        self._config = config
        self._copy_every = copy_every
        self._num_kept = num_kept
        self._max_bytes_per_s = max_bytes_per_s
        self._hooks = hooks
        self._num_saved = 0
        self._changed = threading.Condition()
        self._waiting: list[int] = []
        self._copying: int | None = None
        self._copied = -1
        self._is_closing = False
        self._error: CheckpointError | None = None
        self._thread = threading.Thread(target=self._copy_all, name="dcpstore-copy", daemon=True)
        self._thread.start()

    def folder(self, step: int) -> Folder:
        """Return where a step is saved on the disk."""
        return self.disk.below(f"step-{step}")

    def note_saved(self, group: RankGroup, step: int, *, copies: bool = False) -> None:
        """Make a saved step whole on all disks, and see to its copy. All ranks of the save.

        Args:
            group: Of the save.
            step: Its step.
            copies: Whether to copy it in any case, as the machines are about to go.
        """
        spread_seal(group, self.folder(step))
        self._num_saved += 1
        with self._changed:
            if copies or self._num_saved % self._copy_every == 0:
                self._waiting.append(step)
            self._changed.notify_all()
            needed = [*self._waiting, *([] if self._copying is None else [self._copying])]
        retire_local(self.disk, step, self._num_kept, needed)

    def wait(self) -> None:
        """Return once no copy is due or under way.

        Raises:
            RankFailures: If a copy failed since this was asked last.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting and self._copying is None)
        self.raise_failure()

    def raise_failure(self) -> None:
        """Raise why a copy failed, once."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Wait for the copies that are due, and give the group back."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join()
        self._group.close()
        self.disk.close()

    def _copy_all(self) -> None:
        while (step := self._next()) is not None:
            began_s = monotonic()
            try:
                # A rank may have heard of fewer steps by now.
                step = steps.broadcast(self._group, "choose the step to copy", self._newest)
                self._copy(step, began_s)
            except CheckpointError as error:
                self._error = error
                url = self._bucket.below(f"step-{step}").url
                self._hooks.failed(step, url, monotonic() - began_s, error)
            finally:
                with self._changed:
                    self._copied, self._copying = max(step, self._copied), None
                    self._waiting = [one for one in self._waiting if one > self._copied]
                    self._changed.notify_all()

    def _next(self) -> int | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_closing)
            while self._waiting:
                self._copying = self._waiting.pop(0)
                if self._copying > self._copied:
                    return self._copying
                self._copying = None
            self._changed.notify_all()
        return None if self._is_closing else self._next()

    def _newest(self) -> int:
        with self._changed:
            assert self._copying is not None
            self._copying = max([self._copying, *self._waiting])
            return self._copying

    def _copy(self, step: int, began_s: float) -> None:
        target = self._bucket.below(f"step-{step}")
        done = copy_up(
            self._group,
            self.folder(step),
            target,
            config=self._config,
            overwrite=True,
            max_bytes_per_s=self._max_bytes_per_s,
            before_seal=lambda: self._hooks.before_seal(step),
        )
        num_bytes = sum(done.objects.values())
        self._hooks.copied(step, target.url, monotonic() - began_s, num_bytes)
