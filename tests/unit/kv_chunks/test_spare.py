"""The number of spare cells that a context gets for parked contexts."""

from __future__ import annotations

import llama_cpp
import pytest
from rewritten_models import write_longrope

from llmaas_eval.models import Shape, write_random_model
from llmaas_hooks import ContextCreate, ModelLoad
from llmaas_plugins.kv_chunks.eligibility import spare_cells, why_unserved
from llmaas_plugins.model.digest import files_now

SHAPE = Shape(n_layer=1, n_embd=256, n_head=2, n_head_kv=1, n_ff=512, n_ctx=1024)
"""Little attention for its weights."""


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_random_model(tmp_path_factory.mktemp("spare") / "model.gguf", SHAPE)


@pytest.fixture(scope="module")
def model(path):
    params = llama_cpp.llama_model_default_params()
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
    yield model
    llama_cpp.llama_model_free(model)


@pytest.fixture
def create(model, path):
    def create(path=path, **fields):
        params = llama_cpp.llama_context_default_params()
        for name, value in fields.items():
            setattr(params, name, value)
        load = path and ModelLoad(str(path), None, files_now(path))
        return ContextCreate(model, params, load)

    return create


def test_cells_come_in_llama_cpps_steps(create):
    assert [spare_cells(create(), n) for n in (0, 255, 256, 1000)] == [0, 0, 256, 768]


def test_a_model_with_two_sets_of_rope_factors_keeps_its_own(create, path, tmp_path):
    """llama.cpp takes the other set if the context is larger than that of the model's training."""
    longer = write_longrope(path, tmp_path / "long.gguf")
    for n_ctx in (1024, 800, 0):
        assert spare_cells(create(longer, n_ctx=n_ctx), 512) == 0
        assert spare_cells(create(None, n_ctx=n_ctx), 512) == 0  # the set is unknown
        assert spare_cells(create(n_ctx=n_ctx), 512) == 512
    for n_ctx in (256, 1025):  # the same set with those cells and without
        assert spare_cells(create(longer, n_ctx=n_ctx), 512) == 512


def test_batches_have_a_token_for_each_sequence(create):
    """Otherwise llama.cpp aborts the process."""
    for fields in ({"n_batch": 7}, {"n_ctx": 7}):
        assert spare_cells(create(**fields), 512) == 0
        assert why_unserved(create(**fields)) is None
    assert spare_cells(create(n_batch=8, n_ubatch=1), 512) == 512
    for fields in ({"n_batch": 1}, {"n_ctx": 1}):
        assert "batches of 1 tokens" in why_unserved(create(**fields))
    assert why_unserved(create(n_batch=2, n_ubatch=1)) is None
