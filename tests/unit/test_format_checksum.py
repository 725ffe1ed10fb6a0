from __future__ import annotations

import numpy as np
import pytest

from dcpstore.format.checksum import BlockChecksummer, crc32c, find_bad_block, num_blocks


def checksums(data: bytes, block_bytes: int) -> np.ndarray:
    summer = BlockChecksummer(block_bytes)
    summer.update(data)
    return summer.finish()


def test_crc32c_is_the_castagnoli_one() -> None:
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(b"56789", crc32c(b"1234")) == 0xE3069283
    assert crc32c(b"") == 0


def test_each_block_has_its_checksum_and_the_last_may_be_short() -> None:
    sums = checksums(b"abcdefgh", 3)
    assert sums.dtype == np.uint32
    assert sums.tolist() == [crc32c(b"abc"), crc32c(b"def"), crc32c(b"gh")]


def test_an_empty_payload_has_no_checksum() -> None:
    assert checksums(b"", 4).shape == (0,)
    assert num_blocks(0, 4) == 0
    assert find_bad_block(b"", 0, [], 4) is None


def test_a_checksummer_starts_anew_after_finish() -> None:
    summer = BlockChecksummer(4)
    summer.update(b"abcdef")
    first = summer.finish()
    summer.update(b"abcdef")
    assert summer.finish().tolist() == first.tolist()


def test_buffers_of_other_item_sizes_are_taken_as_bytes() -> None:
    data = np.arange(10, dtype=np.int32)
    assert checksums(data, 7).tolist() == checksums(data.tobytes(), 7).tolist()


@pytest.mark.parametrize("block_bytes", [0, -1])
def test_a_block_has_at_least_one_byte(block_bytes: int) -> None:
    with pytest.raises(ValueError, match="positive"):
        BlockChecksummer(block_bytes)


@pytest.mark.parametrize("bad", range(10))
def test_a_flipped_bit_is_found_in_its_block(bad: int) -> None:
    data = bytearray(range(10))
    sums = checksums(data, 3)
    data[bad] ^= 4
    for first in range(4):
        found = find_bad_block(data[first * 3 :], first, sums, 3)
        assert found == (bad // 3 if bad // 3 >= first else None)


def test_a_short_last_block_is_bad() -> None:
    sums = checksums(bytes(10), 4)
    assert find_bad_block(bytes(9), 0, sums, 4) == 2


def test_a_slice_must_cover_whole_blocks_of_the_payload() -> None:
    sums = checksums(bytes(10), 4)
    with pytest.raises(ValueError, match="ends inside block 0"):
        find_bad_block(bytes(3), 0, sums, 4)
    with pytest.raises(ValueError, match="outside"):
        find_bad_block(bytes(5), 2, sums, 4)
    with pytest.raises(ValueError, match="outside"):
        find_bad_block(bytes(4), -1, sums, 4)
