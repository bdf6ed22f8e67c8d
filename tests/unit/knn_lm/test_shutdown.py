"""The end of the plugin, also if Ctrl-C comes while it waits for the learning thread."""

from __future__ import annotations

from interrupting import interruptions
from selected import pairs

from llmaas_plugins.knn_lm.archive.files import SELECTED
from llmaas_plugins.knn_lm.build import learner
from llmaas_plugins.knn_lm.build.build_datastore import KEYS_LEVEL
from llmaas_plugins.knn_lm.config import KnnLMConfig
from llmaas_plugins.knn_lm.datastore.datastore import Datastore
from llmaas_plugins.knn_lm.mixing.mixture import Mixture
from llmaas_plugins.knn_lm.plugin import KnnLM


def test_ctrl_c_while_learning_ends_closes_the_datastore(tmp_path):
    made = pairs()
    mixture = Mixture(alpha=0.2, beta=0.1, theta=1.0, far=1.0).as_json()
    made["settings"] |= {
        "key": "ffn_input",
        "mixture": mixture,
        "level": KEYS_LEVEL,
        "skip_above": 1.0,
    }
    Datastore.write(tmp_path / SELECTED, basis=None, **made)
    for interruption in interruptions(learner, least=3):
        plugin = KnnLM(KnnLMConfig(store=tmp_path))
        plugin._renew()
        datastore = plugin._opened.datastore
        with interruption:
            plugin.llmaas_shutdown()
        assert datastore._file.fd == -1, interruption.where
