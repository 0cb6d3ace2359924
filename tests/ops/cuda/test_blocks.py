"""The door to the kernels over blocks, in Triton's interpreter, against float64."""

import pytest
from cases import DTYPES, LAYOUTS, Case, error

from dynsparse.ops.linear.cuda import blocks
from dynsparse.ops.linear.cuda.configurations import BLOCKS

pytestmark = pytest.mark.usefixtures("interpreter")


def agrees(case):
    y = blocks.forward(case.x, case.values, case.p, case.bias)
    assert y.dtype == case.x.dtype
    assert y.is_contiguous()
    assert error(y, case.y) < case.limit
    for needs in ((True, True), (True, False), (False, True)):
        dx, dw = blocks.backward(case.dy, case.x, case.values, case.p, *needs)
        assert ((dx is not None), (dw is not None)) == needs
        if dx is not None:
            assert dx.dtype == case.dy.dtype
            assert dx.shape == case.x.shape
            assert error(dx, case.dx) < case.limit
        if dw is not None:
            assert dw.dtype == case.values.dtype
            assert dw.shape == case.values.shape
            assert error(dw, case.dw) < case.limit


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("b", BLOCKS)
def test_every_block_dtype_and_layout(b, dtype, layout):
    agrees(Case(b, (3, 4), 70, dtype, layout=layout, without=1))
