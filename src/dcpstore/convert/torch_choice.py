"""What of a ``torch.save`` file becomes what in a checkpoint. No tensor is read for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch

from dcpstore.convert.selection import Selection
from dcpstore.convert.torch_layout import Layout
from dcpstore.convert.torch_pickle import (
    PickledStructure,
    StorageViews,
    is_stand_in,
    is_wrapper,
    pickle_structure,
)
from dcpstore.convert.torch_structure import Path, Recast, flatten, rearrange
from dcpstore.errors import ConfigError, IncompatibleError
from dcpstore.format.dtypes import dtype_name
from dcpstore.torch_file import TensorPlace, TorchFile
from dcpstore.torch_private import storage_identity

__all__ = ["FileChoice", "OpaqueTensor", "PlannedTensor", "choose"]


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """A strided tensor of the file and what becomes of it.

    Attributes:
        place: Where its elements lie.
        dtype: What they are converted to.
        requires_grad: As in the file.
    """

    place: TensorPlace
    dtype: torch.dtype
    requires_grad: bool


@dataclass(frozen=True, slots=True)
class OpaqueTensor:
    """A tensor that is more than its elements, such as a sparse one.

    Attributes:
        stand_in: What the file has for it.
        record: Its pickle.
    """

    stand_in: torch.Tensor
    record: PickledStructure


@dataclass(frozen=True, slots=True)
class FileChoice:
    """What is written, by key of the checkpoint.

    Attributes:
        names: Every key, in the order of the file's structure.
        paths: Where each lies in the structure.
        tensors: Strided tensors.
        aliases: Keys of tensors that are the very same as another one, which is in `tensors`.
        opaques: Other tensors.
        values: What is no tensor, pickled.
        layout: The structure, for the way back; its archive is still empty.
        extra: Identities of the storages that belong into its archive.
        skipped: Key of the file, and why it is not written.
        cast: Key of the file, and the names of its old and its new dtype.
    """

    names: Sequence[str]
    paths: Mapping[str, Path]
    tensors: Mapping[str, PlannedTensor]
    aliases: Mapping[str, str]
    opaques: Mapping[str, OpaqueTensor]
    values: Mapping[str, PickledStructure]
    layout: Layout
    extra: Sequence[int]
    skipped: Mapping[str, str]
    cast: Mapping[str, tuple[str, str]]


def choose(file: TorchFile, selection: Selection) -> FileChoice:
    """Choose what is written. Pure; the same on all ranks.

    Raises:
        IncompatibleError: If the file holds what no DCP checkpoint can.
        ConfigError: If the selection does not fit the file.
    """
    return _Chooser(file, selection).run()


class _Chooser:
    def __init__(self, file: TorchFile, selection: Selection) -> None:
        self._file = file
        self._leaves = flatten(file.value, file.url)
        self._names = selection.names(list(self._leaves.values))
        self._takes = selection.rules.takes
        lengths = {one: file.storages[key].num_bytes for one, key in file.identities.items()}
        self._recast = Recast(StorageViews(lengths))
        self._replaced, self._cast = self._cast_tensors(StorageViews(lengths), selection)
        self._views = StorageViews({**lengths, **self._recast.num_bytes})
        self._tensors: dict[str, PlannedTensor] = {}
        self._stand_ins: dict[str, torch.Tensor] = {}
        self._opaques: dict[str, OpaqueTensor] = {}
        self._values: dict[str, PickledStructure] = {}
        self._skipped: dict[str, str] = {}

    def _cast_tensors(
        self, views: StorageViews, selection: Selection
    ) -> tuple[dict[str, torch.Tensor], dict[str, tuple[str, str]]]:
        replaced, cast = {}, {}
        for fqn in self._names:
            value = self._leaves.values[fqn]
            if isinstance(value, torch.Tensor) and is_stand_in(value, views):
                dtype = selection.dtype_of(fqn, value.dtype)
                if dtype != value.dtype:
                    replaced[fqn] = self._recast.cast(value, dtype)
                    cast[fqn] = (dtype_name(value.dtype), dtype_name(dtype))
        return replaced, cast

    def run(self) -> FileChoice:
        structure = rearrange(
            self._file.value, self._leaves, self._names, self._replaced, self._takes
        )
        leaves = flatten(structure, self._file.url)
        written = set(self._names.values())
        odd = [name for name, value in leaves.values.items() if not _may_be(name, value, written)]
        if odd or not written <= leaves.values.keys():
            raise ConfigError(
                f"rename makes keys ambiguous, such as {(odd or sorted(written))[0]!r}"
            )
        for fqn, name in self._names.items():
            self._sort_in(fqn, name)
        pickled = pickle_structure(structure, self._views)
        extra = self._extra(pickled)
        by_identity = {one: key for key, one in pickled.storages.items()}
        records = {**self._values, **{k: o.record for k, o in self._opaques.items()}}
        members = {
            name: [by_identity[one] for one in record.storages.values()]
            for name, record in records.items()
        }
        layout = Layout(pickled.data, members, [by_identity[one] for one in extra])
        written -= {self._names[fqn] for fqn in self._skipped}
        ordered = [name for name in leaves.values if name in written]
        primary, aliases = self._aliases()
        return FileChoice(
            names=ordered,
            paths={name: leaves.paths[name] for name in ordered},
            tensors=primary,
            aliases=aliases,
            opaques=self._opaques,
            values=self._values,
            layout=layout,
            extra=extra,
            skipped=self._skipped,
            cast=self._cast,
        )

    def _sort_in(self, fqn: str, name: str) -> None:
        value = self._leaves.values[fqn]
        if not isinstance(value, torch.Tensor):
            self._values[name] = pickle_structure(value, self._views)
            return
        if is_wrapper(value):
            raise IncompatibleError(
                f"{self._file.url}: {fqn!r} is a {type(value).__name__}, which holds other tensors;"
                " save what it holds as plain tensors, or leave it out with exclude="
            )
        place = self._file.place(value)
        made = self._replaced.get(fqn, value)
        if place is not None:
            self._tensors[name] = PlannedTensor(place, made.dtype, made.requires_grad)
            self._stand_ins[name] = made
        elif value.layout == torch.strided:
            self._skipped[fqn] = "a tensor on the meta device, which has no elements"
        else:
            self._opaques[name] = OpaqueTensor(value, pickle_structure(value, self._views))

    def _aliases(self) -> tuple[dict[str, PlannedTensor], dict[str, str]]:
        """Part tensors that are all the same from those that are there first."""
        primary: dict[str, PlannedTensor] = {}
        aliases: dict[str, str] = {}
        first: dict[tuple[TensorPlace, torch.dtype], str] = {}
        for name, tensor in self._tensors.items():
            same = first.setdefault((tensor.place, tensor.dtype), name)
            if same == name or 0 in tensor.place.sizes:
                primary[name] = tensor
            else:
                aliases[name] = same
        return primary, aliases

    def _extra(self, pickled: PickledStructure) -> list[int]:
        """Return the storages of which some bytes would be found under no key."""
        found = {one for value in self._values.values() for one in value.storages.values()}
        found |= {one for o in self._opaques.values() for one in o.record.storages.values()}
        covered = {view_of(stand_in) for stand_in in self._stand_ins.values()}
        odd = set(pickled.bare)
        odd |= {storage_identity(one) for one in pickled.stand_ins if view_of(one) not in covered}
        return [one for one in pickled.storages.values() if one in odd and one not in found]


def _may_be(name: str, value: Any, written: Set[str]) -> bool:
    """Tell whether a leaf is expected: what is left out of a list leaves None there."""
    return name in written or value is None


def view_of(tensor: torch.Tensor) -> tuple[int, int, tuple[int, ...], tuple[int, ...], torch.dtype]:
    """Return what two strided stand-ins share if they are the very same elements."""
    return (
        storage_identity(tensor),
        int(tensor.storage_offset()),
        tuple(tensor.size()),
        tuple(tensor.stride()),
        tensor.dtype,
    )
