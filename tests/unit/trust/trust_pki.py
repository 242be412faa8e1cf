"""Keys, certificate chains and a Sigstore instance of our own, made on the spot: nothing here needs a network."""

from __future__ import annotations

import base64
import datetime
import hashlib
import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID, ObjectIdentifier

NOW = datetime.datetime.now(datetime.timezone.utc).replace(microsecond=0)
DAY = datetime.timedelta(days=1)
PAYLOAD_TYPE = "application/vnd.in-toto+json"


@dataclass(frozen=True)
class KeyPair:
    key: ec.EllipticCurvePrivateKey
    private: Path
    public: Path


def key_pair(folder: Path, name: str, curve: ec.EllipticCurve | None = None, password: str | None = None) -> KeyPair:
    key = ec.generate_private_key(curve or ec.SECP256R1())
    pair = KeyPair(key, folder / f"{name}.key", folder / f"{name}.pub")
    encryption: Any = serialization.NoEncryption()
    if password is not None:
        encryption = serialization.BestAvailableEncryption(password.encode())
    pair.private.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)
    )
    pair.public.write_bytes(
        key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    return pair


def private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _spki(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.public_key().public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates, key_cert_sign=signs_certificates, crl_sign=signs_certificates,
        content_commitment=False, key_encipherment=False, data_encipherment=False, key_agreement=False,
        encipher_only=False, decipher_only=False,
    )  # fmt: skip


@dataclass(frozen=True)
class Authority:
    """A certificate that signs others."""

    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate

    @classmethod
    def make(cls, name: str, parent: Authority | None = None) -> Authority:
        key = ec.generate_private_key(ec.SECP256R1())
        issuer, signer = (parent.certificate.subject, parent.key) if parent else (_name(name), key)
        builder = (
            x509.CertificateBuilder(issuer, _name(name), key.public_key(), x509.random_serial_number())
            .not_valid_before(NOW - 3650 * DAY)
            .not_valid_after(NOW + 3650 * DAY)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
            .add_extension(_usage(signs_certificates=True), True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), False)
        )
        return cls(key, builder.sign(signer, hashes.SHA256()))

    def issue(
        self,
        key: ec.EllipticCurvePrivateKey,
        name: str,
        *,
        start: datetime.datetime = NOW - DAY,
        end: datetime.datetime = NOW + 365 * DAY,
    ) -> x509.Certificate:
        """A certificate for signing, with a key usage that says so."""
        return (
            x509.CertificateBuilder(
                self.certificate.subject, _name(name), key.public_key(), x509.random_serial_number()
            )
            .not_valid_before(start)
            .not_valid_after(end)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), True)
            .add_extension(_usage(signs_certificates=False), True)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()), False)
            .sign(self.key, hashes.SHA256())
        )


def write_pem(path: Path, *certificates: x509.Certificate) -> Path:
    path.write_bytes(b"".join(item.public_bytes(serialization.Encoding.PEM) for item in certificates))
    return path


def _b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


class Sigstore:
    """A certificate authority, a certificate transparency log and a signature log, as Sigstore's public instance has.

    ``bundle`` signs a payload for an identity, as the real services would after that identity has logged in.
    """

    def __init__(self) -> None:
        self._authority = Authority.make("authority")
        self._transparency = ec.generate_private_key(ec.SECP256R1())
        self._log = ec.generate_private_key(ec.SECP256R1())

    def write_trust_config(self, path: Path) -> Path:
        valid = {"start": (NOW - 3650 * DAY).isoformat().replace("+00:00", "Z")}

        def log(key: ec.EllipticCurvePrivateKey) -> dict[str, Any]:
            return {
                "baseUrl": "https://log.invalid",
                "hashAlgorithm": "SHA2_256",
                "publicKey": {"rawBytes": _b64(_spki(key)), "keyDetails": "PKIX_ECDSA_P256_SHA_256", "validFor": valid},
                "logId": {"keyId": _b64(hashlib.sha256(_spki(key)).digest())},
            }

        certificate = _b64(self._authority.certificate.public_bytes(serialization.Encoding.DER))
        authority = {
            "subject": {"organization": "test", "commonName": "authority"},
            "uri": "https://authority.invalid",
            "certChain": {"certificates": [{"rawBytes": certificate}]},
            "validFor": valid,
        }
        service = {"majorApiVersion": 1, "validFor": valid, "operator": "test"}
        document = {
            "mediaType": "application/vnd.dev.sigstore.clienttrustconfig.v0.1+json",
            "trustedRoot": {
                "mediaType": "application/vnd.dev.sigstore.trustedroot+json;version=0.1",
                "tlogs": [log(self._log)],
                "certificateAuthorities": [authority],
                "ctlogs": [log(self._transparency)],
                "timestampAuthorities": [],
            },
            "signingConfig": {
                "mediaType": "application/vnd.dev.sigstore.signingconfig.v0.2+json",
                "caUrls": [{"url": "https://authority.invalid", **service}],
                "oidcUrls": [{"url": "https://issuer.invalid", **service}],
                "rekorTlogUrls": [{"url": "https://log.invalid", **service}],
                "tsaUrls": [],
                "rekorTlogConfig": {"selector": "ANY"},
                "tsaConfig": {"selector": "ANY"},
            },
        }
        path.write_text(json.dumps(document))
        return path

    def bundle(self, payload: bytes, identity: str, issuer: str) -> bytes:
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = self._certificate(key, identity, issuer)
        kind = PAYLOAD_TYPE.encode()
        message = b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(payload), payload)
        signature = key.sign(message, ec.ECDSA(hashes.SHA256()))
        envelope = {
            "payload": _b64(payload),
            "payloadType": PAYLOAD_TYPE,
            "signatures": [{"sig": _b64(signature), "keyid": ""}],
        }
        document = {
            "mediaType": "application/vnd.dev.sigstore.bundle.v0.3+json",
            "verificationMaterial": {
                "certificate": {"rawBytes": _b64(certificate.public_bytes(serialization.Encoding.DER))},
                "tlogEntries": [self._entry(payload, envelope, signature, certificate)],
                "timestampVerificationData": {"rfc3161Timestamps": []},
            },
            "dsseEnvelope": envelope,
        }
        return json.dumps(document).encode()

    def _certificate(self, key: ec.EllipticCurvePrivateKey, identity: str, issuer: str) -> x509.Certificate:
        der_issuer = b"\x0c" + bytes([len(issuer)]) + issuer.encode()
        builder = (
            x509.CertificateBuilder(self._authority.certificate.subject, x509.Name([]), key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(NOW - datetime.timedelta(minutes=5))
            .not_valid_after(NOW + datetime.timedelta(minutes=5))
            .add_extension(_usage(signs_certificates=False), True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CODE_SIGNING]), False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._authority.key.public_key()), False)
            .add_extension(x509.SubjectAlternativeName([x509.RFC822Name(identity)]), True)
            .add_extension(
                x509.UnrecognizedExtension(ObjectIdentifier("1.3.6.1.4.1.57264.1.1"), issuer.encode()), False
            )
            .add_extension(x509.UnrecognizedExtension(ObjectIdentifier("1.3.6.1.4.1.57264.1.8"), der_issuer), False)
        )
        before = builder.sign(self._authority.key, hashes.SHA256()).tbs_certificate_bytes
        times = builder.add_extension(
            x509.UnrecognizedExtension(ObjectIdentifier("1.3.6.1.4.1.11129.2.4.2"), self._timestamp(before)), False
        )
        return times.sign(self._authority.key, hashes.SHA256())

    def _timestamp(self, certificate: bytes) -> bytes:
        """A signed certificate timestamp (RFC 6962, 3.2), in a list, in an octet string."""
        time = int(NOW.timestamp() * 1000)
        issuer = hashlib.sha256(_spki(self._authority.key)).digest()
        entry = issuer + len(certificate).to_bytes(3, "big") + certificate
        signed = struct.pack("!BBQH", 0, 0, time, 1) + entry + struct.pack("!H", 0)
        signature = self._transparency.sign(signed, ec.ECDSA(hashes.SHA256()))
        log = hashlib.sha256(_spki(self._transparency)).digest()
        one = struct.pack("!B32sQHBBH", 0, log, time, 0, 4, 3, len(signature)) + signature
        many = struct.pack("!HH", len(one) + 2, len(one)) + one
        return b"\x04\x81" + bytes([len(many)]) + many if len(many) > 127 else b"\x04" + bytes([len(many)]) + many

    def _entry(
        self, payload: bytes, envelope: dict[str, Any], signature: bytes, certificate: x509.Certificate
    ) -> dict[str, Any]:
        """The only entry of the log: its tree has one leaf, and no path is needed."""

        def sha256(data: bytes) -> dict[str, str]:
            return {"algorithm": "sha256", "value": hashlib.sha256(data).hexdigest()}

        pem = certificate.public_bytes(serialization.Encoding.PEM)
        body = json.dumps(
            {
                "apiVersion": "0.0.1",
                "kind": "dsse",
                "spec": {
                    "envelopeHash": sha256(json.dumps(envelope).encode()),
                    "payloadHash": sha256(payload),
                    "signatures": [{"signature": _b64(signature), "verifier": _b64(pem)}],
                },
            }
        ).encode()
        log = hashlib.sha256(_spki(self._log)).digest()
        time = int(NOW.timestamp())
        promise = json.dumps(
            {"body": _b64(body), "integratedTime": time, "logID": log.hex(), "logIndex": 0},
            separators=(",", ":"),
        ).encode()
        root = hashlib.sha256(b"\0" + body).digest()
        note = f"log.invalid\n1\n{_b64(root)}\n"
        note_signature = log[:4] + self._log.sign(note.encode(), ec.ECDSA(hashes.SHA256()))
        return {
            "logIndex": "0",
            "logId": {"keyId": _b64(log)},
            "kindVersion": {"kind": "dsse", "version": "0.0.1"},
            "integratedTime": str(time),
            "inclusionPromise": {"signedEntryTimestamp": _b64(self._log.sign(promise, ec.ECDSA(hashes.SHA256())))},
            "inclusionProof": {
                "logIndex": "0",
                "rootHash": _b64(root),
                "treeSize": "1",
                "hashes": [],
                "checkpoint": {"envelope": f"{note}\n\u2014 log.invalid {_b64(note_signature)}\n"},
            },
            "canonicalizedBody": _b64(body),
        }
