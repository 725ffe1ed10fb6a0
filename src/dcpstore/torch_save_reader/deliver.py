"""Put what arrives into this rank's targets, and tell the planner of complete ones."""

from __future__ import annotations

import io

from torch.distributed.checkpoint.planner import LoadPlanner

from dcpstore.format.copying import copy_box_in
from dcpstore.format.dtypes import dtype_from_name, item_bytes
from dcpstore.planning.boxes import num_elements
from dcpstore.progress import Meter
from dcpstore.ranges import row_major_strides
from dcpstore.torch_save_reader.targets import OwnPart
from dcpstore.torch_save_reader.waves import Portion

__all__ = ["Delivery"]


class Delivery:
    """This rank's targets on their way to complete. One thread.

    Args:
        own: The targets.
        planner: Told of complete ones.
        value_bytes: Length of each value, by item number.
        meter: Counts the bytes delivered.
    """

    def __init__(
        self, own: OwnPart, planner: LoadPlanner, value_bytes: dict[int, int], meter: Meter
    ) -> None:
        self._own = own
        self._planner = planner
        self._meter = meter
        self._boxes = {want.item: want for want in own.wants}
        self._values = {item: bytearray(size) for item, size in value_bytes.items()}
        self._missing = {want.item: num_elements(want.sizes) for want in own.wants} | value_bytes
        self.num_bytes = sum(value_bytes.values()) + sum(
            target.tensor.numel() * item_bytes(target.item.dtype)
            for target in own.targets
            if target.tensor is not None
        )
        """Bytes that this rank wants."""
        meter.expect(self.num_bytes)

    def commit_empty(self) -> None:
        """Commit the targets without elements, for which nothing arrives."""
        for item in range(len(self._own.targets)):
            if item not in self._missing:
                self.commit(item)

    def take(self, portion: Portion, data: memoryview) -> None:
        """Take a portion; with its last one a target is complete."""
        item = portion.item
        if item in self._values:
            start = portion.offsets[0]
            self._values[item][start : start + data.nbytes] = data
        else:
            self._copy(portion, data)
        self._meter.advance(data.nbytes)
        self._missing[item] -= num_elements(portion.sizes)
        if not self._missing[item]:
            self.commit(item)

    def commit(self, item: int) -> None:
        """Tell the planner that a target is complete."""
        target = self._own.targets[item]
        if target.tensor is None:
            stream = io.BytesIO(self._values.pop(item))
            self._planner.load_bytes(target.read_item, stream)
        else:
            self._planner.commit_tensor(target.read_item, target.tensor)
            target.tensor = None

    def _copy(self, portion: Portion, data: memoryview) -> None:
        target = self._own.targets[portion.item]
        part = target.tensor
        assert part is not None
        first = self._boxes[portion.item].offsets
        for dim, (offset, base, size) in enumerate(
            zip(portion.offsets, first, portion.sizes, strict=True)
        ):
            part = part.narrow(dim, offset - base, size)
        copy_box_in(
            data,
            0,
            dtype_from_name(target.item.dtype),
            row_major_strides(portion.sizes),
            (0,) * len(portion.sizes),
            portion.sizes,
            part,
        )
