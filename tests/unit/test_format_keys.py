from __future__ import annotations

import pytest

from dcpstore.errors import CorruptError
from dcpstore.format.seal import (
    check_relative,
    data_key,
    manifest_key,
    metadata_key,
    new_save_id,
    save_id_of,
)


def test_every_save_draws_another_id() -> None:
    assert len({new_save_id() for _ in range(1000)}) == 1000


def test_names_of_objects_give_their_save_id_back() -> None:
    save_id = new_save_id()
    assert save_id_of(data_key(3, 12, save_id)) == save_id
    assert save_id_of(manifest_key(save_id)) == save_id


@pytest.mark.parametrize(
    "name", [".metadata", "__0.metadata", "__0_0.distcp", "model.safetensors", ".dcpstore-xyz"]
)
def test_names_of_others_have_no_save_id(name: str) -> None:
    assert save_id_of(name) is None


def test_metadata_has_a_name_for_all_and_one_per_rank() -> None:
    assert metadata_key() == ".metadata"
    assert metadata_key(7) == "__7.metadata"


@pytest.mark.parametrize("path", ["__0_0.distcp", "sub/dir/file", ".hidden", "a b%2F+c"])
def test_paths_inside_the_folder_pass(path: str) -> None:
    assert check_relative(path) == path


@pytest.mark.parametrize(
    "path",
    ["", "/etc/passwd", "../other/__0_0.distcp", "a/../../b", "s3://bucket/x", "C:/x", "a\\..\\b"],
)
def test_paths_that_leave_the_folder_are_refused(path: str) -> None:
    with pytest.raises(CorruptError, match="outside the checkpoint's folder"):
        check_relative(path)


def test_a_path_that_no_store_takes_is_refused() -> None:
    assert check_relative("a" * 1024) == "a" * 1024
    with pytest.raises(CorruptError, match="1025 characters"):
        check_relative("a" * 1025)
