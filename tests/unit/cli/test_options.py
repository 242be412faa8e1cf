"""The flags of all commands: one flag has one meaning everywhere, and one thing has one flag."""

from __future__ import annotations

import inspect
import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import typer

import untorch
from untorch.cli.app import app

ROOT = Path(__file__).parents[3]
COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
# What a command may require or default to in its own way.
OWN_REQUIRED = {"--output"}


def options() -> list[tuple[str, Any]]:
    """Each command's options, without --help."""
    found = [
        (name, parameter)
        for name, command in COMMANDS.items()
        for parameter in command.params
        if parameter.param_type_name == "option" and "--help" not in parameter.opts
    ]
    assert len(found) > 50
    return found


def type_text(command: str, parameter: Any) -> str:
    """The type of a value, None apart, and its bounds: from the function, as typer's own classes change."""
    callback = next(c.callback for c in app.registered_commands if c.callback.__name__.replace("_", "-") == command)
    annotated, *info = get_args(get_type_hints(callback, include_extras=True)[parameter.name])
    kinds = [str(kind) for kind in get_args(annotated) or (annotated,) if kind is not type(None)]
    return f"{kinds} {info[0].min}..{info[0].max}"


def test_one_flag_has_one_type_and_one_help_text() -> None:
    seen: dict[str, dict[tuple[Any, ...], list[str]]] = defaultdict(lambda: defaultdict(list))
    for name, option in options():
        meaning = (
            option.help,
            type_text(name, option),
            option.metavar,
            option.multiple,
            option.is_flag,
            tuple(option.opts),
        )
        for flag in option.opts:
            seen[flag][meaning].append(name)
    different = {flag: dict(meanings) for flag, meanings in seen.items() if len(meanings) > 1}
    assert different == {}


def test_one_flag_has_one_default() -> None:
    seen: dict[str, set[Any]] = defaultdict(set)
    for _, option in options():
        default = option.default() if callable(option.default) else option.default
        if option.opts[0] not in OWN_REQUIRED:
            assert not option.required, option.opts
            seen[option.opts[0]].add(default if isinstance(default, bool | int | float | str) else None)
    assert {flag: values for flag, values in seen.items() if len(values) > 1} == {}


def test_one_help_text_has_one_flag() -> None:
    seen: dict[str, set[tuple[str, ...]]] = defaultdict(set)
    for _, option in options():
        seen[option.help].add(tuple(option.opts))
    assert {text: flags for text, flags in seen.items() if len(flags) > 1} == {}


def test_flags_are_words_with_at_most_one_short_form() -> None:
    shorts = {"-o": "--output", "-i": "--input", "-q": "--quiet"}
    for name, option in options():
        long, *rest = option.opts
        assert re.fullmatch(r"--[a-z]+[0-9]*(-[a-z]+)*", long), (name, long)
        assert [shorts[short] for short in rest] == [long] * len(rest), (name, option.opts)
        # Plural parameters are options that may be repeated: --input, --dim, --option.
        assert option.name.replace("_", "-").rstrip("s") == long[2:].rstrip("s"), (name, option.name)


def test_every_option_tells_what_it_takes_and_does() -> None:
    for name, option in options():
        assert option.help and option.help[-1] == "." and option.help[0] != " ", (name, option.opts)
        assert option.is_flag or option.metavar, (name, option.opts)
        assert ("repeatable" in option.help) == option.multiple, (name, option.opts)


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_has_the_common_options(name: str) -> None:
    flags = {flag for parameter in COMMANDS[name].params for flag in parameter.opts}
    assert {"--json", "--debug"} <= flags
    assert ("--quiet" in flags) == (name in {"export", "quantize-report", "tune"})  # those that show their progress


def test_flags_for_loading_are_loads_arguments() -> None:
    """So that nobody has to learn --threads beside num_threads."""
    flags = {option.opts[0] for name, option in options() if name == "bench"}
    arguments = {"--" + name.replace("_", "-") for name in inspect.signature(untorch.load).parameters}
    arguments -= {"--source", "--verify", "--copy"}  # what is loaded, and what is done once before any call
    assert arguments <= flags
    others = {flag for _, option in options() for flag in option.opts} - arguments
    assert {flag for flag in others if re.search("runners|dequant|unpack", flag)} == set()


def test_the_page_describes_every_flag_and_no_other() -> None:
    page = (ROOT / "docs" / "cli.md").read_text()
    flags = {flag for _, option in options() for flag in (*option.opts, *option.secondary_opts)}
    flags |= {"--version", "--help"}
    mentioned = set(re.findall(r"(?<![\w-])--?[a-z][a-z0-9-]*", page))
    assert {flag for flag in mentioned if flag.startswith("--")} - flags == set()
    assert flags - mentioned == set()


def test_a_flag_that_is_gone_is_a_usage_error(cli: Callable[..., Any], package: Path) -> None:
    for command, flag in (("run", "--threads"), ("bench", "--runners"), ("bench", "--unpack-weights")):
        done = cli(command, package, flag)
        assert done.code == 2
        assert done.err.startswith(f"untorch: No such option: {flag}")


def test_a_sweep_and_one_number_do_not_go_together(cli: Callable[..., Any], package: Path) -> None:
    done = cli("bench", package, "--num-threads", 2, "--sweep-threads", "1,2")
    assert (done.code, done.err) == (1, "untorch: --sweep-threads 1,2: leave --num-threads 2 out\n")


def test_ops_takes_a_device_as_the_others_do(cli: Callable[..., Any]) -> None:
    assert cli("ops", "--device", "cuda:1", "--json").document()["device"] == "cuda"
    done = cli("ops", "--device", "tpu")
    assert (done.code, done.err) == (1, "untorch: --device tpu: expected cpu or cuda\n")
