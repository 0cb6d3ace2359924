"""Benchmark of models: contenders agree, and the parts of a step add up."""

import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bench_tables import memory_table, parts_table, steps_table
from torch import nn

from dynsparse.bench.contenders import MaskedLinear
from dynsparse.bench.timing import Effort
from dynsparse.nn import SparseLinear

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from models import (
    BLOCK_PARTS,
    MODELS,
    PARTS,
    Clock,
    ModelCell,
    build_model,
    find_blocks,
    measure_memory,
    measure_model,
    training_step,
    watch,
    why_refused,
)

pytest.importorskip("transformers")

TINY = {"hidden": 32, "inner": 64, "blocks": 3}
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
GPT2 = {"n_embd": 32, "n_head": 4, "vocab_size": 40, "n_positions": 8, "use_cache": False,
        "bos_token_id": 0, "eos_token_id": 0}  # fmt: skip
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
NAMES = ("gpt2-small", "bert-base", "vit-b")


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    """Scale the models down to 0.2 % of their sizes."""
    models = dict(MODELS)
    change = {
        "gpt2-small": {"outputs": 40, "table": 40, "tokens": 8, "settings": GPT2 | NO_DROPOUT},
        "bert-base": {"table": 40, "tokens": 8, "settings": SIZES | {"vocab_size": 40}},
        "vit-b": {"pixels": 16, "tokens": 5, "settings": SIZES | {"image_size": 16,
                                                                   "patch_size": 8}},
    }  # fmt: skip
    for name, what in change.items():
        monkeypatch.setitem(MODELS, name, replace(models[name], **TINY, **what))


def cell(name, block=1, dtype="float32"):
    return ModelCell((32, 64), 2, 0.3, block, 1, dtype, name)


def test_contenders_are_equal():
    models = {who: build_model(cell("gpt2-small"), who, 2) for who in ("dynsparse", "masked")}
    models["dense"] = build_model(cell("gpt2-small"), "dense", 2)
    kinds = {"dynsparse": SparseLinear, "masked": MaskedLinear, "dense": nn.Linear}
    ids = torch.randint(40, (2, 8))
    want = models["dynsparse"](ids).logits
    for who, model in models.items():
        name, blocks = find_blocks(model)
        assert name == "transformer.h"
        assert len(blocks) == 2
        assert (
            sum(type(m) is kinds[who] or isinstance(m, kinds[who]) for m in blocks.modules()) == 8
        )
        torch.testing.assert_close(model(ids).logits, want)


@pytest.mark.parametrize("name", NAMES)
def test_times_of_parts_add_up(name):
    model = build_model(cell(name), "dynsparse", 2)
    step = training_step(cell(name), model)
    step()
    begin = time.perf_counter()
    seconds = step()
    assert 0.9 * sum(seconds.values()) <= time.perf_counter() - begin
    without = {"dropout"} if name == "gpt2-small" else set()
    assert tuple(seconds) == PARTS
    assert {part for part, taken in seconds.items() if taken == 0} <= without
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_backward_time_belongs_to_its_part():
    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, dy):
            time.sleep(0.05)
            return dy

    class SlowNorm(nn.LayerNorm):
        def forward(self, x):
            return Slow.apply(super().forward(x))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            block = nn.Sequential(nn.Linear(4, 4), SlowNorm(4), nn.Linear(4, 4))
            self.layers = nn.ModuleList([nn.Sequential(block)])

    model, clock = Model(), Clock()
    watch(model, clock)
    clock.start()
    x = model.layers[0](torch.randn(2, 4))
    assert clock.stop()["norms"] < 0.05
    clock.start()
    x.sum().backward()
    assert clock.stop()["norms"] >= 0.05


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_figures_cover_all_blocks(dtype):
    found = measure_model(cell("gpt2-small", 16, dtype), ["masked", "dense"], Effort(0, 3, 1, 0))
    assert (found["depth"], found["blocks"], found["rounds"]) == (2, 3, 3)
    assert found["kernel"]
    assert set(found["ratios"]) == set(found["whole"]["ratios"]) == {"masked", "dense"}
    for who, parts in found["parts"].items():
        assert found["whole"]["times"][who]["median"] > found["times"][who]["median"] > 0
        assert sum(parts[part] for part in BLOCK_PARTS) < sum(parts.values())
    figures = {**found, "layer": "gpt2-small", "density": 0.3, "block": 16, "dtype": dtype}
    head, rows = steps_table([figures])
    assert rows[0][:4] == ["gpt2-small", "0.3", "16", dtype]
    assert len(rows[0]) == len(head)
    head, rows = parts_table([figures])
    assert head == ["model", "part", "dynsparse, block 16", "masked", "dense"]
    assert [row[1] for row in rows] == [*PARTS, "all of it"]


def test_table_of_parts_has_a_column_per_block():
    def figures(layer, block, density, taken):
        parts = {who: {"norms": taken, "head": 1.0} for who in ("dynsparse", "masked", "dense")}
        return {"layer": layer, "block": block, "density": density, "dtype": "float32",
                "parts": parts}  # fmt: skip

    head, rows = parts_table(
        [figures("a", 1, 0.1, 2.0), figures("a", 1, 0.05, 9.0), figures("a", 16, 0.1, 3.0),
         figures("b", 16, 0.1, 4.0)]
    )  # fmt: skip
    assert head == ["model", "part", "dynsparse, block 1", "dynsparse, block 16", "masked", "dense"]
    assert rows == [
        ["a", "norms", "2000", "3000", "2000", "2000"],
        ["a", "head", "1000", "1000", "1000", "1000"],
        ["a", "all of it", "3000", "4000", "3000", "3000"],
        ["b", "norms", "", "4000", "4000", "4000"],
        ["b", "head", "", "1000", "1000", "1000"],
        ["b", "all of it", "", "5000", "5000", "5000"],
    ]


def test_the_table_of_memory():
    memory = {"dynsparse": 1e9, "masked": 4e9, "dense": 3e9}
    memory = {who: {"peak": size, "state": size / 2, "blocks": size / 4}
              for who, size in memory.items()}  # fmt: skip
    figures = {"memory": memory, "layer": "vit-b", "density": 0.1, "block": 1, "dtype": "float32"}
    head, rows = memory_table([figures])
    assert rows == [["vit-b", "0.1", "1", "float32", "1.00", "4.00", "3.00", "250", "4.0", "3.0"]]
    assert len(head) == len(rows[0])
    mixed = [figures, {**figures, "layer": "bert-base"}, {**figures, "density": 0.05}]
    names = [row[:2] for row in memory_table(mixed)[1]]
    assert names == [["vit-b", "0.1"], ["vit-b", "0.05"], ["bert-base", "0.1"]]


def test_failing_training_is_named():
    with pytest.raises(RuntimeError, match="block 7, dynsparse: the training failed: "):
        measure_memory(replace(cell("vit-b"), block=7), [])


def test_invalid_cells_raise():
    assert why_refused(cell("vit-b", 5), None) == "block 5 does not divide 32 features"
    assert "GB of memory" in why_refused(cell("vit-b"), 1000)
    assert why_refused(cell("vit-b"), 1 << 40) is None
    assert cell("vit-b").layer == "vit-b"
