"""Small programs for pages of the machine report, and a parser of such pages."""

from __future__ import annotations

import json
from html.parser import HTMLParser

import numpy as np
import torch

from dynsparse import SparsePattern
from popsparse.encoding.partitioner import Partitioner
from popsparse.machine import (
    FLOAT,
    Copy,
    Engine,
    Execute,
    Graph,
    Repeat,
    Sequence,
    Target,
    codelets,
    rotation,
)
from popsparse.planning.params import FullyConnectedParams, SparsityParams
from popsparse.planning.search import make_plan
from popsparse.plans import plan_report, predict
from popsparse.report import encoding_data

VOID = {"meta", "link", "br", "hr", "img", "input"}


class Page(HTMLParser):
    """Checks that elements are closed in order; collects ids, texts and links."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.ids: list[str] = []
        self.addresses: list[str] = []
        self.text: list[str] = []
        self.scripts: list[tuple[dict, str]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        assert len(found) == len(attrs), f"{tag} has an attribute twice"
        if "id" in found:
            self.ids.append(found["id"])
        self.addresses += [found[key] for key in ("href", "src", "action", "data") if key in found]
        if tag == "script":
            self.scripts.append((found, ""))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open[-1:] == [tag], f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, text):
        if self.open and self.open[-1] == "script":
            self.scripts[-1] = (self.scripts[-1][0], self.scripts[-1][1] + text)
        elif not self.open or self.open[-1] != "style":
            self.text.append(text)

    @property
    def words(self) -> str:
        return " ".join(" ".join(self.text).split())

    @property
    def sections(self) -> set[str]:
        return {address[1:] for address in self.addresses if address.startswith("#")}

    @property
    def data(self) -> dict:
        return next(json.loads(text) for attrs, text in self.scripts if attrs.get("id") == "data")


def small_run(tiles=5, turns=7, name="body"):
    graph = Graph(Target(tiles=tiles, sync_cycles=10, exchange_fragment_cycles=0))
    a = graph.add_variable(FLOAT, [tiles, 4], "a", tiles=range(tiles))
    b = graph.add_variable(FLOAT, [tiles, 4], "b", tiles=range(tiles))
    fill = graph.add_compute_set("fill")
    graph.add_vertices(fill, codelets.FILL, np.arange(tiles), {"out": a, "value": 1.0})
    body = Sequence(Execute(fill), Copy(rotation(a, b, 1), name="rotate"), name=name)
    return Engine(graph, Sequence(Repeat(turns, body), Copy(b, a, name="back"))).run()


def small_product(block=4, density=0.25, dtype="float16", force=False, shape=(64, 48), **more):
    params = FullyConnectedParams.create_with_nz_ratio(
        SparsityParams(block),
        nz_ratio=density,
        batch_size=8,
        num_groups=1,
        input_channels_per_group=shape[1],
        output_channels_per_group=shape[0],
    )
    options = {"do_grad_a_pass": True, "force_bucket_spills": force, **more}
    plan = make_plan(Target.bow(tiles=24), dtype, params, options)
    generator = torch.Generator().manual_seed(1)
    pattern = SparsePattern.random(shape, density, block_size=block, generator=generator)
    partitioner = Partitioner(plan)
    encoded = partitioner.encode(pattern, torch.ones(pattern.values_shape))
    return plan, pattern, partitioner, encoded


def whole_page(**changes):
    plan, pattern, partitioner, encoded = small_product(force=True)
    given = {
        "title": "A product",
        "summary": {"cycles": {"forward": 1234567}, "density": 1 / 16, "rows": 4096},
        "plan": plan_report(plan),
        "profile": {"forward": small_run(), "grad_input": small_run(turns=3)},
        "predicted": {name: time.to_dict() for name, time in predict(plan, pattern).items()},
        "encoding": encoding_data(partitioner, encoded),
    }
    return given | changes
