"""MuonAdamW equals torch's Muon and AdamW, also with updates, checkpoints and schedulers."""

import copy

import pytest
import torch
from torch import nn

import dynsparse as ds
from dynsparse.training import ConstantSchedule, MuonAdamW

pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch before 2.9")
IDS = torch.arange(24).view(4, 6) % 20


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.hidden = nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)
        self.sparse = nn.Linear(16, 16)
        self.blocks = nn.Linear(16, 16)
        self.head = nn.Linear(16, 20)

    def forward(self, ids):
        x = self.norm(self.hidden(self.embed(ids)))
        return self.head(self.blocks(self.sparse(x).relu()))


def build():
    torch.manual_seed(0)
    options = {"include": ["sparse", "blocks"], "block_sizes": {"blocks": 4}, "verbose": False}
    return ds.sparsify(Model(), 0.4, **options)


def backward(model):
    nn.functional.cross_entropy(model(IDS[:, :-1]).flatten(0, 1), IDS[:, 1:].flatten()).backward()


def train(model, optimizer, trainer, steps, schedule=None):
    for _ in range(steps):
        optimizer.zero_grad()
        backward(model)
        trainer.step()
        if schedule is not None:
            schedule.step()


def rigl(model, optimizer):
    return ds.RigL(model, optimizer, schedule=ConstantSchedule(100, 3, 0.3))


def test_equals_torch_muon_and_adamw():
    model = build()
    reference = copy.deepcopy(model)
    optimizer = MuonAdamW(model, 0.01, 0.05, adamw="head", momentum=0.9, betas=(0.8, 0.99))
    assert optimizer.param_groups[0]["params"] == [model.hidden.weight]
    assert model.sparse.values in set(optimizer.param_groups[1]["params"])
    muon = torch.optim.Muon(
        [reference.hidden.weight], 0.01, 0.05, 0.9, adjust_lr_fn="match_rms_adamw"
    )
    matrices = ["embed.weight", "sparse.values", "blocks.values", "head.weight"]
    named = dict(reference.named_parameters())
    groups = [
        {"params": [named[name] for name in matrices], "weight_decay": 0.05},
        {"params": [p for p in named.values() if p.dim() == 1 and p is not named[matrices[1]]],
         "weight_decay": 0.0},
    ]  # fmt: skip
    adam = torch.optim.AdamW(groups, 0.01, (0.8, 0.99))
    trainers = rigl(model, optimizer), rigl(reference, adam)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in (optimizer, muon, adam)]
    for _ in range(10):
        for m in (model, reference):
            m.zero_grad()
            backward(m)
        muon.step()
        for trainer in trainers:
            trainer.step()
        for schedule in schedules:
            schedule.step()
    assert trainers[0].steps == 10
    assert trainers[0].updates == trainers[1].updates == 3
    state = reference.state_dict()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, state[name], msg=name)


def test_resume_is_exact(tmp_path):
    def start():
        model = build()
        optimizer = MuonAdamW(model, 0.01)
        return model, optimizer, rigl(model, optimizer)

    whole, first, second = start(), start(), start()
    train(*whole, 8)
    train(*first, 4)
    for function, parts in (
        (ds.training.save_checkpoint, first),
        (ds.training.load_checkpoint, second),
    ):
        function(tmp_path / "c", **dict(zip(("model", "optimizer", "trainer"), parts, strict=True)))
    train(*second, 4)
    copies = copy.deepcopy(first)
    train(*copies, 4)
    for other in (second, copies):
        for name, tensor in whole[0].state_dict().items():
            assert torch.equal(tensor, other[0].state_dict()[name]), name


def test_parameters_assigned_to_muon():
    model = Model()
    model.head.weight = model.embed.weight
    model.blocks.requires_grad_(False)
    model.extra = nn.MultiheadAttention(16, 2)
    names = {id(p): name for name, p in model.named_parameters()}
    groups = MuonAdamW(model, adamw=["sparse"]).param_groups
    muon, decaying, constant = ({names[id(p)] for p in g["params"]} for g in groups)
    assert muon == {"hidden.weight", "extra.in_proj_weight", "extra.out_proj.weight"}
    assert decaying == {"embed.weight", "sparse.weight"}
    assert "norm.weight" in constant
    assert not any(name.startswith("blocks") for name in muon | decaying | constant)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"adamw": ["haed"]}, "adamw: the pattern 'haed' matches no dense matrix"),
        ({"adamw": "*"}, "no dense matrix for Muon"),
        ({"lr": -1.0}, "lr must be"),
    ],
)
def test_bad_input(arguments, message):
    with pytest.raises(ValueError, match=message):
        MuonAdamW(build(), **arguments)
