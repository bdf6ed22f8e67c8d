"""Models of every family, of which each is computed once and copied from then on."""

from __future__ import annotations

import shutil

from gguf import GGMLQuantizationType

from llmaas_eval import families

_made = {}
folder = None  # set before the first test, so import this at the top of a file


def write_family(name, path, *, seed=0, weights=GGMLQuantizationType.Q8_0):
    """Write a model as ``llmaas_eval.families.write_family`` does, which takes 100 ms."""
    family = families.FAMILIES[name]
    key = id(family), seed, weights
    if key not in _made:
        families.write_family(name, path, seed=seed, weights=weights)
        copy = shutil.copyfile(path, folder / f"{len(_made)}.gguf")
        _made[key] = copy, family  # which is held, so that its id stays its own
        return path
    partial = path.with_suffix(".partial")
    shutil.copyfile(_made[key][0], partial)
    return partial.replace(path)
