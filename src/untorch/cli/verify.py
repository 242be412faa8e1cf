"""``untorch verify``: is a file whole, and is it signed by whom it should be. The model is neither opened nor run."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from untorch.cli.options import (
    DebugOption,
    FileArgument,
    JsonOption,
    SigstoreTrustConfigOption,
    TrustOption,
    WeightsOption,
)
from untorch.cli.output import bytes_text, emit, print_fields, seconds_text

if TYPE_CHECKING:
    from untorch.archive import ArchiveReader
    from untorch.trust.check import Requirement

__all__ = ["verify", "verify_integrity"]


def verify_integrity(archive: ArchiveReader, weights: Path | None = None) -> dict[str, Any]:
    """Compares every entry with its digest, and weights in .safetensors files; what was compared.

    Raises InvalidFileError; FileMissingError for a .safetensors file that is not there.
    """
    start = time.perf_counter()
    archive.verify()
    archive.verify_external(weights)
    own = archive.has_manifest()
    external = [weight for weight in archive.manifest()["weights"] if "external" in weight] if own else []
    return {
        "format": "untorch" if own else "stock",
        "algorithm": "SHA-256" if own else "CRC-32",
        "entries": len(archive.entries),
        "bytes": sum(entry.size for entry in archive),
        "external_weights": len(external),
        "external_bytes": sum(weight["nbytes"] for weight in external),
        "seconds": time.perf_counter() - start,
    }


def verify(
    file: FileArgument,
    key: Annotated[
        list[Path] | None,
        typer.Option("--key", metavar="PEM", help="The signature must be by this public key, repeatable."),
    ] = None,
    certificate: Annotated[
        list[Path] | None,
        typer.Option(
            "--certificate", metavar="PEM", help="The signature must be by a certificate under this root, repeatable."
        ),
    ] = None,
    identity: Annotated[
        str | None,
        typer.Option(
            "--identity", metavar="NAME", help="The signature must be by this Sigstore identity; with --issuer."
        ),
    ] = None,
    issuer: Annotated[
        str | None, typer.Option("--issuer", metavar="URL", help="The OpenID Connect issuer of the identity.")
    ] = None,
    sigstore_trust_config: SigstoreTrustConfigOption = None,
    weights: WeightsOption = None,
    trust: TrustOption = None,
    signature: Annotated[
        Path | None,
        typer.Option("--signature", metavar="FILE", help="The signature. Default: FILE.sig, or the one inside."),
    ] = None,
    allow_expired: Annotated[
        bool, typer.Option("--allow-expired", help="Accept certificates whose validity is over.")
    ] = False,
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Compare every entry of a file with its SHA-256; in a stock package with its CRC-32.

    Weights that it takes from .safetensors files are compared as well.

    The digests are the file's own: they find damage, not an exchange of the whole file. With --key, --certificate,
    --identity or --trust also check who signed it. That needs pip install 'untorch[sign]', and no network.
    """
    if (identity is None) != (issuer is None):
        raise typer.BadParameter("expected --identity and --issuer together")

    from untorch.archive import ArchiveReader
    from untorch.progress import large_file
    from untorch.trust.check import Requirement, Subject, require
    from untorch.trust.policy import Identity, TrustPolicy, read_policy

    requirements: list[Requirement] = []
    if key or certificate or identity is not None:
        options = TrustPolicy(
            keys=tuple(str(path) for path in key or ()),
            certificates=tuple(str(path) for path in certificate or ()),
            identities=() if identity is None or issuer is None else (Identity(identity, issuer),),
            sigstore_trust_config=None if sigstore_trust_config is None else str(sigstore_trust_config),
            allow_expired=allow_expired,
        )
        # The caller names the files here and now: who may write to them is his concern.
        requirements.append(Requirement("the command line", options, check_owners=False))
    elif signature is not None and trust is None:
        raise typer.BadParameter("--signature: expected also --key, --certificate, --identity or --trust")
    if trust is not None:
        requirements.append(Requirement(str(trust), read_policy(trust)))
    with large_file("verifying", file), ArchiveReader(file) as archive:
        checked = verify_integrity(archive, weights)
        subject = Subject(archive.core, str(file), None if signature is None else str(signature))
        digests = subject.digests(with_file=True)
        accepted = require(subject, requirements)
    document = {
        "file": str(file),
        **checked,
        "hashes": list(digests.rules),
        "signed_inside": digests.signature is not None,
        "trusted": accepted if requirements else None,
    }
    text = (
        f"{checked['entries']} entries, {bytes_text(checked['bytes'])} by {checked['algorithm']} in "
        f"{seconds_text(checked['seconds'])}: all right"
    )
    if checked["external_weights"]:
        size = bytes_text(checked["external_bytes"])
        text += f", with {checked['external_weights']} weights ({size}) in .safetensors files"
    fields = [
        ("file", str(file)),
        ("checked", text),
        ("hash of the file", digests.rules[0]),
        ("hash of its entries", digests.rules[1]),
        (
            "trust",
            "; ".join(accepted) if requirements else "not asked for: --key, --certificate, --identity or --trust",
        ),
    ]
    emit(document, json, lambda console: print_fields(console, fields))
