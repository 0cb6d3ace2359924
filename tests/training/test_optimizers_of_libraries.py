"""Optimizers of other libraries: kept weights keep their state exactly, grown ones reset."""

import re
from pathlib import Path

import pytest
import torch
from test_optimizer_configurations import OPTIONS

import dynsparse as ds
from dynsparse.nn import SparseLinear
from dynsparse.training import ConstantSchedule, load_checkpoint, save_checkpoint
from dynsparse.training.optimizer_state import nested_optimizers, states_of

N = 128
PAGE = Path(__file__).parents[2] / "docs" / "training.md"

LIBRARIES = {
    "bitsandbytes": lambda: pytest.importorskip("bitsandbytes").optim,
    "pytorch_optimizer": lambda: pytest.importorskip("pytorch_optimizer"),
    "schedulefree": lambda: pytest.importorskip("schedulefree"),
    "torchao": lambda: pytest.importorskip("torchao.optim"),
}
# By library: class name -> arguments. torchao quantizes state of at least 4,096 entries.
OPTIMIZERS = {
    "bitsandbytes": {
        "Adam8bit": {"min_8bit_size": 16},
        "Lion8bit": {"min_8bit_size": 16},
        "AdamW": {},
    },
    "pytorch_optimizer": {
        name: {} for name in ("Lion", "AdaBelief", "Adan", "Prodigy", "ScheduleFreeAdamW")
    },
    "schedulefree": {"AdamWScheduleFree": {}, "SGDScheduleFree": {}, "RAdamScheduleFree": {}},
    "torchao": {"AdamW8bit": {"block_size": 32}, "AdamWFp8": {"block_size": 32}},
}


@pytest.mark.parametrize(
    ("library", "name"), [(lib, name) for lib, names in OPTIMIZERS.items() for name in names]
)
@pytest.mark.parametrize("block_size", [1, 4])
def test_state_follows_updates(library, name, block_size):
    module = LIBRARIES[library]()
    layer = SparseLinear(N, N, 0.5, block_size, bias=False)
    options = {"lr": 0.01} | OPTIMIZERS[library][name]
    optimizer = getattr(module, name)(layer.parameters(), **options)
    getattr(optimizer, "train", lambda: None)()
    trainer = ds.RigL(layer, optimizer, schedule=ConstantSchedule(1000, 3, 0.3))
    before, after_step = {}, trainer._finish_step

    def remember_before_update():
        before.update(tensors_of(optimizer, layer))
        return after_step()

    trainer._finish_step = remember_before_update
    followed = 0

    def check(step, rewirings):
        nonlocal followed
        grown = rewirings[""].grown
        kept = torch.ones(layer.pattern.nnz, dtype=torch.bool)
        kept[grown] = False
        for key, (codes, zero) in tensors_of(optimizer, layer).items():
            assert (codes[grown] == zero).all(), key
            assert torch.equal(codes[kept], before[key][0][kept]), key
            followed += 1

    trainer.on_update.append(check)
    for _ in range(9):
        optimizer.zero_grad()
        x = torch.randn(32, N)
        (layer(x) - x).square().mean().backward()
        trainer.step()
    assert followed >= 3


def tensors_of(optimizer, layer):
    """Return {key: (state per weight, as numbers or codes; state of a fresh weight)}."""
    found = {}
    for _, state in states_of(optimizer, layer.values):
        for key, tensor in state.items():
            if not isinstance(tensor, torch.Tensor) or tensor.shape != layer.values.shape:
                continue
            zero = 0.0
            if key.replace("state", "qmap") in state and key.startswith("state"):
                zero = int(state[key.replace("state", "qmap")].abs().argmin())
            elif hasattr(tensor, "codes"):
                tensor = tensor.dequantize()
            found[key] = tensor.clone(), zero
    return found


COPIES = {
    ("schedulefree", "SGDScheduleFree"): "z",
    ("schedulefree", "AdamWScheduleFree"): "z",
    ("pytorch_optimizer", "ScheduleFreeAdamW"): "z",
    ("pytorch_optimizer", "Prodigy"): "p0",
    ("pytorch_optimizer", "Ranger"): "slow_buffer",
    ("pytorch_optimizer", "Lookahead"): "slow_params",
    ("pytorch_optimizer", "TRAC"): "trac",
}


def training(optimizer, algorithm="RigL", **options):
    """Return a layer, its trainer, and a function that takes steps."""
    torch.manual_seed(0)
    layer = SparseLinear(N, N, 0.1, bias=False)
    if algorithm == "RigL":
        options["schedule"] = ConstantSchedule(1000, 3, 0.3)
    else:
        options |= {"total_steps": 30, "update_interval": 3, "final_density": 0.05}
    made = optimizer(layer.parameters())
    getattr(made, "train", lambda: None)()
    trainer = getattr(ds, algorithm)(layer, made, **options)

    def take(steps):
        for _ in range(steps):
            layer.zero_grad()
            x = torch.randn(32, N)
            (layer(x) - x).square().mean().backward()
            trainer.step()

    return layer, trainer, take


def made_by(library, name, **options):
    module = LIBRARIES[library]()

    def make(parameters):
        if name in ("Lookahead", "TRAC"):
            return getattr(module, name)(torch.optim.AdamW(parameters, **options))
        return getattr(module, name)(parameters, **options)

    return make


@pytest.mark.parametrize(("library", "name"), COPIES)
def test_copies_of_grown_weights_are_their_initial_values(library, name):
    """At a tiny learning rate, they and the weights stay at that value."""
    make = made_by(library, name, lr=1e-9)
    layer, trainer, take = training(make, initial_value=0.5)
    last = {}
    trainer.on_update.append(lambda step, rewirings: last.update(rewirings))
    take(3)
    grown, key = last[""].grown, COPIES[library, name]
    where = key if key == "trac" else layer.values
    states = [o.state[where] for o in nested_optimizers(trainer.optimizer) if where in o.state]
    copies = [state[key] for state in states if key in state]
    copies += [state[layer.values] for state in states if layer.values in state]
    assert copies
    assert all((copy[grown] == 0.5).all() for copy in copies)
    take(2)
    torch.testing.assert_close(layer.values.detach()[grown], torch.full([len(grown)], 0.5))


def test_copies_are_moved_with_gradient_steps_and_with_blocks():
    schedulefree = LIBRARIES["schedulefree"]()
    layer = SparseLinear(N, N, 0.5, 4, bias=False)
    optimizer = schedulefree.SGDScheduleFree(layer.parameters(), lr=0.01)
    optimizer.train()
    trainer = ds.RigL(
        layer,
        optimizer,
        schedule=ConstantSchedule(1000, 3, 0.3),
        initial_value=ds.training.GradientStep(1.0),
    )
    checked = []

    def check(step, rewirings):
        grown, values = rewirings[""].grown, layer.values.detach()
        checked.append(values[grown].abs().min() > 0)
        assert torch.equal(optimizer.state[layer.values]["z"][grown], values[grown])

    trainer.on_update.append(check)
    for _ in range(6):
        x = torch.randn(32, N)
        layer.zero_grad()
        (layer(x) - x).square().mean().backward()
        trainer.step()
    assert len(checked) == 2
    assert all(checked)


def test_sums_of_gradients_named_z_start_at_zero():
    make = made_by("pytorch_optimizer", "FTRL", lr=1e-3)
    layer, trainer, take = training(make, initial_value=0.5)
    checked = []

    def check(step, rewirings):
        checked.append(trainer.optimizer.state[layer.values]["z"][rewirings[""].grown])

    trainer.on_update.append(check)
    take(3)
    assert (checked[0] == 0).all()


@pytest.mark.parametrize("name", ["AdaShift", "Shampoo", "ScalableShampoo"])
def test_unknown_state_warns_or_raises(name):
    make = made_by("pytorch_optimizer", name)
    _, trainer, take = training(make)
    with pytest.warns(RuntimeWarning, match=f"{name} keeps the state .* are unknown"):
        take(3)
    assert trainer.updates == 1
    _, _, take = training(make, "GMP")
    with pytest.raises(ValueError, match=f"{name} keeps the state .* does not follow"):
        take(6)


@pytest.mark.parametrize("algorithm", ["RigL", "GMP"])
def test_references_of_trac_follow(algorithm):
    layer, trainer, take = training(made_by("pytorch_optimizer", "TRAC"), algorithm)
    before, after_step, checked = {}, trainer._finish_step, []

    def references():
        return trainer.optimizer.state["trac"][layer.values]

    def remember_before_update():
        before.update(tensor=references().clone())
        return after_step()

    trainer._finish_step = remember_before_update

    def check(step, rewirings):
        rewiring = rewirings[""]
        assert torch.equal(references(), rewiring.apply(before["tensor"]))
        checked.append(step)

    trainer.on_update.append(check)
    take(7)
    assert checked


# More, by what their state has: group options of infinity or None, tensors of other shapes, entries
# by names instead of parameters, attributes that `load_state_dict` reads, wrapped optimizers.
RESUMED = {library: dict(names) for library, names in OPTIMIZERS.items() if library != "torchao"}
RESUMED["pytorch_optimizer"] |= {
    name: {}
    for name in (
        *("DAdaptAdam", "AvaGrad", "Shampoo", "QHAdam", "FlashAdamW", "MADGRAD", "SPAM"),
        *("EmoNavi", "AdaFactor", "StableSPAM", "Magma"),
    )
}


def make_training(kind):
    """Return (model, optimizer, trainer), the same each time but for random growth."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(SparseLinear(24, 24, 0.5), torch.nn.Tanh(), torch.nn.Linear(24, 24))
    optimizer = kind(model.parameters())
    getattr(optimizer, "train", lambda: None)()
    return model, optimizer, ds.RigL(model, optimizer, schedule=ConstantSchedule(1000, 3, 0.3))


def check_resume_is_exact(kind, file):
    def run(model, optimizer, trainer, steps):
        for _ in range(steps):
            optimizer.zero_grad()
            x = torch.randn(8, 24)
            (model(x) - x).square().mean().backward()
            trainer.step()

    def save_or_load(function, model, optimizer, trainer):
        function(file, model=model, optimizer=optimizer, trainer=trainer)

    straight, resumed = make_training(kind), make_training(kind)
    run(*straight, 7)
    save_or_load(save_checkpoint, *straight)
    run(*straight, 6)
    save_or_load(load_checkpoint, *resumed)
    run(*resumed, 6)
    for p, q in zip(straight[0].parameters(), resumed[0].parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # grown weights inherit factors
@pytest.mark.parametrize(
    ("library", "name"), [(lib, name) for lib, names in RESUMED.items() for name in names]
)
def test_resume_is_exact(library, name, tmp_path):
    kind, options = getattr(LIBRARIES[library](), name), RESUMED[library][name]
    check_resume_is_exact(lambda parameters: kind(parameters, **options), tmp_path / "c")


def test_resume_of_wrapped_optimizer_is_exact(tmp_path):
    lookahead = LIBRARIES["pytorch_optimizer"]().Lookahead
    check_resume_is_exact(lambda p: lookahead(torch.optim.Adam(p, lr=0.01)), tmp_path / "c")


def test_quantized_tensors_of_torchao_are_not_saved(tmp_path):
    layer = SparseLinear(N, N, 0.5)
    optimizer = LIBRARIES["torchao"]().AdamW8bit(layer.parameters(), block_size=32)
    layer(torch.ones(2, N)).sum().backward()
    optimizer.step()
    with pytest.raises(TypeError, match="no tensors of the class OptimState8bit"):
        save_checkpoint(tmp_path / "c", model=layer, optimizer=optimizer)


@pytest.mark.skipif(not PAGE.exists(), reason="the documentation is not part of a wheel")
def test_page_lists_tested_optimizers():
    table = PAGE.read_text().split("<!-- optimizers tested -->")[1].split("<!--")[0]
    rows = [line.strip("| ").split(" | ") for line in table.strip().splitlines()[2:]]
    listed = {library: re.findall(r"`(\w+)`", names) for library, names in rows}
    tested = {"torch.optim": OPTIONS} | OPTIMIZERS
    assert listed == {library: sorted(names) for library, names in tested.items()}
