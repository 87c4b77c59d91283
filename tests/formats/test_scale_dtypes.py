"""The dtype of scales that nobody names."""

from __future__ import annotations

import pytest

from moe_core.formats import QuantizedSpec, format_named, format_names, quantized_specs

SEVERAL = [name for name in format_names() if len(format_named(name).scale_dtypes) > 1]


@pytest.mark.parametrize("name", SEVERAL)
def test_scales_are_of_the_first_dtype_unless_another_is_named(name: str) -> None:
    format = format_named(name)
    spec, last = QuantizedSpec(format, "out_in"), format.scale_dtypes[-1]
    assert quantized_specs(spec, (2, 128, 256)).scales.dtype == format.scale_dtypes[0]
    assert quantized_specs(spec, (2, 128, 256), last).scales.dtype == last != format.scale_dtypes[0]
