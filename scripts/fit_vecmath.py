"""Fits the polynomials of native/kernels/cpu/vecmath: weighted minimax (Remez) in multiple precision; and quotients.

Prints, for every fit, the C initialiser and the weighted error that is left. Needs mpmath only:

    python scripts/fit_vecmath.py [name ...]
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mpmath import mp, mpf  # type: ignore[import-untyped]

mp.dps = 50
Function = Callable[[Any], Any]


@dataclass(frozen=True)
class Fit:
    """A polynomial of ``degree`` in x that approximates ``f`` on [low, high]; error·weight is what is minimised."""

    name: str
    f: Function
    low: Any
    high: Any
    degree: int
    weight: Function
    single: bool = False  # coefficients are rounded to float


def chebyshev_nodes(low: Any, high: Any, count: int) -> list[Any]:
    """The extrema of the Chebyshev polynomial of degree count − 1, mapped to [low, high]."""
    middle, half = (low + high) / 2, (high - low) / 2
    return [middle - half * mp.cos(mp.pi * i / (count - 1)) for i in range(count)]


def evaluate(coefficients: list[Any], x: Any) -> Any:
    """Horner, lowest coefficient first."""
    result = mpf(0)
    for c in reversed(coefficients):
        result = result * x + c
    return result


def remez(fit: Fit, rounds: int = 12) -> tuple[list[Any], Any]:
    """Weighted minimax coefficients, lowest first, and the largest weighted error on a dense grid."""
    low, high = mpf(fit.low), mpf(fit.high)
    count = fit.degree + 2
    nodes = chebyshev_nodes(low, high, count)
    grid = chebyshev_nodes(low, high, 40 * count)
    values = [fit.f(x) for x in grid]
    weights = [fit.weight(x) for x in grid]
    coefficients: list[Any] = []
    worst = mpf(0)
    for _ in range(rounds):
        matrix = mp.matrix(count, count)
        right = mp.matrix(count, 1)
        for i, x in enumerate(nodes):
            power = mpf(1)
            for j in range(count - 1):
                matrix[i, j] = power
                power *= x
            matrix[i, count - 1] = (-1) ** i / fit.weight(x)
            right[i] = fit.f(x)
        solution = mp.lu_solve(matrix, right)
        coefficients = [solution[j] for j in range(count - 1)]
        errors = [(evaluate(coefficients, x) - v) * w for x, v, w in zip(grid, values, weights, strict=True)]
        worst = max(abs(e) for e in errors)
        # One extremum for every run of equal sign; the largest `count` neighbours of alternating sign go on.
        extrema: list[tuple[Any, Any]] = []
        for x, e in zip(grid, errors, strict=True):
            if extrema and (e > 0) == (extrema[-1][1] > 0):
                if abs(e) > abs(extrema[-1][1]):
                    extrema[-1] = (x, e)
            else:
                extrema.append((x, e))
        while len(extrema) > count:
            extrema.pop(0 if abs(extrema[0][1]) < abs(extrema[-1][1]) else -1)
        if len(extrema) < count:
            break
        nodes = [x for x, _ in extrema]
        if worst <= abs(solution[count - 1]) * mpf("1.001"):
            break
    return coefficients, worst


@dataclass(frozen=True)
class Quotient:
    """P(x) / Q(x), both of ``degree``, that approximates ``f`` on [0, high] with a small relative error."""

    name: str
    f: Function
    high: Any
    degree: int


def fit_quotient(fit: Quotient, points: int = 400, rounds: int = 25) -> tuple[list[Any], list[Any], Any]:
    """The coefficients of P and Q, lowest first, Q's first 1, and the largest relative error at the points.

    Least squares of (P − f·Q) / (f·Q), with Q from the round before (Loeb) and weights that grow where the error is
    large (Lawson); the best round counts. x is scaled to [0, 1], and the coefficients back.
    """
    high, n = mpf(fit.high), fit.degree
    nodes = [(1 - mp.cos(mp.pi * (i + mpf(1) / 2) / points)) / 2 for i in range(points)]
    values = [fit.f(u * high) for u in nodes]
    below, weights = [mpf(1)] * points, [mpf(1)] * points
    best: tuple[list[Any], list[Any], Any] = [], [], mpf("inf")
    for _ in range(rounds):
        matrix, right = mp.matrix(points, 2 * n + 1), mp.matrix(points, 1)
        for i, (u, value) in enumerate(zip(nodes, values, strict=True)):
            scale = mp.sqrt(weights[i]) / (value * below[i])
            for j in range(n + 1):
                matrix[i, j] = scale * u**j
            for j in range(1, n + 1):
                matrix[i, n + j] = -scale * value * u**j
            right[i] = scale * value
        solution = mp.lu_solve(matrix.T * matrix, matrix.T * right)
        p, q = list(solution[: n + 1]), [mpf(1), *solution[n + 1 :]]
        below = [evaluate(q, u) for u in nodes]
        quotients = zip(nodes, below, values, strict=True)
        errors = [abs(evaluate(p, u) / divisor / value - 1) for u, divisor, value in quotients]
        if max(errors) < best[2]:
            best = p, q, max(errors)
        mean = sum(w * e for w, e in zip(weights, errors, strict=True)) / sum(weights)
        weights = [max(w * e / mean, mpf(10) ** -12) for w, e in zip(weights, errors, strict=True)]
    p, q, worst = best
    return [c / high**j for j, c in enumerate(p)], [c / high**j for j, c in enumerate(q)], worst


def single(x: Any) -> Any:
    """x rounded to float32."""
    if x == 0:
        return mpf(0)
    exponent = mp.floor(mp.log(abs(x), 2)) - 23
    return mp.nint(x / mpf(2) ** exponent) * mpf(2) ** exponent


def taylor_rest(f: Function, terms: list[Any], order: int, x: Any, series: Function) -> Any:
    """(f(x) − Σ terms·xⁱ) / x^order, by the value of the series at 0."""
    if abs(x) < mpf(10) ** -25:
        return series(x)
    return (f(x) - evaluate(terms, x)) / x**order


LN2 = mp.log(2)


def exp_rest(x: Any) -> Any:
    """(eˣ − 1 − x) / x²."""
    return taylor_rest(mp.exp, [1, 1], 2, x, lambda y: mpf(1) / 2 + y / 6)


def log1p_rest(x: Any) -> Any:
    """(log(1 + x) − x + x²/2) / x³."""
    return taylor_rest(mp.log1p, [0, 1, mpf(-1) / 2], 3, x, lambda y: mpf(1) / 3 - y / 4)


def tanh_rest(s: Any) -> Any:
    """(tanh(√s)/√s − 1) / s."""
    if s < mpf(10) ** -20:
        return -mpf(1) / 3 + 2 * s / 15
    return (mp.tanh(mp.sqrt(s)) / mp.sqrt(s) - 1) / s


def tanh_weight(s: Any) -> Any:
    """What makes an error of tanh_rest relative to tanh; a little more at 0, where it would vanish."""
    return (s + mpf(10) ** -6) / (1 + s * tanh_rest(s))


def erf_ratio(s: Any) -> Any:
    """erf(√s)/√s − 1."""
    if s < mpf(10) ** -20:
        return 2 / mp.sqrt(mp.pi) * (1 - s / 3) - 1
    return mp.erf(mp.sqrt(s)) / mp.sqrt(s) - 1


def normal_rest(s: Any) -> Any:
    """(Φ(√s) − 1/2) / √s of the normal distribution."""
    if s < mpf(10) ** -18:
        return 1 / mp.sqrt(2 * mp.pi)
    return mp.erf(mp.sqrt(s / 2)) / (2 * mp.sqrt(s))


def even_rest(f: Function, terms: list[Any], order: int, at_zero: Any) -> Function:
    """s → (f(√s) − Σ terms·sⁱ) / s^order."""

    def rest(s: Any) -> Any:
        if s < mpf(10) ** -15:
            return mpf(at_zero)
        return (f(mp.sqrt(s)) - evaluate(terms, s)) / s**order

    return rest


def ratio(f: Function) -> Function:
    """x → f(x)/x."""
    return lambda x: f(x) / x


def erfcx_of_reciprocal(t: Any) -> Any:
    """erfc(x)·exp(x²) at x = 1/t − 1.5."""
    x = 1 / t - mpf("1.5")
    return mp.erfc(x) * mp.exp(x * x)


QUARTER = (mp.pi / 4) ** 2 * mpf("1.0001")
TINY = mpf(10) ** -6

ERF_SPLIT = mpf("0.9375")

FITS = [
    # inline.h, float
    Fit("exp_float", exp_rest, -LN2 / 2, LN2 / 2, 4, lambda x: x * x / mp.exp(x), True),
    Fit("log_float", log1p_rest, -mpf(1) / 3, mpf(1) / 3, 8, lambda x: x**2 + mpf(10) ** -6, True),
    Fit("tanh_float", tanh_rest, 0, mpf("1.25") ** 2, 8, tanh_weight, True),
    # float_functions.h: float functions computed in double, to about 2^-32
    Fit("exp_mid", exp_rest, -LN2 / 2, LN2 / 2, 5, lambda x: abs(x) / mp.exp(x) + TINY),
    Fit("log_mid", log1p_rest, -mpf(1) / 3, mpf(1) / 3, 10, lambda x: x**2 + TINY),
    Fit("log_fine", log1p_rest, -mpf(1) / 3, mpf(1) / 3, 13, lambda x: x**2 + TINY),
    Fit("sin_mid", even_rest(ratio(mp.sin), [1], 1, mpf(-1) / 6), 0, QUARTER, 3, lambda s: s + TINY),
    Fit("cos_mid", even_rest(mp.cos, [1, mpf(-1) / 2], 2, mpf(1) / 24), 0, QUARTER, 3, lambda s: s * s + TINY),
    Fit("atan_mid", even_rest(ratio(mp.atan), [1], 1, mpf(-1) / 3), 0, 1, 12, lambda s: s + TINY),
    Fit("asin_mid", even_rest(ratio(mp.asin), [1], 1, mpf(1) / 6), 0, mpf(1) / 4, 8, lambda s: s + TINY),
    Fit("erf_small_mid", erf_ratio, 0, ERF_SPLIT**2, 7, lambda s: mpf(1) / (1 + erf_ratio(s))),
    Fit("erf_large_mid", lambda a: -mp.log(mp.erfc(a)), ERF_SPLIT, 4, 7, lambda a: mp.erfc(a) + mpf(2) ** -40),
    Fit(
        "erfcx_mid",
        erfcx_of_reciprocal,
        1 / mpf("11.7"),
        1 / (ERF_SPLIT + mpf("1.5")),
        10,
        lambda t: 1 / erfcx_of_reciprocal(t),
    ),
    # double_exp_log.h: double functions
    Fit("exp_full", exp_rest, -LN2 / 2, LN2 / 2, 10, lambda x: x * x / mp.exp(x) + TINY),
    Fit("log_full", log1p_rest, -mpf(1) / 3, mpf(1) / 3, 19, lambda x: x**2 + TINY),
    # double_trig.h
    Fit("sin_full", even_rest(ratio(mp.sin), [1], 1, mpf(-1) / 6), 0, QUARTER, 6, lambda s: s + TINY),
    Fit("cos_full", even_rest(mp.cos, [1, mpf(-1) / 2], 2, mpf(1) / 24), 0, QUARTER, 6, lambda s: s * s + TINY),
]

QUOTIENTS = [Quotient("gelu_float", normal_rest, 31, 5)]  # inline.h


def main(names: list[str]) -> None:
    """Runs the fits named, or all."""
    for quotient in QUOTIENTS:
        if names and not any(quotient.name.startswith(n) for n in names):
            continue
        *parts, worst = fit_quotient(quotient)
        print(f"// {quotient.name}: degrees {quotient.degree}, error 2^{mp.nstr(mp.log(worst, 2), 4)}")
        for part in parts:
            print("{" + ", ".join(mp.nstr(single(c), 9) + "f" for c in part) + "}", flush=True)
    for fit in FITS:
        if names and not any(fit.name.startswith(n) for n in names):
            continue
        coefficients, worst = remez(fit)
        rounded = [single(c) for c in coefficients] if fit.single else coefficients
        print(f"// {fit.name}: degree {fit.degree}, error 2^{mp.nstr(mp.log(worst, 2), 4)}")
        suffix, digits = ("f", 9) if fit.single else ("", 17)
        print("{" + ", ".join(mp.nstr(c, digits) + suffix for c in rounded) + "}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
