"""Groups sources so that one compile includes several: ``unity.py FOLDER LARGEST SOURCE…`` prints the files it writes.

A compile of a group means what the compiles of its sources mean: what a source defines in its anonymous namespaces, no
other source of its group mentions, and all have the same using-directives. Definitions start in the first column, as
clang-format leaves them.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

_NOT_CODE = re.compile(r'// (?!namespace$)[^\n]*|^ *#include[^\n]*|"(?:[^"\\\n]|\\.)*"', re.MULTILINE)
_DIRECTIVE = re.compile(r"^using namespace [\w:]+;", re.MULTILINE)
_LOCAL = re.compile(r"^namespace \{$(.*?)^\}  // namespace$", re.MULTILINE | re.DOTALL)
# Before the name of a definition.
_PREFIXES = re.compile(r"alignas\([^)]*\)|\[\[\w+\]\]|template <.*?>(?= \w)")
_TYPE = re.compile(r"(?:struct|class|union|enum class|enum) (\w+)")
_ALIAS = re.compile(r"(?:using|namespace) (?:[\w:]*::)?(\w+)(?: =.*)?;")
_OTHER = re.compile(r"(?! )[\w:<>&*, ]*[\w>&*] +[&*]*(\w+)(?:\[[^]]*\])*(?:\(| =|\{|;|$)")
_FURTHER = re.compile(r", (\w+) = ")
# Constants, types, and functions that are called: what is looked up in the namespaces around it.
_LOOKED_UP = re.compile(r"(?<![\w.>:])(?:k?[A-Z]\w*|\w+(?=\())")


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


@dataclass
class Group:
    """Sources with the same using-directives that are compiled at once, their local names and what they look up."""

    directives: set[str]
    sources: list[Path] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    words: set[str] = field(default_factory=set)


def grouped(sources: list[Path], largest: int) -> list[list[Path]]:
    """Each source goes into the first group that has room for it and its names."""
    groups: list[Group] = []
    for source in sources:
        text = _NOT_CODE.sub("", source.read_text())
        names = local_names(text)
        words = names | set(_LOOKED_UP.findall(text))
        directives = set(_DIRECTIVE.findall(text))
        for group in groups:
            is_alike = group.directives == directives and len(group.sources) < largest
            if is_alike and not (group.words & names or group.names & words):
                break
        else:
            groups.append(group := Group(directives))
        group.sources.append(source)
        group.names |= names
        group.words |= words
    return [group.sources for group in groups]


def main(folder: Path, largest: int, sources: list[Path]) -> None:
    """Writes what has changed, so that nothing else is compiled again."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, members in enumerate(grouped(sources, largest)):
        path = members[0]
        if len(members) > 1:
            path = folder / f"unity_{number}{path.suffix}"
            text = "".join(f'#include "{member}"\n' for member in members)
            if not path.exists() or path.read_text() != text:
                path.write_text(text)
        print(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), [Path(source) for source in sys.argv[3:]])
