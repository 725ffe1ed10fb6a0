"""dcpstore: plugged into DCP, and by its own ``save`` and ``load``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from benchmarks.systems.base import Begin, StateDict, System, of_dcp, quietly

__all__ = ["ours", "ours_async", "ours_managed", "ours_shared"]


def ours(label: str, layout: str, *, engine: Any, **settings: Any) -> System:
    """Return dcpstore's writer and reader on one of its engines, with their defaults.

    Args:
        label: For the table.
        layout: Whose checkpoints it loads.
        engine: See `dcpstore.ReadConfig`.
        settings: Of a load that is no default; such a system is a variant.
    """

    def writer(url: str, options: dict[str, Any]) -> Any:
        import dcpstore

        config = dcpstore.WriteConfig(engine=engine)
        return dcpstore.ObjectStoreWriter(url, storage_options=options, config=config)

    def reader(url: str, options: dict[str, Any]) -> Any:
        import dcpstore

        config = dcpstore.ReadConfig(engine=engine, **settings)
        return dcpstore.ObjectStoreReader(url, storage_options=options, config=config)

    system = of_dcp(
        label,
        layout,
        writer=writer,
        reader=reader,
        converters={"pt": _to_pt, "safetensors": _to_safetensors},
    )
    return replace(system, is_variant=bool(settings))


def ours_shared(label: str, layout: str) -> System:
    """Return `dcpstore.save` and `dcpstore.load`: ranks fetch once what several of them want."""
    return System(label=label, layout=layout, save=_save, load=_load)


def ours_async(label: str, layout: str) -> System:
    """Return `dcpstore.async_save`, which stages into memory that it keeps."""

    def background(url: str, options: dict[str, Any]) -> Begin:
        import dcpstore

        stager, planner = dcpstore.Stager(), dcpstore.SavePlanner()

        def begin(state: StateDict, step: int) -> tuple[Callable[[], bool], Callable[[], object]]:
            handle = dcpstore.async_save(
                state,
                f"{url}/step-{step}",
                storage_options=options,
                planner=planner,
                stager=stager,
            )
            return handle.done, handle.result

        return begin

    return System(label=label, layout=layout, save=_save, load=_load, background=background)


def ours_managed(label: str, layout: str) -> System:
    """Return `dcpstore.CheckpointManager`, which also claims the run and removes old steps."""

    def background(url: str, options: dict[str, Any]) -> Begin:
        import dcpstore

        manager = dcpstore.CheckpointManager(
            url, save=dcpstore.EverySteps(1), keep=dcpstore.Latest(1), storage_options=options
        )

        def begin(state: StateDict, step: int) -> tuple[Callable[[], bool], Callable[[], object]]:
            manager.step(step, state)
            return lambda: not manager.is_saving, manager.wait

        return begin

    return System(label=label, layout=layout, save=_save, load=_load, background=background)


def _save(state: StateDict, url: str, options: dict[str, Any]) -> None:
    import dcpstore

    quietly(lambda: dcpstore.save(state, url, storage_options=options))


def _load(state: StateDict, url: str, options: dict[str, Any]) -> None:
    import dcpstore

    quietly(lambda: dcpstore.load(state, url, storage_options=options))


def _to_pt(source: str, folder: str, options: dict[str, Any]) -> str:
    from dcpstore.convert import dcp_to_torch_save

    target = f"{folder}/state.pt"
    quietly(
        lambda: dcp_to_torch_save(source, target, source_options=options, target_options=options)
    )
    return target


def _to_safetensors(source: str, folder: str, options: dict[str, Any]) -> str:
    from dcpstore.convert import dcp_to_safetensors

    quietly(
        lambda: dcp_to_safetensors(source, folder, source_options=options, target_options=options)
    )
    return f"{folder}/model.safetensors"
