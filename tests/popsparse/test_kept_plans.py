"""Plans of static and dense products in the cache: those that are made, and never another's."""

import logging

import numpy as np
import pytest
import torch

from dynsparse.files.cache import Cache, open_cache
from dynsparse.machine import Target
from dynsparse.pattern import SparsePattern
from dynsparse.popsparse import dense, static
from dynsparse.popsparse.dense import planner as dense_planner

SMALL = Target(tiles=16)
STATIC = {
    "elements": {"block": 1},
    "blocks": {"block": 8, "density": 0.3},
    "float32": {"block": 4, "dtype": "float32"},
    "dense x sparse": {"block": 4, "transposed": True},
    "fixed": {"block": 1, "options": {"num_bands": 3, "n_split": 2}},
    "as it is": {"block": 1, "options": {"enable_preprocessing": False}, "skewed": True},
    "set apart": {"block": 1, "skewed": True},
}


@pytest.fixture
def warm(tmp_path, monkeypatch):
    """A cache of the test's own."""
    monkeypatch.setenv("DYNSPARSE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("DYNSPARSE_CACHE_SIZE", str(1 << 20))
    dense_planner._plan.cache_clear()
    yield tmp_path / "cache"
    dense_planner._plan.cache_clear()


def pattern_of(block, density=0.1, skewed=False, seed=0):
    if skewed:  # a few full columns, and many with next to nothing
        rows, cols = np.nonzero(np.random.default_rng(seed).random((64, 96)) < 0.02)
        rows, cols = rows[cols > 3], cols[cols > 3]
        rows, cols = np.append(rows, np.arange(64)), np.append(cols, np.zeros(64, int))
        return SparsePattern(rows, cols, shape=(64, 96))
    generator = torch.Generator().manual_seed(seed)
    return SparsePattern.random((64, 96), density, block_size=block, generator=generator)


def make(block=1, density=0.1, dtype="float16", transposed=False, options=None, target=SMALL,
         skewed=False, seed=0, n=48):  # fmt: skip
    pattern = pattern_of(block, density, skewed, seed)
    sizes = (1, n, 64, 96) if transposed else (1, 64, 96, n)
    kind = "create_for_dense_sparse" if transposed else "create_for_sparse_dense"
    params = getattr(static.MatmulParams, kind)(*sizes)
    return static.make_plan(target, dtype, params, pattern, options)


def same(one, other):
    """In all that was settled, and in what follows from it."""
    found = []
    for p in (one, other):
        plain = [p.params, p.options, p.target, p.planned, p.bands[1:], p.n_parts, p.tile_parts]
        found.append([*plain, p.band_tiles, p.terms, p.temporary_bytes, p.search])
    arrays = [
        [p.row_order, p.column_order, p.bands.bounds, p.order, p.depths] for p in (one, other)
    ]
    return found[0] == found[1] and all(map(np.array_equal, *arrays)) and one.dtype is other.dtype


def said(caplog, words):
    return sum(one.startswith(words) for one in caplog.messages)


@pytest.mark.parametrize("kind", STATIC)
def test_a_static_plan_from_the_cache_is_the_one_that_was_made(warm, caplog, kind):
    with caplog.at_level(logging.INFO, "dynsparse"):
        made = make(**STATIC[kind])
        found = make(**STATIC[kind])
    assert (said(caplog, "planned static"), said(caplog, "plan of static")) == (1, 1)
    assert same(made, found)


@pytest.mark.parametrize(
    "changes",
    [{"n": 64}, {"dtype": "float32"}, {"seed": 1}, {"block": 4}, {"options": {"n_split": 2}},
     {"target": SMALL.with_(sync_cycles=0)}],
)  # fmt: skip
def test_whatever_a_static_plan_depends_on_makes_it_another(warm, caplog, changes):
    make()
    with caplog.at_level(logging.INFO, "dynsparse"):
        made = make(**changes)
    assert said(caplog, "planned static") == 1
    assert same(make(**changes), made)


def test_a_pattern_without_blocks_is_planned_anew(warm):
    made = make(density=0.0)
    assert same(made, make(density=0.0))
    assert open_cache().kinds() == {}


def test_what_no_cut_serves_is_refused_every_time(warm):
    for _ in range(2):
        with pytest.raises(ValueError, match="static partitions is possible"):
            make(options={"available_memory_proportion": 1e-6})
    assert open_cache().kinds() == {}


SIZES = {"m": 64, "k": 96, "n": 40, "dtype": "float16", "target": SMALL}


def test_a_dense_plan_from_the_cache_is_the_one_that_was_made(warm, caplog):
    with caplog.at_level(logging.INFO, "dynsparse"):
        made = dense.plan(**SIZES)
        dense_planner._plan.cache_clear()
        found = dense.plan(**SIZES)
    assert caplog.messages[0].startswith("planned dense 64x96 by 96x40 of float16: ")
    assert caplog.messages[1].startswith("plan of dense 64x96 by 96x40 of float16 from the cache: ")
    assert (made, made.terms, made.target) == (found, found.terms, found.target)
    assert (found.dtype, found.vertex) == (made.dtype, made.vertex)
    assert dense.plan(**{**SIZES, "partials": "float32"}).partials.name == "float32"
    assert open_cache().kinds()["plans"].entries == 2


@pytest.mark.parametrize("content", [b"{}", b"[]", b"3", b'{"$": ["Target", {}]}', b"no json"])
def test_an_entry_that_is_whole_but_no_plan_is_made_again(warm, caplog, content, monkeypatch):
    wanted, cut = dense.plan(**SIZES), make()
    dense_planner._plan.cache_clear()
    monkeypatch.setattr(Cache, "get", lambda *_: content)
    with caplog.at_level(logging.INFO, "dynsparse"):
        assert dense.plan(**SIZES) == wanted
        assert same(make(), cut)
    assert said(caplog, "planned ") == 2
