"""Layers work in a forked child, whatever the parent did before."""

import os
import subprocess
import sys

import pytest

CHILD = """
import os, sys, torch
from dynsparse.nn import SparseLinear

torch.set_num_threads(2)
layer = SparseLinear(600, 500, 0.3)
x = torch.randn(300, 600)
expected = layer(x)
expected.sum().backward()  # the threads of OpenMP have worked
child = os.fork()
if child == 0:
    y = layer(x)
    y.sum().backward()
    same = torch.allclose(y, expected, atol=1e-4) and torch.randn(1000, 1000).sum().isfinite()
    os._exit(0 if same and torch.get_num_threads() == 1 else 3)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""

WORKERS = """
import torch
from torch.utils.data import DataLoader, Dataset
from dynsparse.nn import SparseLinear

torch.set_num_threads(2)
layer = SparseLinear(600, 500, 0.3)
layer(torch.randn(300, 600))

class Through(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        with torch.no_grad():
            return layer(torch.full((200, 600), float(i)))

loader = DataLoader(Through(), batch_size=2, num_workers=2, multiprocessing_context="fork")
found = torch.cat(list(loader))
with torch.no_grad():
    for i in range(8):
        torch.testing.assert_close(found[i], layer(torch.full((200, 600), float(i))))
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.parametrize("program", [CHILD, WORKERS], ids=["fork", "data loader"])
def test_forward_in_forked_process(program):
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", program],
        capture_output=True,
        text=True,
        timeout=600,
        env={k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"},
    )
    assert done.returncode == 0, done.stderr
