"""The network, the order of its pixels, and the sizes in the summary."""

import pytest
import torch
from torch import nn

from dynsparse.apps.image_classification.mnist import (
    Options,
    arrange_pixels,
    build_network,
    pixel_permutation,
)
from dynsparse.apps.image_classification.run import density, memory
from dynsparse.nn import SparseLinear


def network(generator, **changes):
    return build_network(Options(**changes), generator)


def sparse_layers(net):
    return [name for name, module in net.named_modules() if isinstance(module, SparseLinear)]


def test_layer_types(generator):
    net = network(generator, densities=(0.1, 1.0), block_size=16)
    assert isinstance(net.fc1, SparseLinear)
    assert net.fc1.block_size == 16
    assert type(net.fc2) is nn.Linear
    assert sparse_layers(net) == ["fc1"]
    dense = network(generator, method="dense")
    assert [type(m) for m in (dense.fc1, dense.fc2)] == [nn.Linear, nn.Linear]
    deep = network(generator, hidden_sizes=(300, 100), densities=(0.01, 0.11, 1))
    assert [m.out_features for m in (deep.fc1, deep.fc2, deep.fc3)] == [300, 100, 10]
    assert sparse_layers(deep) == ["fc1", "fc2"]
    # Blocks of 32 do not divide 28 x 28: the image gets a border.
    for block, side in ((16, 28), (32, 32), (64, 32), (128, 32)):
        wide = network(generator, densities=(0.1, 1.0), block_size=block, hidden_sizes=(128,))
        assert wide.fc1.in_features == side**2
    assert network(generator, block_size=32, method="dense").fc1.in_features == 784


def test_forward_is_relu_between_linear_layers(generator):
    net = network(generator).double().eval()
    x = torch.rand(7, 784, dtype=torch.float64)
    hidden = torch.relu(x @ net.fc1.to_dense().T + net.fc1.bias)
    expected = hidden @ net.fc2.to_dense().T + net.fc2.bias
    torch.testing.assert_close(net(x), expected, rtol=1e-12, atol=1e-12)


def test_dropout_in_training_only(generator):
    net = network(generator, droprate=0.5)
    x = torch.rand(3, 784)
    assert not torch.equal(net(x), net(x))
    net.eval()
    assert torch.equal(net(x), net(x))


def test_generator_determines_everything():
    both = [build_network(Options(), torch.Generator().manual_seed(3)) for _ in range(2)]
    other = build_network(Options(), torch.Generator().manual_seed(4))
    for name, tensor in both[0].state_dict().items():
        assert torch.equal(tensor, both[1].state_dict()[name])
    assert both[0].fc1.pattern != other.fc1.pattern
    dense = [
        build_network(Options(method="dense"), torch.Generator().manual_seed(3)) for _ in range(2)
    ]
    assert torch.equal(dense[0].fc1.weight, dense[1].fc1.weight)


@pytest.mark.parametrize("kind", ["none", "block", "random"])
@pytest.mark.parametrize("block", [1, 4, 8, 16, 32, 64, 128])
def test_permutations_contain_every_pixel_once(kind, block, generator):
    side = 32 if block >= 32 else 28
    permutation = pixel_permutation(kind, block, generator)
    assert permutation.sort().values.tolist() == list(range(side * side))
    if kind == "none" or (kind == "block" and block == 1):
        assert permutation.tolist() == list(range(side * side))


TILES = [(4, (2, 2)), (8, (2, 4)), (16, (4, 4)), (32, (4, 8)), (64, (8, 8)), (128, (8, 16))]


@pytest.mark.parametrize(("block", "tile"), TILES)
def test_blocks_cover_tiles_of_the_image(block, tile, generator):
    permutation = pixel_permutation("block", block, generator)
    side = 32 if block >= 32 else 28
    rows, cols = permutation // side, permutation % side
    for start in range(0, side * side, block):
        r, c = rows[start : start + block], cols[start : start + block]
        assert (int(r.max() - r.min()) + 1, int(c.max() - c.min()) + 1) == tile


def test_arranged_pixels():
    images = torch.rand(3, 784)
    assert torch.equal(arrange_pixels(images, torch.arange(784)), images)
    backwards = torch.arange(783, -1, -1)
    assert torch.equal(arrange_pixels(images, backwards), images.flip(1))
    wide = arrange_pixels(images, torch.arange(1024)).view(3, 32, 32)
    assert torch.equal(wide[:, 2:30, 2:30], images.view(3, 28, 28))
    assert wide.sum() == pytest.approx(images.sum().item(), rel=1e-5)


def test_density_counts_weights_only(generator):
    net = network(generator)
    assert density(net) == pytest.approx((25088 + 960) / (784 * 320 + 3200))
    assert density(network(generator, method="dense")) == 1.0


def test_memory_by_hand(generator):
    net = network(generator)
    optimizer = torch.optim.Adam(net.parameters(), fused=True)
    net(torch.rand(2, 784)).sum().backward()
    optimizer.step()
    net.fc2._current().index.column_order()  # which kernels that read by columns have made
    got = memory(net, optimizer)
    weights, biases = 25088 + 960, 330
    assert got["sparse"]["weights"] == 4 * (weights + biases)
    assert got["dense"]["weights"] == 4 * (784 * 320 + 3200 + biases)
    # Two moments per parameter and one step counter per tensor.
    assert got["sparse"]["optimizer"] == 8 * (weights + biases) + 4 * 4
    assert got["dense"]["optimizer"] == 8 * (784 * 320 + 3200 + biases) + 4 * 4
    assert got["dense"]["pattern"] == 0
    # cols of 4 bytes, and the two pointers; csc_rows and csc_perm of the layer that gives its input
    # a gradient.
    pointers = 4 * (320 + 1 + 784 + 1 + 10 + 1 + 320 + 1)
    assert got["sparse"]["pattern"] == 4 * weights + 8 * 960 + pointers
