"""docs/how-to/service.md: its examples run, and its tables are true."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from served import serving

from llmaas_plugins.config import ServiceConfig, load_config
from llmaas_plugins.server.api_keys import read_key_file

pytest.importorskip("openai")
pytest.importorskip("fastapi")

PAGE = (Path(__file__).parents[3] / "docs" / "how-to" / "service.md").read_text()
KEY = "mail-2f6c51e5b0d34a1c"


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def rows(*header):
    """Return the rows of the table with this header."""
    _, _, rest = PAGE.partition(f"| {' | '.join(header)} |\n")
    lines = rest.partition("\n\n")[0].splitlines()[1:]
    assert lines
    return [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("docs")
    keys = folder / "keys.toml"
    keys.write_text(blocks("toml")[0])
    keys.chmod(0o600)
    with serving(folder, "--api_key", "x", key="x", service='key_file = "keys.toml"') as server:
        yield server


@pytest.mark.parametrize("example", blocks("python"))
def test_examples(server, example, capsys):
    assert ":8000" in example
    assert KEY in example
    exec(compile(example.replace(":8000", f":{server.port}"), "docs/how-to/service.md", "exec"), {})
    assert len(capsys.readouterr().out) > 10


def test_the_tables_of_toml(tmp_path):
    keys, service = blocks("toml")
    path = tmp_path / "keys.toml"
    path.write_text(keys)
    path.chmod(0o600)
    assert read_key_file(path) == tomllib.loads(keys)
    table = tomllib.loads(service)["service"]
    assert list(table) == list(ServiceConfig.model_fields)
    found = load_config({"service": table}).service
    own = {"max_context_tokens": 2048, "key_file": Path("~/.config/llmaas/keys.toml")}
    assert found == ServiceConfig(**own)  # all others are the defaults


def test_routes():
    from llmaas_plugins.server.middleware import route_of

    opens_to = {"apps": "apps", "the app": "apps", "apps: their own; administrator: all": "apps",
                "administrator": "administrator", "anyone": "anyone"}  # fmt: skip
    for request, _, who, waits in rows("route", "what it does", "opens to", "waits for the engine"):
        method, path = request.split()
        route, owner = route_of(path)
        assert route.name != "other"
        assert route.opens_to == opens_to[who]
        assert owner == ("mail" if who == "the app" else "")
        assert (route.waits or method == "DELETE") == (waits == "yes")


def test_metrics(server):
    found = server.metrics("x")
    ours = {re.sub(r"_(bucket|count|sum|created)$", "", name.partition("{")[0]) for name in found}
    ours = {name.replace("_total", "") for name in ours if name.startswith("llmaas_")}
    listed = {name.removesuffix("_total") for name, _, _ in rows("name", "type", "meaning")}
    listed -= {"llmaas_cloud_requests"}  # this service asks no cloud
    assert listed == {name for name in ours if not name.startswith("llmaas_kv_chunks_")}
    mentioned = set(re.findall(r"`(llmaas_kv_chunks_\w+)`", PAGE))
    assert mentioned <= ours
    assert len(mentioned) > 5
