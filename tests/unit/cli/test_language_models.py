"""untorch generate, chat and bench-llm on a model that says one text."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.unit.cli.conftest import Done
from tests.unit.llm.fake import TextRunner
from tests.unit.llm.vision.encoders import settings
from untorch import InvalidArgumentError
from untorch.cli import bench_llm, chat, generate, language_model
from untorch.llm import Engine, SamplingParams
from untorch.llm.vision.encoder import ImageEncoder

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}bot:"
TEXT = "Hello, wörld!"


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Iterator[TextRunner]:
    made = TextRunner(TEXT, TEMPLATE, max_positions=400, blocks=200)

    def open_engine(file: Path, **options: Any) -> Engine:
        assert str(file) == "m.pt2"
        left_out = ("kv_memory", "num_threads", "trust")
        return Engine(
            made, **{key: value for key, value in options.items() if key not in left_out and value is not None}
        )

    for module in (generate, chat, bench_llm):
        monkeypatch.setattr(module, "open_engine", open_engine)
    yield made
    assert made.closed


@pytest.mark.usefixtures("runner")
def test_generate(cli: Callable[..., Done], monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli("generate", "m.pt2", "hi").out == TEXT + "\n"
    assert cli("generate", "m.pt2", "hi", "--stop", "wö", "--stop", "x").out == "Hello, \n"
    assert cli("generate", "m.pt2", "ids:5,6", "--max-tokens", "3").out == "Hel\n"
    document = cli("generate", "m.pt2", "hi", "--samples", "2", "--json").document()
    assert document["prompt_tokens"] == 2
    assert document["completion_tokens"] == 2 * (len(TEXT.encode()) + 1)
    assert [item["text"] for item in document["completions"]] == [TEXT, TEXT]
    assert document["completions"][0]["finish_reason"] == "stop"
    assert cli("generate", "m.pt2", "hi", "--samples", "2").out == f"{TEXT}\n{TEXT}\n"


@pytest.mark.usefixtures("runner")
def test_sampling_options(cli: Callable[..., Done], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[SamplingParams] = []
    submit = Engine.submit
    monkeypatch.setattr(
        Engine,
        "submit",
        lambda self, prompt, params, **named: seen.append(params) or submit(self, prompt, params, **named),
    )
    numbers = ("--min-p", 0.1, "--presence-penalty", 0.5, "--frequency-penalty", -0.5, "--repetition-penalty", 1.25)
    assert cli("generate", "m.pt2", "hi", *numbers, "--ignore-eos", "--max-tokens", 4).code == 0
    given = seen[-1]
    assert (given.min_p, given.presence_penalty, given.frequency_penalty) == (0.1, 0.5, -0.5)
    assert (given.repetition_penalty, given.ignore_eos, given.logprobs) == (1.25, True, None)
    assert cli("generate", "m.pt2", "hi").code == 0
    assert seen[-1] == SamplingParams(temperature=0, max_tokens=None)
    document = cli("generate", "m.pt2", "hi", "--logprobs", 2, "--max-tokens", 3, "--json").document()
    (completion,) = document["completions"]
    assert [item["token_id"] for item in completion["logprobs"]] == completion["token_ids"]
    first = completion["logprobs"][0]
    assert (first["rank"], len(first["top"]), first["top"][0]["token_id"]) == (1, 2, first["token_id"])
    assert first["logprob"] == first["top"][0]["logprob"] < 0


@pytest.mark.usefixtures("runner")
def test_structured_text(cli: Callable[..., Done]) -> None:
    pytest.importorskip("llguidance")
    assert cli("generate", "m.pt2", "hi", "--regex", "[xyz]{4}").out.strip("xyz") == "\n"
    assert cli("generate", "m.pt2", "hi", "--grammar", 'start: "yes" | "no"').out in ("yes\n", "no\n")
    done = cli("generate", "m.pt2", "hi", "--grammar", 'start: "a"', "--regex", "a")
    assert (
        done.err == "untorch: SamplingParams: expected one of json_schema, regex and grammar, got regex and grammar\n"
    )


@pytest.mark.usefixtures("runner")
def test_sequences_at_a_time(cli: Callable[..., Done]) -> None:
    done = cli("generate", "m.pt2", "hi", "--samples", 3, "--max-sequences", 2, "--max-tokens", 2)
    assert done.err == "untorch: SamplingParams: n: expected at most the engine's max_sequences (2), got 3\n"
    done = cli("generate", "m.pt2", "hi", "--samples", 65, "--max-sequences", 65, "--max-tokens", 2)
    assert done.out == "He\n" * 65


def test_memory_for_states_of_known_prefixes(cli: Callable[..., Done], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []

    def open_engine(file: Path, **options: Any) -> Engine:
        seen.append(options)
        raise InvalidArgumentError("seen")

    for module in (generate, chat, bench_llm):
        monkeypatch.setattr(module, "open_engine", open_engine)
    for words in (("generate", "m.pt2", "hi"), ("chat", "m.pt2"), ("bench-llm", "m.pt2")):
        assert cli(*words, "--kv-memory", "1GiB", "--snapshot-memory", "0").err == "untorch: seen\n"
        assert cli(*words).code == 1
    assert [(one["kv_memory"], one["snapshot_memory"]) for one in seen] == [("1GiB", "0"), (None, None)] * 3


@pytest.mark.usefixtures("runner")
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("ids:5,x",), "PROMPT: expected token ids such as ids:5,17,3, got ids:5,x"),
        (("hi", "--top-p", "2"), "SamplingParams: top_p: expected a finite number above 0 to 1, got 2.0"),
        (("hi", "--logprobs", "1"), "--logprobs: expected --json, too, which prints them"),
        (("\udcff\udcfe",), "PROMPT: expected text in UTF-8"),
        (("ids:999",), "prompt: token 0: expected an id from 0 to 257, got 999"),
    ],
)
def test_errors(cli: Callable[..., Done], arguments: tuple[str, ...], text: str) -> None:
    if text.startswith(("PROMPT", "--logprobs")):  # before the engine is made
        done = cli("generate", "m.pt2", "hi")
        assert done.code == 0
    done = cli("generate", "m.pt2", *arguments)
    assert (done.code, done.err) == (1, f"untorch: {text}\n")


@pytest.mark.usefixtures("runner")
def test_chat(cli: Callable[..., Done], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    lines = iter(["hi", "/stats", "more", "/reset", "/stats", "/help", "/exit", "never"])
    monkeypatch.setattr("builtins.input", lambda prompt="": next(lines))
    done = cli("chat", "m.pt2", "--system", "be kind")
    assert done.code == 0, done.err
    out = done.out.splitlines()
    assert out[0] == out[3] == TEXT
    assert out[1].startswith("1 answers, 15 tokens in ")
    prompt = len(b"system: be kind\nuser: hi\nbot:")
    assert out[2].startswith(f"last answer: {prompt} prompt tokens (0 cached), first token after ")
    assert out[2].endswith("ended by stop")
    assert out[4].startswith("2 answers, 30 tokens")
    assert out[5].startswith("/reset begins anew")
    assert len(out) == 6
    lines = iter(["hi", "/stats", "/exit"])
    document = cli("chat", "m.pt2", "--json").document()
    assert document["messages"] == [{"role": "user", "content": "hi"}, {"role": "assistant", "content": TEXT}]
    assert document["stats"]["finished"] == 1


@pytest.mark.usefixtures("runner")
def test_chat_goes_on_behind_a_turn_that_is_refused(cli: Callable[..., Done], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    lines = iter(["hi", "x" * 1000, "more", "/exit"])
    monkeypatch.setattr("builtins.input", lambda prompt="": next(lines))
    done = cli("chat", "m.pt2")
    assert done.code == 0
    assert done.out == f"{TEXT}\n{TEXT}\n"
    assert done.err.startswith("untorch: prompt: expected less than 400 tokens, the model's length, got 10")
    assert done.err.endswith("(/reset begins anew)\n")
    lines = iter(["x" * 1000, "never"])
    done = cli("chat", "m.pt2")
    assert done.code != 0
    assert "prompt: expected less than 400 tokens" in done.err


@pytest.mark.usefixtures("runner")
def test_lines_of_a_chat_that_are_no_turns(cli: Callable[..., Done], monkeypatch: pytest.MonkeyPatch) -> None:
    given = b"/foo\nhi\n\xff\xfe\n/foo bar\n /foo\n/etc/hosts?\n"
    monkeypatch.setattr(chat, "keep_wrong_bytes", lambda stream: language_model.keep_wrong_bytes(lines))
    lines = io.TextIOWrapper(io.BytesIO(given), encoding="utf-8")
    monkeypatch.setattr("builtins.input", lambda prompt="": _line(lines))
    done = cli("chat", "m.pt2", "--json")
    assert done.code == 0, done.err
    turns = [message["content"] for message in done.document()["messages"] if message["role"] == "user"]
    assert turns == ["hi", " /foo", "/etc/hosts?"]
    unknown = "untorch: /foo: expected /image, /reset, /stats, /help or /exit\n"
    assert done.err == f"{unknown}untorch: the line is not UTF-8: it is left out\n{unknown}"


def test_images_of_a_turn(
    runner: TextRunner, cli: Callable[..., Done], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    photo = tmp_path / "photo.png"
    Image.new("RGB", (4, 4)).save(photo)
    given = f"/image {photo}\n/image {tmp_path}/none.png\nWhat?\nAnd?\n"
    seen: list[Any] = []
    prompt = Engine.chat_prompt
    monkeypatch.setattr(
        Engine, "chat_prompt", lambda self, messages, **named: seen.append(messages) or prompt(self, [messages[0]])
    )
    for has_encoder in (False, True):
        runner.vision = ImageEncoder(settings(placeholder=0), lambda *arrays: arrays, 1) if has_encoder else None
        monkeypatch.setattr(Engine, "_with_images", lambda self, prompt: prompt.tokens)
        seen.clear()
        lines = io.TextIOWrapper(io.BytesIO(given.encode()), encoding="utf-8")
        monkeypatch.setattr(chat, "keep_wrong_bytes", lambda stream: None)
        monkeypatch.setattr("builtins.input", lambda prompt="", lines=lines: _line(lines))
        done = cli("chat", "m.pt2")
        assert done.code == 0, done.err
        text: Any = "What?"
        if has_encoder:
            assert done.err == f"untorch: /image: there is no file {tmp_path}/none.png\n"
            text = [{"type": "image", "image": str(photo)}, {"type": "text", "text": "What?"}]
        else:
            assert done.err == "untorch: /image: the package has no image encoder\n" * 2
        assert [messages[-1]["content"] for messages in seen] == [text, "And?"]


def test_an_image_of_a_prompt(runner: TextRunner, cli: Callable[..., Done]) -> None:
    done = cli("generate", "m.pt2", "hi", "--image", "photo.png")
    assert done.err == (
        "untorch: prompt: images: the package has no image encoder: export it with causal_lm(…, images=True)\n"
    )
    assert runner.vision is None


def _line(lines: io.TextIOWrapper) -> str:
    if not (line := lines.readline()):
        raise EOFError
    return line.rstrip("\n")


@pytest.mark.usefixtures("runner")
@pytest.mark.parametrize("dataset", ["random", "shared-prefix"])
def test_bench_llm(cli: Callable[..., Done], dataset: str) -> None:
    options = ("--num-prompts", 6, "--max-concurrency", 3, "--input-len", 40, "--output-len", 5, "--prefix-len", 30)
    document = cli("bench-llm", "m.pt2", "--dataset", dataset, *options, "--json").document()
    assert document["requests"] == 6
    assert document["output_throughput"] == pytest.approx(30 / document["duration_s"])
    assert document["total_throughput"] == pytest.approx(270 / document["duration_s"])
    assert (document["cached_tokens"] >= 3 * 28) == (dataset == "shared-prefix")
    for name in ("ttft_s", "tpot_s", "itl_s"):
        assert 0 < document[name]["p50"] <= document[name]["p99"]
    text = cli("bench-llm", "m.pt2", "--dataset", dataset, *options).out
    assert "TTFT" in text
    assert "requests/s" in text
    assert "40 in (" in text and "5 out\n" in text


@pytest.mark.usefixtures("runner")
def test_a_benchmark_that_the_models_length_ends(cli: Callable[..., Done]) -> None:
    options = ("--num-prompts", 2, "--input-len", 390, "--output-len", 64)
    document = cli("bench-llm", "m.pt2", *options, "--json").document()
    assert (document["output_len"], document["output_tokens"], document["max_positions"]) == (64, 20, 400)
    text = " ".join(cli("bench-llm", "m.pt2", *options).out.split())
    assert "10.0 out, not 64: the model's length is 400" in text


def test_speculation(cli: Callable[..., Done], monkeypatch: pytest.MonkeyPatch, runner: TextRunner) -> None:
    runner.script = [*runner.script[:5] * 6, 257]
    text = "Hello" * 6
    options = ("--speculative", "ngram", "--num-speculative-tokens", 3, "--prompt-lookup-min", 1)
    assert cli("generate", "m.pt2", "hi", *options).out == text + "\n"
    document = cli("generate", "m.pt2", "hi", *options, "--prompt-lookup-max", 2, "--json").document()
    assert document["completions"][0]["text"] == text
    assert document["draft_tokens"] >= document["accepted_tokens"] > 10
    document = cli("generate", "m.pt2", "hi", "--json").document()
    assert document["completions"][0]["text"] == text and "draft_tokens" not in document
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    lines = iter(["hi", "/stats", "/exit"])
    monkeypatch.setattr("builtins.input", lambda prompt="": next(lines))
    out = cli("chat", "m.pt2", *options).out.splitlines()
    assert out[0] == text
    assert " proposed tokens accepted (" in out[1] and out[1].endswith(" tokens a draft")
    assert out[2].endswith(" proposed tokens accepted")
    load = ("--num-prompts", 3, "--max-concurrency", 3, "--input-len", 5, "--output-len", 30)
    document = cli("bench-llm", "m.pt2", *load, *options, "--json").document()
    assert document["drafts"] > 0 and document["draft_tokens"] >= document["accepted_tokens"] > 30
    assert document["output_throughput"] == pytest.approx(90 / document["duration_s"])
    assert "speculation" in cli("bench-llm", "m.pt2", *load, *options).out
    assert "speculation" not in cli("bench-llm", "m.pt2", *load).out
    done = cli("generate", "m.pt2", "hi", "--speculative", "magic")
    assert done.err == "untorch: Engine: speculative: expected 'ngram', 'draft' or None, got 'magic'\n"


@pytest.mark.usefixtures("runner")
def test_a_prefix_that_is_too_long(cli: Callable[..., Done]) -> None:
    cli("generate", "m.pt2", "hi")
    done = cli("bench-llm", "m.pt2", "--dataset", "shared-prefix", "--input-len", 8, "--prefix-len", 8)
    assert done.err == "untorch: --prefix-len: expected less than --input-len (8), got 8\n"


def test_tasks(cli: Callable[..., Done], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    done = cli("export", "folder", "-o", tmp_path / "m.pt2", "--task", "translation")
    assert done.code == 2
    assert "expected audio-classification, automatic-speech-recognition" in " ".join(done.err.split())
    done = cli("export", tmp_path, "-o", tmp_path / "m.pt2", "--task", "text-generation")
    assert done.err == f"untorch: causal_lm: model: {tmp_path} has no config.json\n"
    done = cli("export", tmp_path, "-o", tmp_path / "m.pt2", "--task", "text-generation", "--check")
    assert done.code == 2 and "--check is not for --task" in done.err


def test_folders_without_a_task(cli: Callable[..., Done], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import torch

    import untorch.export

    given: dict[str, Any] = {}
    monkeypatch.setattr(untorch.export, "export_folder", lambda source, path, **fields: given.update(fields) or 1 / 0)
    (tmp_path / "config.json").write_text('{"architectures": ["BertForMaskedLM"]}')
    cli("export", tmp_path, "-o", tmp_path / "m.pt2", "--dtype", "bfloat16")
    assert given["task"] is None and given["dtype"] is torch.bfloat16 and "draft" not in given
    done = cli("export", tmp_path, "-o", tmp_path / "m.pt2", "--dtype", "int3")
    assert done.code == 2 and "expected float32, bfloat16, float16, got int3" in " ".join(done.err.split())
    done = cli("export", "models.py:build", "-o", tmp_path / "m.pt2", "--dtype", "float16")
    assert done.code == 2 and "is for a Hugging Face folder" in done.err


def test_a_folder_that_has_no_config(cli: Callable[..., Done], tmp_path: Path) -> None:
    done = cli("export", tmp_path, "-o", tmp_path / "m.pt2")
    assert done.err == f"untorch: export_folder: folder: {tmp_path} has no config.json\n"


def test_list_of_tasks(cli: Callable[..., Done]) -> None:
    done = cli("export", "--list-tasks")
    assert done.code == 0 and "zero-shot-image-classification" in done.out and "text-generation" in done.out


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        ("text-generation", "generate"), ("image-text-to-text", "generate"), ("feature-extraction", "embed"),
        ("text-classification", "classify"),
    ],
)  # fmt: skip
def test_names_of_tasks(
    task: str, expected: str, cli: Callable[..., Done], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import untorch.export

    given: dict[str, Any] = {}
    monkeypatch.setattr(untorch.export, "causal_lm", lambda source, path, **fields: given.update(fields) or 1 / 0)
    cli("export", tmp_path, "-o", tmp_path / "m.pt2", "--task", task)
    assert given["task"] == expected
    assert given.get("images", False) == (task == "image-text-to-text")


def test_a_task_for_gpus(cli: Callable[..., Done], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import untorch.export

    given: dict[str, Any] = {}
    monkeypatch.setattr(untorch.export, "causal_lm", lambda source, path, **fields: given.update(fields) or 1 / 0)
    cli(
        "export", tmp_path, "-o", tmp_path / "m.pt2", "--task", "text-generation", "--device", "cuda", "--arch", "sm_90"
    )
    assert given["device"] == "cuda" and list(given["arch"]) == ["sm_90"] and given["kv_dtype"] is None


def test_pages_of_codes(cli: Callable[..., Done], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import untorch.export

    given: dict[str, Any] = {}
    monkeypatch.setattr(untorch.export, "causal_lm", lambda source, path, **fields: given.update(fields) or 1 / 0)
    cli("export", tmp_path, "-o", tmp_path / "m.pt2", "--task", "text-generation", "--kv-dtype", "int8")
    assert given["kv_dtype"] == "int8" and given["draft"] is None
    cli("export", tmp_path, "-o", tmp_path / "m.pt2", "--task", "text-generation", "--draft", "small")
    assert given["draft"] == "small"
    done = cli("export", "models.py:build", "-o", tmp_path / "m.pt2", "--draft", "small")
    assert done.code == 2 and "is for --task text-generation" in done.err
    done = cli("export", "models.py:build", "-o", tmp_path / "m.pt2", "--kv-dtype", "int8")
    assert done.code == 2 and "is for --task text-generation" in done.err
