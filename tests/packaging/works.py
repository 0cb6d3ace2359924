"""Run in an installation: three passes and a RigL update; prints the backend as JSON.

With the argument `native`, fails if no compiled kernels are used.
"""

import json
import sys
import warnings

import torch

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import dynsparse as ds
    from dynsparse._core import native

    at_import = [str(warning.message) for warning in caught]

    torch.manual_seed(0)
    for block in (1, 16):
        layer = ds.nn.SparseLinear(96, 64, density=0.25, block_size=block)
        x = torch.randn(33, 96, requires_grad=True)
        dy = torch.randn(33, 64)
        y = layer(x)
        y.backward(dy)
        weight, mask = layer.to_dense().detach().double(), layer.pattern.to_mask()
        expected = {
            "y": (y, x.double() @ weight.t() + layer.bias.double()),
            "dx": (x.grad, dy.double() @ weight),
            "dw": (
                layer.pattern.to_dense(layer.values.grad),
                (dy.double().t() @ x.double()) * mask,
            ),
        }
        for name, (got, want) in expected.items():
            torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-4, msg=name)

    model = torch.nn.Sequential(
        ds.nn.SparseLinear(64, 64, density=0.1), torch.nn.ReLU(), ds.nn.SparseLinear(64, 8, 0.3)
    )
    optimizer = torch.optim.Adam(model.parameters())
    trainer = ds.RigL(model, optimizer, total_steps=8, update_interval=4, drop_fraction=0.3)
    before = model[0].pattern.flat.clone()
    inputs, target = torch.randn(16, 64), torch.randn(16, 8)
    for _ in range(5):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), target).backward()
        trainer.step()
    after = model[0].pattern.flat
    assert trainer.updates == 1
    assert len(after) == len(before)
    assert not torch.equal(after, before)

    import popsparse

    target = popsparse.Target.bow(tiles=4)
    assert ds.nn.SparseLinear(64, 32, 0.25, target=target)(torch.randn(8, 64)).shape == (8, 32)

if sys.argv[1:] == ["native"]:
    assert native.describe()["backend"] == "native", native.describe()
print(
    json.dumps(
        {
            **native.describe(),
            "file": ds.__file__,
            "python": sys.version.split()[0],
            "warnings": [str(warning.message) for warning in caught],
            "at_import": at_import,
        }
    )
)
