"""untorch sign and untorch verify."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pki = pytest.importorskip("trust_pki")
pytest.importorskip("model_signing")


@pytest.fixture
def file(package: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(package, tmp_path / "affine.pt2"))


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return pki.key_pair(tmp_path_factory.mktemp("keys"), "team")


def test_a_key(cli: Callable[..., Any], file: Path, keys: Any) -> None:
    done = cli("sign", file, "--private-key", keys.private, "--json")
    assert done.code == 0, done.err
    document = done.document()
    digest = f"sha256:{hashlib.sha256(file.read_bytes()).hexdigest()}"
    assert document == {
        "file": str(file), "signature": f"{file}.sig", "inside": False, "entries": 8, "hashes": document["hashes"],
    }  # fmt: skip
    assert document["hashes"][0] == digest
    found = cli("verify", file, "--key", keys.public, "--json").document()
    assert found.pop("seconds") >= 0 and found.pop("bytes") > 0
    assert found == {
        "file": str(file),
        "format": "untorch",
        "algorithm": "SHA-256",
        "entries": 8,
        "external_weights": 0,
        "external_bytes": 0,
        "hashes": document["hashes"],
        "signed_inside": False,
        "trusted": [f"{file}.sig is by the key {keys.public}"],
    }
    text = cli("verify", file, "--key", keys.public).out
    assert f"{file}.sig is by the key {keys.public}" in text and digest in text


def test_inside(cli: Callable[..., Any], file: Path, keys: Any) -> None:
    before = cli("verify", file, "--json").document()
    assert before["trusted"] is None and not before["signed_inside"]
    done = cli("sign", file, "--private-key", keys.private, "--inside")
    assert f"signature            {file}, of 8 entries" in done.out
    after = cli("verify", file, "--key", keys.public, "--json").document()
    assert after["trusted"] == [f"the signature inside {file} is by the key {keys.public}"]
    assert after["signed_inside"]
    assert (after["hashes"][0] != before["hashes"][0], after["hashes"][1]) == (True, before["hashes"][1])
    assert cli("run", file, "--input", "x=ones:float32[2,4]").code == 0


def test_certificates_and_identities(cli: Callable[..., Any], file: Path, tmp_path: Path) -> None:
    root = pki.Authority.make("root")
    middle = pki.Authority.make("middle", root)
    pair = pki.key_pair(tmp_path, "team")
    certificate = pki.write_pem(tmp_path / "team.pem", middle.issue(pair.key, "team", end=pki.NOW - pki.DAY / 2))
    chain = pki.write_pem(tmp_path / "chain.pem", middle.certificate)
    roots = pki.write_pem(tmp_path / "roots.pem", root.certificate)
    done = cli(
        "sign", file, "--private-key", pair.private, "--signing-certificate", certificate, "--certificate-chain", chain
    )
    assert done.code == 0, done.err
    done = cli("verify", file, "--certificate", roots)
    assert done.code == 1
    assert done.err.startswith(
        f"untorch: {file} is not trusted by the command line: expected a signature by a certific"
    )
    assert "sign again, or allow expired certificates (allow_expired, --allow-expired)" in done.err
    assert cli("verify", file, "--certificate", roots, "--allow-expired").code == 0

    config = pki.Sigstore().write_trust_config(tmp_path / "sigstore.json")
    done = cli("verify", file, "--identity", "a@b.org", "--issuer", "https://b.org", "--sigstore-trust-config", config)
    assert done.code == 1
    assert "does not verify with the identity a@b.org (issuer https://b.org): " in done.err


def test_a_policy(cli: Callable[..., Any], file: Path, tmp_path: Path, keys: Any) -> None:
    hashes = cli("verify", file, "--json").document()["hashes"]
    policy = tmp_path / "policy.json"
    for value in hashes:
        policy.write_text(json.dumps({"hashes": [value]}))
        assert cli("verify", file, "--trust", policy, "--json").document()["trusted"] == [f"its hash is {value}"]
        assert cli("run", file, "--input", "x=ones:float32[2,4]", "--trust", policy).code == 0
    done = cli("verify", file, "--trust", policy, "--key", keys.public)  # both must hold
    assert (done.code, "no signature, neither" in done.err) == (1, True)
    policy.write_text(json.dumps({"hashes": ["sha256:" + "0" * 64]}))
    for command in (("verify", file), ("run", file), ("bench", file)):
        done = cli(*command, "--trust", policy)
        assert done.code == 1
        assert done.err.startswith(f"untorch: {file} is not trusted by ")


def test_a_damaged_file(cli: Callable[..., Any], file: Path) -> None:
    data = bytearray(file.read_bytes())
    at = data.index(b"0.1.0")
    data[at] ^= 1
    file.write_bytes(data)
    done = cli("verify", file)
    assert done.code == 1
    assert "untorch.json" in done.err


def test_another_place_for_the_signature(cli: Callable[..., Any], file: Path, tmp_path: Path, keys: Any) -> None:
    place = tmp_path / "other.sig"
    assert cli("sign", file, "--private-key", keys.private, "-o", place).code == 0
    assert not Path(f"{file}.sig").exists()
    assert cli("verify", file, "--key", keys.public).code == 1
    assert cli("verify", file, "--key", keys.public, "--signature", place).code == 0


def test_an_encrypted_key(cli: Callable[..., Any], file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = pki.key_pair(tmp_path, "locked", password="secret")
    assert cli("sign", file, "--private-key", pair.private).code == 1
    monkeypatch.setenv("UNTORCH_KEY_PASSWORD", "secret")
    assert cli("sign", file, "--private-key", pair.private).code == 0


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("sign",), "expected --private-key or --sigstore, one of them"),
        (("sign", "--private-key", "a", "--sigstore"), "expected --private-key or --sigstore, one of them"),
        (("sign", "--private-key", "a", "--inside", "-o", "b"), "expected --inside or --output, not both"),
        (("sign", "--private-key", "a", "--ambient"), "are for --sigstore"),
        (("verify", "--identity", "a"), "expected --identity and --issuer together"),
        (("verify", "--signature", "a"), "--signature: expected also --key, --certificate, --identity or --trust"),
    ],
)
def test_usage_errors(cli: Callable[..., Any], file: Path, arguments: tuple[str, ...], text: str) -> None:
    done = cli(arguments[0], file, *arguments[1:])
    assert done.code == 2
    assert text in done.err


def test_a_missing_file(cli: Callable[..., Any], tmp_path: Path, keys: Any) -> None:
    for command in (("verify", tmp_path / "nope.pt2"), ("sign", tmp_path / "nope.pt2", "--private-key", keys.private)):
        done = cli(*command, "--json")
        assert (done.code, done.document()["error"]["type"]) == (1, "FileMissingError")
