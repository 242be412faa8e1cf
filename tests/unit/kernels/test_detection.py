"""Detection operators against loops that spell their definitions out, one box and one sample at a time."""

import math

import ml_dtypes
import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from untorch.runtime.errors import InvalidArgumentError
from untorch.runtime.registry import find_kernel

quick = settings(max_examples=30, deadline=None)


def slow_nms(boxes, scores, threshold):
    kept = []
    for i in sorted(range(len(boxes)), key=lambda i: -scores[i]):
        for j in kept:
            w = min(boxes[i][2], boxes[j][2]) - max(boxes[i][0], boxes[j][0])
            h = min(boxes[i][3], boxes[j][3]) - max(boxes[i][1], boxes[j][1])
            common = max(w, 0) * max(h, 0)
            area = sum((boxes[k][2] - boxes[k][0]) * (boxes[k][3] - boxes[k][1]) for k in (i, j))
            if common / (area - common) > threshold:
                break
        else:
            kept.append(i)
    return kept


@quick
@given(st.integers(0, 30), st.integers(0, 99), st.sampled_from([0.0, 0.3, 0.5, 0.9]))
def test_nms(count, seed, threshold):
    random = numpy.random.default_rng(seed)
    corners = random.random((count, 2)) * 5
    boxes = numpy.concatenate((corners, corners + 0.5 + random.random((count, 2)) * 3), axis=1)
    scores = random.integers(0, 9, count) / 8  # with ties: the first of equals wins
    actual = find_kernel("torchvision::nms")(boxes, scores, threshold)
    assert actual.dtype == numpy.int64
    assert actual.tolist() == slow_nms(boxes.tolist(), scores.tolist(), threshold)


def sample(image, y, x):
    height, width = image.shape
    if y < -1 or y > height or x < -1 or x > width:
        return 0.0
    y, x = max(y, 0.0), max(x, 0.0)
    y0, x0 = int(y), int(x)
    if y0 >= height - 1:
        y0 = y = height - 1
    if x0 >= width - 1:
        x0 = x = width - 1
    y1, x1 = min(y0 + 1, height - 1), min(x0 + 1, width - 1)
    v, u = y - y0, x - x0
    top = image[y0, x0] * (1 - u) + image[y0, x1] * u
    return top * (1 - v) + (image[y1, x0] * (1 - u) + image[y1, x1] * u) * v


def slow_roi_align(images, regions, scale, ph, pw, ratio, aligned):
    result = numpy.zeros((len(regions), images.shape[1], ph, pw))
    for n, (image, *corners) in enumerate(regions):
        x1, y1, x2, y2 = (c * scale - (0.5 if aligned else 0) for c in corners)
        w, h = (x2 - x1, y2 - y1) if aligned else (max(x2 - x1, 1), max(y2 - y1, 1))
        gh, gw = (ratio, ratio) if ratio > 0 else (math.ceil(h / ph), math.ceil(w / pw))
        for c, i, j in numpy.ndindex(images.shape[1], ph, pw):
            total = 0.0
            for a, b in numpy.ndindex(gh, gw):
                y = y1 + i * h / ph + (a + 0.5) * h / ph / gh
                x = x1 + j * w / pw + (b + 0.5) * w / pw / gw
                total += sample(images[int(image), c], y, x)
            result[n, c, i, j] = total / max(gh * gw, 1)
    return result


@quick
@given(st.integers(0, 99), st.integers(1, 4), st.integers(1, 3), st.integers(-1, 3), st.booleans())
def test_roi_align(seed, ph, pw, ratio, aligned):
    random = numpy.random.default_rng(seed)
    images = random.random((2, 2, 6, 5))
    corners = random.random((4, 2)) * 14 - 3  # some of them reach outside
    regions = numpy.concatenate((random.integers(0, 2, (4, 1)), corners, corners + random.random((4, 2)) * 8), axis=1)
    actual = find_kernel("torchvision::roi_align")(images, regions, 0.5, ph, pw, ratio, aligned)
    numpy.testing.assert_allclose(actual, slow_roi_align(images, regions, 0.5, ph, pw, ratio, aligned), atol=1e-12)


def test_half_types():
    images = numpy.ones((1, 1, 4, 4), ml_dtypes.bfloat16)
    regions = numpy.array([[0, 0, 0, 4, 4]], ml_dtypes.bfloat16)
    actual = find_kernel("torchvision::roi_align")(images, regions, 1.0, 2, 2, 2, False)
    assert actual.dtype == ml_dtypes.bfloat16
    assert actual.astype("f").tolist() == [[[[1, 1], [1, 1]]]]


def test_wrong_arguments():
    with pytest.raises(
        InvalidArgumentError, match=r"expected boxes \(n, 4\) and scores \(n\), got the shapes \(3, 5\)"
    ):
        find_kernel("torchvision::nms")(numpy.zeros((3, 5)), numpy.zeros(3), 0.5)
    with pytest.raises(InvalidArgumentError, match="torchvision::roi_align: expected an input of 4 dimensions"):
        find_kernel("torchvision::roi_align")(numpy.zeros((3, 5)), numpy.zeros((1, 5)), 1.0, 2, 2, 2, False)
