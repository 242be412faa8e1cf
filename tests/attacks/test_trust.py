"""Trust policies against files that were changed, exchanged or made by somebody else: nothing of them is mapped."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import pathlib
import struct
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import craft
import numpy
import pytest

import untorch
from untorch import TrustPolicy
from untorch.archive import ArchiveReader
from untorch.trust import check
from untorch.trust.bundle import Signer
from untorch.trust.digests import SIGNATURE
from untorch.trust.signing import sign

X = numpy.arange(4, dtype=numpy.float32)
HONEST = [1, 4, 7, 10]  # 2 * x + w
NOTHING = "; nothing of it was run"


def mapped() -> list[str]:
    """What of model libraries the process has mapped."""
    return [line for line in pathlib.Path("/proc/self/maps").read_text().splitlines() if "untorch-model" in line]


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UNTORCH_TRUST", raising=False)


@pytest.fixture
def model(package: craft.Package, tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "model.pt2"
    path.write_bytes(package.bytes())
    return path


def hash_of(path: pathlib.Path) -> str:
    return f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"


def refusal(path: pathlib.Path, trust: Any) -> str:
    """The text of the refusal; nothing more of the file is mapped than before."""
    before = mapped()
    with pytest.raises(untorch.UntrustedError) as caught:
        untorch.load(path, trust=trust)
    assert mapped() == before
    return str(caught.value)


def works(path: pathlib.Path, trust: Any) -> None:
    before = mapped()
    with untorch.load(path, trust=trust) as program:
        assert mapped() == before
        assert program.forward(X).tolist() == HONEST


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Any:
    pytest.importorskip("model_signing")
    return pytest.importorskip("trust_pki").key_pair(tmp_path_factory.mktemp("keys"), "team")


def changed(package: craft.Package) -> dict[str, Callable[[], bytes]]:
    """Files with right checksums that are not what was signed."""

    def with_(**fields: Any) -> bytes:
        other = copy.deepcopy(package)
        for name, value in fields.items():
            setattr(other, name, value)
        return other.bytes()

    def manifest(path: list[Any], value: Any) -> bytes:
        return package.with_manifest(path, value).bytes()

    def first(name: str | None) -> bytes:
        """The first entry, archive_format, removed or renamed."""
        entries = package.entries()
        if name is None:
            del entries[0]
        else:
            entries[0].name = name
        return craft.zip_bytes(entries)

    def top() -> bytes:
        entries = package.entries()
        for entry in entries:
            entry.name = f"mode1{str(entry.name)[5:]}"
        return craft.zip_bytes(entries)

    library = bytearray(package.library)
    library[-1] ^= 1
    return {
        "library": lambda: with_(library=bytes(library)),
        "weight": lambda: with_(weight=struct.pack("<4f", 9, 9, 9, 9)),
        "manifest": lambda: manifest(["methods", "forward", "constants", 0, "mutated"], True),
        "entry added": lambda: with_(extra=[craft.Lie("model/data/note", b"x"), *package.extra]),
        "entry removed": lambda: first(None),
        "entry renamed": lambda: first("model/archive_forma7"),
        "top folder renamed": top,
    }


CHANGES = [
    "library", "weight", "manifest", "entry added", "entry removed", "entry renamed", "top folder renamed"
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("inside", [False, True])
def test_a_changed_file_is_not_what_was_signed(
    model: pathlib.Path, package: craft.Package, keys: Any, change: str, inside: bool
) -> None:
    sign(model, Signer(key=str(keys.private)))
    policy = TrustPolicy(keys=(str(keys.public),))
    works(model, policy)
    signature = pathlib.Path(f"{model}.sig")
    if inside:
        package = copy.deepcopy(package)
        package.extra = [craft.Lie(f"model/{SIGNATURE}", signature.read_bytes())]
        signature.unlink()
        model.write_bytes(package.bytes())
        works(model, policy)
    model.write_bytes(changed(package)[change]())
    text = refusal(model, policy)
    assert text.startswith(f"{model} is not trusted by trust: expected a signature by the key {keys.public}; found: ")
    assert text.endswith(NOTHING)


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_file_has_another_hash(model: pathlib.Path, package: craft.Package, change: str) -> None:
    with ArchiveReader(model) as reader:
        entries = check.Subject(reader.core, str(model)).digests().rules[0]
    policies = [TrustPolicy(hashes=(hash_of(model),)), TrustPolicy(hashes=(entries,))]
    for policy in policies:
        works(model, policy)
    model.write_bytes(changed(package)[change]())
    for policy in policies:
        assert f"expected the hash {policy.hashes[0]}; found: its hash is " in refusal(model, policy)


def test_a_signature_of_another_file(model: pathlib.Path, package: craft.Package, keys: Any) -> None:
    other = model.with_name("other.pt2")
    other.write_bytes(changed(package)["weight"]())
    sign(other, Signer(key=str(keys.private)))
    pathlib.Path(f"{other}.sig").rename(f"{model}.sig")
    text = refusal(model, TrustPolicy(keys=(str(keys.public),)))
    assert "entries were changed after they had been signed: model/data/weights/weight_0" in text


def test_somebody_elses_signature(model: pathlib.Path, keys: Any, tmp_path: pathlib.Path) -> None:
    import trust_pki

    sign(model, Signer(key=str(trust_pki.key_pair(tmp_path, "eve").private)))
    assert "Key mismatch" in refusal(model, TrustPolicy(keys=(str(keys.public),)))


def test_a_key_that_others_may_write(model: pathlib.Path, keys: Any, tmp_path: pathlib.Path) -> None:
    sign(model, Signer(key=str(keys.private)))
    key = tmp_path / "loose.pub"
    key.write_bytes(keys.public.read_bytes())
    works(model, TrustPolicy(keys=(str(key),)))
    key.chmod(0o666)
    assert f"the key {key} is not used: {key} may be written by others" in refusal(model, TrustPolicy(keys=(str(key),)))
    key.unlink()
    with pytest.raises(FileNotFoundError, match=rf"the key {key} cannot be read: No such file"):
        untorch.load(model, trust=TrustPolicy(keys=(str(key),)))


def test_an_empty_policy_trusts_nothing(model: pathlib.Path) -> None:
    assert "expected nothing: the policy has no rule; found: nothing to compare" in refusal(model, TrustPolicy())


def test_both_policies_must_hold(model: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call's policy narrows that of the environment and cannot widen it."""
    good, bad = TrustPolicy(hashes=(hash_of(model),)), TrustPolicy(hashes=("sha256:" + "0" * 64,))
    path = tmp_path / "policy.json"
    monkeypatch.setenv("UNTORCH_TRUST", str(path))
    path.write_text(json.dumps({"hashes": good.hashes}))
    works(model, None)
    works(model, good)
    works(model, path)
    assert "is not trusted by trust: " in refusal(model, bad)
    path.write_text(json.dumps({"hashes": bad.hashes}))
    for trust in (None, good):
        assert f"is not trusted by UNTORCH_TRUST={path}: expected the hash " in refusal(model, trust)


def test_a_policy_that_cannot_be_read_refuses_everything(
    model: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNTORCH_TRUST", "")
    with pytest.raises(
        untorch.InvalidArgumentError, match="UNTORCH_TRUST is empty, expected the path of a policy file"
    ):
        untorch.load(model)
    monkeypatch.setenv("UNTORCH_TRUST", str(tmp_path / "nope.json"))
    with pytest.raises(FileNotFoundError, match="the trust policy"):
        untorch.load(model)
    monkeypatch.delenv("UNTORCH_TRUST")
    with pytest.raises(TypeError, match="load: trust: expected a TrustPolicy or the path of a policy file, got 1"):
        untorch.load(model, trust=1)  # type: ignore[arg-type]


def test_folders(model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    folder, outside = tmp_path / "trusted", tmp_path / "outside"
    for path in (folder, outside, folder / "sub"):
        path.mkdir()
    inner = folder / "sub" / "model.pt2"
    inner.write_bytes(model.read_bytes())
    policy = TrustPolicy(folders=(str(folder),))
    works(inner, policy)
    (outside / "link.pt2").symlink_to(inner)
    works(outside / "link.pt2", policy)

    assert f"it lies at {model}, not in {folder}" in refusal(model, policy)
    (tmp_path / "trusted-not").mkdir()
    near = tmp_path / "trusted-not" / "model.pt2"  # a name that begins in the same way
    near.write_bytes(model.read_bytes())
    assert f"it lies at {near}, not in {folder}" in refusal(near, policy)
    (folder / "link.pt2").symlink_to(model)  # leads out of the folder
    assert f"it lies at {model}, not in {folder}" in refusal(folder / "link.pt2", policy)
    (folder / "out").symlink_to(outside)
    (outside / "model.pt2").write_bytes(model.read_bytes())
    assert "not in" in refusal(folder / "out" / "model.pt2", policy)
    # A trusted folder that is itself a link means where the link leads.
    (tmp_path / "alias").symlink_to(folder)
    works(inner, TrustPolicy(folders=(str(tmp_path / "alias"),)))
    missing = refusal(model, TrustPolicy(folders=(str(tmp_path / "nope"),)))
    assert f"{tmp_path / 'nope'}: No such file or directory" in missing


def test_folders_that_others_may_write(model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    policy = TrustPolicy(folders=(str(tmp_path),))
    folder = tmp_path / "sub"
    folder.mkdir()
    path = folder / "model.pt2"
    path.write_bytes(model.read_bytes())
    for target, mode in ((path, 0o620), (path, 0o602), (folder, 0o770), (folder, 0o703)):
        before = target.stat().st_mode & 0o7777
        target.chmod(mode)
        assert f"{target} may be written by others (mode {mode:04o}): chmod go-w" in refusal(path, policy)
        target.chmod(before)
    works(path, policy)
    if os.geteuid() == 0:
        os.chown(path, 12345, -1)
        assert f"{path} belongs to the user 12345: chown it" in refusal(path, policy)


def test_a_file_that_is_exchanged_while_it_is_checked(
    model: pathlib.Path, package: craft.Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is checked is what was opened, not what lies at the path."""
    evil = model.with_name("evil.pt2")
    evil.write_bytes(changed(package)["weight"]())
    honest = hash_of(model)

    def exchange(*arguments: Any) -> Any:
        os.replace(evil, model)
        return require(*arguments)

    require = check.require
    monkeypatch.setattr(check, "require", exchange)
    works(model, TrustPolicy(hashes=(honest,)))  # the opened file is the honest one
    # The other way round: the opened file is not the one of the folder.
    evil.write_bytes(package.bytes())
    text = refusal(model, TrustPolicy(folders=(str(model.parent),)))
    assert f"{model} is another file now than the one that was opened" in text


@pytest.mark.parametrize("rule", ["hash", "key"])
def test_a_library_that_is_overwritten_before_the_first_call(
    model: pathlib.Path, package: craft.Package, keys: Any, rule: str
) -> None:
    """In place, in the same file, which stays mapped: the copy that would be executed is compared again."""
    sign(model, Signer(key=str(keys.private)))
    policy = TrustPolicy(hashes=(hash_of(model),)) if rule == "hash" else TrustPolicy(keys=(str(keys.public),))
    at = model.read_bytes().index(package.library)
    with untorch.load(model, trust=policy) as program:
        with open(model, "r+b") as file:
            file.seek(at + len(package.library) - 1)
            file.write(bytes([package.library[-1] ^ 1]))
        before = mapped()
        for _ in range(2):
            with pytest.raises(untorch.UntrustedError) as caught:
                program.forward(X)
            assert str(caught.value) == (
                f"{model}: the bytes of entry '{craft.LIBRARY}' are not those that a trust policy accepted at load: the "
                "file was written to since; they were not used: write a new file and rename it instead"
            )
        assert mapped() == before


def test_a_manifest_that_is_overwritten_after_the_check(model: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The manifest is read after the policy has accepted the file, and compared with what it has accepted."""
    honest = model.read_bytes()
    evil = honest.replace(b'"2.13.0"', b'"2.14.0"')
    assert evil != honest

    def overwrite(*arguments: Any) -> None:
        admit(*arguments)
        with open(model, "r+b") as file:
            file.write(evil)

    admit = check.admit
    monkeypatch.setattr(check, "admit", overwrite)
    text = refusal(model, TrustPolicy(hashes=(f"sha256:{hashlib.sha256(honest).hexdigest()}",)))
    assert text.startswith(
        f"{model}: the bytes of entry 'extra/untorch.json' are not those that a trust policy accepted"
    )


def test_contents_in_memory(model: pathlib.Path, keys: Any) -> None:
    """They have no place, so no folder; hashes and a signature inside work."""
    sign(model, Signer(key=str(keys.private)), inside=True)
    data = model.read_bytes()
    for policy in (TrustPolicy(hashes=(hash_of(model),)), TrustPolicy(keys=(str(keys.public),))):
        with untorch.load(data, trust=policy) as program:
            assert program.forward(X).tolist() == HONEST
    with pytest.raises(untorch.UntrustedError, match="it was not loaded from a file"):
        untorch.load(data, trust=TrustPolicy(folders=(str(model.parent),)))


def test_verify_finds_a_signed_file_whole(model: pathlib.Path, keys: Any) -> None:
    """The manifest's digests say nothing of signatures, which are made later."""
    sign(model, Signer(key=str(keys.private)), inside=True)
    with untorch.load(model, verify=True, copy=True, trust=TrustPolicy(keys=(str(keys.public),))) as program:
        assert program.forward(X).tolist() == HONEST


def test_a_refused_file_ran_nothing_in_a_process_of_its_own(model: pathlib.Path) -> None:
    """With UNTORCH_TRUST in the environment of a program that knows nothing of it."""
    policy = model.with_name("policy.json")
    policy.write_text(json.dumps({"hashes": ["sha256:" + "0" * 64]}))
    code = (
        "import sys, untorch\n"
        "try:\n untorch.load(sys.argv[1])\n"
        "except untorch.UntrustedError: pass\n"
        "else: sys.exit('loaded')\n"
        "sys.exit('mapped' if 'untorch-model' in open('/proc/self/maps').read() else 0)\n"
    )
    environment = {**os.environ, "UNTORCH_TRUST": str(policy)}
    done = subprocess.run([sys.executable, "-c", code, str(model)], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
