"""The binding that is compiled from ``tap.c``."""

from typing import Any

ffi: Any
lib: Any
