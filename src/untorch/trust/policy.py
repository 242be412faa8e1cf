"""TrustPolicy: which files may be loaded, as a value, and as a JSON or TOML file."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from untorch.runtime.errors import ArgumentTypeError, InvalidArgumentError, InvalidFileError, file_error
from untorch.trust.ownership import check_ownership

__all__ = ["ENVIRONMENT", "Identity", "TrustPolicy", "read_policy"]

ENVIRONMENT = "UNTORCH_TRUST"
_HASH = re.compile(r"(sha256|entries-sha256):[0-9a-f]{64}")
_MAX_POLICY = 1 << 20
_PATHS = ("keys", "certificates", "folders")


@dataclass(frozen=True)
class Identity:
    """A Sigstore identity: an e-mail address or the URI of a workflow, and the OpenID Connect issuer that vouches."""

    identity: str
    issuer: str

    def __post_init__(self) -> None:
        for field in ("identity", "issuer"):
            value = getattr(self, field)
            if not isinstance(value, str) or not value:
                raise InvalidArgumentError(f"Identity: {field}: expected a string that is not empty, got {value!r}")


@dataclass(frozen=True)
class TrustPolicy:
    """Which files ``untorch.load`` accepts. A file is trusted if one rule of any kind holds; with no rule, none is.

    Relative paths are made absolute when the policy is made.

    Args:
        hashes: ``"sha256:…"`` of a whole file, as ``sha256sum`` prints it, or ``"entries-sha256:…"`` of its entries, as
            ``untorch verify`` prints it: that one stays the same when a signature is added to the file.
        keys: PEM files of elliptic curve public keys. The file has a signature by one of them.
        certificates: PEM files of root certificates. The file has a signature by a certificate under one of them.
        identities: The file has a Sigstore bundle of one of them.
        folders: The file lies in one of these folders or below. It and every folder above it belong to this user or to
            root, and nobody else may write to them.
        sigstore_trust_config: A client trust configuration (JSON) for ``identities``; None: the public instance.
        allow_expired: Accept certificates whose validity is over. The bundle does not prove when it was made.

    Raises:
        ArgumentTypeError: A field has the wrong type. Also a TypeError.
        InvalidArgumentError: A hash has the wrong form. Also a ValueError.
    """

    hashes: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    certificates: tuple[str, ...] = ()
    identities: tuple[Identity, ...] = ()
    folders: tuple[str, ...] = ()
    sigstore_trust_config: str | None = None
    allow_expired: bool = False

    def __post_init__(self) -> None:
        for name in ("hashes", *_PATHS, "identities"):
            values = getattr(self, name)
            if not isinstance(values, tuple | list):
                raise ArgumentTypeError(f"TrustPolicy: {name}: expected a tuple, got {values!r}")
            convert = _path if name in _PATHS else _hash if name == "hashes" else _identity
            object.__setattr__(self, name, tuple(convert(name, value) for value in values))
        if self.sigstore_trust_config is not None:
            value = _path("sigstore_trust_config", self.sigstore_trust_config)
            object.__setattr__(self, "sigstore_trust_config", value)
        if not isinstance(self.allow_expired, bool):
            raise ArgumentTypeError(f"TrustPolicy: allow_expired: expected True or False, got {self.allow_expired!r}")

    def describe(self) -> str:
        """The rules in one line, for messages."""
        parts = [f"the hash {value}" for value in self.hashes]
        parts += [f"a signature by the key {value}" for value in self.keys]
        parts += [f"a signature by a certificate under {value}" for value in self.certificates]
        parts += [f"a Sigstore signature of {item.identity} (issuer {item.issuer})" for item in self.identities]
        parts += [f"a place in the folder {value}" for value in self.folders]
        if len(parts) > 4:
            parts = [*parts[:3], f"{len(parts) - 3} more"]
        return " or ".join(parts) or "nothing: the policy has no rule"


def _hash(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ArgumentTypeError(f"TrustPolicy: {name}: expected strings, got {value!r}")
    if _HASH.fullmatch(value.lower()) is None:
        raise InvalidArgumentError(
            f"TrustPolicy: {name}: expected 'sha256:' (of the file) or 'entries-sha256:' (of its entries) and 64 "
            f"hexadecimal digits, got {value!r}: `untorch verify FILE` prints both"
        )
    return value.lower()


def _path(name: str, value: Any) -> str:
    if not isinstance(value, str | os.PathLike):
        raise ArgumentTypeError(f"TrustPolicy: {name}: expected paths, got {value!r}")
    path = os.fspath(value)
    if not isinstance(path, str) or not path or "\0" in path:
        raise InvalidArgumentError(f"TrustPolicy: {name}: expected a path, got {path!r}")
    return os.path.abspath(path)


def _identity(name: str, value: Any) -> Identity:
    if not isinstance(value, Identity):
        raise ArgumentTypeError(f"TrustPolicy: {name}: expected Identity objects, got {value!r}")
    return value


def read_policy(path: str | os.PathLike[str]) -> TrustPolicy:
    """A policy from a file: TOML if its name ends with ``.toml`` (Python 3.11 and newer), else JSON.

    The fields are those of ``TrustPolicy``; an identity is an object with ``identity`` and ``issuer``. Relative paths
    are relative to the file's folder.

    Raises:
        InvalidFileError: It cannot be read, or says something that is not known.
        UntrustedError: Somebody else than this user and root may write to it.
    """
    name = os.fspath(path)
    try:
        with open(check_ownership(name, f"the trust policy {name}"), "rb") as file:
            data = file.read(_MAX_POLICY + 1)
    except OSError as error:
        text = f"the trust policy {name} cannot be read: {error.strerror}"
        raise file_error(text, error.errno, name) from None
    if len(data) > _MAX_POLICY:
        raise InvalidFileError(f"the trust policy {name} is larger than {_MAX_POLICY} bytes")
    document = _parse(name, data)
    try:
        return _policy(document, os.path.dirname(os.path.realpath(name)))
    except InvalidArgumentError as error:
        raise InvalidFileError(f"the trust policy {name}: {error}") from None


def _parse(name: str, data: bytes) -> Any:
    try:
        text = data.decode()
        if not name.endswith(".toml"):
            return json.loads(text, object_pairs_hook=_unique)
        try:
            import tomllib
        except ImportError:
            raise InvalidFileError(
                f"the trust policy {name} is TOML, which needs Python 3.11 or newer: write it as JSON"
            ) from None
        return tomllib.loads(text)
    except InvalidFileError:
        raise
    except (ValueError, RecursionError) as error:
        kind = "TOML" if name.endswith(".toml") else "JSON"
        raise InvalidFileError(f"the trust policy {name} is not valid {kind}: {error}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ValueError("a name occurs twice in one object")
    return out


def _policy(document: Any, folder: str) -> TrustPolicy:
    known = [field.name for field in dataclasses.fields(TrustPolicy)]
    _check_fields(document, known, "the policy")
    values: dict[str, Any] = dict(document)
    for name in _PATHS:
        if isinstance(paths := values.get(name), list):
            values[name] = [os.path.join(folder, value) if isinstance(value, str) else value for value in paths]
    if isinstance(config := values.get("sigstore_trust_config"), str):
        values["sigstore_trust_config"] = os.path.join(folder, config)
    if isinstance(identities := values.get("identities"), list):
        values["identities"] = [_read_identity(item) for item in identities]
    return TrustPolicy(**values)


def _read_identity(item: Any) -> Identity:
    _check_fields(item, ["identity", "issuer"], "an identity")
    if len(item) != 2:
        raise InvalidArgumentError(f"an identity: expected both identity and issuer, got {item!r}")
    return Identity(**item)


def _check_fields(document: Any, known: list[str], what: str) -> None:
    if not isinstance(document, Mapping):
        raise InvalidArgumentError(f"{what}: expected an object, got {document!r:.80}")
    for name in document:
        if name not in known:
            import difflib  # not at every start of a process

            near = difflib.get_close_matches(str(name), known, 1)
            hint = f", did you mean {near[0]!r}?" if near else f": expected {', '.join(known)}"
            raise InvalidArgumentError(f"{what}: unknown field {name!r}{hint}")
