"""Calls on two CuPy streams, synchronised only at the end, and a CUDA graph.

Usage: python run.py MODEL.pt2, a package for CUDA whose method takes one float32 array [batch, features].
"""

from __future__ import annotations

import sys

import cupy
import numpy

import untorch


def main() -> None:
    with untorch.load(sys.argv[1], num_runners=2) as program:
        method = program[program.methods[0]]
        (spec,) = method.inputs
        shape = [size if isinstance(size, int) else max(size.min, 4) for size in spec.shape]
        streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
        results = []
        for number, stream in enumerate(streams):
            # CuPy's work and the call are enqueued on the same stream, so no synchronisation is needed.
            with stream, untorch.stream(stream):
                x = cupy.full(shape, number + 1, numpy.float32)
                y = cupy.from_dlpack(method(x))
                results.append(cupy.abs(y).max())
        for stream, result in zip(streams, results, strict=True):
            stream.synchronize()
            print(f"largest magnitude: {float(result):.6g}")

        # A CUDA graph: the whole call is one launch.
        with streams[0], untorch.stream(streams[0]):
            graph = method.graph(cupy.zeros(shape, numpy.float32))
            for number in range(3):
                y = cupy.from_dlpack(graph(cupy.full(shape, number, numpy.float32)))
                print(f"replay {number}: {float(cupy.abs(y).max()):.6g}")


if __name__ == "__main__":
    main()
