"""What is wrong in a file of benchmarks is refused in one line."""

import pytest

from dynsparse.bench.spec import read_spec, read_yaml

pytest.importorskip("yaml")


def refused(tmp_path, text: str | bytes, match: str, read=read_spec) -> None:
    file = tmp_path / "b.yml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=match) as error:
        read(file)
    assert str(error.value).startswith("b.yml")
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize(
    "text",
    [
        "a: !!float abc\n",
        "a: !!int\n",
        "a: !!python/object/apply:os.system [x]\n",
        "a: " + "9:" * 400 + "9.5",
        "[1, 2]: x\n",
        "a: [" + "x" * 9_000 + "\n",
        "a: \x07",
        b"a: \xff\n",
        "[" * 20_000,
    ],
)
def test_what_is_no_yaml_of_plain_types(tmp_path, text):
    refused(tmp_path, text, "expected a YAML file, got an error", read_yaml)


def test_dates_stay_text(tmp_path):
    (tmp_path / "b.yml").write_text("a: 1024-10-10\nb: [2024-01-02 10:00:00, 3]\n")
    expected = {"a": "1024-10-10", "b": ["2024-01-02 10:00:00", 3]}
    assert read_yaml(tmp_path / "b.yml") == expected


ENTRY = "benchmarks: {{a: {{about: x, measure: {measure}, grid: {grid}}}}}\n"


@pytest.mark.parametrize(
    ("measure", "grid", "match"),
    [
        ("[step]", "{}", r"measure: expected one of .*, got \['step'\]"),
        ("step", "{layer: 8, batch: 1, density: 1, dtype: [{}]}", "dtype: expected one of"),
        ("step", f"{{layer: 8, batch: {2**31}, density: 1}}", "batch: expected at most"),
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
