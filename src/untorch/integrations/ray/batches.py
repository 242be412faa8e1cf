"""``BatchPredictor``: what ``Dataset.map_batches`` runs in its actors."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from untorch.predictor import Predictor
from untorch.runtime.columns import as_array, input_names, run_columns
from untorch.runtime.errors import ArgumentTypeError, InvalidArgumentError
from untorch.runtime.method import Method

if TYPE_CHECKING:
    from untorch.runtime.pinned import PinnedBuffers

__all__ = ["BatchPredictor"]

_STAGED = 256 << 10  # native/cuda/transfer.cpp


class BatchPredictor:
    """Runs methods of a ``.pt2`` file on batches of columns; an actor loads the file once.

    ::

        actors = ray.data.ActorPoolStrategy(size=2)
        dataset.map_batches(BatchPredictor, fn_constructor_args=("model.pt2",), batch_size=64, compute=actors)

    Inputs are columns of the same names, outputs become columns; dtypes are converted and large batches cut as by
    ``untorch.Predictor``. With several methods each may read the columns that an earlier one made. bfloat16 results
    become float32, as Arrow has no bfloat16.

    Args:
        path: The file, on every node.
        methods: A method's name, or several, which run one after the other.
        inputs: Columns for inputs that have another name: ``{"x": "pixels"}``, ``{"encode.x": "pixels"}`` for the input
            of one method.
        outputs: Likewise, what to call the column of an output. Default: the output's name; with several methods
            ``"method.output"``.
        pinned: On a GPU: copy inputs of more than 256 KiB into pinned memory that the actor keeps, from where the GPU
            reads them at the bus's full speed. Smaller ones are staged in pinned memory in any case.
        keep: Which columns of the batch stay: all (True), none (False), or those of these names.
        **load_options: As for ``untorch.load``.

    Raises:
        InvalidArgumentError: An argument is wrong, or names an input or output that there is not.
        ArgumentTypeError: An argument, or a batch, has the wrong type.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        methods: str | Sequence[str] = "forward",
        *,
        inputs: Mapping[str, str] | None = None,
        outputs: Mapping[str, str] | None = None,
        keep: bool | Sequence[str] = True,
        pinned: bool = False,
        **load_options: Any,
    ) -> None:
        names = [methods] if isinstance(methods, str) else list(methods)
        if not names or len(set(names)) != len(names):
            raise InvalidArgumentError(f"BatchPredictor: methods: expected names that differ, got {methods!r}")
        self._several = len(names) > 1
        self._keep = keep
        self._predictors = {name: Predictor(path, name, **load_options) for name in names}
        self._inputs, self._outputs = dict(inputs or {}), dict(outputs or {})
        for predictor in self._predictors.values():
            predictor.method.open()  # not in the first batch
        self._check_names()
        self._buffers: PinnedBuffers | None = None
        if pinned:
            device = next(iter(self._predictors.values())).program.device
            if device == "cpu":
                raise InvalidArgumentError("BatchPredictor: pinned: expected False, as the methods run on the CPU")
            from untorch.runtime.pinned import PinnedBuffers

            self._buffers = PinnedBuffers(int(device.partition(":")[2] or 0))

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Columns in, columns out."""
        if not isinstance(batch, Mapping):
            raise ArgumentTypeError(
                f"BatchPredictor: expected a dict of arrays, got {type(batch).__name__}: use batch_format='numpy'"
            )
        made: dict[str, Any] = {}
        for name, predictor in self._predictors.items():
            method = predictor.method
            columns = {}
            for key in input_names(method):
                column = self._inputs.get(f"{name}.{key}", self._inputs.get(key, key))
                if column not in made and column not in batch:
                    raise InvalidArgumentError(
                        f"BatchPredictor: method '{name}', input '{key}': expected the column '{column}', got "
                        f"{', '.join([*batch, *made])}: name it in inputs={{'{key}': …}}"
                    )
                columns[key] = made[column] if column in made else batch[column]
            for key, value in run_columns(method, self._prepared(method, columns)).items():
                made[self._column(name, key)] = _for_arrow(value)
        if self._keep is True:
            return {**batch, **made}
        return {**{column: batch[column] for column in self._keep or ()}, **made}

    def _prepared(self, method: Method, columns: dict[str, Any]) -> dict[str, Any]:
        """As the method takes them; on a GPU in pinned memory, if that was asked for."""
        specs = {spec.name: spec for spec in method.inputs}
        arrays = {key: as_array(value, method.name, key, specs.get(key)) for key, value in columns.items()}
        if (buffers := self._buffers) is None or method.device == "cpu":
            return arrays
        return {
            key: buffers.copy((method.name, key), array) if array.nbytes > _STAGED else array
            for key, array in arrays.items()
        }

    def _column(self, method: str, output: str) -> str:
        default = f"{method}.{output}" if self._several else output
        return self._outputs.get(f"{method}.{output}", self._outputs.get(output, default))

    def _check_names(self) -> None:
        """What inputs and outputs rename exists; of a stock package the outputs' names are not known yet."""
        for argument, given in (("inputs", self._inputs), ("outputs", self._outputs)):
            known: list[str] = []
            for name, predictor in self._predictors.items():
                method = predictor.method
                if argument == "outputs" and not method.outputs:
                    return
                specs = method.outputs if argument == "outputs" else ()
                keys = [spec.name for spec in specs if spec is not None] or input_names(method)
                known += [*keys, *(f"{name}.{key}" for key in keys)]
            if unknown := [key for key in given if key not in known]:
                raise InvalidArgumentError(
                    f"BatchPredictor: {argument}: expected {', '.join(dict.fromkeys(known))}, got {', '.join(unknown)}"
                )


def _for_arrow(value: Any) -> Any:
    array = value if hasattr(value, "astype") else value.numpy()
    return array.astype("float32") if array.dtype.name == "bfloat16" else array
