"""dcpstore: plugged into DCP, and by its own ``save`` and ``load``."""

from __future__ import annotations

from typing import Any

from benchmarks.systems.base import Convert, StateDict, System, of_dcp, quietly

__all__ = ["ours", "ours_shared"]


def ours(label: str, layout: str, *, engine: Any) -> System:
    """Return dcpstore's writer and reader on one of its engines, with their defaults."""

    def writer(url: str, options: dict[str, Any]) -> Any:
        import dcpstore

        config = dcpstore.WriteConfig(engine=engine)
        return dcpstore.ObjectStoreWriter(url, storage_options=options, config=config)

    def reader(url: str, options: dict[str, Any]) -> Any:
        import dcpstore

        config = dcpstore.ReadConfig(engine=engine)
        return dcpstore.ObjectStoreReader(url, storage_options=options, config=config)

    return of_dcp(label, layout, writer=writer, reader=reader, converters=_CONVERTERS)


def ours_shared(label: str, layout: str) -> System:
    """Return `dcpstore.save` and `dcpstore.load`: ranks fetch once what several of them want."""
    return System(label=label, layout=layout, save=_save, load=_load)


def _save(state: StateDict, url: str, options: dict[str, Any]) -> None:
    import dcpstore

    quietly(lambda: dcpstore.save(state, url, storage_options=options))


def _load(state: StateDict, url: str, options: dict[str, Any]) -> None:
    import dcpstore

    quietly(lambda: dcpstore.load(state, url, storage_options=options))


_CONVERTERS: dict[str, Convert] = {}
