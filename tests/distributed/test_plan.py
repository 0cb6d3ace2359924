"""Plans: the search against all ways there are, the bound on memory, what is told and refused."""

from __future__ import annotations

import json
from itertools import pairwise, product

import pytest
from torch import nn

import dynsparse as ds
from dynsparse.distributed import Cluster, Link, make_plan, probe
from dynsparse.distributed.chains import find_chains
from dynsparse.distributed.placement import Placement
from dynsparse.distributed.search import Cost, Grid, Search, grids
from dynsparse.ranks import CountingRanks


def mlp(*sizes, density=0.1, block_size=1):
    layers = []
    for a, b in pairwise(sizes):
        layers += [ds.nn.SparseLinear(a, b, density, block_size), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def names(model, given=()):
    return [[bundle.names for bundle in chain] for chain in find_chains(model, given)[1]]


def test_rows_of_layers_are_found():
    model = nn.Sequential(
        ds.nn.SparseLinear(8, 8),
        nn.GELU(),
        nn.Dropout(0.1),
        ds.nn.SparseLinear(8, 6),
        nn.LayerNorm(6),
        ds.nn.SparseLinear(6, 8),
        ds.nn.SparseTransformerLayer(8, 2, 16),
    )
    found = names(model)
    assert found[0] == [("0",), ("3",)]
    assert found[1] == [("5",)]
    assert found[2] == [tuple(f"6.attention.{p}_proj" for p in "qkv"), ("6.attention.out_proj",)]
    assert found[3] == [("6.linear1",), ("6.linear2",)]
    assert find_chains(model)[1][2][0].unit == 4  # heads stay whole
    assert names(model, [["3", "5"]])[:2] == [[("0",)], [("3",), ("5",)]]


def test_grids_are_all_factorisations():
    assert sorted(grids(4)) == [(1, 1, 4), (1, 2, 2), (1, 4, 1), (2, 1, 2), (2, 2, 1), (4, 1, 1)]
    assert len(grids(1024)) == 66
    assert all(x * y * z == 360 for x, y, z in grids(360))


@pytest.mark.parametrize("grid", [Grid(2, 1, 2), Grid(2, 2, 1), Grid(4, 2, 1)])
def test_the_search_finds_the_best_of_all_ways(grid):
    model = mlp(64, 256, 16, 32, density=0.5)
    layers, chains = find_chains(model)
    search = Search(layers, chains, 16, 2, Cluster(Link(1e-5, 1e8)))
    (chain,) = chains
    axes = [p for p in product((None, "x", "y"), repeat=2) if p[0] is None or p[0] != p[1]]
    axes = [p for p in axes if all(a is None or getattr(grid, a) > 1 for a in p)]
    least = float("inf")
    for way in product(axes, repeat=len(chain)):
        total, given = Cost(), None
        for position, (rows, cols) in enumerate(way):
            last = position == len(chain) - 1
            placement = Placement(rows, cols, given, last)
            total += search._layer(
                chain[position].names[0], position, search.borders[0], placement, grid
            )
            given = rows
        least = min(least, total.seconds)
    found = search.best(grid)
    assert found[1].seconds == pytest.approx(least, rel=1e-12)


def test_a_pair_has_one_sum_between_its_layers():
    plan = make_plan(mlp(1024, 4096, 1024), 8, batch=256)
    up, down = plan.placements["0"], plan.placements["2"]
    assert up.rows is not None
    assert up == Placement(up.rows, None, None, False)
    assert down == Placement(None, up.rows, up.rows, True)


def test_sparse_layers_want_replicas_where_dense_ones_want_slabs():
    fast = Cluster(Link(20e-6, 5e9), flops=5e11)
    replicas = [
        make_plan(nn.Sequential(ds.nn.SparseLinear(2048, 2048, d)), 8, 1024, cluster=fast).grid.z
        for d in (1.0, 0.1, 0.01)
    ]
    assert replicas == [2, 4, 8]


def test_axes_that_leave_a_node_cost_more():
    model = mlp(512, 2048, 512)
    slow = Cluster(Link(1e-6, 50e9), Link(1e-4, 1e8), ranks_per_node=2)
    assert slow.link(1, 2) == slow.inner
    assert slow.link(1, 4) == slow.link(2, 2) == slow.outer
    plan = make_plan(model, 8, batch=64, cluster=slow)
    even = make_plan(model, 8, batch=64, cluster=Cluster(slow.inner))
    assert plan.chosen.cost.seconds > even.chosen.cost.seconds


def test_gathers_and_passes_cost_what_the_cluster_says():
    # Over both axes features are gathered and passed over; over z alone nothing is moved but sums.
    layer = ds.nn.SparseLinear(64, 32, pattern=ds.SparsePattern.full((32, 64)))
    layers, chains = find_chains(nn.Sequential(layer))
    grid, placement = Grid(2, 2, 1), Placement("x", "y", None, True)
    usual = Cluster(Link(1e-5, 1e9))

    def features(cluster, placement=placement):
        search = Search(layers, chains, 8, 2, cluster)
        return search._layer("0", 0, search.borders[0], placement, grid).features

    row = 8 * 4  # bytes of a feature
    sums = usual.inner.sum_seconds(16 * row, 2) + usual.inner.sum_seconds(32 * row, 2)
    gathers = usual.inner.gather_seconds(64 * row, 2) + usual.inner.gather_seconds(32 * row, 2)
    # The sum's copy, the bias and its gradient, the slab of what comes in, the gradient's copy.
    passed = (3 * 16 + 32 + 32) * row
    for gathering, copying in ((1.0, 1e-9), (3.0, 1e-9), (3.0, 1e-7)):
        cluster = Cluster(usual.inner, gathering=gathering, copying=copying)
        expected = sums + gathering * gathers + copying * passed
        assert features(cluster) == pytest.approx(expected, rel=1e-9)
    assert features(usual, Placement()) == 0


@pytest.mark.parametrize("disturbed", [1.0, 40.0])
def test_a_link_is_fitted_to_sums(monkeypatch, disturbed):
    """And stays sensible where the machine was busy while the small ones were measured."""
    true, taken = Link(1e-4, 1e9), iter(probe.SIZES)

    def seconds(ranks, work):
        size = 4 * next(taken)
        return true.sum_seconds(size, 4) * (disturbed if size < 1 << 20 else 1.0)

    monkeypatch.setattr(probe, "_median", seconds)
    found = probe._link(CountingRanks(4))
    if disturbed == 1:
        assert found == pytest.approx(true, rel=1e-6)
    assert 0.3 * true.bandwidth < found.bandwidth < 3 * true.bandwidth


def test_a_bound_on_memory_is_kept():
    model = mlp(512, 2048, 512)
    free = make_plan(model, 8, batch=64, cluster=Cluster(Link(1e-3, 1e9)))
    assert all(one.rows is one.cols is None for one in free.placements.values())
    bound = 0.4 * free.chosen.cost.memory
    tight = make_plan(model, 8, batch=64, cluster=free.cluster, memory=bound)
    assert tight.chosen.cost.memory <= bound
    assert tight.chosen.cost.seconds > free.chosen.cost.seconds
    assert "too large" in tight.explain(100)
    with pytest.raises(ValueError, match=r"no grid fits into memory=1,000 bytes: the least is"):
        make_plan(model, 8, batch=64, memory=1000)


def test_memory_is_what_a_rank_holds():
    layer = ds.nn.SparseLinear(64, 32, pattern=ds.SparsePattern.full((32, 64)), bias=False)
    plan = make_plan(nn.Sequential(layer), 1, batch=10, states=1)
    nnz = 64 * 32
    assert plan.chosen.cost.memory == 3 * 4 * nnz + 12 * nnz + 10 * (64 + 32) * 4
    assert plan.chosen.cost.traffic == 0


def test_what_is_sent_is_counted():
    layer = ds.nn.SparseLinear(64, 32, pattern=ds.SparsePattern.full((32, 64)), bias=False)
    model = nn.Sequential(layer)
    sent = {one.grid: one.cost.traffic for one in make_plan(model, 4, batch=8).candidates}
    assert sent[1, 1, 4] == 2 * 3 / 4 * 64 * 32 * 4


def test_unequal_slabs_are_told():
    # All non-zeros in one block row: no cut over rows shares them.
    pattern = ds.SparsePattern([0] * 16, range(16), shape=(16, 16))
    layer = ds.nn.SparseLinear(16, 16, pattern=pattern)
    plan = make_plan(nn.Sequential(layer), 2, batch=4)
    balance = {one.grid: one.balance for one in plan.candidates}
    assert balance[1, 1, 2] == 1
    placed = {one.grid: one.placements["0"] for one in plan.candidates}
    for grid, placement in placed.items():
        assert balance[grid] == (2 if placement.rows else 1)


def test_a_plan_is_told_in_words_and_as_json():
    plan = make_plan(mlp(32, 64, 32), 4, batch=8)
    text = plan.explain()
    assert text.startswith("4 ranks, 8 samples a step: ")
    assert text.count("chosen") == 1
    for one in plan.candidates:
        assert f"{one.grid} " in text
    assert json.loads(json.dumps(plan.to_dict()))["grid"] == plan.grid._asdict()
    shares = plan.to_dict()["candidates"][0]
    parts = ("products", "features", "weights", "optimizer")
    assert shares["seconds"] == pytest.approx(sum(shares[part] for part in parts))


def test_figures_of_a_cluster_are_stored(tmp_path):
    cluster = Cluster(Link(1e-5, 1e9), Link(1e-4, 1e8), 8, threads=4, slowness=1.5)
    cluster.save(tmp_path / "cluster.json")
    assert Cluster.load(tmp_path / "cluster.json") == cluster
    Cluster().save(tmp_path / "cluster.json")
    assert Cluster.load(tmp_path / "cluster.json") == Cluster()


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"inner": 3}', '{"inner": {"latency": 1}}', '{"other": 1}',
             '{"inner": {"latency": -1, "bandwidth": 1}}',
             '{"inner": {"latency": "a", "bandwidth": 1}}']
)  # fmt: skip
def test_a_damaged_file_gets_a_line(tmp_path, text):
    path = tmp_path / "cluster.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"does not hold the figures of a cluster"):
        Cluster.load(path)


def test_what_cannot_be_planned_is_refused():
    model = mlp(32, 32, 32)
    with pytest.raises(ValueError, match=r"no sparse layers"):
        make_plan(nn.Linear(3, 3), 2, batch=8)
    with pytest.raises(TypeError, match=r"mesh must be an integer"):
        make_plan(model, "two", batch=8)
    with pytest.raises(ValueError, match=r"batch must be an integer of at least 1"):
        make_plan(model, 2, batch=0)
    with pytest.raises(ValueError, match=r"'0' writes 32 features and '2' reads 16"):
        make_plan(nn.Sequential(model[0], nn.ReLU(), ds.nn.SparseLinear(16, 8)), 2, batch=8,
                  chains=[["0", "2"]])  # fmt: skip
    with pytest.raises(ValueError, match=r"expected the names of sparse layers, such as '0'"):
        make_plan(model, 2, batch=8, chains=[["0", "5"]])
    with pytest.raises(ValueError, match=r"the layer '0' is named twice"):
        make_plan(model, 2, batch=8, chains=[["0"], ["0"]])
    with pytest.raises(TypeError, match=r"chains must be rows of names"):
        make_plan(model, 2, batch=8, chains="02")


def test_nothing_is_cut_finer_than_a_block():
    coarse = nn.Sequential(ds.nn.SparseLinear(32, 32, 1.0, 16))  # two block rows
    plan = make_plan(coarse, 4, batch=8)
    assert {one.grid for one in plan.candidates} == {*grids(4)}
    placed = {one.grid: one.placements["0"] for one in plan.candidates}
    assert placed[4, 1, 1] == placed[1, 4, 1] == Placement()
    assert "compute the same" in make_plan(coarse, 3, batch=1).explain()
