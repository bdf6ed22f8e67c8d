"""Keys: the apps that they identify, and key files refused without quoting a key."""

from __future__ import annotations

import os

import pytest

from llmaas_hooks import ConfigError
from llmaas_plugins.server.api_keys import ApiKeys, read_key_file
from llmaas_plugins.server.refusal import Refusal

MAIL, NOTES, ADMINISTRATOR = "mail-0123456789abcdef", "notes-0123456789abcdef", "sesame"


def bearer(key, scheme="Bearer"):
    return f"{scheme} {key}".encode()


def test_without_keys_everybody_is_let_in():
    assert ApiKeys(None, {}).caller(b"") is None
    assert ApiKeys(None, {}).caller(bearer("whatever")) is None


@pytest.mark.parametrize("administrator", [None, ADMINISTRATOR])
def test_who_calls(administrator):
    keys = ApiKeys(administrator, {"mail": MAIL, "notes": NOTES})
    assert keys.caller(bearer(MAIL)) == "mail"
    assert keys.caller(bearer(NOTES, "bearer")) == "notes"
    if administrator:
        assert keys.caller(bearer(administrator)) is None


@pytest.mark.parametrize(
    "given",
    [
        b"",
        b"Bearer",
        b"Bearer ",
        bearer("wrong"),
        bearer(MAIL[:-1]),
        bearer(MAIL + "0"),
        bearer(MAIL, "Basic"),
        bearer(f"{MAIL} {NOTES}"),
        MAIL.encode(),
        b"Bearer \xff\xfe",
    ],
)
@pytest.mark.parametrize("administrator", [None, ADMINISTRATOR])
def test_anything_else_is_refused(given, administrator):
    expected = "Invalid API key" if given else "No API key was sent; expected the header `Auth"
    with pytest.raises(Refusal, match=expected) as caught:
        ApiKeys(administrator, {"mail": MAIL}).caller(given)
    assert caught.value.status == 401
    assert (b"www-authenticate", b"Bearer") in caught.value.headers


@pytest.fixture
def key_file(tmp_path):
    def write(text, mode=0o600):
        path = tmp_path / "keys.toml"
        path.write_text(text)
        path.chmod(mode)
        return path

    return write


def test_key_file(key_file):
    text = f'mail = "{MAIL}"\n"com.example.notes" = "{NOTES}"\n'
    assert read_key_file(key_file(text)) == {"mail": MAIL, "com.example.notes": NOTES}
    assert read_key_file(None) == {}


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_key_file_that_others_can_open(key_file, mode):
    with pytest.raises(ConfigError, match=r"open to other users. Try `chmod 600 .*keys\.toml`"):
        read_key_file(key_file(f'mail = "{MAIL}"', mode))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"mail = {MAIL}", "is not valid TOML"),
        (f'[mail]\nkey = "{MAIL}"', "'mail': a key must be a string"),
        (f'mail = "{MAIL} x"', "without spaces"),
        (f'mail = "{MAIL}ü"', "printable ASCII"),
        ('mail = "short"', "16 characters or more"),
        (f'"" = "{MAIL}"', "'': an app's name must be 1 to 128 printable characters"),  # of nobody
        (f'"a/b" = "{MAIL}"', "'a/b': an app's name must be"),
        (f'mail = "{MAIL}"\nnotes = "{MAIL}"', "two apps have the same key"),
    ],
)
def test_wrong_key_files(key_file, text, message):
    with pytest.raises(ConfigError, match=message) as caught:
        read_key_file(key_file(text))
    assert MAIL not in str(caught.value)


def test_a_key_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read service\.key_file .*No such file"):
        read_key_file(tmp_path / "none.toml")


def test_a_pipe_is_no_key_file(tmp_path):
    os.mkfifo(tmp_path / "keys.toml", 0o600)
    with pytest.raises(ConfigError, match="is not a regular file"):
        read_key_file(tmp_path / "keys.toml")  # does not wait for a writer


def test_a_key_file_with_a_byte_order_mark(key_file):
    assert read_key_file(key_file(f'\ufeffmail = "{MAIL}"\r\n')) == {"mail": MAIL}


def test_no_app_has_the_administrators_key():
    with pytest.raises(ConfigError, match="app 'mail' has the administrator's key") as caught:
        ApiKeys(MAIL, {"mail": MAIL})
    assert MAIL not in str(caught.value)


@pytest.mark.parametrize("key", ["sesame ", " sesame", "sesame\udcff", "ü", "a\tb", "k\x7f"])
def test_a_key_that_clients_cannot_send(key):
    with pytest.raises(
        ConfigError, match=r"^--api_key: a key must be a string of printable"
    ) as caught:
        ApiKeys(key, {})
    assert key not in str(caught.value)


@pytest.mark.parametrize("key", ["", " "])
def test_an_empty_key_is_no_key(key):
    with pytest.raises(ConfigError, match="--api_key is empty"):
        ApiKeys(key, {})
