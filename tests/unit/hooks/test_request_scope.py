"""Blocks end with the scope that they began with, wherever Ctrl-C comes."""

from __future__ import annotations

import contextvars

import pytest

from llmaas_hooks import Levels, request_scope
from llmaas_hooks.request_scope import at_levels, current, serving_context, without

BLOCKS = {
    "serving_context": lambda: serving_context("a context", "an app"),
    "without": lambda: without("knn_lm"),
    "at_levels": lambda: at_levels(Levels(0.5, 0.5)),
}


def generate():
    with serving_context("mine", "my app"):
        yield


class Interrupted:
    """Context variable whose ``set`` is interrupted when it has ended, as C code is."""

    def __init__(self, variable):
        self._variable, self.is_next = variable, False

    def __getattr__(self, name):
        return getattr(self._variable, name)

    def set(self, scope):
        token = self._variable.set(scope)
        if self.is_next:
            self.is_next = False
            raise KeyboardInterrupt
        return token


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
def test_ctrl_c_right_after_a_scope_was_set_leaves_the_scope_before(block, monkeypatch):
    variable = Interrupted(request_scope._scope)
    monkeypatch.setattr(request_scope, "_scope", variable)
    variable.is_next = True
    with pytest.raises(KeyboardInterrupt), block():
        pytest.fail("the block has begun")
    assert current() == request_scope.RequestScope()


def test_a_block_that_ends_in_another_task_does_not_change_its_scope():
    generator = generate()
    with serving_context("outer", "outer app"):
        contextvars.copy_context().run(next, generator)
    with serving_context("another", "another app"):
        here = current()
        assert next(generator, "ended") == "ended"
        assert current() is here
    assert current() == request_scope.RequestScope()


def test_a_block_that_is_left_in_another_task_does_not_change_its_scope():
    generator = generate()
    contextvars.copy_context().run(next, generator)
    with serving_context("another", "another app"):
        here = current()
        generator.close()
        assert current() is here


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("\ud800", r"'\\ud800': expected text in Unicode; surrogates not allowed"),
        ("ü" * 32_769, "…: expected at most 65536 bytes in UTF-8, found 65538"),
    ],
)
def test_name_that_no_store_can_keep_is_refused(name, message):
    with pytest.raises(ValueError, match=rf"^context name .*{message}"), serving_context(name):
        pytest.fail("the block has begun")
    with pytest.raises(ValueError, match=r"^app name "), serving_context(None, name):
        pytest.fail("the block has begun")
    with pytest.raises(TypeError, match=r"^app name b'x': expected text, found bytes"):
        serving_context(None, b"x").__enter__()
    with serving_context("ü" * 32_768, ""):
        pass
