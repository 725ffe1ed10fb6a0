"""The settings of the writer and the reader, each with its unit and the reason for its default."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

from dcpstore.errors import ConfigError

_KIB = 1 << 10
_MIB = 1 << 20

MAX_METADATA_BYTES = 32 << 30
"""The default of ``ReadConfig.max_metadata_bytes``, also where nobody asks for a config."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteConfig:
    """How to write a checkpoint.

    Attributes:
        budget_bytes: Memory for bytes on their way to the store, per rank, whatever the
            size of the checkpoint. 256 MiB holds 16 parts; host tensors that are sent from
            where they lie take next to nothing of it.
        part_bytes: Size of a slab, which is also the size of a part of a multipart
            upload. 16 MiB costs one request per 0.16 s of a 100 MB/s connection. A rank
            with a few GiB or less takes smaller ones, of 8 MiB at least, where all connections
            then end at about the same time; one with an object of more than 156 GiB takes
            larger ones, as S3 allows 10,000 parts, up to half of the budget.
        object_bytes: Items are packed into objects of about this size. 256 MiB keeps an
            11 TB checkpoint at about 44,000 objects; a larger item gets an object alone.
        max_uploads: Parts in flight, as far as the budget holds what they copy, and objects in
            flight. 32 took 0.8 of the time of 16 at 100 MB/s per connection, and host tensors
            no more memory.
        checksum_block_bytes: Bytes covered by one CRC32C. A ranged read is widened to
            whole blocks, so small blocks read less and large ones make a smaller
            manifest: 256 KiB costs 16 bytes per MiB stored.
        inline_bytes: Items of at most this size are repeated in the manifest, so that
            loading scalars and optimizer counters sends no data request.
        inline_rank_bytes: Most bytes that one rank puts into the manifest this way.
        embed_manifest_bytes: A manifest of at most this size lies inside ``.metadata``: one
            request fewer per save and per load. A larger one is an object of its own, and 0
            makes each one so. Stock readers, and the look before a save, fetch all of
            ``.metadata``: 8 MiB cost them 0.08 s of a 100 MB/s connection. That is the manifest
            of 400,000 small tensors, or of 0.4 TB; to load more takes longer than a request.
        require_conditional_put: If the store cannot decide a put by a precondition
            although it should (a server that answers 501 or refuses a right ETag), raise
            rather than compare first and put then, which two writers could both win.
        sweep: After an overwrite is sealed, delete the objects of the old save.
        sync_local: Flush files in a local folder to the medium before a put returns, and the
            folders that lead to them, so that a power cut loses no sealed checkpoint. Without it,
            only a crash of the process loses none. Object stores do so by themselves.
        engine: ``"obstore"``, ``"fsspec"``, or ``"auto"`` for whichever serves the URL.
        max_attempts: Tries per request, the first one included. 16 outlast a 30 s storm of
            503s nearly always, 10 did in six of ten simulated ones.
        retry_deadline_s: Most seconds spent on one request with all its tries: the last one's
            time-out is cut to what is left.
        timeout_s: Time-out of a request without a body; what it moves adds to it, at
            ``min_bytes_per_s``, up to two fifths of the deadline, so that one lost connection
            costs a try and not the request. 20 s is more than stores take under load.
        min_bytes_per_s: The slowest connection that is not taken for a dead one. A part of
            16 MiB has 72 s, and 32 of them at a time need a link of 7 MiB/s. Where it is
            slower, raise the deadline or have fewer at a time.
    """

    budget_bytes: int = 256 * _MIB
    part_bytes: int = 16 * _MIB
    object_bytes: int = 256 * _MIB
    max_uploads: int = 32
    checksum_block_bytes: int = 256 * _KIB
    inline_bytes: int = 2 * _KIB
    inline_rank_bytes: int = 16 * _MIB
    embed_manifest_bytes: int = 8 * _MIB
    require_conditional_put: bool = True
    sweep: bool = True
    sync_local: bool = True
    engine: Literal["auto", "obstore", "fsspec"] = "auto"
    max_attempts: int = 16
    retry_deadline_s: float = 180.0
    timeout_s: float = 20.0
    min_bytes_per_s: int = 256 * _KIB

    def __post_init__(self) -> None:
        zero_allowed = ("inline_bytes", "inline_rank_bytes", "embed_manifest_bytes")
        _check_positive(self, zero_allowed=zero_allowed)
        if self.part_bytes < 5 * _MIB:
            raise ConfigError(
                f"part_bytes={self.part_bytes} is below 5 MiB, the least that S3 takes as a part"
            )
        if self.part_bytes % 4096:
            raise ConfigError(f"part_bytes={self.part_bytes} must be a multiple of 4096")
        if self.budget_bytes < 2 * self.part_bytes:
            raise ConfigError(
                f"budget_bytes={self.budget_bytes} must hold at least two parts of"
                f" part_bytes={self.part_bytes}: one to fill while one uploads"
            )
        block_bytes = self.checksum_block_bytes
        if block_bytes < 4096 or block_bytes & (block_bytes - 1):
            raise ConfigError(
                f"checksum_block_bytes={block_bytes} must be a power of two of at least 4096,"
                " so that no element is split between two blocks"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadConfig:
    """How to read a checkpoint.

    Attributes:
        budget_bytes: Memory for fetched bytes not yet copied into their target, per rank.
            Half of it is asked for at a time: the engine's allocator takes the other half.
        request_bytes: Longest range asked for at once. 4 MiB costs one request per
            0.04 s of a 100 MB/s connection and keeps 32 of them in the budget: as fast
            as 32 of 8 MiB at 30 ms, in 60% of the memory. What is received straight into
            its targets takes no memory and is asked for in ranges of up to 16 MiB.
        max_requests: Requests in flight.
        join_gap_bytes: Two ranges at most this far apart are fetched as one. 512 KiB
            takes about 5 ms of a 100 MB/s connection, less than one more request does.
        hedge_share: Most requests, as a share of all, that are sent a second time because the
            first answer is late (twice as late as nine of ten, and 0.3 s at least); whichever
            comes first is taken. 0.05 is five times the share of slow answers that object
            stores are known for. 0 never asks twice. Not for local files.
        verify: Check CRC32C of every block fetched, where the checkpoint has them.
        casts: Which differences of dtype between checkpoint and target are allowed:
            ``"exact"`` none, ``"widening"`` those that keep every value, ``"any"`` all.
        allow_pickle: Open a foreign ``.metadata`` with plain pickle, which runs code that
            lies in the bucket. Only for checkpoints you wrote yourself.
        max_metadata_bytes: Most memory in bytes that decoded metadata may take, by an estimate
            made before they are decoded; beyond it they are refused. An item (a chunk or a
            value) counts 2 KiB with all that torch makes of it, so that the 11.5 million
            chunks of an 11 TB checkpoint, with their columns and 42 million checksums, count
            24 GiB: 32 GiB take them. Small files cannot make use of it, since what is decoded
            is also bounded by what is stored (``docs/design/002-manifest.md``).
        engine: ``"obstore"``, ``"fsspec"``, or ``"auto"`` for whichever serves the URL.
        max_attempts: Tries per request, the first one included. 16 outlast a 30 s storm of
            503s nearly always, 10 did in six of ten simulated ones.
        retry_deadline_s: Most seconds spent on one request with all its tries: the last one's
            time-out is cut to what is left.
        timeout_s: How long an answer may take to begin, and to go on. As a whole it has two
            fifths of the deadline, so that one lost connection costs a try and not the
            request: 32 ranges of 4 MiB at a time need a link of 1.8 MiB/s. Where it is slower,
            raise the deadline or have fewer at a time.
    """

    budget_bytes: int = 256 * _MIB
    request_bytes: int = 4 * _MIB
    max_requests: int = 32
    join_gap_bytes: int = 512 * _KIB
    hedge_share: float = 0.05
    verify: bool = True
    casts: Literal["exact", "widening", "any"] = "widening"
    allow_pickle: bool = False
    max_metadata_bytes: int = MAX_METADATA_BYTES
    engine: Literal["auto", "obstore", "fsspec"] = "auto"
    max_attempts: int = 16
    retry_deadline_s: float = 180.0
    timeout_s: float = 20.0

    def __post_init__(self) -> None:
        _check_positive(self, zero_allowed=("join_gap_bytes", "hedge_share"))
        if self.hedge_share > 1:
            raise ConfigError(f"hedge_share={self.hedge_share} is a share of all requests: 0 to 1")
        if self.budget_bytes < self.request_bytes:
            raise ConfigError(
                f"budget_bytes={self.budget_bytes} must hold at least one request of"
                f" request_bytes={self.request_bytes}"
            )
        if self.casts not in ("exact", "widening", "any"):
            raise ConfigError(f"casts={self.casts!r} must be 'exact', 'widening' or 'any'")


def _check_positive(config: Any, *, zero_allowed: tuple[str, ...]) -> None:
    for field in fields(config):
        value = getattr(config, field.name)
        if isinstance(value, bool | str):
            continue
        least = 0 if field.name in zero_allowed else 1
        if not value >= least:
            raise ConfigError(f"{field.name}={value!r} must be at least {least}")
