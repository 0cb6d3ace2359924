"""Pages of the site that are no Markdown: notebooks, executed, and files that pages link to.

A hook of MkDocs (mkdocs.yml). Links between pages stay those that work in the repository.
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path
from typing import Any

import nbformat
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"\]\(([^)#\s]+)((?:#[^)\s]*)?)\)")
LANGUAGES = {".py": "python", ".yml": "yaml", ".cpp": "cpp", ".h": "cpp", ".json": "json"}


class Notebook(File):
    """A notebook that is a page."""

    def is_documentation_page(self) -> bool:
        return True


def on_files(files: Files, *, config: Any) -> Files:
    for file in list(files):
        if file.src_uri.endswith(".ipynb"):
            files.remove(file)
            urls = config.use_directory_urls
            files.append(Notebook(file.src_uri, file.src_dir, config.site_dir, urls))
    outside = {
        path
        for file in files.documentation_pages()
        if not isinstance(file, Notebook)
        for link, _ in LINK.findall(file.content_string)
        if (path := outside_of_docs(file.src_uri, link))
    }
    for path in sorted(outside):
        files.append(
            File.generated(
                config,
                page_of(path),
                content=file_as_markdown(path),
                inclusion=InclusionLevel.NOT_IN_NAV,
            )
        )
    return files


def on_page_read_source(*, page: Page, config: Any) -> str | None:
    if not isinstance(page.file, Notebook):
        return None
    return notebook_as_markdown(executed(Path(config.docs_dir, page.file.src_uri)))


def on_page_markdown(markdown: str, *, page: Page, config: Any, files: Files) -> str:
    source = page.file.src_uri

    def within_the_site(match: re.Match[str]) -> str:
        path = outside_of_docs(source, match[1])
        if not path:
            return match[0]
        return f"]({posixpath.relpath(page_of(path), posixpath.dirname(source))}{match[2]})"

    return LINK.sub(within_the_site, markdown)


def outside_of_docs(source: str, link: str) -> str:
    """The file in the repository that a page's link to outside of docs/ means, or "" for others."""
    if "://" in link:
        return ""
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(source), link))
    inside = path.startswith(("docs/", "../"))
    return "" if inside or not (ROOT / path).is_file() else path


def page_of(path: str) -> str:
    return f"files/{path}.md"


def file_as_markdown(path: str) -> str:
    language = LANGUAGES.get(Path(path).suffix, "text")
    return f"# {path}\n\n~~~~{language}\n{(ROOT / path).read_text()}~~~~\n"


def executed(path: Path) -> nbformat.NotebookNode:
    """The notebook with the outputs that its cells give now.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed; the message has it.
    """
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=300,
        # Not that it talks over TCP, which does not leave this machine.
        extra_arguments=["--log-level=ERROR"],
        resources={"metadata": {"path": str(path.parent)}},
    )
    # Figures are shown in the page, whatever this process draws with.
    client.execute(env=os.environ | {"MPLBACKEND": "module://matplotlib_inline.backend_inline"})
    return notebook


def notebook_as_markdown(notebook: nbformat.NotebookNode) -> str:
    parts = []
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source)
        elif cell.cell_type == "code":
            parts.append(f"~~~~python\n{cell.source}\n~~~~")
            # What a cell prints may come in pieces.
            text = "".join(output.text for output in cell.outputs if "text" in output)
            parts += [as_text(text)] if text else []
            parts += [as_shown(output.data) for output in cell.outputs if "data" in output]
    return "\n\n".join(parts) + "\n"


def as_text(text: str) -> str:
    return f"~~~~{{.text .output}}\n{text.rstrip()}\n~~~~"


def as_shown(data: dict[str, str]) -> str:
    if "text/html" in data:
        return f'<div class="output">\n{data["text/html"]}\n</div>'
    for kind in data:
        if kind.startswith("image/"):
            image = data[kind].replace("\n", "")
            return f'<img alt="What the cell above drew" src="data:{kind};base64,{image}">'
    return as_text(data["text/plain"])
