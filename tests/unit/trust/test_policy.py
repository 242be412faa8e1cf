"""TrustPolicy as a value, and its files."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

import untorch
from untorch import Identity, TrustPolicy
from untorch.trust.policy import read_policy

HASH = "sha256:" + "0123456789abcdef" * 4


def test_a_policy_is_a_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    policy = TrustPolicy(hashes=[HASH.upper().replace("SHA", "sha")], keys=(Path("a.pub"),), folders=("/srv",))  # type: ignore[arg-type]
    assert policy == TrustPolicy(hashes=(HASH,), keys=(str(tmp_path / "a.pub"),), folders=("/srv",))
    assert hash(policy) == hash(TrustPolicy(hashes=(HASH,), keys=(str(tmp_path / "a.pub"),), folders=("/srv",)))
    with pytest.raises(AttributeError):
        policy.keys = ()  # type: ignore[misc]


@pytest.mark.parametrize(
    ("fields", "error", "text"),
    [
        ({"hashes": HASH}, TypeError, f"TrustPolicy: hashes: expected a tuple, got '{HASH}'"),
        ({"hashes": (1,)}, TypeError, "TrustPolicy: hashes: expected strings, got 1"),
        ({"hashes": ("0" * 64,)}, ValueError, "TrustPolicy: hashes: expected 'sha256:' (of the file) or "),
        ({"hashes": (HASH[:-1],)}, ValueError, "and 64 hexadecimal digits, got "),
        ({"keys": "a.pub"}, TypeError, "TrustPolicy: keys: expected a tuple, got 'a.pub'"),
        ({"keys": (1,)}, TypeError, "TrustPolicy: keys: expected paths, got 1"),
        ({"folders": ("",)}, ValueError, "TrustPolicy: folders: expected a path, got ''"),
        ({"certificates": ("a\0",)}, ValueError, "TrustPolicy: certificates: expected a path, got 'a\\x00'"),
        ({"identities": ("a@b",)}, TypeError, "TrustPolicy: identities: expected Identity objects, got 'a@b'"),
        ({"allow_expired": 1}, TypeError, "TrustPolicy: allow_expired: expected True or False, got 1"),
        ({"sigstore_trust_config": 1}, TypeError, "TrustPolicy: sigstore_trust_config: expected paths, got 1"),
    ],
)
def test_wrong_fields_are_named(fields: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(untorch.InvalidArgumentError) as caught:
        TrustPolicy(**fields)
    assert isinstance(caught.value, error)
    assert text in str(caught.value)


def test_an_identity_needs_both_parts() -> None:
    with pytest.raises(untorch.InvalidArgumentError, match="Identity: issuer: expected a string that is not empty"):
        Identity("a@b.org", "")


def test_a_policy_file(tmp_path: Path) -> None:
    path = tmp_path / "policy.json"
    path.write_text(
        json.dumps(
            {
                "hashes": [HASH],
                "keys": ["team.pub", "/etc/keys/other.pub"],
                "identities": [{"identity": "a@b.org", "issuer": "https://issuer"}],
                "folders": ["models"],
                "sigstore_trust_config": "sigstore.json",
                "allow_expired": True,
            }
        )
    )
    expected = TrustPolicy(
        hashes=(HASH,),
        keys=(str(tmp_path / "team.pub"), "/etc/keys/other.pub"),
        identities=(Identity("a@b.org", "https://issuer"),),
        folders=(str(tmp_path / "models"),),
        sigstore_trust_config=str(tmp_path / "sigstore.json"),
        allow_expired=True,
    )
    assert read_policy(path) == expected
    # Paths are relative to the file itself, not to a link on it.
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "policy.json").symlink_to(path)
    assert read_policy(tmp_path / "links" / "policy.json") == expected


def test_a_policy_file_in_toml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(f'hashes = ["{HASH}"]\n[[identities]]\nidentity = "a@b.org"\nissuer = "https://issuer"\n')
    if sys.version_info >= (3, 11):
        assert read_policy(path) == TrustPolicy(hashes=(HASH,), identities=(Identity("a@b.org", "https://issuer"),))
        path.write_text("hashes = [")
        with pytest.raises(untorch.InvalidFileError, match=r"the trust policy .*policy.toml is not valid TOML: "):
            read_policy(path)
    monkeypatch.setitem(sys.modules, "tomllib", None)
    with pytest.raises(untorch.InvalidFileError, match=r"is TOML, which needs Python 3\.11 or newer: write it as JSON"):
        read_policy(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "policy.json is not valid JSON: "),
        ("[" * 100_000, "policy.json is not valid JSON: "),
        ('{"keys": [], "keys": ["a"]}', "is not valid JSON: a name occurs twice in one object"),
        ("[]", "the policy: expected an object, got []"),
        ('{"hash": []}', "the policy: unknown field 'hash', did you mean 'hashes'?"),
        ('{"zzz": []}', "the policy: unknown field 'zzz': expected hashes, keys, certificates, identities, folders, "),
        ('{"keys": "a.pub"}', "TrustPolicy: keys: expected a tuple, got 'a.pub'"),
        ('{"keys": [1]}', "TrustPolicy: keys: expected paths, got 1"),
        ('{"hashes": ["md5:0"]}', "TrustPolicy: hashes: expected 'sha256:' (of the file) or "),
        (
            '{"identities": [{"identity": "a"}]}',
            "an identity: expected both identity and issuer, got {'identity': 'a'}",
        ),
        ('{"identities": ["a"]}', "an identity: expected an object, got 'a'"),
        ('{"identities": [{"identity": "a", "issuer": 1}]}', "Identity: issuer: expected a string that is not empty"),
        ('{"allow_expired": "no"}', "TrustPolicy: allow_expired: expected True or False, got 'no'"),
        (f'{{"folders": ["{"a" * (1 << 20)}"]}}', "policy.json is larger than 1048576 bytes"),
    ],
)
def test_a_malformed_policy_file_is_an_error(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "policy.json"
    path.write_text(text)
    with pytest.raises(untorch.InvalidFileError) as caught:
        read_policy(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "policy.json"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(untorch.InvalidFileError, match="is not valid JSON"):
        read_policy(path)


def test_a_missing_policy_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"the trust policy .*nope\.json cannot be read: No such file"):
        read_policy(tmp_path / "nope.json")
    with pytest.raises(IsADirectoryError, match="cannot be read: Is a directory"):
        read_policy(tmp_path)


@pytest.mark.parametrize("mode", [0o666, 0o664, 0o602])
def test_a_policy_that_others_may_write_is_not_used(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "policy.json"
    path.write_text("{}")
    path.chmod(mode)
    with pytest.raises(untorch.UntrustedError) as caught:
        read_policy(path)
    assert str(caught.value) == (
        f"the trust policy {path} is not used: {path} may be written by others (mode {mode:04o}): chmod go-w"
    )


def test_a_policy_in_a_folder_that_others_may_write_is_not_used(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    (folder / "policy.json").write_text("{}")
    folder.chmod(0o777)
    with pytest.raises(untorch.UntrustedError, match=rf"{folder} may be written by others \(mode 0777\)"):
        read_policy(folder / "policy.json")
    folder.chmod(0o1777)  # the sticky bit, as /tmp has it: nobody can exchange another user's file
    assert read_policy(folder / "policy.json") == TrustPolicy()


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file away")
def test_a_policy_of_another_user_is_not_used(tmp_path: Path) -> None:
    path = tmp_path / "policy.json"
    path.write_text("{}")
    os.chown(path, 12345, -1)
    with pytest.raises(
        untorch.UntrustedError, match=r"belongs to the user 12345: chown it to this user \(0\) or to root"
    ):
        read_policy(path)
