"""The checks that `dcpstore.testing.conformance` ships, over every engine and wrapper."""

from __future__ import annotations

import pytest

from dcpstore.testing import conformance

from .conftest import ENGINES, ONCE, WRAPPERS

PRECONDITIONS = {
    "a_create_succeeds_once",
    "one_of_many_creates_wins",
    "compare_and_swap_needs_the_right_mark",
}
# moto's XML API is S3's and knows no generations; Google's emulator ignores them, and
# cuts a key at a semicolon.
NOT_EMULATED = {
    "obstore-gcs": PRECONDITIONS,
    "gcsfs": PRECONDITIONS | {"odd_keys_keep_their_names"},
}


# gcsfs hands aiohttp a whole part as bytes.
@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")
@pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("engine", ENGINES)
def test_engine(engine, check, open_engine):
    if check.__name__ in NOT_EMULATED.get(engine, ()):
        pytest.skip("the emulator cannot do this")
    check(open_engine(engine, retry=ONCE))


@pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrapper(wrapper, check, open_engine):
    check(WRAPPERS[wrapper](open_engine("fsspec-memory")))
