"""Replays every earlier finding, and runs a few seconds of seeded mutation per reader."""

from __future__ import annotations

import importlib
import random
import resource
from pathlib import Path

import pytest
from mutate import mutate
from targets import NAMES

CORPUS = Path(__file__).parent / "corpus"
CASES = sorted(file for file in CORPUS.glob("*/*") if file.is_file())
ROUNDS = {
    "bpe": 300,
    "checkpoints": 150,
    "records": 200,
    "specs": 300,
    "weights": 300,
}


@pytest.fixture(autouse=True)
def _bounded(monkeypatch):
    """Limit memory to 1 GiB above the current mapping; cases that need more raise MemoryError."""
    monkeypatch.setenv("DYNSPARSE_READ_LIMIT", str(1 << 20))
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (mapped + (1 << 30), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def target(name: str):
    pytest.importorskip("yaml")
    pytest.importorskip("safetensors")
    pytest.importorskip("typer")
    if name == "tokens":
        pytest.importorskip("tokenizers")
    return importlib.import_module(f"targets.{name}")


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.parent.name}/{case.name}")
def test_earlier_findings_stay_fixed(case):
    target(case.parent.name).run(case.read_bytes())


def test_every_corpus_folder_has_a_target():
    assert {case.parent.name for case in CASES} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_seeds_and_mutations_are_read_or_rejected(name):
    seeds, run = target(name).SEEDS, target(name).run
    for seed in seeds:
        run(seed)
    chance = random.Random(name)
    for _ in range(ROUNDS.get(name, 1000)):
        data = mutate(chance, chance.choice(seeds), seeds)
        try:
            run(data)
        except BaseException:
            print(f"data: {data!r}")
            raise


@pytest.mark.parametrize("name", NAMES)
def test_valid_file_is_read(name, monkeypatch):
    """The first seed of each kind is read, so the target reaches the code behind the checks."""
    module = target(name)
    refused: list[str] = []

    class Watch:
        def __init__(self, *kinds):
            self.kinds = kinds

        def __enter__(self):
            return None

        def __exit__(self, kind, error, trace):
            if kind is not None and issubclass(kind, self.kinds):
                refused.append(str(error))
                return True
            return False

    monkeypatch.setattr(module, "refused_as", Watch)
    for seed in module.SEEDS:
        module.run(seed)
    assert len(refused) <= len(module.SEEDS) // 2, refused
