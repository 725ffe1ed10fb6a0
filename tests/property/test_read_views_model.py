"""Whatever is done to a view is done to an `io.BytesIO` of the same bytes, and must agree."""

from __future__ import annotations

import io

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from dcpstore.read.targets import BufferView


class ViewsAgreeWithBytesIO(RuleBasedStateMachine):
    @initialize(content=st.binary(max_size=60))
    def open(self, content: bytes) -> None:
        self.model = io.BytesIO(content)
        self.views = [
            BufferView(bytearray(content)),
            io.BufferedReader(BufferView(content), buffer_size=5),
        ]

    @rule(size=st.integers(-2, 70))
    def read(self, size: int) -> None:
        expected = self.model.read(size)
        for view in self.views:
            # BufferedReader refuses sizes below -1.
            assert view.read(max(size, -1)) == expected

    @rule(size=st.integers(0, 70))
    def readinto(self, size: int) -> None:
        expected = self.model.read(size)
        for view in self.views:
            target = bytearray(size)
            got = 0
            while step := view.readinto(memoryview(target)[got:]):
                got += step
            assert bytes(target[:got]) == expected

    @rule(offset=st.integers(-70, 70), whence=st.sampled_from([0, 1, 2]))
    def seek(self, offset: int, whence: int) -> None:
        bases = (0, self.model.tell(), len(self.model.getvalue()))
        if bases[whence] + offset < 0:
            for view in self.views:
                try:
                    view.seek(offset, whence)
                except ValueError:
                    continue
                raise AssertionError("a negative position must raise")
            return
        expected = self.model.seek(bases[whence] + offset)
        for view in self.views:
            assert view.seek(offset, whence) == expected

    @rule()
    def readline(self) -> None:
        expected = self.model.readline()
        for view in self.views:
            assert view.readline() == expected

    @invariant()
    def cursors_agree(self) -> None:
        for view in getattr(self, "views", ()):
            assert view.tell() == self.model.tell()


TestViewsAgreeWithBytesIO = ViewsAgreeWithBytesIO.TestCase
TestViewsAgreeWithBytesIO.settings = settings(
    max_examples=150, stateful_step_count=25, deadline=None
)
