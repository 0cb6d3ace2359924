"""Any sequence of what users do with a training equals masked dense training.

The reference does not use the library: dense weights, a mask that multiplies their gradients, and
torch's optimizer. Only the positions that an update chooses are taken from the sparse training.
"""

import copy
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel

import dynsparse as ds
from dynsparse.training import ConstantSchedule, load_checkpoint, save_checkpoint

pytestmark = pytest.mark.slow

SCHEDULE = ConstantSchedule(total_steps=10**6, update_interval=2, drop_fraction=0.3)
GRADUAL = {"total_steps": 40, "final_density": 0.2, "update_interval": 2}
ALGORITHMS = {
    "RigL": lambda m, o: ds.RigL(m, o, schedule=SCHEDULE),
    "RigL, regrowing": lambda m, o: ds.RigL(m, o, schedule=SCHEDULE, regrow_dropped=True),
    "RigL, global": lambda m, o: ds.RigL(m, o, schedule=SCHEDULE, budget="global"),
    "SET": lambda m, o: ds.SET(m, o, schedule=SCHEDULE, seed=1),
    "SNFS": lambda m, o: ds.SNFS(m, o, schedule=SCHEDULE, window=3),
    "MEST": lambda m, o: ds.MEST(m, o, schedule=SCHEDULE, seed=1, soft_memory_bound=True),
    "GraNet": lambda m, o: ds.GraNet(m, o, **GRADUAL),
}
# An epsilon that is not tiny, so that rounding does not change the direction of a step.
OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-4, weight_decay=0.1, amsgrad=True),
    "Adam, foreach": lambda p: torch.optim.Adam(p, lr=0.01, eps=1e-4, foreach=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.02, eps=1e-4),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.01, eps=1e-4),
}


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(12, 8)
        self.conv = nn.Conv1d(8, 8, 3, padding=1)
        self.hidden = nn.Linear(8, 16)
        self.norm = nn.LayerNorm(16)
        self.branch = nn.Linear(16, 16)
        self.head = nn.Linear(16, 6)

    def forward(self, tokens, use_branch=True):
        x = self.table(tokens).transpose(1, 2)
        x = self.norm(self.hidden((x + self.conv(x).tanh()).mean(2)))
        return self.head(x + self.branch(x).tanh() if use_branch else x)


SPARSE = ["table", "conv", "hidden", "branch"]


def make_sparse(seed):
    torch.manual_seed(seed)
    return ds.sparsify(Network().double(), 0.5, include=SPARSE, verbose=False)


def to_weight(layer, values):
    """Return one tensor of a layer's slots as a dense weight."""
    matrix = layer.pattern.to_dense(values.detach())
    if not isinstance(layer, ds.nn.SparseConv1d):
        return matrix
    return matrix.view(layer.out_channels, *layer.kernel_size, -1).transpose(1, 2)


class Training(RuleBasedStateMachine):
    @initialize(
        algorithm=st.sampled_from(["RigL"] * 3 + list(ALGORITHMS)),
        optimizer=st.sampled_from(list(OPTIMIZERS)),
        seed=st.integers(0, 99),
    )
    def begin(self, algorithm, optimizer, seed):
        self.make_trainer, self.make_optimizer = ALGORITHMS[algorithm], OPTIMIZERS[optimizer]
        self.ranks_gradients = algorithm == "RigL"
        self.keeps_sizes = algorithm not in ("SNFS", "MEST", "GraNet")
        self.model, self.reference = make_sparse(seed), Network().double()
        self.averages = self.snapshot = None
        self.batches = torch.Generator().manual_seed(seed)
        self.masks = self.read_masks()
        with torch.no_grad():
            for name, parameter in self.reference.named_parameters():
                module, _, kind = name.partition(".")
                if module in SPARSE and kind == "weight":
                    parameter.copy_(self.model.get_submodule(module).to_dense())
                else:
                    parameter.copy_(self.model.get_parameter(name))
        self.renew_optimizers()

    # What is compared.

    def read_masks(self):
        return {
            n: to_weight(layer, torch.ones_like(layer.values)).bool() for n, layer in self.layers
        }

    @property
    def layers(self):
        return [(name, self.model.get_submodule(name)) for name in SPARSE]

    def weight(self, name):
        return self.reference.get_submodule(name).weight

    def follow(self):
        """Let the reference follow the new masks; return the old ones."""
        before, self.masks = self.masks, self.read_masks()
        for name in SPARSE:
            weight, changed = self.weight(name), before[name] ^ self.masks[name]
            followed = [weight.data, *self.reference_optimizer.state.get(weight, {}).values()]
            if self.averages is not None:
                followed.append(self.averages[1].module.get_submodule(name).weight.data)
            for tensor in followed:
                if tensor.shape == weight.shape:
                    tensor[changed] = 0.0
            weight.data.mul_(self.masks[name])  # the optimizer's step may leave -0.0 or decay
        return before

    @invariant()
    def check(self):
        masks = self.read_masks()
        for name, layer in self.layers:
            weight, mask = self.weight(name), self.masks[name]
            assert torch.equal(masks[name], mask)
            self.assert_close(layer.to_dense(), weight)
            mine = self.optimizer.state.get(layer.values, {})
            theirs = self.reference_optimizer.state.get(weight, {})
            assert mine.keys() == theirs.keys()
            for key, state in mine.items():
                if state.shape == layer.values.shape:
                    self.assert_close(to_weight(layer, state), theirs[key] * mask)
            if self.averages is not None:
                average, expected = (a.module.get_submodule(name) for a in self.averages)
                assert average.pattern == layer.pattern
                self.assert_close(average.to_dense(), expected.weight)
        for name, parameter in self.reference.named_parameters():
            if not (name.endswith("weight") and name.split(".")[0] in SPARSE):
                self.assert_close(self.model.get_parameter(name), parameter)

    @staticmethod
    def assert_close(a, b):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-7)

    # What users do.

    def draw(self):
        tokens = torch.randint(0, 12, (5, 4), generator=self.batches)
        return tokens, torch.randint(0, 6, (5,), generator=self.batches)

    @rule(
        micro_batches=st.integers(1, 3),
        zero=st.sampled_from(["before", "between", "never"]),
        set_to_none=st.booleans(),
        other=st.sampled_from(["none", "backward", "grad"]),
        use_branch=st.booleans(),
        clip=st.booleans(),
        how=st.sampled_from(["trainer", "optimizer", "halves"]),
    )
    def step(self, micro_batches, zero, set_to_none, other, use_branch, clip, how):
        data = [self.draw() for _ in range(micro_batches)]

        def backward(model, optimizer):
            loss = 9 * cross_entropy(model(data[0][0]) * 3, data[0][1])
            if other == "backward":
                loss.backward()
            elif other == "grad":
                torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad])
            for i, (tokens, labels) in enumerate(data):
                if zero == "before" and i == 0:
                    optimizer.zero_grad(set_to_none)
                loss = cross_entropy(model(tokens, use_branch), labels)
                if zero == "between" and i == 0:
                    optimizer.zero_grad(set_to_none)
                loss.backward()

        backward(self.model, self.optimizer)
        backward(self.reference, self.reference_optimizer)
        gradients = {}
        for name in SPARSE:
            gradient = self.weight(name).grad
            if gradient is not None:
                gradients[name] = gradient.abs()
                gradient.mul_(self.masks[name])
        if clip:
            for model in (self.model, self.reference):
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        if how == "trainer":
            self.trainer.step()
        elif how == "optimizer":
            self.optimizer.step()
        else:
            self.trainer.before_optimizer_step()
            self.optimizer.step()
            self.trainer.after_optimizer_step()
        self.reference_optimizer.step()
        before = self.follow()
        if self.averages is not None:
            for average, model in zip(self.averages, (self.model, self.reference), strict=True):
                average.update_parameters(model)
        if self.ranks_gradients and zero != "never":
            for name, scores in gradients.items():
                self.check_grown(scores, before[name], self.masks[name])

    @staticmethod
    def check_grown(scores, before, after):
        grown, absent = after & ~before, ~after & ~before
        if grown.any() and absent.any():
            assert scores[grown].min() >= scores[absent].max() - 1e-9

    @rule()
    def evaluate(self):
        tokens, _ = self.draw()
        with torch.inference_mode():
            self.assert_close(self.model(tokens), self.reference(tokens))

    @rule(how=st.sampled_from(["copies", "checkpoint", "states"]))
    def continue_with_other_objects(self, how):
        self.averages = None
        self.reference_optimizer.zero_grad()  # neither copies nor files hold gradients
        if how == "copies":
            copied = copy.deepcopy((self.model, self.optimizer, self.trainer))
            self.model, self.optimizer, self.trainer = copied
            return
        with TemporaryDirectory() as folder:
            states = self.read_states()
            if how == "checkpoint":
                save_checkpoint(f"{folder}/a", **self.parts)
            frozen = [name for name, layer in self.layers if not layer.values.requires_grad]
            self.model = make_sparse(100)
            self.optimizer = self.make_optimizer(self.model.parameters())
            self.trainer = self.make_trainer(self.model, self.optimizer)
            if how == "checkpoint":
                load_checkpoint(f"{folder}/a", **self.parts)
            else:
                self.load_states(states)
        for name in frozen:
            self.model.get_submodule(name).values.requires_grad_(False)

    @property
    def parts(self):
        return {"model": self.model, "optimizer": self.optimizer, "trainer": self.trainer}

    def read_states(self):
        return copy.deepcopy([part.state_dict() for part in self.parts.values()])

    def load_states(self, states):
        for part, state in zip(self.parts.values(), states, strict=True):
            part.load_state_dict(state)

    @rule()
    def save_snapshot(self):
        reference = self.reference.state_dict(), self.reference_optimizer.state_dict()
        self.snapshot = self.read_states(), *copy.deepcopy(reference), dict(self.masks)

    @precondition(lambda self: self.snapshot is not None)
    @rule()
    def return_to_snapshot(self):
        states, weights, state, self.masks = copy.deepcopy(self.snapshot)
        self.load_states(states)
        self.reference.load_state_dict(weights)
        self.reference_optimizer.load_state_dict(state)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.averages = None

    @property
    def optimizers(self):
        return self.optimizer, self.reference_optimizer

    def renew_optimizers(self):
        self.optimizer, self.reference_optimizer = (
            self.make_optimizer(model.parameters()) for model in (self.model, self.reference)
        )
        self.trainer = self.make_trainer(self.model, self.optimizer)

    @rule(what=st.sampled_from(["optimizers", "state", "learning rate", "weights"]))
    def change(self, what):
        if what == "optimizers":
            self.renew_optimizers()
        for model, optimizer in zip((self.model, self.reference), self.optimizers, strict=True):
            if what == "state":
                optimizer.state.clear()
            elif what == "learning rate":
                optimizer.param_groups[0]["lr"] *= 0.7
            elif what == "weights":
                with torch.no_grad():
                    torch._foreach_mul_(list(model.parameters()), 0.9)

    @precondition(lambda self: self.keeps_sizes)
    @rule(name=st.sampled_from(["conv", "branch"]))
    def freeze_or_unfreeze(self, name):
        values, weight = self.model.get_submodule(name).values, self.weight(name)
        for parameter in (values, weight):
            parameter.requires_grad_(not parameter.requires_grad)
            parameter.grad = None

    @rule()
    def average(self):
        self.averages = [
            AveragedModel(model, avg_fn=lambda a, b, _: 0.8 * a + 0.2 * b)
            for model in (self.model, self.reference)
        ]


TestTraining = Training.TestCase
TestTraining.settings = settings(max_examples=60, stateful_step_count=25)
