"""Compares a file with a trust policy."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from untorch import _core
from untorch.runtime.errors import ArgumentTypeError, InvalidArgumentError, UntrustedError, file_error
from untorch.trust import bundle
from untorch.trust.digests import Digests, digests_of
from untorch.trust.ownership import check_ownership, ownership_problem
from untorch.trust.policy import ENVIRONMENT, TrustPolicy, read_policy

__all__ = ["Requirement", "Subject", "admit", "check_policy", "policies_of", "read_signature", "require"]

_MAX_SIGNATURE = 64 << 20


@dataclass(frozen=True)
class Requirement:
    """A policy and who asked for it, for messages."""

    source: str
    policy: TrustPolicy
    check_owners: bool = True  # of key and certificate files


def policies_of(trust: TrustPolicy | str | os.PathLike[str] | None) -> list[Requirement]:
    """The policies that a load has to meet, all of them: that of the environment, and the call's own.

    Raises:
        ArgumentTypeError: ``trust`` is neither a policy nor a path.
        InvalidFileError: A policy's file cannot be read.
        UntrustedError: Others may write to a policy's file.
    """
    out = []
    if (path := os.environ.get(ENVIRONMENT)) is not None:
        if not path:
            raise InvalidArgumentError(
                f"{ENVIRONMENT} is empty, expected the path of a policy file: unset it if every file may be loaded"
            )
        out.append(Requirement(f"{ENVIRONMENT}={path}", read_policy(path)))
    if isinstance(trust, TrustPolicy):
        out.append(Requirement("trust", trust))
    elif isinstance(trust, str | os.PathLike):
        out.append(Requirement(f"trust={os.fspath(trust)!r}", read_policy(trust)))
    elif trust is not None:
        raise ArgumentTypeError(f"load: trust: expected a TrustPolicy or the path of a policy file, got {trust!r}")
    return out


@dataclass
class Subject:
    """The file that is checked: an open archive and its name.

    ``signature``: a bundle beside the file, to be looked at instead of ``<path>.sig``.
    """

    archive: _core.Archive
    path: str
    signature: str | None = None
    _digests: Digests | None = field(default=None, repr=False)

    @property
    def identity(self) -> tuple[int, int] | None:
        """Device and inode of the file that was opened; None for contents in memory."""
        parts = self.archive.identity.split(":")
        return (int(parts[0]), int(parts[1])) if len(parts) == 4 and parts[1].isdecimal() else None

    def digests(self, *, with_file: bool = False) -> Digests:
        """The digests, computed once."""
        if self._digests is None or (with_file and self._digests.file is None):
            before = self._digests
            self._digests = digests_of(self.archive, self.path, with_file=with_file)
            if before is not None and before.entries != self._digests.entries:
                raise UntrustedError(f"{self.path} was written to while it was checked")
        return self._digests

    @property
    def known_digests(self) -> Digests | None:
        """The digests, if a rule needed them."""
        return self._digests

    def statement(self) -> bundle.Statement:
        """What a signature must be of."""
        digests = self.digests()
        return bundle.Statement(digests.entries, digests.root, lambda: self.digests(with_file=True).file or "")

    def signatures(self) -> list[tuple[str, bytes]]:
        """The bundles that there are: beside the file, and inside of it."""
        beside = self.signature if self.signature is not None else f"{self.path}.sig"
        out = []
        data = read_signature(beside, missing_ok=self.signature is None)
        if data is not None:
            out.append((beside, data))
        if self.signature is None and (inside := self.digests().signature) is not None:
            out.append((f"the signature inside {self.path}", inside))
        return out


def read_signature(path: str, *, missing_ok: bool) -> bytes | None:
    """The bytes of a bundle's file; None if there is none and that is allowed. Raises a FileOpenError."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError as error:
        if missing_ok:
            return None
        raise file_error(f"the signature {path} cannot be read: {error.strerror}", error.errno, path) from None
    except OSError as error:
        raise file_error(f"the signature {path} cannot be read: {error.strerror}", error.errno, path) from None
    with os.fdopen(descriptor, "rb") as file:
        try:
            data = file.read(_MAX_SIGNATURE + 1)
        except OSError as error:
            raise file_error(f"the signature {path} cannot be read: {error.strerror}", error.errno, path) from None
    if len(data) > _MAX_SIGNATURE:
        raise UntrustedError(f"the signature {path} has more than {_MAX_SIGNATURE} bytes")
    return data


def check_policy(subject: Subject, requirement: Requirement) -> str:
    """Which rule of the policy holds. Raises UntrustedError if none does: with what was required and what was found."""
    policy = requirement.policy
    found: list[str] = []
    for folder in policy.folders:
        problem = _folder_problem(subject, folder)
        if problem is None:
            return f"it lies in the folder {folder}"
        found.append(problem)
    if policy.hashes:
        digests = subject.digests(with_file=any(rule.startswith("sha256:") for rule in policy.hashes))
        for rule in digests.rules:
            if rule in policy.hashes:
                return f"its hash is {rule}"
        found.append(f"its hash is {' and '.join(digests.rules)}")
    if policy.keys or policy.certificates or policy.identities:
        signed, problems = _check_signatures(subject, requirement)
        if signed is not None:
            return signed
        found += problems
    raise UntrustedError(
        f"{subject.path} is not trusted by {requirement.source}: expected {policy.describe()}; "
        f"found: {'; '.join(found) or 'nothing to compare'}; nothing of it was run"
    )


def require(subject: Subject, requirements: Sequence[Requirement]) -> list[str]:
    """Checks every policy; gives the rules that held. Raises UntrustedError at the first that does not accept it."""
    return [check_policy(subject, requirement) for requirement in requirements]


def admit(archive: _core.Archive, path: str, requirements: Sequence[Requirement]) -> None:
    """Checks an archive of which only the zip directory was read, and ties it to the digests that were found.

    Libraries, manifest and descriptions are then compared with them once more when they are used: on the private copies
    that are opened and parsed. Weights in .safetensors files are compared with the manifest's digests when the program
    is made, whatever rule accepted the file. Raises UntrustedError.
    """
    subject = Subject(archive, path)
    require(subject, requirements)
    archive.trust_external()
    if (digests := subject.known_digests) is not None:
        for name, digest in digests.entries.items():
            archive.expect(name[len(digests.root) + 1 :], digest)


def _check_signatures(subject: Subject, requirement: Requirement) -> tuple[str | None, list[str]]:
    bundles = subject.signatures()
    if not bundles:
        return None, [f"no signature, neither {subject.path}.sig nor one inside of the file"]
    checks = list(_checks(subject.statement(), requirement))
    problems = []
    for where, data in bundles:
        for who, run in checks:
            try:
                run(data)
                return f"{where} is by {who}", []
            except UntrustedError as error:
                problems.append(f"{where} does not verify with {error}")
    return None, problems


def _checks(statement: bundle.Statement, requirement: Requirement) -> Iterator[tuple[str, Callable[[bytes], None]]]:
    """Each signer of the policy, and what raises UntrustedError unless a bundle is by that signer."""
    policy = requirement.policy
    for key in policy.keys:
        path = _trusted_file(key, "the key", requirement)
        yield f"the key {key}", partial(bundle.verify_key, statement=statement, key=path)
    for roots in policy.certificates:
        path = _trusted_file(roots, "the certificate", requirement)
        check = partial(bundle.verify_certificate, statement=statement, roots=path, allow_expired=policy.allow_expired)
        yield f"a certificate under {roots}", check
    config = policy.sigstore_trust_config
    if config is not None and policy.identities:
        config = _trusted_file(config, "the Sigstore trust configuration", requirement)
    for identity in policy.identities:
        check = partial(bundle.verify_identity, statement=statement, identity=identity, trust_config=config)
        yield f"{identity.identity} (issuer {identity.issuer})", check


def _trusted_file(path: str, what: str, requirement: Requirement) -> str:
    try:
        return (
            check_ownership(path, f"{what} {path}") if requirement.check_owners else os.path.realpath(path, strict=True)
        )
    except OSError as error:
        raise file_error(f"{what} {path} cannot be read: {error.strerror}", error.errno, path) from None


def _folder_problem(subject: Subject, folder: str) -> str | None:
    """Why the opened file is not one of the folder's; None if it is."""
    if subject.identity is None:
        return "it was not loaded from a file"
    try:
        real, base = os.path.realpath(subject.path, strict=True), os.path.realpath(folder, strict=True)
        if os.path.commonpath([real, base]) != base:
            return f"it lies at {real}, not in {folder}" + (f" ({base})" if base != folder else "")
        if problem := ownership_problem(real):
            return problem
        status = os.lstat(real)
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    if (status.st_dev, status.st_ino) != subject.identity:
        return f"{real} is another file now than the one that was opened"
    return None
