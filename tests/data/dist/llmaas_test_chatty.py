"""A plugin that prints when it is imported."""

from __future__ import annotations

import sys
from typing import ClassVar

from llmaas_test_plugins import NoKeys

sys.stdout.write("Welcome to chatty!\n")


class Chatty:
    Config: ClassVar[type[NoKeys]] = NoKeys

    def __init__(self, config):
        pass
