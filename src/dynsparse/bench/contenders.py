"""The contenders on a layer: dynsparse as a user calls it, masked, dense and other libraries."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable, Iterable
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dynsparse.bench.cells import Cell
from dynsparse.bench.host import medium_precision
from dynsparse.nn import SparseConv1d, SparseConv2d, SparseLinear
from dynsparse.nn.linear import make_linear
from dynsparse.ops.grow import topk_outside
from dynsparse.pattern import Rewiring, SparsePattern
from dynsparse.training import ConstantSchedule, RigL, SparseTrainer, Static
from dynsparse.training.drop import lowest, magnitude


class MaskedLinear(nn.Linear):
    """The same layer as a `SparseLinear`, as a dense weight [out, in] times a mask.

    Attributes:
        mask: [out, in] of the weight's type, 1 where a weight is present.
        keep_gradient: whether the next backward keeps the dense gradient, in `product.grad`.
    """

    mask: Tensor
    product: Tensor

    @torch.no_grad()
    def __init__(self, layer: SparseLinear) -> None:
        dtype = layer.values.dtype
        super().__init__(
            layer.in_features, layer.out_features, bias=layer.bias is not None, dtype=dtype
        )
        self.register_buffer("mask", layer.pattern.to_mask().to(dtype))
        self.weight.copy_(layer.to_dense())
        if layer.bias is not None:
            self.bias.copy_(layer.bias)
        self.keep_gradient = False

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]; autograd masks the gradient of the weight, too."""
        product = self.weight * self.mask
        if self.keep_gradient:
            product.retain_grad()
            self.product = product
        return F.linear(x, product, self.bias)


def mask_layers(model: nn.Module) -> nn.Module:
    """Put a `MaskedLinear` in the place of every `SparseLinear` inside, and return the model."""
    for name, layer in list(model.named_modules()):
        if isinstance(layer, (SparseConv1d, SparseConv2d)):
            raise TypeError(f"only linear layers can be masked, got {type(layer).__name__}")
        if isinstance(layer, SparseLinear):
            model.set_submodule(name, MaskedLinear(layer))
    return model


Work = Callable[[], object]


@lru_cache(maxsize=1)  # cells that differ in the batch alone follow each other
def _pattern(in_features: int, out_features: int, density: float, block: int) -> SparsePattern:
    total = (out_features // block) * (in_features // block)
    return SparsePattern.random(
        (out_features, in_features),
        nnz=max(1, round(density * total)),  # as the layer itself would
        block_size=block,
        generator=torch.Generator().manual_seed(0),
    )


def build_layer(cell: Cell) -> tuple[SparseLinear, Tensor, Tensor]:
    """The layer of a cell, x [batch, in] that wants a gradient, and dY [batch, out]."""
    generator = torch.Generator().manual_seed(0)
    in_features, out_features = cell.features
    dtype = cell.torch_dtype
    pattern = _pattern(in_features, out_features, cell.density, cell.block)
    layer = SparseLinear(
        in_features, out_features, pattern=pattern, generator=generator, dtype=dtype
    )
    x = torch.randn(cell.batch, in_features, generator=generator).to(dtype).requires_grad_()
    dy = torch.randn(cell.batch, out_features, generator=generator).to(dtype)
    return layer, x, dy


def step_of(layer: nn.Module, x: Tensor, dy: Tensor) -> Work:
    """A training step without the optimizer: forward, and the gradients of x and the parameters."""
    inputs = [x, *layer.parameters()]

    def step() -> object:
        return torch.autograd.grad(layer(x), inputs, dy)

    return step


def dense_layer(layer: SparseLinear) -> nn.Linear:
    """A dense layer with the same weights, zeros included, and a bias of its own."""
    weight = nn.Parameter(layer.to_dense().detach())
    return make_linear(weight, copy.deepcopy(layer.bias), layer.training)


def _use_one_thread(work: Work) -> Work:
    def work_alone() -> object:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return work()
        finally:
            torch.set_num_threads(threads)

    return work_alone


def _use_medium_precision(work: Work) -> Work:
    def work_rounded() -> object:
        with medium_precision():
            return work()

    return work_rounded


def build_steps(cell: Cell, names: Iterable[str]) -> tuple[SparseLinear, dict[str, Work]]:
    """Forward with bias, and the gradients of input, weights and bias by autograd.

    Natural layout throughout.
    """
    layer, x, dy = build_layer(cell)
    makers: dict[str, Callable[[], Work]] = {
        "masked": lambda: step_of(MaskedLinear(layer), x, dy),
        "dense": lambda: step_of(dense_layer(layer), x, dy),
        "masked_medium": lambda: _use_medium_precision(step_of(MaskedLinear(layer), x, dy)),
        "dense_medium": lambda: _use_medium_precision(step_of(dense_layer(layer), x, dy)),
        "mkl": lambda: step_of(MklLinear(layer), x, dy),
        "one_thread": lambda: _use_one_thread(step_of(layer, x, dy)),
    }
    contenders = {"dynsparse": step_of(layer, x, dy)}
    contenders.update((name, makers[name]()) for name in names if _can_compute(name, cell))
    return layer, contenders


def build_forwards(cell: Cell, names: Iterable[str]) -> tuple[SparseLinear, dict[str, Work]]:
    """Forward with bias, without gradients; natural layout."""
    layer, with_gradient, _ = build_layer(cell)
    x = with_gradient.detach()

    def of(module: nn.Module) -> Work:
        def forward() -> Tensor:
            with torch.no_grad():
                return module(x)

        return forward

    makers: dict[str, Callable[[], Work]] = {
        "masked": lambda: of(MaskedLinear(layer)),
        "dense": lambda: of(dense_layer(layer)),
        "mkl": lambda: _torch_sparse_forward(layer, x),
        "bsr": lambda: _torch_sparse_forward(layer, x),
        "scipy": lambda: _scipy_forward(layer, x),
        "one_thread": lambda: _use_one_thread(of(layer)),
    }
    contenders = {"dynsparse": of(layer)}
    contenders.update((name, makers[name]()) for name in names if _can_compute(name, cell))
    return layer, contenders


def _can_compute(name: str, cell: Cell) -> bool:
    """Whether a contender can compute a cell: others lack some formats and types."""
    if name in ("mkl", "scipy") and cell.dtype == "bfloat16":
        return False
    if name == "mkl":
        return cell.block == 1 and torch.backends.mkl.is_available()
    if name == "bsr":
        return cell.block > 1 and cell.dtype != "bfloat16" and torch.backends.mkl.is_available()
    if name in ("masked_medium", "dense_medium"):
        return cell.dtype == "float32" and torch.backends.mkldnn.is_available()
    return name != "one_thread" or cell.threads > 1


def _make_csr(pattern: SparsePattern, values: Tensor) -> tuple[Tensor, Tensor]:
    """torch's CSR (or BSR) matrix of W, and a CSR matrix of W^T with values of its own."""
    index = pattern.index
    out, in_features = pattern.shape
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch announces once that its sparse tensors are beta
        if pattern.block_size > 1:
            matrix = torch.sparse_bsr_tensor(index.row_ptr, index.cols, values, pattern.shape)
            return matrix, matrix
        return (
            torch.sparse_csr_tensor(index.row_ptr, index.cols, values, (out, in_features)),
            torch.sparse_csr_tensor(
                index.col_ptr, index.csc_rows, values.clone(), (in_features, out)
            ),
        )


class _TwoCopies(torch.autograd.Function):
    """A layer out of torch's sparse products, which have no autograd of their own for this."""

    @staticmethod
    def forward(ctx, x, values, bias, matrix, transposed, order):
        ctx.save_for_backward(x, values)
        ctx.matrix, ctx.transposed, ctx.order = matrix, transposed, order
        return torch.mm(matrix, x.t()).t().contiguous().add_(bias)

    @staticmethod
    def backward(ctx, dy):
        x, values = ctx.saved_tensors
        # The values change every step, so the second copy's must follow.
        torch.index_select(values, 0, ctx.order, out=ctx.transposed.values())
        dx = torch.mm(ctx.transposed, dy.t()).t().contiguous()
        dw = torch.sparse.sampled_addmm(ctx.matrix, dy.t(), x, beta=0.0)
        return dx, dw.values(), dy.sum(0), None, None, None


class MklLinear(nn.Module):
    """`layer` out of torch's sparse products, with the same values and bias."""

    def __init__(self, layer: SparseLinear) -> None:
        super().__init__()
        self.values, self.bias = layer.values, layer.bias
        self.matrix, self.transposed = _make_csr(layer.pattern, layer.values.detach())
        self.order = layer.pattern.index.csc_perm.long()

    def forward(self, x: Tensor) -> Tensor:
        return _TwoCopies.apply(x, self.values, self.bias, self.matrix, self.transposed, self.order)


def _torch_sparse_forward(layer: SparseLinear, x: Tensor) -> Work:
    matrix, _ = _make_csr(layer.pattern, layer.values.detach())
    bias = layer.bias.detach()
    return lambda: torch.mm(matrix, x.t()).t().contiguous().add_(bias)


def _scipy_forward(layer: SparseLinear, x: Tensor) -> Work:
    matrix = layer.pattern.to_scipy(layer.values)
    columns, bias = x.numpy().T, layer.bias.detach().numpy()[:, None]
    return lambda: (matrix @ columns + bias).T


def mlp(features: tuple[int, ...], make: Callable[[int, int], nn.Module]) -> nn.Sequential:
    """Layers made by `make(in, out)`, with relu in between."""
    layers: list[nn.Module] = []
    for in_features, out_features in itertools.pairwise(features):
        layers += [make(in_features, out_features), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def build_network_steps(cell: Cell, names: Iterable[str]) -> tuple[nn.Module, dict[str, Work]]:
    """A training step of a whole network: zero_grad, forward, cross entropy, backward, SGD.

    Every layer is sparse; blocks are taken where they divide both feature counts.
    """
    generator = torch.Generator().manual_seed(0)

    def sparse(in_features: int, out_features: int) -> nn.Module:
        fits = in_features % cell.block == 0 and out_features % cell.block == 0
        return SparseLinear(
            in_features,
            out_features,
            density=cell.density,
            block_size=cell.block if fits else 1,
            generator=generator,
        )

    model = mlp(cell.features, sparse)
    x = torch.randn(cell.batch, cell.features[0], generator=generator)
    labels = torch.randint(cell.features[-1], (cell.batch,), generator=generator)

    def training_step_of(network: nn.Module) -> Work:
        optimizer = torch.optim.SGD(network.parameters(), lr=1e-3, momentum=0.9)

        def step() -> None:
            optimizer.zero_grad()
            F.cross_entropy(network(x), labels).backward()
            optimizer.step()

        return step

    makers: dict[str, Callable[[], nn.Module]] = {
        "masked": lambda: mask_layers(copy.deepcopy(model)),
        "dense": lambda: mlp(cell.features, nn.Linear),
    }
    contenders = {"dynsparse": training_step_of(model)}
    contenders.update((name, training_step_of(makers[name]())) for name in names)
    return model, contenders


DROP_FRACTION = 0.3


def build_update_parts(cell: Cell) -> tuple[SparseLinear, dict[str, Work]]:
    """A step with Adam (the reference), one that ends in an update, and the pieces of the update.

    - drop: ranking the magnitudes; growth: the best positions from x and dY;
    - dense_topk: growth as it is done elsewhere, by the dense gradient and torch.topk;
    - rewiring: the new pattern, with values and both of Adam's states following it;
    - encoding: the index tensors of a pattern that is new.

    The share of training time that updates take follows from `step_with_update` over `step`.
    """
    layer, x, dy = build_layer(cell)
    pairs = [(x.detach(), dy)]
    pattern = layer.pattern
    count = min(int(DROP_FRACTION * pattern.nnz), pattern.total - pattern.nnz)
    mask = pattern.to_mask()
    states = [torch.zeros_like(layer.values.detach()) for _ in range(3)]

    def drop() -> torch.Tensor:
        return lowest(magnitude(layer.values), count)

    def growth() -> torch.Tensor:
        return topk_outside(pairs, pattern, count, sort=False).flat

    def dense_topk() -> object:
        score = (dy.t() @ pairs[0][0]).abs_().masked_fill_(mask, -1.0)
        b = cell.block
        if b > 1:
            score = score.view(pattern.grid[0], b, pattern.grid[1], b).sum((1, 3))
        return score.flatten().topk(count, sorted=False)

    dropped, joins = drop(), growth()

    def rewiring() -> object:
        rewiring = Rewiring.make(pattern, dropped, joins)
        return [rewiring.apply(state) for state in states]

    flat = pattern.flat

    def encoding() -> object:
        fresh = SparsePattern.from_flat(flat, shape=pattern.shape, block_size=pattern.block_size)
        return fresh.index

    parts: dict[str, Work] = {
        "step": _training_step(cell, updates=False),
        "step_with_update": _training_step(cell, updates=True),
        "drop": drop,
        "growth": growth,
        "dense_topk": dense_topk,
        "rewiring": rewiring,
        "encoding": encoding,
    }
    return layer, parts


def _training_step(cell: Cell, updates: bool) -> Work:
    layer, x, dy = build_layer(cell)
    optimizer = torch.optim.Adam(layer.parameters())
    trainer: SparseTrainer = Static(layer, optimizer)
    if updates:
        every_step = ConstantSchedule(2**62, 1, DROP_FRACTION)
        trainer = RigL(layer, optimizer, schedule=every_step)

    def step() -> None:
        optimizer.zero_grad()
        x.grad = None
        layer(x).backward(dy)
        trainer.step()

    return step
