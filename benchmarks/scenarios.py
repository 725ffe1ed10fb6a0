"""The rows of the table: what is saved or loaded, how far away, by whom."""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.states import Want

MIB = 1 << 20
_ALL = Want()
_LOADERS = ("stock", "ours", "ours-fsspec")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One row.

    Attributes:
        name: For the command line.
        title: For the table.
        action: ``save`` or ``load``.
        kind: Of the state, see `benchmarks.states`.
        num_bytes: Size of the state.
        quick_bytes: Its size in a smoke test.
        latency_s: Of every request.
        want: What a load asks for.
        systems: Who is measured, in turn.
    """

    name: str
    title: str
    action: str
    kind: str
    num_bytes: int
    quick_bytes: int
    latency_s: float = 0.03
    want: Want = _ALL
    systems: tuple[str, ...] = _LOADERS

    def scaled(self, factor: float) -> Scenario:
        """Return the same row with a state of another size."""
        return replace(self, num_bytes=max(self.quick_bytes, int(self.num_bytes * factor)))

    def quick(self) -> Scenario:
        """Return the same row for a smoke test."""
        return replace(self, num_bytes=self.quick_bytes, latency_s=0.002)


SCENARIOS = (
    Scenario(
        name="save",
        title="save 1 GiB, tensors of 4 to 64 MiB",
        action="save",
        kind="mixed",
        num_bytes=1024 * MIB,
        quick_bytes=24 * MIB,
        systems=("stock", "stock-8", "ours", "ours-fsspec", "bare"),
    ),
    Scenario(
        name="load",
        title="load the same, in the order saved",
        action="load",
        kind="mixed",
        num_bytes=1024 * MIB,
        quick_bytes=24 * MIB,
        systems=(*_LOADERS, "bare"),
    ),
    Scenario(
        name="load-64x4",
        title="load 64 x 4 MiB, in the order saved",
        action="load",
        kind="even",
        num_bytes=256 * MIB,
        quick_bytes=8 * MIB,
        latency_s=0.05,
        systems=(*_LOADERS, "bare"),
    ),
    Scenario(
        name="load-shuffled",
        title="load 64 x 4 MiB, in another order than saved",
        action="load",
        kind="shuffled",
        num_bytes=256 * MIB,
        quick_bytes=8 * MIB,
        latency_s=0.05,
    ),
    Scenario(
        name="reshard-rows",
        title="1/8 of the rows of a 128 MiB tensor saved whole",
        action="load",
        kind="rows",
        num_bytes=128 * MIB,
        quick_bytes=8 * MIB,
        want=Want(shard_dim=0),
    ),
    Scenario(
        name="reshard-columns-long",
        title="1/8 of the columns of 241 MiB saved whole, in runs of 2 MiB",
        action="load",
        kind="long_runs",
        num_bytes=256 * MIB,
        quick_bytes=32 * MIB,
        want=Want(shard_dim=1),
    ),
    Scenario(
        name="reshard-columns-short",
        title="1/8 of the columns of 128 MiB saved whole, in runs of 4 KiB",
        action="load",
        kind="short_runs",
        num_bytes=128 * MIB,
        quick_bytes=4 * MIB,
        want=Want(shard_dim=1),
    ),
    Scenario(
        name="load-one",
        title="one tensor of 1 MiB out of 40",
        action="load",
        kind="small",
        num_bytes=40 * MIB,
        quick_bytes=40 * MIB,
        want=Want(is_one=True),
    ),
    Scenario(
        name="save-scalars",
        title="save 20,000 scalars",
        action="save",
        kind="scalars",
        num_bytes=80_000,
        quick_bytes=400,
        systems=_LOADERS,
    ),
    Scenario(
        name="load-scalars",
        title="load 20,000 scalars",
        action="load",
        kind="scalars",
        num_bytes=80_000,
        quick_bytes=400,
    ),
)
