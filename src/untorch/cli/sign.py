"""``untorch sign``: signs a file in the OpenSSF Model Signing format."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from untorch.cli.options import (
    DebugOption,
    FileArgument,
    JsonOption,
    OutputOption,
    SigstoreTrustConfigOption,
)
from untorch.cli.output import emit, print_fields

__all__ = ["sign"]

_PASSWORD = "UNTORCH_KEY_PASSWORD"


def sign(
    file: FileArgument,
    private_key: Annotated[
        Path | None,
        typer.Option("--private-key", metavar="PEM", help="An elliptic curve private key: P-256, P-384 or P-521."),
    ] = None,
    signing_certificate: Annotated[
        Path | None, typer.Option("--signing-certificate", metavar="PEM", help="The certificate of the private key.")
    ] = None,
    certificate_chain: Annotated[
        list[Path] | None,
        typer.Option(
            "--certificate-chain", metavar="PEM", help="Certificates between that one and the root, repeatable."
        ),
    ] = None,
    sigstore: Annotated[
        bool, typer.Option("--sigstore", help="Sign with Sigstore, by an OpenID Connect identity. Needs a network.")
    ] = False,
    identity_token: Annotated[
        str | None,
        typer.Option("--identity-token", metavar="TOKEN", help="The identity's token; else a browser opens."),
    ] = None,
    ambient: Annotated[
        bool, typer.Option("--ambient", help="Take the token of the workflow that runs this (GitHub Actions, …).")
    ] = False,
    sigstore_trust_config: SigstoreTrustConfigOption = None,
    inside: Annotated[
        bool, typer.Option("--inside", help="Put the signature into the file instead of beside it.")
    ] = False,
    output: OutputOption = None,
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Sign the list of a file's entries: with --private-key, also with its certificate, or with --sigstore.

    The signature goes to FILE.sig, in the format of OpenSSF Model Signing. An encrypted key's password is taken from
    UNTORCH_KEY_PASSWORD. Needs pip install 'untorch[sign]'.
    """
    if sigstore == (private_key is not None):
        raise typer.BadParameter("expected --private-key or --sigstore, one of them")
    if inside and output is not None:
        raise typer.BadParameter("expected --inside or --output, not both")
    if not sigstore and (identity_token is not None or ambient or sigstore_trust_config is not None):
        raise typer.BadParameter("--identity-token, --ambient and --sigstore-trust-config are for --sigstore")

    from untorch.archive import ArchiveReader
    from untorch.trust.bundle import Signer
    from untorch.trust.digests import digests_of
    from untorch.trust.signing import sign as sign_file

    signer = Signer(
        key=None if private_key is None else str(private_key),
        password=os.environ.get(_PASSWORD) if signing_certificate is None else None,
        certificate=None if signing_certificate is None else str(signing_certificate),
        chain=tuple(str(path) for path in certificate_chain or ()),
        identity_token=identity_token,
        ambient=ambient,
        trust_config=None if sigstore_trust_config is None else str(sigstore_trust_config),
    )
    target = sign_file(file, signer, inside=inside, output=None if output is None else str(output))
    with ArchiveReader(file) as reader:
        digests = digests_of(reader.core, str(file), with_file=True)
    document = {
        "file": str(file),
        "signature": str(target),
        "inside": inside,
        "entries": len(digests.entries),
        "hashes": list(digests.rules),
    }
    fields = [("signature", f"{target}, of {len(digests.entries)} entries")]
    fields += [("hash of the file" if i == 0 else "hash of its entries", rule) for i, rule in enumerate(digests.rules)]
    emit(document, json, lambda console: print_fields(console, fields))
