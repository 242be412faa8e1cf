#!/usr/bin/env bash
# Installs untorch's wheel in another root directory, without an index, and runs a package there: as root,
#
#   scripts/check_root.sh ROOT PYTHON WHEELS MODEL.pt2 --input random
#
# ROOT: a system's files, with glibc 2.28 for example and no compiler. PYTHON: the path in it of a CPython that has pip.
# WHEELS: a folder with the wheels of untorch, numpy, typer, rich and what they need (pip download). The rest are
# options of `untorch run`.
set -euo pipefail
root=$(realpath "$1") python=$2 wheels=$3 model=$4
shift 4
work=$(mktemp -d "$root/tmp/untorch.XXXXXX")
trap 'rm -rf "$work"' EXIT
inside=${work#"$root"}
mkdir "$work/wheels"
cp "$wheels"/*.whl "$work/wheels"
cp "$model" "$work/model.pt2"

in_root() {
  # Model libraries are opened from memory files, by their names in /proc.
  unshare --mount sh -c 'mount -t proc proc "$0/proc" && exec chroot "$@"' "$root" "$root" \
    /usr/bin/env -i PATH=/usr/bin:/bin HOME="$inside" PYTHONPATH="$inside/site" PYTHONDONTWRITEBYTECODE=1 "$@"
}

in_root "$python" -m pip install --quiet --root-user-action ignore --no-index --find-links "$inside/wheels" --target "$inside/site" 'untorch[cli]'
in_root "$python" -c "
import os, shutil, sys
assert not any(map(shutil.which, ('cc', 'gcc', 'g++', 'clang'))), 'there is a compiler in the root'
print(os.confstr('CS_GNU_LIBC_VERSION'), 'Python', sys.version.split()[0])"
in_root "$python" -m untorch doctor
in_root "$python" -m untorch run "$inside/model.pt2" "$@"
