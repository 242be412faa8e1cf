"""Signs and verifies lists of entries in the OpenSSF Model Signing format, with the package ``model-signing``.

``model_signing.signing.Config`` and ``verifying.Config`` make and read bundles. They get their list of files from a
hashing configuration; here it is one that gives an archive's entries instead of a folder's files. So an unpacked
archive verifies with the same bundle and an unmodified ``model_signing``.
"""

from __future__ import annotations

import base64
import contextlib
import datetime
import importlib
import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from untorch.runtime.errors import InvalidArgumentError, UnsupportedError, UntrustedError, file_error
from untorch.trust.digests import SIGNATURE
from untorch.trust.policy import Identity

__all__ = ["Signer", "Statement", "sign_entries", "verify_certificate", "verify_identity", "verify_key"]

_WHOLE_FILE = "."  # what model_signing calls the only item of a model that is one file
_PAYLOAD = "application/vnd.in-toto+json"
_STATEMENT = "https://in-toto.io/Statement/v1"
_PREDICATE = "https://model_signing/signature/v1.0"


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UnsupportedError(
            f"signatures need the package model-signing, which cannot be imported ({error}): "
            "pip install 'untorch[sign]'; policies of hashes and folders need nothing"
        ) from None


@dataclass(frozen=True)
class Statement:
    """What a bundle is compared with: digests by name, and the archive's top folder.

    ``file`` gives the SHA-256 of the whole file, for a bundle that somebody made of the file itself.
    """

    entries: Mapping[str, str]
    root: str
    file: Callable[[], str]


@dataclass(frozen=True)
class Signer:
    """Who signs: a key; a key with its certificate and the certificates above it; or, without a key, Sigstore.

    Args:
        key: PEM file of an elliptic curve private key (P-256, P-384 or P-521).
        password: Of the key, if it is encrypted. Not with a certificate.
        certificate: PEM file of the key's certificate.
        chain: PEM files of the certificates between it and the root.
        identity_token: For Sigstore: an OpenID Connect token.
        ambient: For Sigstore: take the token of the workflow (GitHub Actions and others) that runs this.
        trust_config: For Sigstore: a client trust configuration (JSON); None: the public instance.
    """

    key: str | None = None
    password: str | None = None
    certificate: str | None = None
    chain: tuple[str, ...] = ()
    identity_token: str | None = None
    ambient: bool = False
    trust_config: str | None = None

    def __post_init__(self) -> None:
        if self.certificate is not None and self.key is None:
            raise InvalidArgumentError("sign: a certificate needs its private key: give --key too")
        if self.chain and self.certificate is None:
            raise InvalidArgumentError("sign: a chain needs the certificate that it belongs to: give --certificate too")
        if self.password is not None and self.certificate is not None:
            raise InvalidArgumentError(
                "sign: model-signing takes no encrypted key beside a certificate: decrypt the key first"
            )
        if self.key is not None and (self.identity_token or self.ambient or self.trust_config):
            raise InvalidArgumentError("sign: expected either a key or Sigstore, got both")


def sign_entries(statement: Statement, signer: Signer) -> bytes:
    """A bundle over the entries. Raises UnsupportedError without model-signing, InvalidArgumentError for a bad key."""
    signing = _library("model_signing.signing")
    config = signing.Config().set_hashing_config(_hashing(statement, whole_file=False))
    try:
        if signer.key is None:
            from pathlib import Path

            config.use_sigstore_signer(
                identity_token=signer.identity_token,
                use_ambient_credentials=signer.ambient,
                trust_config=None if signer.trust_config is None else Path(signer.trust_config),
            )
        elif signer.certificate is None:
            # model-signing says str and gives it to cryptography, which takes bytes.
            password: Any = None if signer.password is None else signer.password.encode()
            config.use_elliptic_key_signer(private_key=signer.key, password=password)
        else:
            # An empty chain is an error to model-signing; the certificate itself changes nothing there.
            config.use_certificate_signer(
                private_key=signer.key,
                signing_certificate=signer.certificate,
                certificate_chain=signer.chain or (signer.certificate,),
            )
    except OSError as error:
        raise file_error(f"sign: {error}", error.errno, error.filename) from None
    except Exception as error:
        what = "Sigstore" if signer.key is None else f"the key {signer.key}"
        raise InvalidArgumentError(f"sign: {what} cannot be used: {_reason(error)}") from None
    with tempfile.TemporaryDirectory(prefix="untorch-sign-") as folder:
        path = os.path.join(folder, "bundle")
        try:
            config.sign(statement.root, path)
        except Exception as error:
            raise UntrustedError(f"sign: no signature was made: {_reason(error)}") from None
        with open(path, "rb") as file:
            return file.read()


def verify_key(bundle: bytes, statement: Statement, key: str) -> None:
    """Raises UntrustedError unless the bundle is of these entries and by this key."""
    verifying = _library("model_signing.verifying")
    with _reasons(f"the key {key}"):
        config = verifying.Config().use_elliptic_key_verifier(public_key=key)
        _compare(config, bundle, statement, "publicKey", "a public key")


def verify_certificate(bundle: bytes, statement: Statement, roots: str, *, allow_expired: bool) -> None:
    """Raises UntrustedError unless the bundle is of these entries, by a certificate under one of the roots.

    The library looks at a chain as it was when the signing certificate became valid, since a bundle of this kind does
    not prove when it was made. Unless ``allow_expired``, the certificates in the bundle must be valid now, too.
    """
    verifying = _library("model_signing.verifying")
    with _reasons(f"certificates under {roots}"):
        config = verifying.Config().use_certificate_verifier(certificate_chain=[roots])
        _compare(config, bundle, statement, "x509CertificateChain", "a certificate")
        if not allow_expired:
            _check_validity(bundle)


def verify_identity(bundle: bytes, statement: Statement, identity: Identity, trust_config: str | None) -> None:
    """Raises UntrustedError unless the bundle is of these entries and by this Sigstore identity. Uses no network.

    Without a ``trust_config``, the root of trust is the one that the package sigstore brings or has in its cache.
    """
    models, verify = _library("sigstore.models"), _library("sigstore.verify")
    logging.getLogger("sigstore").addHandler(logging.NullHandler())  # it warns that it works offline, as it is to
    with _reasons(f"the identity {identity.identity} (issuer {identity.issuer})"):
        if trust_config is None:
            config = models.ClientTrustConfig.production(offline=True)
        else:
            with open(trust_config, encoding="utf-8") as file:
                config = models.ClientTrustConfig.from_json(file.read())
        verifier = verify.Verifier(trusted_root=config.trusted_root)
        policy = verify.policy.Identity(identity=identity.identity, issuer=identity.issuer)
        kind, payload = verifier.verify_dsse(bundle=models.Bundle.from_json(bundle), policy=policy)
        if kind != _PAYLOAD:
            raise ValueError(f"expected a payload of the type {_PAYLOAD}, got {kind}")
        _compare_payload(json.loads(payload), statement)


def _compare(config: Any, bundle: bytes, statement: Statement, material: str, who: str) -> None:
    """Verifies the bundle against the entries, or against the file if that is what the bundle says it is of."""
    # What is read here is not verified yet. It only decides what the verified content is compared with.
    document = json.loads(bundle)
    if material not in document["verificationMaterial"]:
        raise ValueError(f"the bundle was not made with {who}")
    payload = json.loads(base64.b64decode(document["dsseEnvelope"]["payload"]))
    whole_file = _resources(payload).keys() == {_WHOLE_FILE}
    config.set_hashing_config(_hashing(statement, whole_file=whole_file))
    with _as_file(bundle) as path:
        try:
            config.verify(statement.root, path)
        except ValueError as error:
            if str(error).startswith("Signature mismatch"):  # the signature holds, of other entries
                _compare_payload(payload, statement)
            raise


def _compare_payload(payload: Any, statement: Statement) -> None:
    if payload["_type"] != _STATEMENT or payload["predicateType"] != _PREDICATE:
        raise ValueError(f"expected a model signature ({_PREDICATE}), got {payload['predicateType']!r}")
    signed = _resources(payload)
    own = {_WHOLE_FILE: statement.file()} if signed.keys() == {_WHOLE_FILE} else dict(statement.entries)
    if signed == {name: ("sha256", digest) for name, digest in own.items()}:
        return
    if extra := sorted(own.keys() - signed.keys()):
        raise ValueError(f"the archive has entries that were not signed: {', '.join(extra)}")
    if missing := sorted(signed.keys() - own.keys()):
        raise ValueError(f"the archive lacks entries that were signed: {', '.join(missing)}")
    changed = sorted(name for name in own if signed[name] != ("sha256", own[name]))
    raise ValueError(f"entries were changed after they had been signed: {', '.join(changed)}")


def _resources(payload: Any) -> dict[str, tuple[str, str]]:
    out: dict[str, tuple[str, str]] = {}
    for item in payload["predicate"]["resources"]:
        if item["name"] in out:
            raise ValueError(f"it names {item['name']!r} twice")
        out[item["name"]] = (item["algorithm"], item["digest"])
    return out


def _hashing(statement: Statement, *, whole_file: bool) -> Any:
    """A hashing configuration of model_signing whose files are the archive's entries."""
    hashing, manifest = _library("model_signing.hashing"), _library("model_signing.manifest")
    engine = _library("model_signing._hashing.hashing")

    class Entries(hashing.Config):  # type: ignore[misc, name-defined]
        def hash(self, model_path: Any, *, files_to_hash: Any = None) -> Any:
            # The place of a signature inside the archive is left out, also by a reader of the unpacked archive.
            kind = manifest.SerializationType.from_args(
                {
                    "method": "files",
                    "hash_type": "sha256",
                    "allow_symlinks": False,
                    "ignore_paths": [f"{statement.root}/{SIGNATURE}"],
                }
            )
            items = {_WHOLE_FILE: statement.file()} if whole_file else statement.entries
            return manifest.Manifest(
                statement.root,
                [kind.new_item(name, engine.Digest("sha256", bytes.fromhex(value))) for name, value in items.items()],
                kind,
            )

    return Entries()


def _check_validity(bundle: bytes) -> None:
    x509 = _library("cryptography.x509")
    now = datetime.datetime.now(datetime.timezone.utc)
    material = json.loads(bundle)["verificationMaterial"]
    for item in material["x509CertificateChain"]["certificates"]:
        certificate = x509.load_der_x509_certificate(base64.b64decode(item["rawBytes"]))
        first, last = certificate.not_valid_before_utc, certificate.not_valid_after_utc
        if not first <= now <= last:
            raise ValueError(
                f"the certificate {certificate.subject.rfc4514_string()} is valid from {first:%Y-%m-%d} to "
                f"{last:%Y-%m-%d}: sign again, or allow expired certificates (allow_expired, --allow-expired)"
            )


@contextlib.contextmanager
def _as_file(data: bytes) -> Iterator[str]:
    """A path that has these bytes, without a file system that can be written."""
    descriptor = os.memfd_create("untorch-signature", os.MFD_CLOEXEC)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        yield f"/proc/self/fd/{descriptor}"


@contextlib.contextmanager
def _reasons(what: str) -> Iterator[None]:
    """Every failure in here becomes an UntrustedError: the libraries raise a dozen classes."""
    try:
        yield
    except (UnsupportedError, UntrustedError):
        raise
    except Exception as error:
        raise UntrustedError(f"{what}: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    name = type(error).__name__
    if name == "InvalidSignature":  # of cryptography; it has no text
        return "the signature is not by it"
    if isinstance(error, KeyError | AttributeError | TypeError):
        return f"the bundle is not of this kind, or damaged ({name}: {error})"
    return " ".join(str(error).split()) or name
