"""Signatures: made, verified, refused; and an unmodified model_signing on the unpacked archive."""

from __future__ import annotations

import base64
import datetime
import hashlib
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import craft
import pytest
from cryptography.hazmat.primitives.asymmetric import ec

import untorch
from untorch import Identity, TrustPolicy
from untorch.archive import ArchiveReader
from untorch.trust import bundle
from untorch.trust.bundle import Signer, Statement
from untorch.trust.check import Requirement, Subject, check_policy
from untorch.trust.digests import SIGNATURE
from untorch.trust.signing import sign

from .conftest import write_archive

pki = pytest.importorskip("trust_pki")
pytest.importorskip("model_signing")

IDENTITY, ISSUER = "builder@example.org", "https://issuer.example.org"


def verdict(path: Path, policy: TrustPolicy, signature: Path | None = None) -> str:
    """Which rule of the policy holds for the file."""
    with ArchiveReader(path) as reader:
        subject = Subject(reader.core, str(path), None if signature is None else str(signature))
        return check_policy(subject, Requirement("the test", policy))


def refusal(path: Path, policy: TrustPolicy, signature: Path | None = None) -> str:
    with pytest.raises(untorch.UntrustedError) as caught:
        verdict(path, policy, signature)
    return str(caught.value)


def model_signing(*arguments: object) -> str:
    """The command line of the package as it is, in a process of its own."""
    command = [sys.executable, "-m", "model_signing", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    return (done.stdout + done.stderr).strip() if done.returncode == 0 else f"failed: {done.stdout}{done.stderr}"


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return pki.key_pair(tmp_path_factory.mktemp("keys"), "team")


@pytest.mark.parametrize("inside", [False, True])
def test_a_key_signs_and_verifies(archive: Path, keys: Any, inside: bool) -> None:
    target = sign(archive, Signer(key=str(keys.private)), inside=inside)
    assert target == (archive if inside else Path(f"{archive}.sig"))
    policy = TrustPolicy(keys=(str(keys.public),))
    where = f"the signature inside {archive}" if inside else f"{archive}.sig"
    assert verdict(archive, policy) == f"{where} is by the key {keys.public}"


@pytest.mark.slow
@pytest.mark.parametrize("inside", [False, True])
def test_model_signing_verifies_the_unpacked_archive(archive: Path, keys: Any, tmp_path: Path, inside: bool) -> None:
    sign(archive, Signer(key=str(keys.private)), inside=inside)
    unpacked = tmp_path / "unpacked"
    with zipfile.ZipFile(archive) as zipped:
        zipped.extractall(unpacked)
    signature = unpacked / "model" / SIGNATURE if inside else Path(f"{archive}.sig")
    command = ("verify", "key", unpacked, "--signature", signature, "--public_key", keys.public)
    assert model_signing(*command) == "Verification succeeded"
    (unpacked / "model" / "data" / "weights" / "weight_0").write_bytes(b"other")
    text = model_signing(*command)
    assert text.startswith("failed: ") and "Hash mismatch for" in text and "weight_0" in text


@pytest.mark.slow
def test_what_model_signing_signs_verifies_here(archive: Path, keys: Any, tmp_path: Path) -> None:
    """Signatures of the unpacked archive and of the file itself."""
    with zipfile.ZipFile(archive) as zipped:
        zipped.extractall(tmp_path / "unpacked")
    policy = TrustPolicy(keys=(str(keys.public),))
    other = write_archive(tmp_path / "other.pt2", weight=craft.WEIGHT[::-1])
    for i, model in enumerate((tmp_path / "unpacked", archive)):
        signature = tmp_path / f"{i}.sig"
        done = model_signing("sign", "key", model, "--signature", signature, "--private_key", keys.private)
        assert done == "Signing succeeded"
        assert verdict(archive, policy, signature) == f"{signature} is by the key {keys.public}"
        assert "entries were changed after they had been signed: " in refusal(other, policy, signature)


def test_certificates(archive: Path, tmp_path: Path) -> None:
    root, other = pki.Authority.make("root"), pki.Authority.make("other")
    middle = pki.Authority.make("middle", root)
    pair = pki.key_pair(tmp_path, "team")
    leaf = pki.write_pem(tmp_path / "leaf.pem", middle.issue(pair.key, "team"))
    chain = pki.write_pem(tmp_path / "chain.pem", middle.certificate)
    signer = Signer(key=str(pair.private), certificate=str(leaf), chain=(str(chain),))
    sign(archive, signer)
    roots = pki.write_pem(tmp_path / "roots.pem", root.certificate)
    policy = TrustPolicy(certificates=(str(roots),))
    assert verdict(archive, policy) == f"{archive}.sig is by a certificate under {roots}"

    others = pki.write_pem(tmp_path / "others.pem", other.certificate)
    text = refusal(archive, TrustPolicy(certificates=(str(others),)))
    assert f"{archive}.sig does not verify with certificates under {others}: " in text
    assert "unable to get local issuer certificate" in text
    sign(archive, replace(signer, chain=()))  # the intermediate one is missing
    assert "unable to get" in refusal(archive, policy)
    # A bundle by a certificate is none by a key, and the other way round.
    assert "the bundle was not made with a public key" in refusal(archive, TrustPolicy(keys=(str(pair.public),)))
    sign(archive, Signer(key=str(pair.private)))
    assert "the bundle was not made with a certificate" in refusal(archive, policy)
    # A certificate authority's own certificate is not for signing.
    authority = pki.KeyPair(root.key, tmp_path / "root.key", tmp_path / "root.pub")
    authority.private.write_bytes(pki.private_pem(root.key))
    sign(archive, Signer(key=str(authority.private), certificate=str(roots)))
    assert refusal(archive, policy)


def test_an_expired_certificate(archive: Path, tmp_path: Path) -> None:
    root = pki.Authority.make("root")
    pair = pki.key_pair(tmp_path, "team")
    roots = str(pki.write_pem(tmp_path / "roots.pem", root.certificate))
    day = datetime.timedelta(days=1)
    for name, start, end in (("over", -30, -1), ("future", 1, 30)):
        certificate = root.issue(pair.key, name, start=pki.NOW + start * day, end=pki.NOW + end * day)
        leaf = pki.write_pem(tmp_path / f"{name}.pem", certificate)
        sign(archive, Signer(key=str(pair.private), certificate=str(leaf)))
        text = refusal(archive, TrustPolicy(certificates=(roots,)))
        assert f"the certificate CN={name} is valid from {pki.NOW + start * day:%Y-%m-%d} to " in text
        assert "sign again, or allow expired certificates (allow_expired, --allow-expired)" in text
        assert verdict(archive, TrustPolicy(certificates=(roots,), allow_expired=True))


@pytest.fixture(scope="module")
def sigstore() -> Any:
    return pki.Sigstore()


@pytest.fixture
def sigstore_policy(sigstore: Any, tmp_path: Path) -> Callable[..., TrustPolicy]:
    config = sigstore.write_trust_config(tmp_path / "sigstore.json")
    return lambda identity=IDENTITY, issuer=ISSUER: TrustPolicy(
        identities=(Identity(identity, issuer),), sigstore_trust_config=str(config)
    )


def payload_of(signature: Path) -> bytes:
    return base64.b64decode(json.loads(signature.read_bytes())["dsseEnvelope"]["payload"])


def test_sigstore_identities(
    archive: Path, keys: Any, sigstore: Any, sigstore_policy: Callable[..., TrustPolicy], tmp_path: Path
) -> None:
    signature = sign(archive, Signer(key=str(keys.private)))
    payload = payload_of(signature)
    signature.write_bytes(sigstore.bundle(payload, IDENTITY, ISSUER))
    assert verdict(archive, sigstore_policy()) == f"{signature} is by {IDENTITY} (issuer {ISSUER})"
    text = refusal(archive, sigstore_policy(identity="other@example.org"))
    assert f"does not verify with the identity other@example.org (issuer {ISSUER}): " in text
    assert "Certificate's OIDCIssuer does not match" in refusal(archive, sigstore_policy(issuer="https://other"))

    changed = write_archive(tmp_path / "changed.pt2", weight=craft.WEIGHT[::-1])
    more = tmp_path / "more.pt2"
    package = craft.Package(b"library", craft.manifest("x86_64"), extra=[craft.Lie("model/extra/note", b"x")])
    more.write_bytes(package.bytes())
    for path, found in (
        (changed, "entries were changed after they had been signed: model/data/weights/weight_0"),
        (more, "the archive has entries that were not signed: model/extra/note"),
    ):
        assert found in refusal(path, sigstore_policy(), signature)
    package.extra = []
    entries = package.entries()
    more.write_bytes(craft.zip_bytes(entries[:2] + entries[3:]))
    lacks = "the archive lacks entries that were signed: model/data/weights/weight_0"
    assert lacks in refusal(more, sigstore_policy(), signature)

    # Another payload under the same signature, other types of payloads, a bundle by a key.
    document = json.loads(signature.read_bytes())
    document["dsseEnvelope"]["payload"] = base64.b64encode(payload.replace(b"model/", b"mode1/")).decode()
    signature.write_text(json.dumps(document))
    assert "does not verify with the identity" in refusal(archive, sigstore_policy())
    for old, new, text in (
        (b"https://model_signing/signature/v1.0", b"https://example.org/other", "expected a model signature"),
        (b"https://in-toto.io/Statement/v1", b"https://in-toto.io/Statement/v9", "expected a model signature"),
    ):
        signature.write_bytes(sigstore.bundle(payload.replace(old, new), IDENTITY, ISSUER))
        assert text in refusal(archive, sigstore_policy())
    sign(archive, Signer(key=str(keys.private)))
    assert "expected certificate in bundle" in refusal(archive, sigstore_policy())


def test_another_sigstore_instance_is_not_trusted(
    archive: Path, keys: Any, sigstore_policy: Callable[..., TrustPolicy]
) -> None:
    signature = sign(archive, Signer(key=str(keys.private)))
    signature.write_bytes(pki.Sigstore().bundle(payload_of(signature), IDENTITY, ISSUER))
    assert f"does not verify with the identity {IDENTITY}" in refusal(archive, sigstore_policy())


def test_the_public_instance_is_verified_without_a_network(
    archive: Path, keys: Any, sigstore: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its root of trust comes with the package sigstore. A bundle by somebody else's instance is refused."""
    import socket

    def no_network(*_: object) -> None:
        raise AssertionError("a network was used")

    monkeypatch.setattr(socket, "create_connection", no_network)
    monkeypatch.setattr(socket.socket, "connect", no_network)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    signature = sign(archive, Signer(key=str(keys.private)))
    signature.write_bytes(sigstore.bundle(payload_of(signature), IDENTITY, ISSUER))
    text = refusal(archive, TrustPolicy(identities=(Identity(IDENTITY, ISSUER),)))
    assert "failed to build timestamp certificate chain" in text


def test_signing_with_sigstore_passes_the_options_on(archive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Making a signature needs a network and an OpenID Connect token; what the library gets is all that is seen here."""
    import model_signing.signing

    given: dict[str, Any] = {}

    def use(self: Any, **options: Any) -> Any:
        given.update(options)
        raise RuntimeError("no network")

    monkeypatch.setattr(model_signing.signing.Config, "use_sigstore_signer", use)
    with pytest.raises(untorch.InvalidArgumentError, match="sign: Sigstore cannot be used: no network"):
        sign(archive, Signer(identity_token="token", trust_config="config.json"))
    assert given == {
        "identity_token": "token", "use_ambient_credentials": False, "trust_config": Path("config.json")
    }  # fmt: skip


def test_a_wrong_key_is_named(archive: Path, keys: Any, tmp_path: Path) -> None:
    sign(archive, Signer(key=str(keys.private)))
    other = pki.key_pair(tmp_path, "other")
    text = refusal(archive, TrustPolicy(keys=(str(other.public),)))
    assert text.startswith(
        f"{archive} is not trusted by the test: expected a signature by the key {other.public}; found: {archive}.sig "
        f"does not verify with the key {other.public}: Key mismatch: "
    )
    assert text.endswith("; nothing of it was run")
    # A bundle that claims to be by the right key.
    signature = Path(f"{archive}.sig")
    hint = json.loads(signature.read_bytes())["verificationMaterial"]
    sign(archive, Signer(key=str(other.private)))
    document = json.loads(signature.read_bytes())
    document["verificationMaterial"] = hint
    signature.write_text(json.dumps(document))
    assert "the signature is not by it" in refusal(archive, TrustPolicy(keys=(str(keys.public),)))
    # One of several keys is enough.
    sign(archive, Signer(key=str(other.private)))
    assert verdict(archive, TrustPolicy(keys=(str(keys.public), str(other.public))))


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b"", "the key "),
        (b"{}", "the bundle is not of this kind, or damaged (KeyError: "),
        (b"[1]", "the bundle is not of this kind, or damaged (TypeError: "),
        (b"\xff", "the key "),
        (b"[" * 100_000, "the key "),
        (b'{"verificationMaterial": {"publicKey": {}}, "dsseEnvelope": {"payload": "e30="}}', "KeyError: 'predicate'"),
    ],
)
def test_a_malformed_bundle_is_refused(archive: Path, keys: Any, data: bytes, found: str) -> None:
    Path(f"{archive}.sig").write_bytes(data)
    assert found in refusal(archive, TrustPolicy(keys=(str(keys.public),)))


def test_no_signature(archive: Path, keys: Any) -> None:
    text = refusal(archive, TrustPolicy(keys=(str(keys.public),)))
    assert f"found: no signature, neither {archive}.sig nor one inside of the file; nothing of it was run" in text
    with pytest.raises(FileNotFoundError, match=r"the signature nope\.sig cannot be read: No such file"):
        verdict(archive, TrustPolicy(keys=(str(keys.public),)), Path("nope.sig"))
    os.mkfifo(f"{archive}.sig")  # does not block
    assert f"{archive}.sig does not verify with the key" in refusal(archive, TrustPolicy(keys=(str(keys.public),)))


def test_a_signature_inside_holds_when_the_one_beside_does_not(archive: Path, keys: Any, tmp_path: Path) -> None:
    sign(archive, Signer(key=str(keys.private)), inside=True)
    Path(f"{archive}.sig").write_text("{}")
    assert verdict(archive, TrustPolicy(keys=(str(keys.public),))).startswith("the signature inside ")


def test_a_signature_inside_leaves_the_rest_as_it_is(archive: Path, keys: Any) -> None:
    before = archive.read_bytes()
    archive.chmod(0o640)
    with ArchiveReader(archive) as reader:
        entries = {entry.name: entry for entry in reader}
    for _ in range(2):  # the second one takes the place of the first one
        sign(archive, Signer(key=str(keys.private)), inside=True)
        with ArchiveReader(archive) as reader:
            reader.verify()
            assert reader.entries.keys() == {*entries, SIGNATURE}
            assert {name: entry for name, entry in reader.entries.items() if name != SIGNATURE} == entries
            added = reader.entries[SIGNATURE]
        assert added.offset % 64 == 0
        end = max(entry.offset + entry.size for entry in entries.values())
        assert archive.read_bytes()[:end] == before[:end]
    assert archive.stat().st_mode & 0o777 == 0o640
    assert [path.name for path in archive.parent.iterdir() if path.name.startswith(".")] == []


def test_a_signature_in_the_middle_is_not_exchanged(tmp_path: Path, keys: Any) -> None:
    package = craft.Package(b"library", craft.manifest("x86_64"))
    entries = [craft.Lie(f"model/{SIGNATURE}", b"{}"), *package.entries()]
    path = tmp_path / "model.pt2"
    path.write_bytes(craft.zip_bytes(entries))
    before = path.read_bytes()
    with pytest.raises(
        untorch.InvalidFileError, match="its signature is not the last entry, so it cannot be exchanged"
    ):
        sign(path, Signer(key=str(keys.private)), inside=True)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["model.pt2"]


def test_signing_takes_what_the_library_takes(archive: Path, tmp_path: Path) -> None:
    for name, curve in (("p384", ec.SECP384R1()), ("p521", ec.SECP521R1())):
        pair = pki.key_pair(tmp_path, name, curve)
        sign(archive, Signer(key=str(pair.private)))
        assert verdict(archive, TrustPolicy(keys=(str(pair.public),)))
    locked = pki.key_pair(tmp_path, "locked", password="secret")
    sign(archive, Signer(key=str(locked.private), password="secret"), output=str(tmp_path / "other.sig"))
    assert verdict(archive, TrustPolicy(keys=(str(locked.public),)), tmp_path / "other.sig")
    with pytest.raises(untorch.InvalidArgumentError, match=rf"sign: the key {locked.private} cannot be used: "):
        sign(archive, Signer(key=str(locked.private), password="wrong"))
    with pytest.raises(untorch.InvalidArgumentError, match="cannot be used: .*[Pp]assword"):
        sign(archive, Signer(key=str(locked.private)))
    koblitz = pki.key_pair(tmp_path, "koblitz", ec.SECP256K1())
    with pytest.raises(untorch.InvalidArgumentError, match="cannot be used: Unsupported key for curve 'secp256k1'"):
        sign(archive, Signer(key=str(koblitz.private)))
    with pytest.raises(FileNotFoundError, match=r"sign: .*nope\.pem"):
        sign(archive, Signer(key=str(tmp_path / "nope.pem")))
    certificate = pki.write_pem(tmp_path / "a.pem", pki.Authority.make("root").issue(koblitz.key, "team"))
    pair = pki.key_pair(tmp_path, "pair")
    with pytest.raises(untorch.InvalidArgumentError, match="does not match the public key paired with the private key"):
        sign(archive, Signer(key=str(pair.private), certificate=str(certificate)))


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"certificate": "a"}, "sign: a certificate needs its private key"),
        ({"key": "a", "chain": ("b",)}, "sign: a chain needs the certificate that it belongs to"),
        (
            {"key": "a", "certificate": "b", "password": "c"},
            "sign: model-signing takes no encrypted key beside a certif",
        ),
        ({"key": "a", "ambient": True}, "sign: expected either a key or Sigstore, got both"),
    ],
)
def test_a_signer_that_makes_no_sense(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(untorch.InvalidArgumentError, match=text):
        Signer(**fields)


def test_without_model_signing(archive: Path, keys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sign(archive, Signer(key=str(keys.private)))
    for name in [name for name in sys.modules if name.split(".")[0] == "model_signing"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "model_signing", None)
    text = (
        r"signatures need the package model-signing, .*: pip install 'untorch\[sign\]'; policies of hashes and folders"
    )
    with pytest.raises(untorch.UnsupportedError, match=text):
        sign(archive, Signer(key=str(keys.private)))
    with pytest.raises(untorch.UnsupportedError, match=text):
        verdict(archive, TrustPolicy(keys=(str(keys.public),)))
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    assert verdict(archive, TrustPolicy(hashes=(f"sha256:{digest}",)))
    assert verdict(archive, TrustPolicy(folders=(str(archive.parent),)))


def test_a_bundle_that_names_an_entry_twice(keys: Any, sigstore: Any, sigstore_policy: Any, tmp_path: Path) -> None:
    item = {"name": "model/a", "algorithm": "sha256", "digest": "00" * 32}
    payload = {
        "_type": "https://in-toto.io/Statement/v1",
        "predicateType": "https://model_signing/signature/v1.0",
        "predicate": {"resources": [item, item]},
    }
    data = sigstore.bundle(json.dumps(payload).encode(), IDENTITY, ISSUER)
    statement = Statement({"model/a": "00" * 32}, "model", lambda: "")
    policy = sigstore_policy()
    with pytest.raises(untorch.UntrustedError, match="it names 'model/a' twice"):
        bundle.verify_identity(data, statement, policy.identities[0], policy.sigstore_trust_config)


def test_a_read_only_folder(archive: Path, keys: Any) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    archive.parent.chmod(0o555)
    with pytest.raises(PermissionError, match=r"cannot write .*model\.pt2\.sig: Permission denied"):
        sign(archive, Signer(key=str(keys.private)))
