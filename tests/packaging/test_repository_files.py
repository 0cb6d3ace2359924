"""Containers, the workflow, the citation and the package index page, which external CI uses,
checked as far as possible here."""

from __future__ import annotations

import fnmatch
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from dynsparse._core.version import __version__

ROOT = Path(__file__).resolve().parents[2]


def instructions() -> list[list[str]]:
    """Return the Dockerfile's instructions as lists of words, with lines joined."""
    text = re.sub(r"\\\n", " ", (ROOT / "Dockerfile").read_text())
    return [line.split() for line in text.splitlines() if line and not line.startswith("#")]


def sources() -> list[str]:
    """Return the paths that the Dockerfile copies from the source tree."""
    copied = [words[1:-1] for words in instructions() if words[0] == "COPY"]
    return [name for words in copied if not words[0].startswith("--from") for name in words]


def test_dockerfile_instructions_and_paths():
    known = {"FROM", "RUN", "COPY", "WORKDIR", "USER", "ENTRYPOINT", "CMD"}
    found = instructions()
    assert found[0][0] == "FROM"
    assert {words[0] for words in found} <= known
    assert len(sources()) >= 7
    for name in sources():
        assert (ROOT / name).exists(), name
    for words in found:
        if words[0] in ("ENTRYPOINT", "CMD"):
            assert isinstance(json.loads(" ".join(words[1:])), list)


def test_image_contains_the_files_of_the_build():
    """Files named by CMake and the build backend are copied and not ignored."""
    kept = {
        line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] == "!"
    }
    assert set(sources()) <= kept
    read = {"benchmarks/benchmarks.yml", "README.md", "LICENSE", "CMakeLists.txt", "pyproject.toml"}
    assert read <= set(sources())
    cmake = (ROOT / "CMakeLists.txt").read_text()
    named = re.findall(r"(?:include|add_subdirectory|install\(FILES)\(?\s*([\w./]+)", cmake)
    for name in [name for name in named if "/" in name or (ROOT / name).exists()]:
        assert any(fnmatch.fnmatch(name, f"{copied}*") for copied in sources()), name


@pytest.mark.slow
def test_image_builds():
    commands = {"docker": "build", "podman": "build", "buildah": "bud"}
    works = [
        name
        for name in commands
        if shutil.which(name)
        and subprocess.run([name, "info"], capture_output=True, check=False).returncode == 0
    ]
    if not works:
        pytest.skip("needs docker, podman or buildah that can build")
    builder, tag = works[0], "dynsparse-test"
    subprocess.run([builder, commands[builder], "-t", tag, str(ROOT)], check=True, timeout=3000)
    if builder != "buildah":
        said = subprocess.run(
            [builder, "run", "--rm", tag], capture_output=True, text=True, check=True, timeout=300
        )
        assert "native: compiled C++" in said.stdout


def test_devcontainer_matches_the_makefile():
    container = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())
    assert container["image"]
    makefile = (ROOT / "Makefile").read_text().replace("$(VENV)", ".venv")
    first, *targets = container["postCreateCommand"].split()
    assert first == "make"
    for target in targets:
        assert re.search(rf"^{re.escape(target)}:", makefile, flags=re.MULTILINE), target


def test_workflow_names_existing_files_and_commands():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "wheels.yml").read_text())
    assert set(workflow["jobs"]) == {"wheel", "source", "release"}
    platforms = workflow["jobs"]["wheel"]["strategy"]["matrix"]["include"]
    assert {row["platform"] for row in platforms} == {
        "manylinux_x86_64",
        "manylinux_aarch64",
        "macosx_arm64",
    }
    for job in workflow["jobs"].values():
        for step in job["steps"]:
            assert ("run" in step) != ("uses" in step)
            for name in re.findall(r"python (\S+\.py)", step.get("run", "")):
                assert (ROOT / name).is_file(), name
    test = re.search(
        r'test-command = "python \{project\}/(\S+)', (ROOT / "pyproject.toml").read_text()
    )
    assert test
    assert (ROOT / test.group(1)).is_file()


def test_citation_has_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0"
    assert citation["version"] == __version__
    assert citation["license"] == "Apache-2.0"
    assert {"message", "title", "authors"} <= set(citation)


def index_page():
    spec = importlib.util.spec_from_file_location("index_page", ROOT / ".ci" / "index_page.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_relative_links_become_absolute():
    text = "![a](docs/p.png) [b](docs/x.md#part) [c](https://e.org/y) [d](#here) [e](LICENSE)"
    assert index_page().absolute(text, "https://h.org/o/r", "v1") == (
        "![a](https://h.org/o/r/raw/v1/docs/p.png) [b](https://h.org/o/r/blob/v1/docs/x.md#part)"
        " [c](https://e.org/y) [d](#here) [e](https://h.org/o/r/blob/v1/LICENSE)"
    )


def test_package_index_page_has_no_relative_link(tmp_path: Path):
    for name in ("README.md", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    command = [sys.executable, str(ROOT / ".ci" / "index_page.py"), "https://h.org/o/r", "v1"]
    subprocess.run(command, cwd=tmp_path, check=True)
    targets = re.findall(r"\]\(([^)\s]+)\)", (tmp_path / "README.md").read_text())
    assert len(targets) > 5
    for target in targets:
        assert re.match("https?://|#", target), target
        inside = re.match(r"https://h\.org/o/r/(?:blob|raw)/v1/([^#]+)", target)
        assert inside is None or (ROOT / inside.group(1)).exists(), target
    project = (tmp_path / "pyproject.toml").read_text()
    assert 'Homepage = "https://h.org/o/r"\n' in project
    again = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert again.returncode == 1
    assert "this has been run here" in again.stderr
    wrong = subprocess.run([*command[:2], "h.org", "v1"], capture_output=True, check=False)
    assert wrong.returncode == 1
