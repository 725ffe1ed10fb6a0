from __future__ import annotations

from typing import Any

import pytest

from dcpstore import ConfigError, ReadConfig, WriteConfig


@pytest.mark.parametrize(
    ("kwargs", "names"),
    [
        ({"part_bytes": 1 << 20}, "part_bytes"),
        ({"part_bytes": (8 << 20) + 1}, "part_bytes"),
        ({"budget_bytes": 16 << 20}, "budget_bytes"),
        ({"checksum_block_bytes": 3 << 10}, "checksum_block_bytes"),
        ({"checksum_block_bytes": 1024}, "checksum_block_bytes"),
        ({"max_uploads": 0}, "max_uploads"),
        ({"inline_bytes": -1}, "inline_bytes"),
    ],
)
def test_a_writer_knob_that_cannot_work_is_named(kwargs: dict[str, Any], names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        WriteConfig(**kwargs)


@pytest.mark.parametrize(
    ("kwargs", "names"),
    [
        ({"budget_bytes": 1 << 20}, "budget_bytes"),
        ({"casts": "some"}, "casts"),
        ({"max_requests": 0}, "max_requests"),
        ({"retry_deadline_s": 0}, "retry_deadline_s"),
    ],
)
def test_a_reader_knob_that_cannot_work_is_named(kwargs: dict[str, Any], names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        ReadConfig(**kwargs)
