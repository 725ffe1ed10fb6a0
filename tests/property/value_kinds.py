"""Classes of a user's, whose instances are saved."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any, NamedTuple


class Color(enum.Enum):
    RED = 1
    BLUE = "blue"


class Point(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Settings:
    value: Any
    color: Color | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    value: Any


CLASSES = (Color, Point, Settings, Frozen)
