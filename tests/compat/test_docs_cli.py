"""The terminal of docs/cli.md shows what the commands print."""

from __future__ import annotations

import re

import pytest
from cli_page import PAGE, blocks, bucket, constant_part, run

from dcpstore.testing import MotoServer


def test_the_page_shows_what_each_command_prints(
    s3_server: MotoServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = list(blocks(PAGE.read_text()))
    assert len(pairs) >= 15
    with bucket(s3_server, monkeypatch.setenv):
        for command, output in pairs:
            assert constant_part(run(command)) == constant_part(output), command


def test_the_comparison_sees_another_word_and_another_line() -> None:
    shown = "step-100    dcpstore  yes     9.0 MiB        6  now"
    assert constant_part(shown) == constant_part(shown.replace("9.0", "12.5"))
    assert constant_part(shown) != constant_part(shown.replace("yes", "no"))
    assert constant_part(shown) != constant_part(f"{shown}\n{shown}")


def test_links_and_images_of_the_page_lead_somewhere() -> None:
    text = PAGE.read_text()
    anchors = {
        re.sub(r"[^a-z ]", "", h.lower()).replace(" ", "-")
        for h in re.findall("^## (.*)", text, re.MULTILINE)
    }
    assert set(re.findall(r"\]\(#(.*?)\)", text)) <= anchors
    images = re.findall(r"!\[.*?\]\((.*?)\)", text)
    assert images
    assert all((PAGE.parent / image).is_file() for image in images)
