"""Tests of kernels again with those of other CPUs: one process for each level of instructions."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.native.instruction_sets import NAMES, is_another, skip_if_own
from tests.native.shim import ROOT, library_path

# The tests of each file that depend on the level.
TESTS = {
    "test_gemm.py": "test_packed_linear_half test_packed_linear_half_strides test_half_values_survive "
    "test_half_gemm_layouts test_packed_linear_half_blocks[150-1537-300-dtype0] "
    "test_packed_linear_half_blocks[150-1537-300-dtype1]",
    "test_int4.py": "test_rows_groups_and_tiles test_every_value_of_four_bits test_scales_of_float16 test_sizes",
    "test_hqq.py": "test_as_published test_groups_of_every_length",
    "test_quantize_int4.py": "test_as_the_reference test_drawn",
    "test_quantize_int8.py": "test_as_the_reference test_drawn",
    "test_quantize_nvfp4.py": "test_as_the_reference test_drawn test_every_scale_of_a_block",
    "test_int8.py": "test_groups test_one_range_for_all_rows test_drawn test_exact_integers test_dynamic_rows_are_exact_where_the_step_is_one "
    "test_saturation_of_static_ranges test_rows_that_are_not_finite test_zeros_tiny_and_huge_rows "
    "test_no_rows_columns_or_features",
    "test_int8_convolution.py": "test_exact_integers test_drawn test_saturation_and_values_that_are_not_finite "
    "test_dynamic_ranges_of_images test_one_range_for_all_images test_no_images_and_one_pixel test_pool",
    "test_packed_convolution.py": "test_matches_eager test_depthwise test_depthwise_tiles test_activations",
    "test_vecmath.py": "test_inline_header test_inline_gelu",
    "test_nvfp4_int8.py": "test_rows test_the_largest_sums test_every_code_and_every_scale "
    "test_rows_that_are_not_finite_or_tiny test_a_row_alone_gives_what_it_gives_among_others",
    "test_w4a8.py": "test_rows_and_groups test_the_largest_sums test_every_value_of_four_bits "
    "test_rows_that_are_not_finite_or_tiny test_a_row_alone_gives_what_it_gives_among_others",
}


@pytest.mark.slow
@pytest.mark.parametrize("isa", NAMES)
def test_other_instruction_sets(isa: str) -> None:
    skip_if_own(isa)
    folder = Path(__file__).parent
    selected = [f"{folder / file}::{name}" for file, names in TESTS.items() for name in names.split()]
    env = {**os.environ, "UNTORCH_ISA": isa, "UNTORCH_LIBRARY": library_path()}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *selected]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None and int(passed[1]) >= 200, done.stdout[-1000:]


@pytest.mark.parametrize(
    ("own", "flags", "others"),
    [
        ("baseline", "", ""),
        ("v3", "", "baseline"),
        ("v3", "avx_vnni", "baseline v3"),
        ("v4", "", "baseline v3"),
        ("v4", "avx512_vnni", "baseline v3 v4"),
        ("v4", "avx512_vnni avx_vnni avx512_bf16", "baseline v3 v3-vnni v4 v4-vnni"),
        ("v4", "avx512_vnni avx_vnni avx512_bf16 amx_bf16", "baseline v3 v3-vnni v4 v4-vnni v4-bf16"),
    ],
)
def test_levels_that_are_others(own: str, flags: str, others: str) -> None:
    assert [name for name in NAMES if is_another(name, own, set(flags.split()))] == others.split()
