"""`torch_save_to_dcp`: a ``torch.save`` file, in any store, becomes a DCP checkpoint.

Every rank has the file's structure and plans a share of it, a run of the file; tensors are
read when their turn to be written comes (see `dcpstore.convert.torch.source`). Tensors
that are the very same elements are written once: their keys name the same bytes of the same
object, which is all that DCP's format can say of sharing.

1. (all ranks) open the file: its directory and its pickle; see that all opened the same one
2. (all ranks) choose what becomes what: pure, the same everywhere
3. a save (see `dcpstore.convert.dcp.sink`): each rank reads a run of the file, ahead of writing it
4. (all ranks) compare the checksums of what was read whole; (coordinator) see that the file is
   still the same
5. (coordinator) seal
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch
from torch.distributed.checkpoint.metadata import TensorProperties
from typing_extensions import Unpack

from dcpstore.config import WriteConfig
from dcpstore.convert.dcp.sink import SinkEntry, write_checkpoint
from dcpstore.convert.options import Conversion, ConversionOptions
from dcpstore.convert.selection import ConvertResult, Selection
from dcpstore.convert.torch.source import FileCheckpoint, FileView
from dcpstore.convert.torch.structure import (
    LAYOUT_KEY,
    Layout,
    Leaves,
    Path,
    PickledStructure,
    StorageViews,
    cast_stand_ins,
    is_wrapper,
    pickle_structure,
    rearrange,
    view_of,
)
from dcpstore.errors import ConfigError, ConflictError, IncompatibleError
from dcpstore.ranks import RankGroup, steps
from dcpstore.read.torch_file import TensorPlace, TorchFile, open_torch_file
from dcpstore.read.torch_save import contents_of, flatten
from dcpstore.store.folder import parse_location
from dcpstore.torch_private import storage_identity

_NO_VALUE = b"\x80\x02N."  # the pickle of None, of a record that is there for its storages


@dataclass(frozen=True, slots=True)
class FileChoice:
    """What of a file is written.

    Attributes:
        view: Where it comes from.
        entries: Every key of the checkpoint, in the order of the file's structure, and the layout.
        skipped: Key of the file, and why it is not written.
    """

    view: FileView
    entries: Sequence[SinkEntry]
    skipped: Mapping[str, str]


class _Chooser:
    """Chooses what of a file is written. Pure; the same on all ranks."""

    def __init__(self, file: TorchFile, selection: Selection) -> None:
        self._file = file
        self._leaves = Leaves(*flatten(file.value, file.url))
        self._contents, _ = contents_of(file)
        self._names = selection.names(list(self._leaves.values))
        self._takes = selection.rules.takes
        lengths = {one: file.storages[key].num_bytes for one, key in file.identities.items()}
        self._stand_ins, made = cast_stand_ins(
            self._leaves.values, self._names, StorageViews(lengths), selection
        )
        self._views = StorageViews({**lengths, **made})
        self._entries: dict[str, SinkEntry] = {}
        self._first: dict[tuple[TensorPlace, torch.dtype], str] = {}
        self._opaques: dict[str, torch.Tensor] = {}
        self._records: dict[str, PickledStructure] = {}
        self._skipped: dict[str, str] = {}

    def run(self) -> FileChoice:
        """Choose.

        Raises:
            IncompatibleError: If the file holds what no DCP checkpoint can.
            ConfigError: If the selection does not fit the file.
        """
        structure = rearrange(
            self._file.value, self._leaves, self._names, self._stand_ins, self._takes
        )
        leaves = Leaves(*flatten(structure, self._file.url))
        written = set(self._names.values())
        # What is left out of a list leaves None there.
        odd = [k for k, one in leaves.values.items() if k not in written and one is not None]
        if odd or not written <= leaves.values.keys():
            raise ConfigError(
                f"rename makes keys ambiguous, such as {(odd or sorted(written))[0]!r}"
            )
        for fqn, name in self._names.items():
            self._add(fqn, name, leaves.paths[name])
        entries = [self._entries[name] for name in leaves.values if name in self._entries]
        pickled = pickle_structure(structure, self._views)
        key_of = {one: key for key, one in pickled.storages.items()}
        members = {
            self._names[fqn]: [key_of[one] for one in record.storages.values()]
            for fqn, record in self._records.items()
        }
        extra = self._extra(pickled)
        layout = Layout(pickled.data, members, [key_of[one] for one in extra])
        storages = {str(number): one for number, one in enumerate(extra)}
        archive = PickledStructure(_NO_VALUE, storages, {}, (), frozenset())
        records = {**self._records, LAYOUT_KEY: archive}
        return FileChoice(
            FileView(self._contents, self._opaques, records, layout),
            [*entries, SinkEntry(LAYOUT_KEY, LAYOUT_KEY, None)],
            self._skipped,
        )

    def _add(self, fqn: str, name: str, path: Path) -> None:
        value = self._leaves.values[fqn]
        if not isinstance(value, torch.Tensor):
            self._records[fqn] = pickle_structure(value, self._views)
            self._entries[name] = SinkEntry(name, fqn, path)
        elif is_wrapper(value):
            raise IncompatibleError(
                f"{self._file.url}: {fqn!r} is a {type(value).__name__}, which holds other tensors;"
                " save what it holds as plain tensors, or leave it out with exclude="
            )
        elif fqn in self._contents.tensors:
            self._entries[name] = self._strided(fqn, name, path)
        elif value.layout == torch.strided:
            self._skipped[fqn] = "a tensor on the meta device, which has no elements"
        else:
            self._opaques[fqn] = value
            self._records[fqn] = pickle_structure(value, self._views)
            properties = TensorProperties(dtype=value.dtype, layout=value.layout)
            self._entries[name] = SinkEntry(name, fqn, path, properties, tuple(value.size()))

    def _strided(self, fqn: str, name: str, path: Path) -> SinkEntry:
        start, place = self._contents.tensors[fqn]
        made = self._stand_ins[fqn]
        first = self._first.setdefault((place, made.dtype), name)
        return SinkEntry(
            name,
            fqn,
            path,
            TensorProperties(dtype=made.dtype, requires_grad=made.requires_grad),
            place.sizes,
            same_as=None if first == name or 0 in place.sizes else first,
            position=start + place.span().start,
        )

    def _extra(self, pickled: PickledStructure) -> list[int]:
        """Return the storages of which some bytes would be found under no key."""
        found = {one for record in self._records.values() for one in record.storages.values()}
        covered = {view_of(stand_in) for stand_in in self._stand_ins.values()}
        odd = set(pickled.bare)
        odd |= {storage_identity(one) for one in pickled.stand_ins if view_of(one) not in covered}
        return [one for one in pickled.storages.values() if one in odd and one not in found]


def torch_save_to_dcp(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    weights_only: bool = True,
    **options: Unpack[ConversionOptions],
) -> ConvertResult:
    """Turn a ``torch.save`` file into a DCP checkpoint.

    ```python
    torch_save_to_dcp("s3://hub/model.pt", "gs://run/step-0", rename={"state_dict.": "model."})
    ```

    The file is read by ranges, without local disk; no tensor need be held whole. All ranks
    of the group may call it together; each converts a share. Keys are those that ``dcp.save``
    would give, and stock DCP loads the checkpoint. Tensors that are the very same elements
    are stored once. `dcp_to_torch_save` restores the structure, types of containers, shared
    storages and all.

    Arguments that are not listed are those of every converter: see `dcpstore.convert`.

    Args:
        source: The file: a URL, or a local path. It holds a dictionary.
        target: Folder for the checkpoint.
        weights_only: Allow in the file what ``torch.load(weights_only=True)`` allows, with
            ``torch.serialization.add_safe_globals`` honoured. False runs whatever code the
            file names: only for files that you trust.
        budget_bytes: Memory for tensors on their way, per rank. Values that are not tensors,
            with the tensors in them, and sparse tensors are held beside it: an eighth of it at a
            time, or one that is larger.

    Raises:
        NotFoundError: If there is no such file.
        AlreadyExistsError: If ``target`` holds a checkpoint and ``overwrite`` is False.
        IncompatibleError: If it is no ``torch.save`` file of a dictionary; says what it is. Or
            if it holds what DCP cannot.
        CorruptError: If the file is damaged, or names something that is not allowed; it was
            not run.
        ConflictError: If the file was replaced meanwhile. Nothing was sealed.
        ConfigError: If the arguments do not fit together or match no key.
        RankFailures: On every rank of several, if any failed.
    """
    conversion = Conversion(source, target, **options)
    if parse_location(source).url == parse_location(target).url:
        raise ConfigError(f"source and target are both {parse_location(source).url}")
    with conversion.join() as group, ExitStack() as stack:
        file = _open(group, stack, conversion, weights_only=weights_only)
        choice = steps.each(
            group, "choose the keys", lambda: _Chooser(file, conversion.selection).run()
        )
        checkpoint = FileCheckpoint(file, choice.view, conversion.shares.read_config())

        def check() -> None:
            if group.is_coordinator:
                file.check_unchanged()
            checkpoint.check_crcs()

        result = write_checkpoint(
            group,
            conversion,
            checkpoint,
            choice.entries,
            object_bytes=WriteConfig().object_bytes,
            splits_tensors=False,  # else no rank could check the CRC32 of a storage
            check=check,
        )
        return replace(result, skipped=choice.skipped)


def _open(
    group: RankGroup, stack: ExitStack, conversion: Conversion, *, weights_only: bool
) -> TorchFile:
    """Open the file on every rank, for as long as the stack. Collective."""

    def open_it() -> TorchFile:
        file = open_torch_file(
            conversion.source,
            storage_options=conversion.source_options,
            weights_only=weights_only,
        )
        return stack.enter_context(file)

    file = steps.each(group, "open the source", open_it)
    seen = steps.all_gather(
        group, "compare the source", lambda: (file.info.size_bytes, file.info.etag)
    )
    if len(set(seen)) > 1:
        raise ConflictError(
            f"{file.url} was replaced while ranks opened it: they found files of"
            f" {sorted({size for size, _ in seen})} bytes. Start again"
        )
    return file
