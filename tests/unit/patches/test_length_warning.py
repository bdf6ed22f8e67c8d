"""The log callback while llama.cpp's warning of a long context is kept back."""

from __future__ import annotations

import ctypes

from llama_cpp import llama_cpp

from llmaas_patches.length_warning import no_length_warning


def callback():
    found, data = llama_cpp.llama_log_callback(), ctypes.c_void_p()
    llama_cpp.llama_log_get(ctypes.byref(found), ctypes.byref(data))
    return found, ctypes.cast(found, ctypes.c_void_p).value


def test_the_callback_of_before_is_back():
    before = callback()[1]
    with no_length_warning():
        assert callback()[1] != before
    assert callback()[1] == before


def test_a_callback_that_the_app_sets_meanwhile_stays():
    before, _ = callback()
    own = llama_cpp.llama_log_callback(lambda level, text, data: None)
    try:
        with no_length_warning():
            llama_cpp.llama_log_set(own, ctypes.c_void_p())
        assert callback()[1] == ctypes.cast(own, ctypes.c_void_p).value
    finally:
        llama_cpp.llama_log_set(before, ctypes.c_void_p())
