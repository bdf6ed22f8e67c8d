"""Plugins that the tests find through the dist-info folder beside this file."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from pydantic import BaseModel, ByteSize, ConfigDict, Field, model_validator

from llmaas_hooks import hookimpl

events: list[str] = []


class NoKeys(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class RecorderConfig(NoKeys):
    budget: ByteSize = Field(default=ByteSize(1024), description="Bytes.")
    level: int = Field(default=3, ge=1, description="How much to record.")
    store: Path = Path("~/recorder")


class Recorder:
    Config: ClassVar[type[BaseModel]] = RecorderConfig

    def __init__(self, config):
        events.append("construct")
        self.config = config

    @hookimpl
    def llmaas_status(self):
        return {"level": self.config.level}

    @hookimpl
    def llmaas_shutdown(self):
        events.append("shutdown")


class BrokenConstructor:
    Config: ClassVar[type[BaseModel]] = NoKeys

    def __init__(self, config):
        raise RuntimeError("no luck")


class Misspelled:
    Config: ClassVar[type[BaseModel]] = NoKeys

    def __init__(self, config):
        pass

    @hookimpl
    def llmaas_logit(self, view):
        pass

    @hookimpl
    def llmaas_shutdown(self):
        events.append("misspelled shutdown")


class WithoutConfig:
    pass


class BrokenConfig:
    class Config(NoKeys):
        @model_validator(mode="before")
        @classmethod
        def _look_elsewhere(cls, values):
            raise ZeroDivisionError("no luck")
