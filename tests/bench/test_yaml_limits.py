"""Small YAML files that stand for much are refused before it is made, in one line."""

import time
import tracemalloc

import pytest

from dynsparse.bench.spec import read_spec
from dynsparse.bench.yaml_file import read_yaml

pytest.importorskip("yaml")


def refused(tmp_path, text: str | bytes, match: str, read=read_spec) -> None:
    file = tmp_path / "b.yml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=match) as error:
            read(file)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 64 << 20
    assert str(error.value).startswith("b.yml")
    assert len(str(error.value)) < 1000


def doubled(levels: int) -> str:
    lists = ["&a0 [x,x,x,x,x,x,x,x,x]"]
    lists += [f"&a{i} [{','.join([f'*a{i - 1}'] * 9)}]" for i in range(1, levels)]
    return f"benchmarks: {{a: {{measure: step, about: [{', '.join(lists)}]}}}}\n"


@pytest.mark.parametrize("levels", [6, 10, 200])
def test_aliases_of_aliases(tmp_path, levels):
    refused(tmp_path, doubled(levels), "expected at most 50,000 values, got more")


def test_aliases_are_read_where_they_stand_for_little(tmp_path):
    (tmp_path / "b.yml").write_text("a: &one [1, 2]\nb: *one\nc: {d: *one}\n")
    expected = {"a": [1, 2], "b": [1, 2], "c": {"d": [1, 2]}}
    assert read_yaml(tmp_path / "b.yml") == expected
    refused(tmp_path, doubled(3), "about: expected text, got ")


def test_depth(tmp_path):
    refused(tmp_path, "[" * 20_000, "expected at most 30 levels")
    refused(tmp_path, "- " * 5_000, "expected at most 30 levels")
    chain = "a0: &a0 [1]\n" + "".join(f"a{i}: &a{i} [[[*a{i - 1}]]]\n" for i in range(1, 2000))
    refused(tmp_path, chain, "expected at most 30 levels")
    refused(tmp_path, "a: &a [*a]\n", "expected an alias of a value before it in line 1")


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("a: !!float abc\n", "expected no tags, got 'tag:yaml.org,2002:float'"),
        ("a: !!int\n", "expected no tags"),
        ("a: !!python/object/apply:os.system [x]\n", "expected no tags"),
        ("a: " + "9" * 5000, "."),
        ("a: " + "9:" * 400 + "9.5", "expected numbers that fit"),
        ("a: " + "x" * 10_001, "texts of at most 10,000 characters"),
        ("a: x\n" * (1 << 19), "expected at most 1,048,576 bytes"),
        ("[1, 2]: x\n", r"expected keys that are text, got \[1, 2\]"),
        ("a: [" + "x" * 9_000 + "\n", "expected a YAML file, got an error"),
        ("a: \x07", "expected a YAML file, got an error"),
    ],
)
def test_what_pyyaml_would_stumble_over(tmp_path, text, match):
    refused(tmp_path, text, match, read_yaml)


def test_many_keys_do_not_take_the_square_of_their_number(tmp_path):
    times = []
    for count in (1_500, 24_000):
        (tmp_path / "b.yml").write_text("".join(f"k{i}:\n" for i in range(count)))
        begin = time.process_time()
        assert len(read_yaml(tmp_path / "b.yml")) == count
        times.append(time.process_time() - begin)
    assert times[1] < 64 * times[0]  # 16 times the keys; the square would be 256


ENTRY = "benchmarks: {{a: {{about: x, measure: {measure}, grid: {grid}}}}}\n"


@pytest.mark.parametrize(
    ("measure", "grid", "match"),
    [
        ("[step]", "{}", r"measure: expected one of .*, got \['step'\]"),
        ("step", "{layer: 8, batch: 1, density: 1, dtype: [{}]}", "dtype: expected one of"),
        ("step", f"{{layer: 8, batch: {2**31}, density: 1}}", "batch: expected an integer of at m"),
        ("step", f"{{layer: 1{'0' * 30}, batch: 1, density: 1}}", "layer: expected features such"),
        ("step", f"{{layer: {'9' * 30}x3, batch: 1, density: 1}}", "layer: expected features such"),
        (
            "step",
            "{{layer: 8, batch: [{0}], density: 1, threads: [{0}]}}".format("1," * 101),
            "expected at most 10,000 cells, got 10,201",
        ),
        ("step", "{layer: 8, batch: 1, density: 1, xxxx: 1}".replace("xxxx", "x" * 900), "keys"),
    ],
)  # fmt: skip
def test_entries(tmp_path, measure, grid, match):
    refused(tmp_path, ENTRY.format(measure=measure, grid=grid), match)
