"""The text of values is canonical: plan keys and files are made of it."""

from __future__ import annotations

from moe_core.base import codec
from moe_core.base.arrays import ArraySpec


def test_fields_are_in_order_of_their_names_without_blanks() -> None:
    text = '{"dtype":"int32","shape":[2,3],"strides":[3,1],"type":"ArraySpec"}'
    assert codec.dumps(ArraySpec((2, 3), "int32")) == text
    assert codec.dumps((1, None, True, 0.5, "a")) == '[1,null,true,{"float":"0x1.0000000000000p-1"},"a"]'
