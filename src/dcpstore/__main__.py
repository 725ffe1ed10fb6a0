"""Entry point of ``python -m dcpstore``."""

from __future__ import annotations

from dcpstore.cli.main import entry

if __name__ == "__main__":
    entry()
