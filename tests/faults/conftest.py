from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dcpstore.testing import MotoServer
from faults.places import ENGINES, Place, new_place


@pytest.fixture
def make_place(s3_server: MotoServer) -> Callable[..., Place]:
    """Makes empty folders of the embedded S3."""

    def make(engine: str = "obstore", **more: Any) -> Place:
        return new_place(s3_server, engine, **more)

    return make


@pytest.fixture
def place(make_place: Callable[..., Place]) -> Place:
    """An empty folder of the embedded S3, reached by obstore."""
    return make_place()


@pytest.fixture(params=ENGINES)
def any_place(request: pytest.FixtureRequest, make_place: Callable[..., Place]) -> Place:
    """An empty folder of the embedded S3, reached by each engine in turn."""
    return make_place(request.param)
