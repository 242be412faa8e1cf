"""A pandas UDF of Spark that calls ``untorch.Predictor``, on a local cluster of two processes. Needs pyspark and Java."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import untorch
from tests import packages

pyspark = pytest.importorskip("pyspark")
pytest.importorskip("pyarrow")
pandas = pytest.importorskip("pandas")
if shutil.which("java") is None and "JAVA_HOME" not in os.environ:
    pytest.skip("needs Java", allow_module_level=True)

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # Spark's own

ROWS = 1000


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from pyspark.sql import SparkSession

    folder = tmp_path_factory.mktemp("spark")
    # Workers are this Python, with this process's modules.
    paths = os.pathsep.join(path for path in sys.path if path)
    made = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.local.dir", str(folder))
        .config("spark.sql.warehouse.dir", str(folder / "warehouse"))
        .config("spark.sql.execution.arrow.maxRecordsPerBatch", "100")
        .config("spark.executorEnv.PYTHONPATH", paths)
    )  # fmt: skip
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    try:
        spark = made.getOrCreate()
        yield spark
        spark.stop()
    finally:
        monkeypatch.undo()


def test_a_pandas_udf(session: Any) -> None:
    """Each row has its own result, however Spark cuts the batches; the predictor travels as its path."""
    from pyspark.sql.functions import pandas_udf

    package = packages.compiled(packages.ROOT / "tests" / "unit" / "models.py", "own")
    predictor = untorch.Predictor(package, "linear", num_threads=1)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, 4)).astype(np.float32)

    @pandas_udf("array<float>")
    def forward(column: pandas.Series) -> pandas.Series:
        assert "torch" not in sys.modules
        output = next(iter(predictor({"x": np.stack(column.to_list())}).values()))
        return pandas.Series(list(output))

    frame = session.createDataFrame(pandas.DataFrame({"id": range(ROWS), "x": x.tolist()}), "id long, x array<float>")
    found = frame.repartition(4).select("id", forward("x").alias("y")).toPandas()
    assert sorted(found["id"]) == list(range(ROWS))
    weight = np.arange(12, dtype=np.float32).reshape(3, 4)
    for row in found.itertuples():
        np.testing.assert_allclose(row.y, x[row.id] @ weight.T + np.array([10, 20, 30]), rtol=1e-4, atol=1e-4)
