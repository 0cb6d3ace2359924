"""--device: an unavailable device raises a one-line error; data and losses follow the model."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dynsparse import SparsePattern, data
from dynsparse.apps import lm
from dynsparse.apps.common.training import Sums, precision
from dynsparse.apps.image_classification import mnist, transformer
from dynsparse.apps.image_classification.mnist import MnistTraining
from dynsparse.apps.image_classification.transformer import TransformerTraining
from dynsparse.apps.lm.corpus import load_corpus
from dynsparse.apps.lm.training import Training as LmTraining
from dynsparse.pattern import Rewiring

TINY = {
    "layers": 1, "hidden_size": 16, "ff_size": 32, "heads": 2, "sequence_length": 8,
    "batch_size": 4, "steps": 12, "warmup_steps": 2, "update_interval": 3, "sparsity": 0.5,
}  # fmt: skip


@pytest.mark.parametrize(
    ("devices", "device", "line"),
    [
        (0, "gpu", r"--device: expected cpu, cuda or cuda:N, got 'gpu'"),
        (0, "cuda:-1", r"--device: expected cpu, cuda or cuda:N, got 'cuda:-1'"),
        (0, "cuda:", r"--device: expected cpu, cuda or cuda:N, got 'cuda:'"),
        (0, 3, r"--device: expected cpu, cuda or cuda:N, got 3"),
        (0, "cuda", r"--device: expected a machine with a CUDA device .*: use --device cpu"),
        (2, "cuda:2", r"--device: expected a device .* \(cuda:0, cuda:1\), got 'cuda:2'"),
    ],
)
def test_unavailable_device_raises(monkeypatch, devices, device, line):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    with pytest.raises(ValueError, match=line) as error:
        mnist.Options(device=device).check()
    assert "\n" not in str(error.value)


def test_available_device_is_used(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for device in ("cpu", "cuda", "cuda:0", "cuda:1"):
        mnist.Options(device=device).check()


def test_sums_are_on_the_device_of_the_losses():
    with FakeTensorMode():
        sums = Sums()
        for _ in range(2):
            sums.add(torch.empty((), device="cuda"), torch.empty((), device="cuda").long(), 3)
        whole = Sums()
        whole.include(sums)
        assert whole.loss.device.type == whole.right.device.type == "cuda"
        assert (whole.loss.dtype, whole.right.dtype) == (torch.float64, torch.int64)


def test_replaced_blocks_are_counted_without_extra_waits():
    options = lm.Options(**TINY, data="stdlib")
    training = LmTraining(options, load_corpus(options), 7)
    counts = []
    for device in ("cpu", "meta"):
        training.device, sums = torch.device(device), Sums()
        pattern = SparsePattern([0, 0, 1], [0, 1, 1], shape=(4, 4), block_size=2)
        rewiring = Rewiring.make(pattern, torch.tensor([1]), torch.tensor([2]))
        training.trainer._step_with = lambda _, rewiring=rewiring: {"a": rewiring}
        training.optimise(sums)
        counts.append((sums.replaced, len(sums.rewirings)))
        training.finish_window(sums)
        assert (sums.replaced, sums.rewirings) == (4, [])
    assert counts == [(4, 0), (0, 1)]


def test_autocast_uses_the_device():
    with precision("bfloat16", torch.device("cpu")):
        assert torch.is_autocast_enabled("cpu")
    with precision("float32", torch.device("cuda")):
        assert not torch.is_autocast_enabled("cuda")


class Meta(torch.nn.Module):
    """A model on the meta device that records its inputs."""

    def __init__(self, *shape):
        super().__init__()
        self.logits = torch.nn.Parameter(torch.empty(*shape, device="meta"))
        self.seen = []

    def forward(self, x):
        self.seen.append(x.device.type)
        shape = (*x.shape, self.logits.shape[-1]) if x.dtype is torch.int64 else (len(x), -1)
        return self.logits.expand(*shape)


def test_text_batches_are_moved_to_the_model():
    options = lm.Options(**TINY, data="stdlib")
    corpus = load_corpus(options)
    training = LmTraining(options, corpus, 7)
    training.device = torch.device("meta")
    training.replica = training.model = Meta(corpus.size)
    _, losses, right = training.losses(corpus.batch(4, 8, training.generator))
    assert [*training.model.seen, losses.device.type, right.device.type] == ["meta"] * 3


@pytest.mark.parametrize(
    ("kind", "options"),
    [(MnistTraining, mnist.Options), (TransformerTraining, transformer.Options)],
)
def test_images_are_moved_to_the_model(kind, options):
    training = kind(options(), data.load("digits"), 7)
    training.device = torch.device("meta")
    training.replica = training.model = Meta(1, 10)
    for part in ("train", "test"):
        arranged = training._images(part)
        assert arranged.images.device.type == arranged.labels.device.type == "meta"
        loss, right = training._forward(arranged.images, arranged.labels)
        assert loss.device.type == right.device.type == "meta"
