"""Segmentation by queries (MaskFormer, Mask2Former, OneFormer): their classes and masks to segments of an image.

classes: logits [queries, labels + 1], the last for no object. masks: logits [queries, h, w]. size: of the image,
(width, height). Results are those of transformers' image processors.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from untorch.pipeline.resized_maps import bilinear_rows, nearest_indices
from untorch.pipeline.scores import sigmoid, softmax

__all__ = ["instance_segments", "merged_instance_segments", "panoptic_segments", "semantic_scores"]

_DIGITS = 6  # of a score
# A score, a label and a mask [height, width] of bools.
Segment = tuple[float, int, NDArray[np.bool_]]


def semantic_scores(classes: NDArray[np.float32], masks: NDArray[np.float32]) -> NDArray[np.float32]:
    """Of each label at each place, [labels, h, w]: the sum over queries of class times mask."""
    weights = softmax(classes)[:, :-1]
    places = sigmoid(masks).reshape(len(masks), -1)
    found: NDArray[Any] = (weights.T @ places).reshape(-1, *masks.shape[1:])
    return found


def instance_segments(
    classes: NDArray[np.float32], masks: NDArray[np.float32], size: tuple[int, int], threshold: float
) -> Iterator[Segment]:
    """Of the likeliest pairs of a query and a label, as many as queries, the likeliest first.

    A score is the label's, times the mean of the mask's where it is above a half. Where segments overlap, the later one
    has the pixels.
    """
    rows, columns = nearest_indices(masks.shape[1], size[1]), nearest_indices(masks.shape[2], size[0])
    places = np.full((size[1], size[0]), -1, np.int32)
    kept: list[tuple[float, int]] = []
    for chance, label, query in zip(*_likeliest_pairs(classes), strict=True):
        if chance < threshold:  # which its mask does not raise
            continue
        mask = masks[query]
        inside = mask > 0
        share = (sigmoid(mask) * inside).sum(dtype=np.float32) / (inside.sum(dtype=np.float32) + np.float32(1e-6))
        score = float(chance * share)
        pixels = inside[rows][:, columns]
        if score >= threshold and pixels.any():
            places[pixels] = len(kept)
            kept.append((round(score, _DIGITS), int(label)))
    for index, (score, label) in enumerate(kept):
        yield score, label, places == index


def panoptic_segments(
    classes: NDArray[np.float32],
    masks: NDArray[np.float32],
    size: tuple[int, int],
    threshold: float,
    mask_threshold: float,
    overlap_mask_area_threshold: float,
) -> Iterator[Segment]:
    """Each pixel to one query: segments do not overlap.

    Left out are queries whose label's score is not above ``threshold``, and those that keep no more than a share of
    ``overlap_mask_area_threshold`` of the pixels at which their mask, times that score, reaches ``mask_threshold``.
    """
    chances = softmax(classes)
    labels, scores = chances.argmax(1), chances.max(1)
    kept = np.flatnonzero((labels != classes.shape[1] - 1) & (scores > threshold))
    yield from _merge(
        scores[kept], labels[kept], sigmoid(masks[kept]), size, mask_threshold, overlap_mask_area_threshold
    )


def merged_instance_segments(
    classes: NDArray[np.float32],
    masks: NDArray[np.float32],
    size: tuple[int, int],
    threshold: float,
    mask_threshold: float,
    overlap_mask_area_threshold: float,
) -> Iterator[Segment]:
    """OneFormer's instances: of the likeliest pairs of a query and a label, as many as queries, the likeliest first.

    Segments do not overlap, as panoptic ones, but are found by logits, not by their sigmoids.
    """
    scores, labels, queries = _likeliest_pairs(classes)
    kept = scores > threshold
    yield from _merge(
        scores[kept], labels[kept], masks[queries[kept]], size, mask_threshold, overlap_mask_area_threshold
    )


def _likeliest_pairs(
    classes: NDArray[np.float32],
) -> tuple[NDArray[np.float32], NDArray[np.intp], NDArray[np.intp]]:
    """Scores, labels and queries of as many pairs of them as there are queries, the likeliest first."""
    labels = classes.shape[1] - 1
    scores = softmax(classes)[:, :-1].reshape(-1)
    pairs = np.argsort(-scores, kind="stable")[: len(classes)]
    return scores[pairs], pairs % labels, pairs // labels


def _merge(
    scores: NDArray[np.float32],
    labels: NDArray[np.intp],
    masks: NDArray[np.float32],
    size: tuple[int, int],
    mask_threshold: float,
    overlap_mask_area_threshold: float,
) -> Iterator[Segment]:
    """Each pixel to the segment whose mask, times its score, is largest. masks: [segments, h, w]."""
    if not len(scores):
        return
    owners = np.empty((size[1], size[0]), np.min_scalar_type(len(scores)))
    reached = np.zeros(len(scores), np.int64)
    for rows, values in bilinear_rows(masks, size):
        weighted = values * scores[:, None, None]
        owners[rows] = weighted.argmax(0)
        reached += (weighted >= mask_threshold).sum((1, 2))
    areas = np.bincount(owners.reshape(-1), minlength=len(scores))
    for index, (area, most) in enumerate(zip(areas, reached, strict=True)):
        if area and most and float(np.float32(area) / np.float32(most)) > overlap_mask_area_threshold:
            yield round(float(scores[index]), _DIGITS), int(labels[index]), owners == index
