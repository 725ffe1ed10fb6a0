"""One measurement to take, and how to talk to the server about it."""

from __future__ import annotations

import json
import urllib.request
from dataclasses import dataclass
from typing import Any

from benchmarks.want import Want

__all__ = ["Job", "Site", "control"]


@dataclass(frozen=True, slots=True)
class Site:
    """Where checkpoints go.

    Attributes:
        url: The folder of all of them, such as ``s3://bench``.
        options: fsspec's options for it.
        control_url: Of the server that counts; None where nobody does.
    """

    url: str
    options: dict[str, Any]
    control_url: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What to measure.

    Attributes:
        site: Where checkpoints go.
        action: ``seed`` (an unmeasured save), ``forget`` (remove a folder), ``save``,
            ``load``, ``train`` or ``convert``.
        system: A name in `benchmarks.systems.SYSTEMS`.
        kind: Of the state, see `benchmarks.states`.
        num_bytes: Size of the state.
        want: What a load asks for.
        num_ranks: Processes that do it together.
        folder: Where the checkpoint is, or goes to.
        target: Of a conversion: ``pt`` or ``safetensors``.
    """

    site: Site
    action: str
    system: str
    kind: str
    num_bytes: int
    want: Want
    num_ranks: int
    folder: str
    target: str = ""

    @property
    def url(self) -> str:
        """Of the checkpoint's folder."""
        return f"{self.site.url}/{self.folder}"

    @classmethod
    def from_json(cls, line: str) -> Job:
        """Undo ``json.dumps(asdict(job))``."""
        given = json.loads(line)
        given["site"], given["want"] = Site(**given["site"]), Want(**given["want"])
        return cls(**given)


def control(site: Site, what: str, **given: object) -> Any:
    """Talk to the server out of band; None where nobody listens."""
    if site.control_url is None:
        return None
    request = urllib.request.Request(
        f"{site.control_url}/_bench/{what}", json.dumps(given).encode(), method="POST"
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)
