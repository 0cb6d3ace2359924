"""Training loops of other libraries; each function runs in every process of a group."""

from __future__ import annotations

import os
import tempfile
import warnings

import torch
import torchvision_names  # noqa: F401
from rank_trainings import SCHEDULE, model_of, weights
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import dynsparse as ds

SAMPLES, BATCH = 48, 4


def samples():
    g = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 16, generator=g, dtype=torch.float64)
    return x, torch.randn(SAMPLES, 8, generator=g, dtype=torch.float64)


def environ(rank, size):
    """Set the environment variables that torchrun sets."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size),
        GROUP_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0", TORCHELASTIC_RUN_ID="test",
        CUDA_VISIBLE_DEVICES="", ACCELERATE_USE_CPU="true", HF_HUB_OFFLINE="1",
    )  # fmt: skip
    warnings.simplefilter("ignore")


def plain(rank, size):
    """Train with DistributedDataParallel in a plain loop, each rank with every size-th sample."""
    net = model_of()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    ddp = DistributedDataParallel(net)
    trainer = ds.RigL(net, optimizer, schedule=SCHEDULE)
    x, y = samples()
    for first in range(rank, SAMPLES, BATCH * size):
        own = slice(first, first + BATCH * size, size)
        optimizer.zero_grad()
        nn.functional.mse_loss(ddp(x[own]), y[own]).backward()
        trainer.step()
    return weights(net)


def lightning(rank, size):
    import lightning.pytorch as pl

    from dynsparse.integrations.lightning import SparseCallback

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = model_of()

        def training_step(self, batch, index):
            return nn.functional.mse_loss(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.05)

    module = Module()
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            strategy="ddp", accelerator="cpu", devices=size, max_epochs=1, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            precision="64-true", default_root_dir=folder, use_distributed_sampler=False,
            callbacks=[SparseCallback(ds.RigL, schedule=SCHEDULE)],
        )  # fmt: skip
        own = TensorDataset(*(part[rank::size] for part in samples()))
        trainer.fit(module, DataLoader(own, BATCH))
    return weights(module.net)


def accelerate(rank, size):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    net = model_of()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    # Batch by batch in turn; drawn together they are those of the others.
    order = torch.arange(SAMPLES).view(-1, BATCH, size).transpose(1, 2).reshape(-1)
    x, y = (part[order] for part in samples())
    model, optimizer, loader = accelerator.prepare(
        net, optimizer, DataLoader(TensorDataset(x, y), BATCH)
    )
    trainer = ds.RigL(model, optimizer.optimizer, schedule=SCHEDULE)
    for inputs, targets in loader:
        optimizer.zero_grad()
        accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
        trainer.step()
    return weights(net)


def huggingface(rank, size):
    from transformers import Trainer, TrainingArguments

    from dynsparse.integrations.huggingface import SparseCallback

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = model_of()

        def forward(self, x, y):
            out = self.net(x)
            return {"loss": nn.functional.mse_loss(out, y), "logits": out}

    class InOrder(Trainer):
        def _get_train_sampler(self, *_):
            return torch.utils.data.SequentialSampler(self.train_dataset)

    order = torch.arange(SAMPLES).view(-1, BATCH, size).transpose(1, 2).reshape(-1)
    x, y = (part[order] for part in samples())
    data = [{"x": a, "y": b} for a, b in zip(x, y, strict=True)]
    model = Net()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, per_device_train_batch_size=BATCH, num_train_epochs=1, use_cpu=True,
            report_to=[], save_strategy="no", optim="sgd", learning_rate=0.05, max_grad_norm=0,
            lr_scheduler_type="constant", disable_tqdm=True, label_names=["y"],
        )  # fmt: skip
        InOrder(
            model, arguments, train_dataset=data,
            callbacks=[SparseCallback(ds.RigL, schedule=SCHEDULE)],
        ).train()  # fmt: skip
    return weights(model.net)


def train_with_every_loop(rank, size):
    environ(rank, size)
    return {work.__name__: work(rank, size) for work in (plain, lightning, accelerate, huggingface)}


def keras(rank, size, accumulated=1):
    """Run `fit` on the samples of this rank; return values, biases and patterns."""
    environ(rank, size)
    os.environ["KERAS_BACKEND"] = "torch"
    import keras

    from dynsparse.integrations import keras as sparse

    keras.utils.set_random_seed(0)
    layers = [
        sparse.SparseDense(24, "tanh", density=0.2, dtype="float64"),
        sparse.SparseDense(8, density=0.2, dtype="float64"),
    ]
    model = keras.Sequential([keras.Input((16,), dtype="float64"), *layers])
    steps = None if accumulated == 1 else accumulated
    model.compile(keras.optimizers.Adam(0.01, gradient_accumulation_steps=steps), "mse")
    if rank:
        layers[0].bias.assign_add(torch.ones(24))
    x, y = samples()
    own = slice(rank, None, size)
    model.fit(
        x[own], y[own], batch_size=BATCH // size // accumulated, epochs=2, shuffle=False,
        verbose=0, callbacks=sparse.RigL(schedule=SCHEDULE),
    )  # fmt: skip
    return {str(i): weight.value.detach() for i, weight in enumerate(model.weights)}
