"""The study of certificates: splits of known answers, and what its table counts."""

from __future__ import annotations

from answered import answers

from llmaas_eval.deadlines.certificate import Setting, splits
from llmaas_eval.deadlines.certificate_report import TABLES

SETTING = Setting(1000, n_splits=20, answers=(1, 4))


def test_certificates_of_known_risks_hold_and_use_narrow_levels():
    found = {name: answers(1000, seed=seed) for seed, name in enumerate(("mail", "notes"))}
    rows = list(splits("mail", found, SETTING))
    assert [row.n_tokens for row in rows] == [1] * 20 + [4] * 20
    assert all(row.level < 1 and row.n_certified == 500 for row in rows)
    assert all(row.risk <= row.worst for row in rows)
    assert sum(row.risk <= 0.1 for row in rows) >= 36


def test_the_table_counts_splits():
    rows = [
        {"app": "mail", "n_tokens": 2, "level": level, "risk": risk, "worst": worst}
        for level, risk, worst in ((1.0, 0.0, 0.0), (0.5, 0.08, 0.11), (0.6, 0.12, 0.12))
    ]
    table = TABLES["deadlines-certificate"]([{"rows": rows, "settings": {"max_risk": 0.1}}])
    expected = ["mail", "2", "2 of 3", "0.700", "6.7 %", "2 of 3", "1 of 3"]
    assert table.rows == [expected]
