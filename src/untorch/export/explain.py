"""Explains torch.export's errors: what it said, the user's line, and what to write instead."""

from __future__ import annotations

import linecache
import re
import sysconfig
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

__all__ = ["Frame", "explain", "is_model_code", "shorten", "source_frames", "wants_strict_mode"]

# Lines of torch's messages that are about debugging torch.
_NOISE = re.compile(
    r"^\s*(For more (information|debugging help)|For extended logs|If you suspect the guard|For C\+\+ stack trace|"
    r"The error above occurred when calling torch\.export|Caused by: |Set TORCHDYNAMO_VERBOSE|Developer debug context|"
    r"consider using data-dependent friendly APIs|To fix the error, insert one of the following checks|"
    r"\(These suggested fixes were derived|\d+\. torch\._check)"
)
_ENDS = re.compile(r"^\s*(The following call raised this error:|User Stack|from user code:|Stacktrace:)")
_SENTENCES = re.compile(
    r" *(For more information about this error, see: \S+|For more information, run with \S+|\(unhinted: .*|"
    r"If you're using mark_dynamic, .*|If this type holds tensors, you need to register .*|"
    r"Export only supports pytree containers .*)"
)
_DYNAMO_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
_MAX_LINES, _MAX_CHARACTERS, _MAX_LINE = 12, 2000, 400

_STANDARD = f"{sysconfig.get_path('stdlib')}/"
_TORCH, _SELF = f"{Path(torch.__file__).parent}/", f"{Path(__file__).parents[1]}/"


@dataclass(frozen=True)
class Frame:
    """A line of code."""

    path: str
    line: int
    function: str

    @property
    def is_library(self) -> bool:
        """Whether it lies in an installed package."""
        return "/site-packages/" in self.path or "/dist-packages/" in self.path

    @property
    def text(self) -> str:
        """Without its indentation; empty if the file is not there."""
        return linecache.getline(self.path, self.line).strip()

    def __str__(self) -> str:
        return f"{self.path}:{self.line}, in {self.function}" + (f": {self.text}" if self.text else "")


def shorten(text: str) -> str:
    """The beginning of a message: torch puts whole graphs and compiler outputs into some."""
    lines = [line if len(line) <= _MAX_LINE else f"{line[:_MAX_LINE]} …" for line in text.strip().splitlines()]
    kept: list[str] = []
    for line in lines[: 4 * _MAX_LINES]:
        if sum(map(len, kept)) + len(line) > 2 * _MAX_CHARACTERS:
            break
        kept.append(line)
    rest = len(lines) - len(kept)
    return "\n".join(kept) + (f"\n… ({rest} more lines; the cause has all)" if rest else "")


def source_frames(error: BaseException) -> list[Frame]:
    """Where the model raised it, innermost first: the line in a package that it calls, if any, and the model's own."""
    frames = [
        Frame(frame.filename, frame.lineno or 0, frame.name)
        for frame in reversed(traceback.extract_tb(error.__traceback__))
    ]
    found = [frame for frame in frames if is_model_code(frame)]
    if not found:  # strict mode: Dynamo has the model's stack in its message
        _, _, stack = str(error).partition("from user code:")
        frames = [Frame(path, int(line), name) for path, line, name in _DYNAMO_FRAME.findall(stack)]
        found = [frame for frame in reversed(frames) if is_model_code(frame)]
    own = [frame for frame in found if not frame.is_library]
    return [*found[:1], *own[:1]] if found and found[0].is_library else own[:1]


def wants_strict_mode(error: BaseException) -> bool:
    """Whether Dynamo may trace what the model does there: Python numbers and arrays made from tensors."""
    text = str(error)
    return "Could not extract specialized integer" in text or ".numpy() is not supported" in text


def explain(error: BaseException, guards: Sequence[str] = ()) -> str:
    """The error's message for users.

    guards: what torch.export assumed about sizes, each with its line, where it was asked for that.
    """
    text = _clean(str(error) or type(error).__name__)
    lines = [text]
    frames = source_frames(error)
    if frames:
        lines.append(f"  at {frames[0]}")
        lines += [f"  called from {frame}" for frame in frames[1:]]
    said_with_kind = f"{type(error).__name__}: {error}"
    for pattern, answer in _ANSWERS:
        if match := re.search(pattern, said_with_kind, re.DOTALL):
            said = answer(match, guards, frames)
            lines += [f"  {line}" for line in said.splitlines()]
            break
    return "\n".join(lines)


def is_model_code(frame: Frame) -> bool:
    """Whether the line is the model's, and neither torch's nor untorch's."""
    is_standard = frame.path.startswith(_STANDARD) and not frame.is_library
    return not (is_standard or frame.path.startswith((_TORCH, _SELF, "<")))


def _clean(text: str) -> str:
    """torch's message without its advice on debugging torch, and without stacks."""
    kept: list[str] = []
    for line in text.splitlines():
        if _ENDS.match(line):
            break
        if not _NOISE.match(line):
            kept.append(_SENTENCES.sub("", line).rstrip())
    lines = [line for line in kept if line]
    return shorten("\n".join(lines[:_MAX_LINES])) if lines else text.strip()


_Answer = Callable[["re.Match[str]", Sequence[str], Sequence[Frame]], str]


def _says(text: str) -> _Answer:
    return lambda match, guards, frames: text


def _branches(match: re.Match[str], guards: Sequence[str], frames: Sequence[Frame]) -> str:
    if any(re.match(r"while\b", frame.text) for frame in frames):
        return (
            "How often the loop runs depends on a tensor's values, which are not known while the model is traced. "
            "Write torch.while_loop(condition, body, operands): both take the operands, and the body gives them anew, "
            "as a tuple of tensors of the same shapes and dtypes."
        )
    return (
        "The branch depends on a tensor's values, which are not known while the model is traced. Write "
        "torch.cond(predicate, true_fn, false_fn, operands), or torch.where on both results; for a loop, "
        "torch.while_loop(condition, body, operands). Where only one of them can happen, write torch._check(condition) "
        "before it, and no branch."
    )


def _specialized(match: re.Match[str], guards: Sequence[str], frames: Sequence[Frame]) -> str:
    name, size = match[1], match[2]
    where = [guard for guard in guards if re.search(rf"Eq\(\w+, {size}\)", guard)]
    return (
        f"The model works for the size {size} alone"
        + (f": {where[0]}" if where else "")
        + f"\nChange that line, so that it takes any size, or leave {name} out of dynamic_shapes. Dim.AUTO instead of "
        f"{name} makes a size dynamic only where the model allows it."
    )


def _related(match: re.Match[str], guards: Sequence[str], frames: Sequence[Frame]) -> str:
    fixes = _fixes(match.string)
    where = next((guard for guard in guards if guard.startswith("Eq(")), None)
    return (
        (f"The model needs that here: {where}\n" if where else "")
        + (f"Write {'; '.join(fixes)} in dynamic_shapes" if fixes else "Write that relation in dynamic_shapes")
        + ", or Dim.AUTO for these sizes, which lets torch.export find it."
    )


def _fixes(text: str) -> list[str]:
    """What torch suggests to write."""
    _, _, after = text.partition("Suggested fixes:\n")
    return [line.strip() for line in after.splitlines() if re.match(r"\s+\w+ = ", line)]


_ANSWERS: tuple[tuple[str, _Answer], ...] = (
    (
        r"Could not extract specialized integer from data-dependent",
        _says(
            "A Python number is made from a tensor's values, which are not known while the model is traced: int(x), "
            "range(x), len() of what nonzero or a mask gives. Use x.item() without int(), and x.shape[0] for len(x); "
            "write loops over it with torch.while_loop, whose condition compares tensors, and branches on it with "
            "torch.cond."
        ),
    ),
    (r"Could not guard on data-dependent|Data-dependent branching|data-dependent control flow", _branches),
    (r"You marked (\S+) as dynamic but your code specialized it to be a constant \((\d+)\)", _specialized),
    (r"must always be related to|satisfy the generated guard|Constraints violated", _related),
    (
        r"input integers as dynamic through named Dims",
        _says("Write Dim.DYNAMIC for a number that varies: dynamic_shapes={'n': Dim.DYNAMIC}."),
    ),
    (
        r"Received user-specified dim hint Dim\.DYNAMIC",
        _says(
            "The model works for this size alone. Write Dim.AUTO instead of Dim.DYNAMIC, which makes a size dynamic "
            "only where the model allows it, or leave it out of dynamic_shapes."
        ),
    ),
    (
        r"Unsupported input type",
        _says(
            "Pass its tensors as arguments of their own, or in a dict, list or tuple; or register its class: "
            "torch.export.register_dataclass(cls, serialized_type_name='…')."
        ),
    ),
    (
        r"in output, which is not a known type|Unsupported output type",
        _says("Return tensors, numbers, None, and tuples, lists, dicts, namedtuples or dataclasses of them."),
    ),
    (
        r"^UnsupportedOperatorException: |There was no fake impl registered|has no fake|no fake impl",
        _says(
            "The operator does not tell the shape of its result. Register a function that does: "
            "@torch.library.register_fake('namespace::operator')."
        ),
    ),
    (
        r"\.numpy\(\) is not supported",
        _says("Use torch's functions instead of numpy's, or export with strict=True, which traces many of numpy's."),
    ),
    (
        r"solve_univariate_inequality|Sizes of tensors must match except in dimension",
        _says(
            "Two tensors have to have the same size there, which holds for some sizes of the input only, as behind "
            "halving and doubling. Write these dimensions as multiples in dynamic_shapes, "
            "{2: 4 * Dim('height', max=256)}, or give the tensors the same size in the model: interpolate(x, "
            "size=other.shape[-2:])."
        ),
    ),
    (
        r"view functorch tensor|TensorWrapper|fake tensor in the exported program constant|trace_autograd_ops",
        _says(
            "The model computes gradients in its forward (torch.autograd.grad, torch.func.grad), which torch.export "
            "does not trace: write the derivative out as operators."
        ),
    ),
    (
        r"ScriptModule",
        _says("Export the module that torch.jit.script or torch.jit.trace was given."),
    ),
)
