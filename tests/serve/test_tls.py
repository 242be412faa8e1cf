"""HTTPS and gRPC over TLS with one certificate."""

from __future__ import annotations

import datetime
import ipaddress
import pathlib
import ssl
import urllib.request

import numpy as np
import pytest

from tests.serve.process import linear, serve

x509 = pytest.importorskip("cryptography.x509")
grpcclient = pytest.importorskip("tritonclient.grpc")


def make_certificate(folder: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path]:
    """For 127.0.0.1, signed by its own key."""
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "untorch test")])
    now = datetime.datetime.now(datetime.timezone.utc)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        .sign(key, hashes.SHA256())
    )
    paths = folder / "certificate.pem", folder / "key.pem"
    paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    paths[1].write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )  # fmt: skip
    return paths


def test_tls(package: pathlib.Path, tmp_path: pathlib.Path) -> None:
    certificate, key = make_certificate(tmp_path)
    with serve(tmp_path, f"own={package}", "--tls-certificate", certificate, "--tls-key", key) as server:
        assert server.addresses["http"].startswith("https://")
        context = ssl.create_default_context(cafile=certificate)
        with urllib.request.urlopen(f"{server.addresses['http']}/v2/health/ready", context=context) as answer:
            assert answer.status == 200
        x = np.ones((1, 4), np.float32)
        one = grpcclient.InferInput("x", [1, 4], "FP32")
        one.set_data_from_numpy(x)
        with grpcclient.InferenceServerClient(server.grpc, ssl=True, root_certificates=str(certificate)) as client:
            assert client.infer("own.linear", [one]).as_numpy("output").tolist() == linear(x.tolist())
