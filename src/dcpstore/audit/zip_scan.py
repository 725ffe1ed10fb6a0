"""The pass over the zip records of a stock checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

from dcpstore.audit.findings import Finding
from dcpstore.audit.scan import Piece, Scanner
from dcpstore.audit.zip_records import Coverage, Expected, LargeMember, RecordPiece, open_large
from dcpstore.config import ReadConfig
from dcpstore.store.base import Store

__all__ = ["ZipScan"]


class ZipScan:
    """Plans the pieces of zip records and collects the verdicts on large members.

    Args:
        store: Rooted at the checkpoint's folder.
        config: Size and number of requests.
        coverage: Counts what has a checksum.
    """

    def __init__(self, store: Store, config: ReadConfig, coverage: Coverage) -> None:
        self._store = store
        self._config = config
        self._coverage = coverage
        self._members: list[LargeMember] = []
        self._findings: list[Finding] = []

    def pieces(self, records: Iterable[Expected]) -> Iterator[Piece]:
        """Yield what to read: small records whole, then the members of the large ones."""
        large = []
        for expected in records:
            if expected.record.num_bytes <= self._config.request_bytes:
                yield RecordPiece(expected, self._coverage)
            else:
                large.append(expected)
        yield from self._large_pieces(iter(large))

    def _large_pieces(self, records: Iterator[Expected]) -> Iterator[Piece]:
        """Open a batch of large records at a time, while the scan reads the batch before."""
        num_at_once = self._config.max_requests
        while batch := list(islice(records, num_at_once)):
            with ThreadPoolExecutor(num_at_once, "dcpstore-audit") as executor:
                opened = list(executor.map(self._open, batch))
            for members, found in opened:
                self._findings += found
                self._members += members
                for member in members:
                    yield from member.pieces(self._config.request_bytes)

    def _open(self, expected: Expected) -> tuple[list[LargeMember], list[Finding]]:
        members, found = open_large(self._store, self._coverage, expected)
        if found:  # a second look, in case it was damaged on the way
            return open_large(self._store, self._coverage, expected)
        return members, found

    def verdicts(self, scanner: Scanner) -> Iterator[Finding]:
        """Yield what is wrong with large records, after all their pieces were read."""
        yield from self._findings
        bad = [member for member in self._members if any(member.verdict())]
        again = (p for member in bad for p in member.pieces(self._config.request_bytes))
        yield from scanner.run(again)
        for member in bad:
            yield from member.verdict()
