from __future__ import annotations

from collections.abc import Iterator

import pytest
from rank_pool import RankPool

from dcpstore.testing import MotoServer


@pytest.fixture(scope="session")
def pool(tmp_path_factory) -> Iterator[RankPool]:
    """Four processes for the whole run."""
    with RankPool(4, tmp_path_factory.mktemp("groups")) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def bucket(moto_server: MotoServer) -> str:
    """A bucket on the embedded S3; tests use folders of their own."""
    moto_server.create_bucket("ranks")
    return "s3://ranks"
