"""Claims translated to parts of tensors, to llama.cpp's patterns, and to files."""

from __future__ import annotations

import re

import numpy as np
import pytest

from llmaas_hooks import ConfigError, PluginError, TensorInfo, WeightClaim
from llmaas_patches.native.claims import Place, overrides, resolve, split_paths

NAMES = [f"blk.{i}.{part}.weight" for i in range(12) for part in ("ffn_up", "ffn_up_exps")]
ENDS = ["token_embd.weight", "output.weight"]
MATRIX = Place("model.gguf", 0, TensorInfo(0, (64, 64, 1), 16384, 0))
VECTOR = Place("model.gguf", 0, TensorInfo(0, (64, 1, 1), 256, 0))
PLACES = dict.fromkeys(NAMES + ENDS, MATRIX)
BIASES = np.ones((1, 64), np.float32)
UP = r"blk\.\d+\.ffn_up\.weight"


def found(*claims):
    return resolve([("one", claim) for claim in claims], PLACES)


def test_a_pattern_means_whole_names():
    claimed, wrong = found(WeightClaim(r"blk\.1\.ffn_up\.weight", rows=(8,)))
    assert list(claimed) == ["blk.1.ffn_up.weight"]
    assert wrong == []


def test_a_vector_is_not_multiplied_with():
    places = PLACES | {"blk.0.ffn_norm.weight": VECTOR}
    claimed, wrong = resolve([("one", WeightClaim(r"blk\.0\.ffn_.*", rows=(8,)))], places)
    assert claimed == {}
    assert "blk.0.ffn_norm.weight is a vector" in str(wrong[0])


def test_each_property_has_its_owner():
    rows = WeightClaim(UP, rows=(None, 8))
    claims = [("first", rows), ("second", WeightClaim(UP, source="file"))]
    claimed, wrong = resolve(claims, PLACES)
    assert {len(claimed), len(wrong)} == {12, 0}
    each = claimed["blk.11.ffn_up.weight"]
    assert each.part == ("first", rows)
    assert (each.source[0], each.source[1].source) == ("second", "file")
    assert each.owner == "second"


def test_one_claim_may_have_both():
    claim = WeightClaim("output.*", source="tiles", columns=(32,))
    claimed, _ = found(claim)
    assert claimed["output.weight"].source[1].source == "tiles"
    assert claimed["output.weight"].part == ("one", claim)


@pytest.mark.parametrize(
    "claims",
    [
        (WeightClaim(UP, source="tiles"), WeightClaim("blk.3.*", source="file")),
        (WeightClaim(UP, rows=(1,)), WeightClaim("blk.3.*", columns=(32,))),
    ],
    ids=["source", "part"],
)
def test_two_plugins_cannot_have_the_same(claims, request):
    what = request.node.callspec.id
    with pytest.raises(ConfigError, match=rf"'a' and 'b'.*the {what} of blk\.3\.ffn_up\.weight"):
        resolve(zip("ab", claims, strict=True), PLACES)
    with pytest.raises(ConfigError, match=rf"'one' claims the {what} of blk\.3.* twice"):
        found(*claims)


@pytest.mark.parametrize(
    ("claim", "reason"),
    [
        (WeightClaim(UP, rows=(1,), columns=(32,)), "rows and columns"),
        (WeightClaim(UP), "claims nothing"),
        (WeightClaim(UP, rows=(1,) * 65), "up to 64 extents"),
        (WeightClaim(UP, columns=(None, -1)), "0 or more"),
        (WeightClaim(UP, rows=(8,), biases=BIASES), "columns of a single matrix"),
        (WeightClaim(UP, columns=(32,), biases=BIASES[:, 1:]), "float32 (1, 64)"),
        (WeightClaim(UP, columns=(32,), biases=BIASES.astype(float)), "found float64"),
        (WeightClaim("blk.(", rows=(1,)), "not a regular expression"),
        (WeightClaim("ffn_up", rows=(1,)), "matches no tensor"),
        (WeightClaim("(token_embd|output).weight", source="tiles"), "token_embd.weight is looked"),
    ],
    ids=lambda value: None if isinstance(value, WeightClaim) else value,
)
def test_what_is_wrong_is_left_out_and_named(claim, reason):
    good = WeightClaim(UP, rows=(16,))
    claimed, wrong = found(claim, good)
    assert len(claimed) == 12
    (error,) = wrong
    assert isinstance(error, PluginError)
    assert (error.plugin, error.hook) == ("one", "llmaas_weights")
    assert reason in str(error)


def test_the_most_levels_there_can_be():
    claimed, wrong = found(WeightClaim(UP, rows=tuple(range(64))))
    assert {len(claimed), len(wrong)} == {12, 0}


def test_a_part_of_the_embeddings_can_be_claimed():
    claimed, wrong = found(WeightClaim("token_embd.weight", rows=(64,)))
    assert list(claimed) == ["token_embd.weight"]
    assert wrong == []


def matched(patterns):
    """Return the tensors that llama.cpp would override; its patterns match anywhere in a name."""
    return [name for name in NAMES + ENDS if any(re.search(each, name) for each in patterns)]


@pytest.mark.parametrize(
    "names",
    [
        ["blk.1.ffn_up.weight"],
        ["blk.1.ffn_up.weight", "blk.11.ffn_up.weight", "blk.2.ffn_up_exps.weight"],
        NAMES,
        [*NAMES[:2], "output.weight"],
    ],
)
def test_overrides_match_these_names_and_no_others(names):
    assert set(matched(overrides(names))) == set(names)


def test_overrides_are_few():
    assert len(overrides(NAMES)) == 2
    assert overrides([]) == []


def test_a_dot_is_a_dot():
    assert not any(re.search(each, "blk.1.ffn_upxweight") for each in overrides(NAMES))


def test_the_first_of_several_files_names_them_all():
    assert split_paths("/m/a-00001-of-00003.gguf") == [
        "/m/a-00001-of-00003.gguf",
        "/m/a-00002-of-00003.gguf",
        "/m/a-00003-of-00003.gguf",
    ]


@pytest.mark.parametrize("path", ["/m/a.gguf", "/m/a-00002-of-00003.gguf", "a-00001-of-3.gguf"])
def test_any_other_name_is_one_file(path):
    assert split_paths(path) == [path]
