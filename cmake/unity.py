"""Groups sources so that one compile includes several: ``unity.py FOLDER LARGEST SOURCE…`` prints the files it writes.

A compile of a group means what the compiles of its sources mean: what a source defines in its anonymous namespaces, no
other source of its group mentions, and all have the same using-directives. Definitions start in the first column, as
clang-format leaves them.

Most CUDA sources have a kThreads. There, macros give such names a number while their source is included, behind all
headers of the group, which do not see them. A name that the source also gives a member stays, and keeps others out, and
so do headers with the same local names.
"""

from __future__ import annotations

import functools
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

_NOT_CODE = re.compile(r'// (?!namespace$)[^\n]*|^ *#include[^\n]*|"(?:[^"\\\n]|\\.)*"', re.MULTILINE)
_NATIVE = Path(__file__).resolve().parents[1] / "native"
_HEADER = re.compile(r'^#include "([^"]+)"', re.MULTILINE)
_OPENING = re.compile(r"^#(?:define|include) [^\n]*", re.MULTILINE)
_DIRECTIVE = re.compile(r"^using namespace [\w:]+;", re.MULTILINE)
_LOCAL = re.compile(r"^namespace \{$(.*?)^\}  // namespace$", re.MULTILINE | re.DOTALL)
# Before the name of a definition.
_PREFIXES = re.compile(r"alignas\((?:[^()]|\([^()]*\))*\) ?|\[\[\w+\]\]|template <.*?>(?= \w)")
_BOUNDS = re.compile(r"__launch_bounds__\((?:[^()]|\([^()]*\))*\)\s*")
_TYPE = re.compile(r"(?:struct|class|union|enum class|enum) (\w+)")
_ALIAS = re.compile(r"(?:using|namespace) (?:[\w:]*::)?(\w+)(?: =.*)?;")
_OTHER = re.compile(r"(?! )[\w:<>&*, ]*[\w>&*] +[&*]*(\w+)(?:\[[^]]*\])*(?:\(| =|\{|;|$)")
_FURTHER = re.compile(r", (\w+) = ")
# Constants, types, and functions that are called: what is looked up in the namespaces around it.
_LOOKED_UP = re.compile(r"(?<![\w.>:])(?:k?[A-Z]\w*|\w+(?=\())")
_WORD = re.compile(r"\b[A-Za-z_]\w*")
_MEMBER = re.compile(r"(?:::|\.|->) *(\w+)")


def local_names(text: str) -> set[str]:
    """What a source without comments defines in its anonymous namespaces."""
    names = set()
    for line in "".join(_LOCAL.findall(text)).splitlines():
        line = _PREFIXES.sub("", line)
        for pattern in (_ALIAS, _TYPE, _OTHER):
            if found := pattern.match(line):
                names.add(found[1])
                break
        if line.startswith("constexpr"):
            names.update(_FURTHER.findall(line))
    return names


@functools.cache
def names_of_headers(header: Path) -> dict[str, Path]:
    """The local names of a header and of those that it includes, and which has them."""
    if not header.exists():
        return {}
    text = header.read_text()
    names = dict.fromkeys(local_names(_BOUNDS.sub("", _NOT_CODE.sub("", text))), header)
    for further in _HEADER.findall(text):
        names |= names_of_headers(_NATIVE / further)
    return names


@dataclass
class Source:
    """What decides with which others it may be compiled."""

    path: Path
    text: str = ""
    directives: set[str] = field(default_factory=set)
    names: set[str] = field(default_factory=set)  # local
    fixed: set[str] = field(default_factory=set)  # those of them that no macro may change
    words: set[str] = field(default_factory=set)  # that it mentions
    headers: dict[str, Path] = field(default_factory=dict)  # by the local names in them

    @classmethod
    def read(cls, path: Path) -> Source:
        """Of a file."""
        text = path.read_text()
        code = _BOUNDS.sub("", _NOT_CODE.sub("", text))
        names, directives = local_names(code), set(_DIRECTIVE.findall(code))
        if path.suffix == ".cu":
            headers = {
                name: file for own in _HEADER.findall(text) for name, file in names_of_headers(_NATIVE / own).items()
            }
            fixed = names & set(_MEMBER.findall(code))
            return cls(path, text, directives, names, fixed, set(_WORD.findall(code)) | set(headers), headers)
        return cls(path, text, directives, names, names, names | set(_LOOKED_UP.findall(code)))

    def goes_with(self, other: Source) -> bool:
        """Whether one compile of both means the same."""
        if self.directives != other.directives or self.fixed & other.words or other.fixed & self.words:
            return False
        return all(other.headers.get(name, header) == header for name, header in self.headers.items())


def grouped(sources: list[Path], largest: int) -> list[list[Path]]:
    """Each source goes into the first group that has room for it and its names."""
    return [[source.path for source in group] for group in _grouped(sources, largest)]


def _grouped(sources: list[Path], largest: int) -> list[list[Source]]:
    groups: list[list[Source]] = []
    for path in sources:
        source = Source.read(path)
        for group in groups:
            if len(group) < largest and all(source.goes_with(other) for other in group):
                break
        else:
            groups.append(group := [])
        group.append(source)
    return groups


def group_text(group: list[Source]) -> str:
    """A file that includes the sources."""
    lines = []
    are_numbered = group[0].path.suffix == ".cu"
    if are_numbered:
        opening = dict.fromkeys(line for source in group for line in _OPENING.findall(source.text))
        lines += sorted(opening, key=lambda line: not line.startswith("#define"))  # the headers look at them
    for number, source in enumerate(group):
        changed = sorted(source.names - source.fixed) if are_numbered else []
        lines += [f"#define {name} {name}_{number}" for name in changed]
        lines.append(f'#include "{source.path}"')
        lines += [f"#undef {name}" for name in changed]
    return "".join(f"{line}\n" for line in lines)


def main(folder: Path, largest: int, sources: list[Path]) -> None:
    """Writes what has changed, so that nothing else is compiled again."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, members in enumerate(_grouped(sources, largest)):
        path = members[0].path
        if len(members) > 1:
            path = folder / f"unity_{number}{''.join(path.suffixes)}"
            text = group_text(members)
            if not path.exists() or path.read_text() != text:
                path.write_text(text)
        print(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), [Path(source) for source in sys.argv[3:]])
