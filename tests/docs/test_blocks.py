"""Code blocks marked ```py on pages, which need more than torch, run.

Code marked ```python runs in tests/test_readme.py, page by page.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

DOCS = Path(__file__).parents[2] / "docs"

# Who runs those of a page.
RUN_BY = {
    "deploy.md": "tests/integrations/test_huggingface_folders.py and test_onnxruntime.py",
    "gpu.md": "this file",
    "training.md": "this file",
    "integrations.md": "tests/integrations/test_integrations_page.py",
    "make-your-model-sparse.md": "tests/integrations/test_integrations_page.py",
    "pruned-models.md": "tests/nn/test_pruned_models.py",
    "many-processes.md": "tests/distributed/test_many_processes_page.py",
}


def code_of(page: str, kinds: str) -> str:
    found = re.findall(rf"^```(?:{kinds})\n(.*?)^```$", (DOCS / page).read_text(), re.M | re.S)
    return "\n".join(found)


def test_every_block_is_run_by_a_test():
    pages = [page for page in DOCS.rglob("*.md") if "```py\n" in page.read_text()]
    assert {page.relative_to(DOCS).as_posix() for page in pages} == RUN_BY.keys()


def test_ddp_block(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"DistributedDataParallel": DistributedDataParallel}
    exec(code_of("training.md", "python").partition("train(100)\n")[0], names)
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        exec(code_of("training.md", "py") + "train(100)", names)
    finally:
        torch.distributed.destroy_process_group()
    assert names["trainer"].steps == 100
    assert names["trainer"].updates == 1


@pytest.mark.slow
def test_cuda_graph_block_runs_captured_steps_eagerly():
    names: dict[str, object] = {}
    exec(code_of("gpu.md", "python"), names)
    torch.compiler.reset()
    names["batches"] = torch.randn(101, 8, 64, device=names["device"]).unbind()
    block = code_of("gpu.md", "py")
    assert block.count('mode="reduce-overhead"') == 1
    # Which takes a GPU, and elsewhere a compiler.
    exec(block.replace('mode="reduce-overhead"', 'backend="aot_eager"'), names)
    assert names["trainer"].updates == 1
