"""Plans: sizes equal the model's, and predictions follow memory, disk and sparsity."""

from __future__ import annotations

import dataclasses

import pytest
from flash_models import N_FF, N_KV, WIDTH, tensors_of, write_model
from gguf import GGMLQuantizationType, GGUFWriter
from plan_sizes import (
    BUFFERS,
    FIXED,
    IN_CHANNELS,
    MACHINE,
    MIB,
    PARTS,
    SIZES,
    channels,
    plan,
    sparse,
)

from llmaas_hooks import BudgetError, ConfigError, StoreError, TensorInfo
from llmaas_plugins.flash_weights import engine_modes
from llmaas_plugins.flash_weights.disk import Disk
from llmaas_plugins.flash_weights.memory_bandwidth import memory_rate
from llmaas_plugins.flash_weights.model_sizes import Metadata, metadata_of, sizes_of

# -- sizes ---------------------------------------------------------------------------------------


def test_sizes_of_a_model(tmp_path):
    tensors = tensors_of(write_model(tmp_path / "m.gguf", GGMLQuantizationType.Q4_0, 3))
    found = sizes_of(tensors, Metadata(4, 1.0), 512)
    per_layer = WIDTH * (2 * WIDTH + 2 * N_KV + 3 * N_FF)
    assert found.n_layers == 3
    embeddings = 256 * WIDTH * 18 // 32  # embeddings that are also the output matrix
    assert found.streamed == 3 * per_layer * 18 // 32 + embeddings
    assert found.resident == 4 * WIDTH
    assert found.kv == 512 * 3 * 2 * N_KV * 2
    assert (found.dense, found.experts) == (embeddings, 0)
    assert found.used == found.streamed
    assert {part.family: part.n_bytes for part in found.channels} == {
        "attn_qkv": 3 * 64, "attn_output": 64, "ffn_up": 2 * 2 * 64, "ffn_down": 64,
    }  # fmt: skip
    assert all(part.n_layers == 3 and part.stride == part.n_bytes for part in found.channels)
    assert found.scales == 2 * 3 * (2 * 3 * 128 + 2 * 128 + 2 * 2 * 256 + 5 * 128)
    assert found.app == (8 << 20) + 400 * 256
    of_attention, of_logits = 4 * 512 + 7 * WIDTH, 256 + 2 * WIDTH
    assert of_attention > of_logits
    assert found.buffers == 512 * (64 + 4 * (512 + of_attention))
    assert found.work == 512 * 2 * 4 * 512  # scores of attention in 16 bits


def test_flash_attention_needs_less(tmp_path):
    tensors = tensors_of(write_model(tmp_path / "m.gguf", GGMLQuantizationType.Q4_0, 1))
    found = sizes_of(tensors, Metadata(4, 1.0), 512, is_flash=True)
    forward = 3 * N_FF + 4 * WIDTH
    assert forward > 256 + 2 * WIDTH
    assert found.buffers == 512 * (64 + 2 * 512 + 4 * forward)
    assert found.work == 512 * N_FF * 5 // 4


def test_cells_in_other_types(tmp_path):
    tensors = tensors_of(write_model(tmp_path / "m.gguf", GGMLQuantizationType.Q4_0, 1))
    found = sizes_of(tensors, Metadata(4, 1.0), 500, cell_bytes=2 * 34 / 32)
    assert found.kv == 512 * 2 * N_KV * 34 // 32  # whole multiples of 256 cells


def test_mins_take_as_much_memory_as_scales(tmp_path):
    found = [
        sizes_of(tensors_of(write_model(tmp_path / "m.gguf", kind, 1)), Metadata(4, 1.0), 512)
        for kind in (GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q4_1)
    ]
    assert found[1].scales == 2 * found[0].scales
    assert found[1].in_channels == found[0].in_channels


def test_a_short_contexts_batches_are_short(tmp_path):
    tensors = tensors_of(write_model(tmp_path / "m.gguf", GGMLQuantizationType.Q4_0, 1))
    found = sizes_of(tensors, Metadata(4, 1.0), 128)
    assert found.buffers == 128 * (64 + 4 * (256 + 4 * 256 + 7 * WIDTH))


def test_layers_of_a_group_are_further_apart(tmp_path):
    tensors = tensors_of(write_model(tmp_path / "m.gguf", GGMLQuantizationType.Q4_0, 3))
    found = sizes_of(tensors, Metadata(4, 1.0), 512, group_layers=2)
    by_stride = {
        one.stride // one.n_bytes: one.n_layers
        for one in found.channels
        if one.family == "ffn_down"
    }
    assert by_stride == {2: 2, 1: 1}


def test_experts_and_merged_keys_and_what_has_no_channels():
    def info(rows, columns, experts=1):
        return TensorInfo(2, (columns, rows, experts), rows * columns * experts * 18 // 32, 0)

    tensors = {
        "token_embd.weight": info(256, 64),
        "output.weight": info(256, 64),
        "blk.0.attn_qkv.weight": info(64 + 2 * 32, 64),
        "blk.0.attn_output.weight": info(64, 64),
        "blk.0.ffn_gate_exps.weight": info(128, 64, 8),
        "blk.0.ffn_down_exps.weight": info(64, 128, 8),
    }
    found = sizes_of(tensors, Metadata(2, 0.25), 256)
    assert found.kv == 256 * 2 * 64
    assert found.experts == 2 * 8 * 128 * 64 * 18 // 32
    assert found.least_experts == found.experts // 2
    assert found.dense == (256 + 128) * 64 * 18 // 32
    assert [one.family for one in found.channels] == ["attn_output"]
    assert found.used == found.streamed - 0.75 * found.experts


def test_what_has_no_tensors_that_are_known():
    found = sizes_of({"x": TensorInfo(2, (64, 64, 1), 2304, 0)}, Metadata(2, 1.0), 256)
    assert (found.n_layers, found.dense, found.channels, found.scales) == (0, 2304, (), 0)


def test_metadata(reference_model, tmp_path):
    assert metadata_of(reference_model).expert_share == 1
    assert metadata_of(reference_model).n_heads > 1
    (tmp_path / "x").write_bytes(b"no model")
    with pytest.raises(ConfigError, match="is not a GGUF file"):
        metadata_of(tmp_path / "x")
    with pytest.raises(StoreError):
        metadata_of(tmp_path / "none")


def test_metadata_of_experts_and_of_heads_by_layer(tmp_path):
    writer = GGUFWriter(tmp_path / "x.gguf", "x")
    writer.add_uint32("x.expert_count", 8)
    writer.add_uint32("x.expert_used_count", 2)
    writer.add_array("x.attention.head_count", [4, 12, 8])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert metadata_of(tmp_path / "x.gguf") == Metadata(12, 0.25, n_used=2)


# -- the engine ----------------------------------------------------------------------------------


def test_the_exact_mode_takes_the_longer_of_both():
    found = plan(377).exact
    assert found.cache == 377 * MIB - FIXED - 32 * MIB
    assert found.read == 530 * MIB - found.cache
    assert found.token_s == found.read / 1.5e9
    assert found.least_budget == FIXED + BUFFERS + 32 * MIB
    slow = dataclasses.replace(MACHINE, bytes_per_s=1e9)
    assert plan(377, machine=slow).exact.token_s == 530 * MIB / 1e9
    fits = plan(1000).exact
    assert (fits.cache, fits.read, fits.token_s) == (530 * MIB, 0, 530 * MIB / 10e9)


def test_the_sparse_mode_waits_for_channels():
    found = sparse(377)
    passing = (4 + 8) * MIB
    assert found.least_budget == FIXED + BUFFERS + 32 * MIB + 58 * MIB + passing
    assert found.cache == 377 * MIB - found.least_budget + BUFFERS
    assert found.group_layers == 1
    computing_s = (8 * MIB + 58 * MIB + IN_CHANNELS / 2) / 10e9
    kept = (found.cache - SIZES.dense) / IN_CHANNELS
    reads = engine_modes._Use(SIZES, kept, 0.5, "shared", 12_000).reads()
    assert found.read == reads.n_bytes
    reading_s = reads.n_reads * 8e-6 + reads.n_bytes / 1.5e9
    assert found.token_s == pytest.approx(reading_s + computing_s)
    whole = sparse(2000)
    assert whole.read == 0
    assert whole.token_s == pytest.approx(computing_s)


def test_channels_that_are_read_ahead_are_read_while_others_are_computed_with():
    found = sparse(377, keeps="streamed")
    assert found.least_budget == FIXED + BUFFERS + (32 + 58) * MIB
    assert found.cache == 377 * MIB - found.least_budget + BUFFERS
    assert found.read == 8 * MIB + IN_CHANNELS - found.cache
    assert found.token_s == found.read / 1.5e9
    computing_s = (8 * MIB + 58 * MIB + IN_CHANNELS / 2) / 10e9
    assert sparse(2000, keeps="streamed").token_s == pytest.approx(computing_s)
    wide = dataclasses.replace(SIZES, channels=(channels("ffn_up", 2048, 40 << 10),))
    assert (
        sparse(377, sizes=wide, keeps="streamed").least_budget - BUFFERS == FIXED + (84 + 58) * MIB
    )
    grouped = tuple(dataclasses.replace(part, stride=2 * part.n_bytes) for part in PARTS)
    found = plan(377, sizes=dataclasses.replace(SIZES, channels=grouped)).sparse
    assert [(row.keeps, row.group_layers) for row in found] == 2 * [("busiest", 2), ("shared", 2)]
    assert [row.preload for row in found] == [False, False, True, True]


@pytest.mark.parametrize(
    ("keeps", "share", "measured_s"),
    [
        ("shared", 0.2, 0.262), ("shared", 0.3, 0.244), ("shared", 0.4, 0.223),
        ("busiest", 0.2, 0.229), ("busiest", 0.3, 0.199), ("busiest", 0.4, 0.170),
    ],
)  # fmt: skip
def test_reads_of_channels_take_what_was_measured(keeps, share, measured_s):
    """Compare with traces of a small model's channels, on a disk of 9 µs a read and 1.5 GB/s."""
    reads = engine_modes._Use(SIZES, share, 0.5, keeps, 12 << 10).reads()
    seconds = Disk(9e-6, 1.5e9, 64, 4, ()).seconds(reads.n_bytes / reads.n_reads, reads.n_reads)
    assert seconds == pytest.approx(measured_s, rel=0.05)


def test_more_memory_is_never_slower():
    plans = [plan(budget) for budget in range(280, 900, 80)]
    for mode, rows in {
        "exact": [found.exact for found in plans],
        **{keeps: [row for found in plans for row in found.sparse
                  if row.keeps == keeps and not row.preload]
           for keeps in ("streamed", "busiest", "shared")},
    }.items():  # fmt: skip
        for name in ("token_s", "read"):
            values = [getattr(row, name) for row in rows]
            assert values == sorted(values, reverse=True), (mode, name)
            assert values[0] > values[-1]


def test_more_sparsity_reads_less_and_a_faster_disk_is_faster():
    rows = [sparse(377, sparsity) for sparsity in (0.3, 0.5, 0.7, 0.9)]
    assert [row.read for row in rows] == sorted((row.read for row in rows), reverse=True)
    fast = dataclasses.replace(MACHINE, disk=Disk(1e-6, 6e9, 64, 4, ()))
    assert sparse(377, machine=fast).token_s < rows[1].token_s
    assert plan(377, machine=fast).exact.token_s < plan(377).exact.token_s


def test_what_has_no_channels_is_read_as_well():
    dense = dataclasses.replace(SIZES, dense=100 * MIB)
    with_room, without = sparse(467, sizes=dense), sparse(260, sizes=dense)
    assert without.cache == 260 * MIB - without.least_budget + BUFFERS < dense.dense
    assert without.read - sparse(260).read > 70 * MIB  # and none of its channels is kept
    assert with_room.cache > dense.dense


def test_experts_get_what_is_left():
    mixture = dataclasses.replace(
        SIZES, experts=400 * MIB, expert_share=0.25, least_experts=10 * MIB
    )
    found = plan(260, sizes=mixture).exact
    room = 260 * MIB - FIXED - 32 * MIB
    assert room < 130 * MIB
    assert found.read == 130 * MIB - room + 100 * MIB * (1 - 10 / 400)
    assert found.least_budget == FIXED + BUFFERS + 42 * MIB
    half = plan(144 + 130 + 200, sizes=mixture).exact
    assert half.read == pytest.approx(100 * MIB * 0.5)
    assert plan(1000, sizes=mixture).exact.token_s == 230 * MIB / 10e9


# -- what is recommended -------------------------------------------------------------------------


def test_the_sparse_mode_has_to_be_worth_it():
    assert plan(377, 0.5).recommended.mode == "exact"
    found = plan(377, 0.9)
    assert found.fastest_sparse.token_s * 1.25 < found.exact.token_s
    assert found.recommended is found.fastest_sparse
    assert found.recommended.token_s == min(row.token_s for row in found.sparse)
    assert plan(2000, 0.9).recommended.mode == "exact"  # all weights fit


def test_only_what_works_is_recommended():
    found = plan(220, 0.9)
    assert all(row.least_budget > 220 * MIB for row in found.sparse)
    assert found.fastest_sparse is None
    assert found.recommended is found.exact
    with pytest.raises(BudgetError, match="expected 180 MiB or more"):
        plan(176)
    assert plan(177).recommended.mode == "exact"


def test_a_model_without_channels():
    found = plan(377, sizes=dataclasses.replace(SIZES, channels=(), scales=0, dense=530 * MIB))
    assert (found.sparse, found.pipeline, found.search) == ((), (), None)
    assert found.recommended is found.exact


def test_memory_is_read_by_threads():
    assert memory_rate(2, 0.0) > 0
