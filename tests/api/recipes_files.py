"""Valid calls that read or write files: records, checkpoints, data, pages and plots."""

from __future__ import annotations

import struct
from contextlib import nullcontext
from functools import cache

import torch
from recipes import Recipe, call, of
from recipes_parts import folder, model, pattern, rewiring
from recipes_popsparse import encoded, partitioner
from recipes_popsparse import layer as machine_layer
from recipes_popsparse import pattern as machine_pattern
from recipes_popsparse import plan as machine_plan
from recipes_training import checkpoint, optimizer_of

import dynsparse as ds
import popsparse
from dynsparse import data, selfcheck, tracing
from dynsparse.bench import find_spec, read_spec
from dynsparse.integrations.follower import Follower
from dynsparse.report import plot
from dynsparse.report.training.connectivity import visualise
from dynsparse.training.checkpoint import read_extra
from dynsparse.training.records import RecordedLayer, Recorder, Records
from popsparse import report as reports
from popsparse.report import encoding_data, report_html, write_layer_report, write_report


def recorder():
    made = Recorder(folder())
    made.start({"a": pattern()})
    return made


def recorded():
    made = recorder()
    made.update(1, {"a": rewiring()})
    made.log(1, {"loss": 0.5})
    return made


def layer_file():
    file = folder() / "layer"
    machine_layer().save(file)
    return file


def traced(**named):
    with ds.trace(**named), tracing.span("a"), tracing.span("b"):
        pass


def within_a_trace(make):
    """Call `make` and enter its result as a context while a trace is active."""

    def run(**named):
        with ds.trace(folder() / "run.json"), make(**named) or nullcontext():
            pass

    return run


def records():
    return Records.load(recorded().path)


def idx_file():
    path = folder() / "labels"
    path.write_bytes(struct.pack(">HBBI", 0, 8, 1, 3) + bytes(3))
    return path


def images():
    count = 8
    half = data.LabelledImages(torch.zeros(count, 784), torch.zeros(count, dtype=torch.int64))
    return data.DataSet("mine", half, half)


@cache  # reports do not change it
def ran():
    made = machine_layer()
    made.run("forward")
    return made


@cache
def page():
    profile = ran().profiles["forward"]
    return {
        "title": "A product",
        "summary": {"cycles": 10.0},
        "plan": popsparse.plan_report(machine_plan()),
        "profile": profile,
        "predicted": {
            name: one.to_dict()
            for name, one in popsparse.predict(machine_plan(), machine_pattern()).items()
        },
        "encoding": encoding_data(partitioner(), encoded()),
    }


def profile_file():
    return reports.save_profile(folder() / "a.json", title="A", profile=page()["profile"])


def read_profile():
    return reports.read_profiles(page()["profile"])[0]


def followed(algorithm, options):
    net = model()
    Follower(algorithm, options).start(net, optimizer_of(net), 10)


FILES = (OSError,)
LAYERS = (KeyError,)

RECIPES = {
    "dynsparse.training.records.RecordedLayer": call(
        RecordedLayer, shape=lambda: (8, 12), block_size=lambda: 1
    ),
    "dynsparse.training.records.Recorder": call(
        Recorder, FILES, path=folder, metadata=lambda: {"seed": 0}
    ),
    "dynsparse.training.records.Recorder.start": of(
        lambda: Recorder(folder()),
        "start",
        patterns=lambda: {"a": pattern()},
        step=lambda: 0,
        overwrite=lambda: False,
    ),
    "dynsparse.training.records.Recorder.update": Recipe(
        lambda **named: recorder().update(**named),
        lambda: {"step": 1, "rewirings": {"a": rewiring()}},
        LAYERS,
    ),
    "dynsparse.training.records.Recorder.log": of(
        recorder, "log", step=lambda: 1, figures=lambda: {"loss": 1.0}
    ),
    "dynsparse.training.records.Recorder.flush": of(recorder, "flush"),
    "dynsparse.training.records.Recorder.truncate": of(
        recorded, "truncate", step=lambda: 1, patterns=lambda: {"a": rewiring().after}
    ),
    "dynsparse.training.records.Records.load": call(
        Records.load, FILES, path=lambda: recorded().path, updates=lambda: 2
    ),
    "dynsparse.training.records.Records.pattern": Recipe(
        lambda **named: records().pattern(**named),
        lambda: {"layer": "a", "index": 1},
        (KeyError, IndexError),
    ),
    **{
        f"dynsparse.training.records.Records.{name}": Recipe(
            lambda layer, name=name: list(getattr(records(), name)(layer)),
            lambda: {"layer": "a"},
            LAYERS,
        )
        for name in ("initial", "changes", "patterns", "churn", "exploration", "dead_units")
    },
    "dynsparse.training.checkpoint.read_extra": call(read_extra, FILES, path=checkpoint),
    "dynsparse.data.load": call(data.load, FILES, name=lambda: "digits", data_dir=lambda: None),
    "dynsparse.data.read_idx": call(data.read_idx, FILES, path=idx_file, dimensions=lambda: 1),
    "dynsparse.data.DataSet.hold_out": of(images, "hold_out", count=lambda: 2),
    "dynsparse.bench.find_spec": call(find_spec),
    "dynsparse.bench.read_spec": call(read_spec, FILES, file=find_spec),
    "popsparse.report.report_html": Recipe(report_html, lambda: {**page()}),
    "popsparse.report.write_report": Recipe(
        lambda path: write_report(path, title="A page", summary={}),
        lambda: {"path": folder() / "page.html"},
        FILES,
    ),
    "popsparse.report.write_layer_report": Recipe(
        write_layer_report,
        lambda: {
            "path": folder() / "page.html",
            "layer": ran(),
            "title": "A layer",
            "pattern": machine_pattern(),
            "summary": {"seed": 0},
        },
        FILES,
    ),
    "popsparse.report.layer_page": call(
        reports.layer_page,
        layer=ran,
        title=lambda: "A layer",
        pattern=machine_pattern,
        summary=lambda: {"seed": 0},
    ),
    "popsparse.report.save_profile": Recipe(
        reports.save_profile, lambda: {"path": folder() / "a.json", **page()}, FILES
    ),
    "popsparse.report.load_profile": Recipe(
        reports.load_profile, lambda: {"path": profile_file()}, FILES
    ),
    "popsparse.report.read_profiles": call(
        reports.read_profiles, profile=lambda: page()["profile"]
    ),
    "popsparse.report.operations": call(reports.operations, profile=read_profile, depth=lambda: 2),
    "popsparse.report.findings": call(reports.findings, profile=read_profile),
    "popsparse.report.memory_steps": call(reports.memory_steps, profile=read_profile),
    "popsparse.report.peak_step": call(reports.peak_step, profile=read_profile, tile=lambda: 1),
    "popsparse.report.profile_text": call(
        reports.profile_text, title=lambda: "A run", profiles=lambda: [read_profile()]
    ),
    "popsparse.report.compare": call(
        reports.compare,
        first=lambda: reports.load_profile(profile_file()),
        second=lambda: page()["profile"],
    ),
    "popsparse.report.comparison_text": call(
        reports.comparison_text,
        comparison=lambda: reports.compare(page()["profile"], page()["profile"]),
    ),
    "popsparse.report.encoding_data": call(encoding_data, partitioner=partitioner, encoded=encoded),
    "dynsparse.report.training.connectivity.visualise": Recipe(
        visualise,
        lambda: {
            "records_path": recorded().path,
            "output_dir": folder(),
            "cmap": "magma",
            "animate": False,
        },
        FILES,
    ),
    "dynsparse.report.plot": Recipe(
        plot, lambda: {"source": model(), "what": "connectivity", "layer": "0"}, FILES
    ),
    "popsparse.Layer.save": Recipe(
        machine_layer().save, lambda: {"file": folder() / "layer"}, FILES
    ),
    "popsparse.Layer.load": Recipe(popsparse.Layer.load, lambda: {"file": layer_file()}, FILES),
    "dynsparse.selfcheck.run_checks": Recipe(selfcheck.run_checks, lambda: {"seed": 1}),
    "dynsparse.trace": Recipe(traced, lambda: {"file": folder() / "run.json", "limit": 3}, FILES),
    "dynsparse.tracing.span": Recipe(
        within_a_trace(lambda **named: tracing.span(**named)), lambda: {"name": "data", "layer": 1}
    ),
    "dynsparse.tracing.spanned": Recipe(
        within_a_trace(lambda name: tracing.spanned(name)(nullcontext)()), lambda: {"name": "data"}
    ),
    "dynsparse.tracing.counter": Recipe(
        within_a_trace(lambda **named: tracing.counter(**named)),
        lambda: {"name": "loss", "value": 0.5},
    ),
    "dynsparse.integrations.follower.Follower": Recipe(
        followed, lambda: {"algorithm": ds.RigL, "options": {"update_interval": 2}}
    ),
}
