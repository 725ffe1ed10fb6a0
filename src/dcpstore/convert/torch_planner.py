"""Save what was chosen of a ``torch.save`` file: a save planner and a writer for it.

Every rank has the file's structure and plans a share of it, a run of the file; tensors are
read when their turn to be written comes (see `dcpstore.convert.torch_source`). Tensors
that are the very same elements are written once: their keys name the same bytes of the same
object, which is all that DCP's format can say of sharing.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner import SavePlanner as DcpSavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from dcpstore.convert.torch_choice import FileChoice, OpaqueTensor, PlannedTensor
from dcpstore.convert.torch_layout import LAYOUT_KEY
from dcpstore.convert.torch_source import ReadAhead, WantedBox, bands_of
from dcpstore.errors import IncompatibleError
from dcpstore.planners import SavePlanner
from dcpstore.torch_private import validate_global_plan
from dcpstore.writer import ObjectStoreWriter

__all__ = ["FileSavePlanner", "Share", "SharingWriter", "share_of"]


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank writes: boxes in the order of the file, and the key of each."""

    names: tuple[str, ...]
    boxes: tuple[WantedBox, ...]


def share_of(
    tensors: Mapping[str, PlannedTensor],
    positions: Mapping[str, int],
    *,
    rank: int,
    num_ranks: int,
    max_item_bytes: int,
) -> Share:
    """Return a rank's share: a run of the file of about as many bytes as the others'.

    Args:
        tensors: What is written, by key.
        positions: Where each storage lies in the file.
        rank: The rank.
        num_ranks: How many share.
        max_item_bytes: Larger tensors are cut, so that none need be held whole.
    """
    order = sorted(
        tensors,
        key=lambda one: (positions[tensors[one].place.storage_key], tensors[one].place.span()),
    )
    total = sum(_whole(tensors[name]).num_bytes for name in order)
    names, boxes = [], []
    before = 0
    for name in order:
        box = _whole(tensors[name])
        # By where its middle lies, so that all ranks agree and none is given a part twice.
        owner = min(num_ranks - 1, (2 * before + box.num_bytes) * num_ranks // (2 * total or 1))
        before += box.num_bytes
        if owner != rank:
            continue
        parts = [box] if 0 in box.sizes else list(bands_of(box, max_item_bytes))
        boxes += parts
        names += [name] * len(parts)
    return Share(tuple(names), tuple(boxes))


def _whole(tensor: PlannedTensor) -> WantedBox:
    sizes = tensor.place.sizes
    return WantedBox(tensor.place, (0,) * len(sizes), sizes)


class FileSavePlanner(SavePlanner):
    """Plans and resolves one rank's share; the state dict that it is set up with is not looked at.

    Args:
        choice: What is written.
        share: Of this rank.
        read_ahead: Over the share's boxes.
        read_opaque: Reads a tensor that is more than its elements.
        read_bytes: Returns the bytes of a value, or of the layout, by key.
    """

    keeps_tensors = False  # the memory of a tensor that was taken counts no longer

    def __init__(
        self,
        choice: FileChoice,
        share: Share,
        read_ahead: ReadAhead,
        read_opaque: Callable[[OpaqueTensor], torch.Tensor],
        read_bytes: Callable[[str], bytes],
    ) -> None:
        super().__init__()
        self._choice = choice
        self._share = share
        self._read_ahead = read_ahead
        self._read_opaque = read_opaque
        self._read_bytes = read_bytes
        self._numbers: dict[tuple[str, tuple[int, ...]], int] = {
            (name, box.offsets): number
            for number, (name, box) in enumerate(zip(share.names, share.boxes, strict=True))
        }

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Learn this rank's role. All ranks."""
        del state_dict, storage_meta
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        """Plan this rank's share; values and opaque tensors are the coordinator's."""
        items = [
            self._chunk(name, box)
            for name, box in zip(self._share.names, self._share.boxes, strict=True)
        ]
        if self.is_coordinator:
            items += [self._opaque(name, one) for name, one in self._choice.opaques.items()]
            keys = [*self._choice.values, LAYOUT_KEY]
            items += [WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO) for key in keys]
        return SavePlan(items)

    def _chunk(self, name: str, box: WantedBox) -> WriteItem:
        planned = self._choice.tensors[name]
        is_whole = box.sizes == planned.place.sizes
        size, offsets = torch.Size(planned.place.sizes), torch.Size(box.offsets)
        chunk = ChunkStorageMetadata(offsets, torch.Size(box.sizes))
        kind = WriteItemType.TENSOR if is_whole else WriteItemType.SHARD
        data = TensorWriteData(chunk, _properties(planned), size)
        return WriteItem(MetadataIndex(name, offsets), kind, tensor_data=data)

    def _opaque(self, name: str, one: OpaqueTensor) -> WriteItem:
        size = one.stand_in.size()
        offsets = torch.Size([0] * len(size))
        properties = TensorProperties(dtype=one.stand_in.dtype, layout=one.stand_in.layout)
        data = TensorWriteData(ChunkStorageMetadata(offsets, size), properties, size)
        return WriteItem(MetadataIndex(name, offsets), WriteItemType.TENSOR, tensor_data=data)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Join the shares; name the keys that share their bytes with another. Coordinator only."""
        # Not the base's: shares are disjoint, and torch's search for replicas fails at some dtypes.
        plans, metadata = create_default_global_save_plan(all_plans)
        entries = metadata.state_dict_metadata
        for alias, name in self._choice.aliases.items():
            entries[alias] = entries[name]
        metadata.state_dict_metadata = {name: entries[name] for name in self._choice.names}
        metadata.planner_data = dict(self._choice.paths)
        problems = validate_global_plan(plans, metadata)
        if problems:
            raise IncompatibleError(f"the shares do not fit together: {problems[:3]}")
        return plans, metadata

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Read an item. Called by the writer, one at a time, in the order of the plan."""
        name = write_item.index.fqn
        if write_item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(self._read_bytes(name))
        if name in self._choice.opaques:
            return self._read_opaque(self._choice.opaques[name])
        offsets = write_item.index.offset
        assert offsets is not None
        tensor = self._read_ahead.take(self._numbers[name, tuple(offsets)])
        return tensor.to(self._choice.tensors[name].dtype)


def _properties(tensor: PlannedTensor) -> TensorProperties:
    return TensorProperties(dtype=tensor.dtype, requires_grad=tensor.requires_grad)


class SharingWriter(ObjectStoreWriter):
    """A writer that seals some keys as other names of what is stored under another key.

    Args:
        url: Folder of the checkpoint.
        aliases: From such a key to the other.
        check: Called on every rank when its share is written, before anything is sealed.
        **settings: As of `ObjectStoreWriter`.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        aliases: Mapping[str, str],
        check: Callable[[], None],
        **settings: Any,
    ) -> None:
        super().__init__(url, **settings)
        self._names: dict[str, list[str]] = {}
        for alias, name in aliases.items():
            self._names.setdefault(name, []).append(alias)
        self._check = check
        self.objects: dict[str, int] = {}
        """Size of each data object; on the coordinator, when the checkpoint is sealed."""

    def write_data(self, plan: SavePlan, planner: DcpSavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's items, and say where the keys that share theirs lie."""
        results = super().write_data(plan, planner).wait()
        self._check()
        shared = [
            WriteResult(replace(one.index, fqn=alias), 0, one.storage_data)
            for one in results
            for alias in self._names.get(one.index.fqn, ())
        ]
        future: Future[list[WriteResult]] = Future()
        future.set_result([*results, *shared])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Seal the checkpoint. Coordinator only."""
        written = [one.storage_data.object for own in results for one in own]
        super().finish(metadata, results)
        self.objects = {one.key: one.size_bytes for one in written}
