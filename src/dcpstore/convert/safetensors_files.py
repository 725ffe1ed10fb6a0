"""One rank's way through a conversion to safetensors files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import torch

from dcpstore.collectives import RankGroup, steps
from dcpstore.commit import Proof, sweep
from dcpstore.convert.dcp_blocks import Block, plan_blocks, read_blocks
from dcpstore.convert.dcp_memory import Shares
from dcpstore.convert.output import Outputs, is_surely_unpublished
from dcpstore.convert.result import ConvertResult
from dcpstore.convert.safetensors_choice import Choice, choose_tensors, compare_tied
from dcpstore.convert.safetensors_folder import Replaced, finish_folder, prepare_folder
from dcpstore.convert.safetensors_layout import FilePlan, FolderPlan, plan_folder, share_files
from dcpstore.convert.selection import Selection
from dcpstore.discovery import INDEX_FILE
from dcpstore.errors import CorruptError
from dcpstore.folder import Folder
from dcpstore.progress import Meter
from dcpstore.reading import Checkpoint
from dcpstore.report import Phases
from dcpstore.store.base import Store
from dcpstore.upload import ObjectStream

__all__ = ["FilesJob"]

_STEP_PUBLISH = "write the index"


class FilesJob:
    """One rank's way through a conversion to safetensors.

    Args:
        group: The ranks.
        checkpoint: The source, open on every rank.
        folder: The target.
        shares: Of the memory.
        meter: Counts the bytes handed to the store.
        overwrite: Replace what lies there.
    """

    def __init__(
        self,
        group: RankGroup,
        checkpoint: Checkpoint,
        folder: Folder,
        shares: Shares,
        meter: Meter,
        overwrite: bool,
    ) -> None:
        self._group = group
        self._checkpoint = checkpoint
        self._folder = folder
        self._shares = shares
        self._meter = meter
        self._overwrite = overwrite
        self._phases = Phases()
        self._written: dict[str, int] = {}

    def run(
        self,
        selection: Selection,
        max_shard_bytes: int,
        tied: Mapping[str, str],
        values: Literal["skip", "error"],
    ) -> ConvertResult:
        """Convert. All ranks; arguments and errors as for `dcp_to_safetensors`."""
        with self._phases.phase("plan"):
            choice, plan = self._plan(selection, max_shard_bytes, tied, values)
            store = self._folder.open()
            replaced = steps.broadcast(
                self._group,
                "look at the target",
                lambda: prepare_folder(store, plan, overwrite=self._overwrite),
            )
        with self._phases.phase("write"):
            try:
                self._write(store, plan, replaced)
            except BaseException as error:
                if not self._overwrite and is_surely_unpublished(error, self._group, _STEP_PUBLISH):
                    sweep(store, self._written, Proof.NOT_BEGUN, why="this failed conversion")
                raise
        return self._result(choice, plan)

    def _plan(
        self,
        selection: Selection,
        max_shard_bytes: int,
        tied: Mapping[str, str],
        values: Literal["skip", "error"],
    ) -> tuple[Choice, FolderPlan]:
        """Plan the files; the same on all ranks."""
        planned: list[tuple[Choice, FolderPlan]] = []

        def plan() -> None:
            choice = choose_tensors(self._checkpoint, selection, tied, values)
            planned.append((choice, plan_folder(choice.tensors, max_shard_bytes, choice.about)))

        steps.barrier(self._group, "plan the files", plan)
        choice = planned[0][0]
        dtypes = {tensor.fqn: tensor.dtype for tensor in choice.tensors}
        named = {alias: kept for alias, kept in choice.aliases.items() if alias in tied}
        steps.broadcast(
            self._group,
            "compare tied tensors",
            lambda: compare_tied(self._checkpoint, named, dtypes, self._shares.block_bytes),
        )
        return planned[0]

    def _write(self, store: Store, plan: FolderPlan, replaced: Replaced) -> None:
        own = share_files(plan.files, self._group.size)[self._group.rank]
        steps.barrier(self._group, "write the files", lambda: self._write_files(store, own))
        steps.broadcast(
            self._group,
            _STEP_PUBLISH,
            lambda: finish_folder(store, plan, replaced, overwrite=self._overwrite),
        )

    def _write_files(self, store: Store, files: Sequence[FilePlan]) -> None:
        if not files:
            return
        self._meter.expect(sum(file.layout.size_bytes for file in files))
        outputs = Outputs(
            store,
            budget_bytes=self._shares.output_bytes,
            largest_bytes=max(file.layout.size_bytes for file in files),
            overwrite=self._overwrite,
            meter=self._meter,
        )
        with outputs:
            for file in files:
                with outputs.write(file.key) as stream:
                    self._fill(stream, file)
        self._written = outputs.objects

    def _fill(self, stream: ObjectStream, file: FilePlan) -> None:
        stream.write(file.layout.header)
        blocks = self._blocks(file)
        with read_blocks(self._checkpoint, blocks, self._shares.block_bytes) as contents:
            for _, content in contents:
                assert isinstance(content, torch.Tensor)
                stream.write_tensor(content)
        if stream.tell() != file.layout.size_bytes:
            raise CorruptError(
                f"{file.key}: {stream.tell()} bytes were read for a file of"
                f" {file.layout.size_bytes}",
                key=file.key,
            )

    def _blocks(self, file: FilePlan) -> Iterator[Block]:
        for placed in file.layout.tensors:
            tensor = file.tensors[placed.fqn]
            yield from plan_blocks(
                self._checkpoint, tensor.fqn, tensor.dtype, self._shares.block_bytes
            )

    def _result(self, choice: Choice, plan: FolderPlan) -> ConvertResult:
        fetched = steps.all_gather(
            self._group, "finish", lambda: self._checkpoint.stats.fetched_bytes
        )
        objects = {file.key: file.layout.size_bytes for file in plan.files}
        if plan.index is not None:
            objects[INDEX_FILE] = len(plan.index)
        return ConvertResult(
            source=self._checkpoint.url,
            target=self._folder.url,
            num_tensors=len(choice.tensors),
            tensor_bytes=sum(tensor.num_bytes for tensor in choice.tensors),
            objects=objects,
            skipped=choice.skipped,
            cast=choice.cast,
            fetched_bytes=sum(fetched),
            seconds=dict(self._phases.seconds),
        )
