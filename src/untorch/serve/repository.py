"""The packages that are served: loaded, unloaded and replaced by name while others are called."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import untorch
from untorch.runtime.errors import InvalidArgumentError, UnsupportedError, UntorchError
from untorch.runtime.log import INFO, log
from untorch.serve.admission import Admission
from untorch.serve.embedder import MOST_CHARACTERS
from untorch.serve.errors import ModelNotFoundError, NotReadyError
from untorch.serve.model import MethodModel, Model
from untorch.serve.options import check_name

if TYPE_CHECKING:
    from untorch.llm import Engine
    from untorch.serve.embedder import Embedder
    from untorch.serve.front_end import FrontEnd
    from untorch.serve.metrics import Metrics
    from untorch.serve.options import ServeOptions
    from untorch.speech import Transcriber

__all__ = ["Embedders", "Engines", "Package", "Repository", "Transcribers"]

VERSION = "1"
_UNLOADED = "unloaded"
_CHARACTERS = 32  # of a token: few texts have as many on average
_M = TypeVar("_M")


@dataclass
class Package:
    """A loaded file and the models that it serves."""

    name: str
    path: str
    models: dict[str, Model]
    program: untorch.Program | None = None
    engine: Engine | None = None
    transcriber: Transcriber | None = None
    embedder: Embedder | None = None
    front_end: FrontEnd | None = None

    def close(self, drain: float = 0.0) -> None:
        """Waits for calls, those of language and speech models for at most ``drain`` seconds, and frees the file."""
        if self.front_end is not None:
            self.front_end.close()
        for model in self.models.values():
            if isinstance(model, MethodModel):
                model.close()
        if self.transcriber is not None:
            self.transcriber.close(drain)
        if self.engine is not None:
            self.engine.close(drain)
        if self.program is not None:
            self.program.close()


@dataclass
class _Entry:
    """A name: where its file is, what is loaded of it, and why it is not."""

    path: str
    package: Package | None = None
    state: str = "UNAVAILABLE"
    reason: str = "not loaded"
    tried: Any = None  # the identity of the file that was loaded, refused or unloaded last
    loaded: Any = None  # of the file of the package
    is_damaged: bool = False  # what was loaded was written over
    lock: threading.Lock = field(default_factory=threading.Lock)


class Repository:
    """Packages by name. Methods may be called by any thread; ``load`` and ``unload`` take their time.

    A package NAME with a method ``forward``, or with one method, is the model NAME. Each further method is the model
    NAME.METHOD.

    Args:
        options: What to serve.
        metrics: Where models count and measure.

    Attributes:
        admission: Counts the prompts of language models.
    """

    def __init__(self, options: ServeOptions, metrics: Metrics | None = None) -> None:
        self._options = options
        self._metrics = metrics
        self.admission = Admission(options.max_queue)
        self._lock = threading.Lock()
        self._entries = {name: _Entry(path) for name, path in options.models.items()}
        self._models: dict[str, Model] = {}
        self._hidden: set[str] = set()  # files whose names the options give to others
        self._scan()

    @property
    def models(self) -> dict[str, Model]:
        """All that can be called now, by name."""
        return dict(self._models)

    @property
    def packages(self) -> list[Package]:
        """Those that are loaded."""
        with self._lock:
            return [entry.package for entry in self._entries.values() if entry.package is not None]

    def get(self, name: str, version: str = "") -> Model:
        """A model by the protocol's name. Raises ModelNotFoundError, NotReadyError."""
        model = self._models.get(name)
        if model is not None and version in ("", VERSION):
            return model
        if model is not None:
            raise ModelNotFoundError(f"model '{name}' has the version {VERSION}, not {version!r:.40}")
        with self._lock:
            entry = self._entries.get(name)
            if entry is None:
                self._check_method(name)
                names = ", ".join(sorted(self._models)) or "none"
                raise ModelNotFoundError(f"no model is named {name!r:.210}, there are: {names}")
            if entry.package is not None:
                methods = ", ".join(entry.package.models)
                raise ModelNotFoundError(f"package '{name}' has several methods, call one of: {methods}")
            raise NotReadyError(f"model '{name}' is not loaded: {entry.reason}")

    def _check_method(self, name: str) -> None:
        """Raises NotReadyError for a name of the form PACKAGE.METHOD whose package is still to be loaded, or failed."""
        package = name.rpartition(".")[0]
        while package:
            entry = self._entries.get(package)
            if entry is not None and entry.package is None and entry.reason != _UNLOADED:
                raise NotReadyError(f"model '{package}' is not loaded: {entry.reason}")
            package = package.rpartition(".")[0]

    def unavailable(self, name: str) -> str | None:
        """Why a package that is known cannot be called now; None: it can, or no package has this name."""
        with self._lock:
            entry = self._entries.get(name)
            return None if entry is None or entry.package is not None else entry.reason

    def is_ready(self, name: str, version: str = "") -> bool:
        """Whether a model, or a package, can be called. Raises ModelNotFoundError."""
        try:
            self.get(name, version)
        except NotReadyError:
            return False
        except ModelNotFoundError:
            with self._lock:
                entry = self._entries.get(name)
                if entry is not None and entry.package is not None and version in ("", VERSION):
                    return True  # its methods are models of their own
            raise
        return True

    def index(self) -> list[dict[str, str]]:
        """Every model that is loaded, and every package that could be."""
        self._scan()
        with self._lock:
            rows: list[dict[str, str]] = []
            for name, entry in sorted(self._entries.items()):
                names = list(entry.package.models) if entry.package is not None else [name]
                rows += [
                    {"name": one, "version": VERSION, "state": entry.state, "reason": entry.reason} for one in names
                ]
            return rows

    def load_all(self) -> None:
        """Loads what the options name. A package that they name has to load; one of the folder may fail alone."""
        for name in list(self._entries):
            try:
                self.load(name)
            except (UntorchError, OSError) as error:
                if name in self._options.models:
                    raise
                log(INFO, "model %s was not loaded: %s", name, error)

    def load(self, name: str) -> None:
        """Loads a package, or loads it again from its file; then the new one takes the calls at once.

        Returns when those of the old one have ended, or ``options.drain`` seconds after.

        Raises:
            ModelNotFoundError: There is no such file.
            UntorchError: What ``untorch.load`` raises. What was loaded before stays.
        """
        entry = self._entry(name)
        with entry.lock:
            if entry.package is None:
                entry.state, entry.reason = "LOADING", "it is being loaded"
            entry.tried = _identity(entry.path)
            identity = entry.tried
            try:
                package = self._open(name, entry.path)
                old = self._exchange(entry, package)
                entry.loaded, entry.is_damaged = identity, False
            except BaseException as error:
                if entry.package is None:
                    entry.state, entry.reason = "UNAVAILABLE", str(error)
                raise
            if old is not None:
                old.close(self._options.drain)
        log(INFO, "model %s is loaded from %s", name, entry.path)

    def unload(self, name: str, drain: float | None = None) -> None:
        """Takes no more calls for a package, waits for those that run, and frees it. Raises ModelNotFoundError.

        drain: Seconds for calls of language and speech models. Default: ``options.drain``.
        """
        with self._lock:
            entry = self._entries.get(name)
        if entry is None:
            raise ModelNotFoundError(f"no package is named {name!r:.210}")
        with entry.lock:
            old = self._exchange(entry, None)
            entry.tried, entry.is_damaged = _identity(entry.path), False
            if old is not None:
                old.close(self._options.drain if drain is None else drain)
        log(INFO, "model %s is unloaded", name)

    def poll(self) -> None:
        """Looks at the folder once: loads what is new or was replaced, unloads what is gone."""
        self._scan()
        for name, entry in list(self._entries.items()):
            if name in self._options.models:
                continue
            identity = _identity(entry.path)
            try:
                if identity is None:
                    self.unload(name)
                    with self._lock:
                        self._entries.pop(name, None)
                elif entry.tried != identity:
                    self.load(name)
            except (UntorchError, OSError) as error:
                log(INFO, "model %s was not loaded: %s", name, error)

    def check_files(self) -> None:
        """Looks at the files of loaded packages once: one that was written over, not replaced, is loaded again.

        The weights of the package are those of the file now, whatever it has. If it cannot be loaded, the package is
        taken out of service until it can.
        """
        for name, entry in list(self._entries.items()):
            identity = _identity(entry.path)
            if entry.is_damaged:
                if identity is None or identity == entry.tried:
                    continue
            elif entry.package is None or not _is_written_over(entry.loaded, identity):
                continue
            else:
                log(INFO, "the file of model %s was written over: it is loaded again", name)
            try:
                self.load(name)
            except (UntorchError, OSError) as error:
                self._retire(entry, f"its file was written over, and cannot be loaded: {error}")
                log(INFO, "model %s is not served: %s", name, entry.reason)

    def _retire(self, entry: _Entry, reason: str) -> None:
        with entry.lock:
            old = self._exchange(entry, None)
            entry.reason, entry.is_damaged = reason, True
            if old is not None:
                old.close()

    def close(self) -> None:
        """Unloads everything. What still runs is ended."""
        for name in list(self._entries):
            self.unload(name, 0.0)

    def _entry(self, name: str) -> _Entry:
        self._scan()
        with self._lock:
            entry = self._entries.get(name)
            if entry is None:
                where = f" in the repository's folder as {name!r:.210}.pt2" if self._options.repository else ""
                raise ModelNotFoundError(f"no package is named {name!r:.210}: expected a file{where}")
            return entry

    def _scan(self) -> None:
        """Files of the folder that have no entry get one. Names of clients are never made into paths."""
        if self._options.repository is None:
            return
        try:
            found = sorted(Path(self._options.repository).glob("*.pt2"))
        except OSError as error:
            log(INFO, "the repository %s cannot be read: %s", self._options.repository, error)
            return
        with self._lock:
            for path in found:
                if not path.exists():  # a link to nowhere
                    continue
                name = path.name.removesuffix(".pt2")
                try:
                    check_name(name)
                except InvalidArgumentError:
                    continue
                entry = self._entries.setdefault(name, _Entry(str(path.absolute())))
                if entry.path not in (str(path.absolute()), str(path.resolve())) and str(path) not in self._hidden:
                    self._hidden.add(str(path))
                    log(INFO, "%s is not served: %s has its name", path, entry.path)

    def _exchange(self, entry: _Entry, package: Package | None) -> Package | None:
        """Puts the package in the place of the entry's, and gives that back."""
        with self._lock:
            old = entry.package
            others = {
                name: model
                for name, model in self._models.items()
                if old is None or old.models.get(name) is not model
            }  # fmt: skip
            taken = sorted(set(others) & set(package.models)) if package is not None else []
            if package is not None and taken:
                raise InvalidArgumentError(
                    f"package '{package.name}' serves {', '.join(taken)}, which another package serves already: "
                    "rename the file"
                )
            entry.package = package
            entry.state, entry.reason = ("READY", "") if package is not None else ("UNAVAILABLE", _UNLOADED)
            self._models = {**others, **(package.models if package is not None else {})}
            return old

    def _open(self, name: str, path: str) -> Package:
        options = self._options
        begin = time.perf_counter()
        program = untorch.load(
            path, device=options.device, num_runners=options.num_runners, num_threads=options.num_threads,
            cuda_graphs=options.cuda_graphs, trust=options.trust,
        )  # fmt: skip
        package = Package(name, path, {}, program)
        try:
            if "speech" in program.manifest:
                self._open_speech_model(package)
            if "llm" in program.manifest:
                self._open_language_model(package)
                if package.transcriber is not None:
                    self._open_pipeline(package)
            else:
                for method in program.methods:
                    model = model_name(name, method, program.methods)
                    observer = self._metrics.observer(model) if self._metrics is not None else None
                    package.models[model] = MethodModel(model, program, program[method], options, observer)
                self._open_pipeline(package)
        except BaseException:
            package.close()
            raise
        log(INFO, "opened %s in %.3f s: %s", path, time.perf_counter() - begin, ", ".join(package.models))
        return package

    def _open_speech_model(self, package: Package) -> None:
        from untorch.speech import Transcriber

        assert package.program is not None
        options = self._options
        engine: dict[str, Any] = {}
        if "llm" in package.program.manifest:
            engine = {"kv_memory": options.kv_memory, "snapshot_memory": options.snapshot_memory}
        package.transcriber = Transcriber(package.program, max_seconds=options.max_audio, **engine)

    def _open_pipeline(self, package: Package) -> None:
        """Of a package that has a front end, whose methods are served without it where it cannot be opened."""
        program = package.program
        assert program is not None
        if package.transcriber is None and not isinstance(program.manifest.get("pipeline"), Mapping):
            return
        from untorch.pipeline import open_pipeline
        from untorch.pipeline.speech import SpeechRecognition
        from untorch.pipeline.text import TextEmbedding
        from untorch.serve.embedder import Embedder
        from untorch.serve.front_end import FrontEnd

        options, names = self._options, program.methods
        methods = {method: package.models.get(model_name(package.name, method, names)) for method in names}
        try:
            pipeline = (
                open_pipeline(program)
                if package.transcriber is None
                else SpeechRecognition(program, owned=False, transcriber=package.transcriber)
            )
            if isinstance(pipeline, TextEmbedding):
                model = package.models[model_name(package.name, "forward", names)]
                package.embedder = Embedder(pipeline, model, options.max_batch_size)
            package.front_end = FrontEnd(
                package.name, pipeline,
                {method: model for method, model in methods.items() if isinstance(model, MethodModel)},
                max_pixels=options.max_pixels, max_audio=options.max_audio, max_batch_size=options.max_batch_size,
                timeout=options.timeout if package.transcriber is None else options.llm_timeout,
            )  # fmt: skip
        except UnsupportedError as error:
            log(INFO, "model %s is served without its front end: %s", package.name, error)

    def _open_language_model(self, package: Package) -> None:
        from untorch.llm import Engine
        from untorch.serve.language_model import LanguageModel

        options = self._options
        if package.transcriber is not None:
            package.engine = package.transcriber.engine
        else:
            if package.program is not None:
                package.program.close()
                package.program = None
            names = ("speculative", "num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max")
            given = {name: value for name in names if (value := getattr(options, name)) is not None}
            package.engine = Engine(
                package.path, kv_memory=options.kv_memory, snapshot_memory=options.snapshot_memory,
                num_threads=options.num_threads, trust=options.trust, loras=options.loras_of(package.name), **given,
            )  # fmt: skip
        assert package.engine is not None
        if (tokenizer := package.engine.tokenizer) is not None:
            tokenizer.max_characters = max(MOST_CHARACTERS, _CHARACTERS * package.engine.max_prompt_tokens)
        package.models[package.name] = LanguageModel(
            package.name, package.engine, self._metrics, timeout=options.llm_timeout, admission=self.admission
        )


class _Loaded(Generic[_M]):
    """The packages that are loaded and have such a model, for the routes of the OpenAI API."""

    def __init__(self, repository: Repository, model_of: Callable[[Package], _M | None]) -> None:
        self._repository, self._model_of = repository, model_of

    def names(self) -> list[str]:
        """Of all that are loaded now."""
        return sorted(package.name for package in self._repository.packages if self._model_of(package) is not None)

    def get(self, name: str) -> _M | None:
        """The model of a name; None: there is no such one."""
        for package in self._repository.packages:
            if package.name == name:
                return self._model_of(package)
        return None


class Engines(_Loaded["Engine"]):
    """Language models. ``metrics`` takes the times to a first and to a further token, which only those routes know."""

    def __init__(self, repository: Repository, metrics: Metrics) -> None:
        super().__init__(repository, lambda package: package.engine)
        self.metrics = metrics


class Transcribers(_Loaded["Transcriber"]):
    """Speech models."""

    def __init__(self, repository: Repository) -> None:
        super().__init__(repository, lambda package: package.transcriber)


class Embedders(_Loaded["Embedder"]):
    """Packages of the task text-embedding, which embed by their front end."""

    def __init__(self, repository: Repository) -> None:
        super().__init__(repository, lambda package: package.embedder)


def model_name(package: str, method: str, methods: list[str]) -> str:
    """The protocol's name of a method."""
    return package if method == "forward" or len(methods) == 1 else f"{package}.{method}"


def _identity(path: str) -> Any:
    """Changes when the file is replaced; None: there is none."""
    try:
        status = Path(path).stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _is_written_over(before: Any, now: Any) -> bool:
    """Whether it is the same file with other contents. A file that was replaced by renaming is another one."""
    return before is not None and now is not None and before[:2] == now[:2] and before != now
