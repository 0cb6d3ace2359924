"""torch's tests of nn modules applied to every sparse layer, and opcheck of every operator."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import dynsparse as ds
from dynsparse.nn import attention_patterns
from dynsparse.nn.conv import SparseConv1d, SparseConv2d

pytestmark = pytest.mark.slow


def normal(*shape):
    return lambda dtype: torch.randn(*shape, dtype=dtype)


# Name -> (what makes a layer of a device and dtype, what makes its input).
LAYERS = {
    "linear": (lambda **o: ds.nn.SparseLinear(12, 8, 0.4, **o), normal(3, 12)),
    "blocks": (lambda **o: ds.nn.SparseLinear(12, 8, 0.4, 4, **o), normal(2, 3, 12)),
    "no bias": (lambda **o: ds.nn.SparseLinear(12, 8, 0.4, bias=False, **o), normal(12)),
    "conv2d": (
        lambda **o: SparseConv2d(4, 8, 3, 2, padding=1, groups=2, density=0.4, **o),
        normal(2, 4, 7, 6),
    ),
    "conv1d": (
        lambda **o: SparseConv1d(4, 8, 3, padding=1, padding_mode="circular", density=0.4, **o),
        normal(2, 4, 9),
    ),
    "embedding": (
        lambda **o: ds.nn.SparseEmbedding(9, 8, 0.4, **o),
        lambda dtype: torch.tensor([[1, 2], [8, 0]]),
    ),
    "attention": (
        lambda **o: Attention(ds.nn.SparseMultiheadAttention(8, 2, density=0.5, **o)),
        normal(6, 2, 8),
    ),
    "attention at blocks": (
        lambda **o: Attention(
            ds.nn.SparseMultiheadAttention(
                8,
                2,
                density=0.5,
                batch_first=True,
                attention_pattern=attention_patterns.sliding_window(8, 3, block_size=4),
                **o,
            )
        ),
        normal(2, 8, 8),
    ),
    "transformer layer": (
        lambda **o: ds.nn.SparseTransformerLayer(8, 2, 16, dropout=0.0, density=0.5, **o),
        normal(2, 5, 8),
    ),
}


class Attention(nn.Module):
    """Self-attention with one argument and one result."""

    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


@pytest.fixture(params=LAYERS)
def name(request):
    torch.manual_seed(0)
    return request.param


def made(name, dtype=torch.float64):
    make, make_input = LAYERS[name]
    layer, x = make(dtype=dtype), make_input(dtype)
    return layer, x.requires_grad_(x.is_floating_point())


def test_dtype_and_device_of_the_constructor(name):
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        layer = LAYERS[name][0](dtype=dtype)
        assert {p.dtype for p in layer.parameters()} == {dtype}
    meta = LAYERS[name][0](device="meta")
    assert {p.device.type for p in meta.parameters()} == {"meta"}
    layer = meta.to_empty(device="cpu")
    layer.load_state_dict(LAYERS[name][0]().state_dict())
    x = LAYERS[name][1](torch.float32)
    assert layer(x).isfinite().all()


def test_text_pickles_and_copies(name):
    layer, x = made(name)
    y = layer(x)
    assert type(layer).__name__ in repr(layer)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    copies = [
        copy.deepcopy(layer),
        pickle.loads(pickle.dumps(layer)),
        torch.load(file, weights_only=False),
    ]
    for other in copies:
        assert torch.equal(other(x), y)
        assert repr(other) == repr(layer)
        assert [p.requires_grad for p in other.parameters()] == [
            p.requires_grad for p in layer.parameters()
        ]


def test_states_load_with_weights_only(name):
    layer, x = made(name)
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    other = LAYERS[name][0](dtype=torch.float64)
    state = torch.load(file, weights_only=True)
    assert not any(other.load_state_dict(state))
    assert torch.equal(other(x), layer(x))
    assigned = LAYERS[name][0](dtype=torch.float64)
    assigned.load_state_dict(state, assign=True)
    assert torch.equal(assigned(x), layer(x))


def test_gradients(name):
    layer, x = made(name)
    parameters = dict(layer.named_parameters())

    def function(x, *values):
        return torch.func.functional_call(layer, dict(zip(parameters, values, strict=True)), (x,))

    assert torch.autograd.gradcheck(function, (x, *parameters.values()), fast_mode=True)


def test_inputs_of_any_strides(name):
    layer, x = made(name)
    if not x.is_floating_point():
        x = x.t()
    strided = (
        x.detach().flatten().repeat_interleave(2)[::2].view(x.shape)
        if x.dim() < 2
        else (x.detach().transpose(0, -1).contiguous().transpose(0, -1))
    )
    if strided.is_floating_point():
        strided.requires_grad_()
    grads = []
    for given in (x, strided):
        layer.zero_grad()
        y = layer(given)
        y.square().sum().backward()
        grads.append([y.detach(), *(p.grad.clone() for p in layer.parameters())])
    for mine, other in zip(*grads, strict=True):
        torch.testing.assert_close(mine, other)


def test_modes_freezing_and_zero_grad(name):
    layer, x = made(name)
    assert torch.equal(layer.train()(x), layer.eval()(x))
    layer(x).sum().backward()
    assert all(p.grad is not None for p in layer.parameters())
    layer.zero_grad()
    assert all(p.grad is None for p in layer.parameters())
    layer.requires_grad_(False)
    y = layer(x)
    assert y.requires_grad == x.requires_grad
    with torch.inference_mode():
        assert torch.equal(layer(x.detach()), y)


def test_dtype_conversions_round_trip(name):
    layer, x = made(name)
    y = layer(x)
    layer.float()
    low = x.float() if x.is_floating_point() else x
    torch.testing.assert_close(layer(low), y.float(), rtol=1e-4, atol=1e-5)
    layer.to(torch.float64)
    torch.testing.assert_close(layer(x), y, rtol=1e-5, atol=1e-6)
    layer.share_memory()
    torch.testing.assert_close(layer(x), y, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # of a layer of integers
def test_hooks(name):
    layer, x = made(name)
    seen = []
    layer.register_forward_pre_hook(lambda *_: seen.append("before"))
    layer.register_forward_hook(lambda *_: seen.append("after"))
    layer.register_full_backward_hook(lambda *_: seen.append("backward"))
    layer(x).sum().backward()
    assert seen == ["before", "after", "backward"]


class RecordedCalls(TorchDispatchMode):
    """Records the arguments of the first call of each operator of this library."""

    def __init__(self):
        super().__init__()
        self.found = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "dynsparse":
            held = [a.detach().clone() if isinstance(a, torch.Tensor) else a for a in args]
            self.found.setdefault(func, (held, kwargs or {}))
        return func(*args, **(kwargs or {}))


def checked_operators(calls: RecordedCalls) -> set[str]:
    for operator, (args, kwargs) in calls.found.items():
        checks = ("test_schema", "test_faketensor")
        torch.library.opcheck(operator, args, kwargs, test_utils=checks)
    return {str(operator).removesuffix(".default") for operator in calls.found}


def test_opcheck_of_every_operator():
    seen = set()
    for name in LAYERS:
        layer, x = made(name, torch.float32)
        with RecordedCalls() as calls:
            layer(x).square().sum().backward()
        seen |= checked_operators(calls)
    # Layers with int8 weights call theirs in compiled code only.
    layer = ds.quantize(nn.Sequential(ds.nn.SparseLinear(32, 16, density=0.5)))[0]
    operands = layer.values, layer.scale, layer.row_ptr, layer.cols, layer.bias
    with RecordedCalls() as calls:
        torch.ops.dynsparse.linear_int8(torch.randn(4, 32), *operands, 32, False)
    seen |= checked_operators(calls)
    registered = {
        name.replace("::", ".")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("dynsparse::")
    }
    assert seen == registered
