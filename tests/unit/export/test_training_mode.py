"""The warning for a model in training mode."""

from __future__ import annotations

import warnings

import pytest
import torch

from untorch.export.training_mode import warn_if_training


def test_affected_layers_are_named() -> None:
    layers = [torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), *(torch.nn.Dropout(0.5) for _ in range(6))]
    with pytest.warns(UserWarning, match="training mode") as caught:
        warn_if_training("forward", torch.nn.Sequential(*layers))
    assert [str(warning.message) for warning in caught] == [
        "export: method 'forward': the model is in training mode, and the file will compute as in training: batch "
        "statistics instead of running ones (1); dropout (2, 3, 4, 5 and 2 more). Call model.eval() before the export, "
        "unless that is meant"
    ]


@pytest.mark.parametrize(
    ("layer", "what"),
    [
        (torch.nn.Dropout2d(0.1), r"dropout \(Dropout2d\)"),
        (torch.nn.AlphaDropout(0.1), "dropout"),
        (torch.nn.LSTM(4, 4, num_layers=2, dropout=0.1), "dropout"),
        (torch.nn.MultiheadAttention(4, 2, dropout=0.1), "dropout"),
        (torch.nn.InstanceNorm1d(4, track_running_stats=True), "batch statistics"),
        (torch.nn.RReLU(), "random slopes"),
    ],
)
def test_kinds(layer: torch.nn.Module, what: str) -> None:
    with pytest.warns(UserWarning, match=what):
        warn_if_training("f", layer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_training("f", layer.eval())


@pytest.mark.parametrize(
    "layer",
    [torch.nn.Linear(4, 4), torch.nn.Dropout(0.0), torch.nn.LSTM(4, 4), torch.nn.InstanceNorm1d(4),
     torch.nn.BatchNorm1d(4, track_running_stats=False), None],
)  # fmt: skip
def test_layers_that_do_the_same_in_both_modes(layer: torch.nn.Module | None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_training("f", layer)
