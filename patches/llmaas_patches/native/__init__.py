"""Native backend, on which contexts compute if they are made while a native plugin is active."""

from __future__ import annotations

from llmaas_patches.native.host import NativeHost, native_host
from llmaas_patches.native.library import has_our_buffers, include_dirs, load_library

__all__ = ["NativeHost", "has_our_buffers", "include_dirs", "load_library", "native_host"]
