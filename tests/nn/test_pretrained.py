"""load_pretrained reads patterns from several kinds of files, or changes nothing."""

import json

import pytest
import torch
from conv1d_layer import Conv1D
from torch import nn

import dynsparse as ds
from dynsparse.nn import SparseEmbedding, SparseLinear

safetensors = pytest.importorskip("safetensors")
from safetensors.torch import load_file, save_file  # noqa: E402


class Model(nn.Module):
    """A model with every kind of layer, two that share their weight, and a tied head."""

    def __init__(self, dtype=None, sparse_table=False):
        super().__init__()
        self.embed = nn.Embedding(20, 16, dtype=dtype)
        layer = nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=True, dtype=dtype)
        self.body = nn.TransformerEncoder(layer, 1)
        self.mix = Conv1D(16, 16).to(dtype)
        self.one = nn.Linear(16, 16, bias=False, dtype=dtype)
        self.two = nn.Linear(16, 16, bias=False, dtype=dtype)
        self.two.weight = self.one.weight
        self.head = nn.Linear(16, 20, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight
        if sparse_table:
            self.table = SparseEmbedding(8, 4, 0.5)

    def forward(self, ids):
        return self.head(self.two(self.one(self.mix(self.body(self.embed(ids))))))


def sparse(block=1, **options):
    return ds.sparsify(Model(**options), 0.3, block, verbose=False).eval()


def save_like_huggingface(model, folder, shards=1):
    """Save each tensor once, in one file or in several with an index, as Hugging Face does."""
    folder.mkdir(exist_ok=True)
    seen, tensors = set(), {}
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in seen:
            tensors[name] = tensor.contiguous()
        seen.add(tensor.data_ptr())
    assert "head.weight" not in tensors
    assert "two.values" not in tensors
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return folder
    where = {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensors[name] for name in list(tensors)[i::shards]}
        save_file(part, folder / file, {"format": "pt"})
        where |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 1}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def save_like_dynsparse(model, folder):
    folder.mkdir()
    ds.save_safetensors(model, folder / "model.safetensors")
    return folder


IDS = torch.arange(6).view(2, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("block", [1, 4])
@pytest.mark.parametrize("shards", [0, 1, 3])
def test_dense_model_becomes_the_saved_one(tmp_path, shards, block, dtype):
    saved = sparse(block, dtype=dtype)
    folder = tmp_path / "saved"
    save_like_huggingface(saved, folder, shards) if shards else save_like_dynsparse(saved, folder)
    loaded = Model(dtype=dtype).eval()
    before = torch.get_rng_state()
    assert ds.load_pretrained(loaded, folder) is loaded
    assert torch.equal(torch.get_rng_state(), before)
    assert type(loaded) is Model
    mine, theirs = loaded.state_dict(), saved.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in mine.items())
    assert loaded.one is loaded.two
    assert loaded.head.weight is loaded.embed.weight
    assert torch.equal(loaded(IDS), saved(IDS))
    with torch.no_grad():
        assert torch.equal(loaded(IDS), saved(IDS))
    optimizer = torch.optim.SGD(loaded.parameters(), 0.1)
    trainer = ds.RigL(loaded.train(), optimizer, total_steps=10, update_interval=1)
    loaded(IDS).square().mean().backward()
    assert len(trainer.step()) == len(trainer.layers) == 8
    ds.densify(loaded)
    assert type(loaded.mix) is Conv1D


@pytest.mark.parametrize("shards", [0, 1, 3])
def test_model_on_the_meta_device(tmp_path, shards):
    saved = sparse(4)
    folder = tmp_path / "saved"
    save_like_huggingface(saved, folder, shards) if shards else save_like_dynsparse(saved, folder)
    with torch.device("meta"):
        loaded = Model().eval()
    loaded.two.weight, loaded.head.weight = loaded.one.weight, loaded.embed.weight
    loaded.mix.bias.requires_grad_(False)
    ds.load_pretrained(loaded, folder)
    assert torch.equal(loaded(IDS), saved(IDS))
    assert loaded.one is loaded.two
    assert loaded.head.weight is loaded.embed.weight
    assert not loaded.mix.bias.requires_grad
    assert {t.device.type for t in loaded.state_dict().values()} == {"cpu"}
    loaded(IDS).sum().backward()
    assert loaded.one.values.grad is not None


def test_buffers_on_the_meta_device(tmp_path):
    def network():
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        model.register_buffer("table", torch.ones(3), persistent=persistent)
        return model

    persistent = True
    saved = ds.sparsify(network(), 0.5, verbose=False).eval()
    ds.save_safetensors(saved, tmp_path / "m")
    with torch.device("meta"):
        loaded = network().eval()
    x = torch.randn(2, 8)
    assert torch.equal(ds.load_pretrained(loaded, tmp_path / "m")(x), saved(x))
    assert torch.equal(loaded.table, torch.ones(3))
    persistent = False
    ds.save_safetensors(ds.sparsify(network(), 0.5, verbose=False), tmp_path / "n")
    with torch.device("meta"):
        loaded = network()
    with pytest.raises(ValueError, match="the buffer 'table' is on the meta device and not in"):
        ds.load_pretrained(loaded, tmp_path / "n")
    assert type(loaded[0]) is nn.Linear
    assert all(tensor.is_meta for tensor in loaded.state_dict().values())


@pytest.mark.parametrize("named", ["model.safetensors", "model.safetensors.index.json"])
def test_path_of_a_single_file(tmp_path, named):
    saved = sparse()
    folder = save_like_huggingface(saved, tmp_path / "saved", 1 if named.endswith("rs") else 2)
    loaded = ds.load_pretrained(Model().eval(), str(folder / named))
    assert torch.equal(loaded(IDS), saved(IDS))


def test_sparse_layers_take_the_saved_pattern(tmp_path):
    saved = sparse(sparse_table=True)
    folder = save_like_dynsparse(saved, tmp_path / "saved")
    mixed = Model(sparse_table=True).eval()
    ds.load_pretrained(mixed, folder)
    assert mixed.table.pattern == saved.table.pattern
    assert torch.equal(mixed(IDS), saved(IDS))
    other = sparse(sparse_table=True)
    assert ds.load_pretrained(other, folder).one.pattern == saved.one.pattern


def test_single_sparse_layer_and_dense_model(tmp_path):
    layer = SparseLinear(8, 8, 0.5)
    ds.save_safetensors(layer, tmp_path / "m")
    assert torch.equal(
        ds.load_pretrained(SparseLinear(8, 8, 0.5), tmp_path / "m").to_dense(), layer.to_dense()
    )
    dense = Model()
    ds.save_safetensors(dense, tmp_path / "d")
    assert torch.equal(ds.load_pretrained(Model(), tmp_path / "d").one.weight, dense.one.weight)


def check_rejected(model, path, message, error=ValueError):
    """Check that loading raises a one-line error and leaves the model unchanged."""
    modules = list(model.named_modules())
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(error, match=message) as caught:
        ds.load_pretrained(model, path)
    assert "\n" not in str(caught.value)
    assert [(n, id(m)) for n, m in model.named_modules()] == [(n, id(m)) for n, m in modules]
    now = model.state_dict()
    assert all(torch.equal(tensor, now[name]) for name, tensor in state.items())


def changed(tmp_path, change):
    folder = save_like_huggingface(sparse(4), tmp_path / "saved")
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def also_as(tensors, name):
    for part in ("rows", "cols", "values"):
        tensors[f"{name}.{part}"] = tensors[f"mix.{part}"].clone()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t["mix.rows"].fill_(99), "the pattern of 'mix' does not fit"),
        (lambda t: t["mix.cols"].fill_(-1), "the pattern of 'mix' does not fit"),
        (lambda t: t.update({"mix.rows": t["mix.rows"].float()}), "the pattern of 'mix' does"),
        (lambda t: t.update({"mix.values": t["mix.values"][1:]}), "of 'mix' is damaged: expected"),
        (
            lambda t: t.update({"mix.values": t["mix.values"][:, 1:].contiguous()}),
            r"the values of 'mix' must be \[nnz\] or",
        ),
        (lambda t: t.update({"mix.values": t["mix.values"].double()}), "'mix' are torch.float64"),
        (lambda t: t.pop("one.values"), "the sparse layer 'one' has no values in the file"),
        (lambda t: t.pop("mix.bias"), "'mix.bias' is only in the model"),
        (lambda t: t.pop("embed.weight"), "'embed.weight' is only in the model"),
        (lambda t: t.update(extra=torch.zeros(2)), "'extra' is only in the file"),
        (
            lambda t: t.update({"mix.bias": torch.zeros(3)}),
            r"'mix.bias' is torch.float32 \[3\] in the file, torch.float32 \[16\] in the model",
        ),
        (
            lambda t: also_as(t, "body.layers.0.norm1"),
            "'body.layers.0.norm1' is a sparse layer in the file, the model has a LayerNorm there",
        ),
        (
            lambda t: also_as(t, "away"),
            "'away' is a sparse layer in the file, the model has no such layer",
        ),
        (
            lambda t: also_as(t, "head"),
            "'head' is sparse in the file, but in the model it shares its weight with an embedding",
        ),
        (lambda t: [t.pop(f"two.{k}") for k in ("rows", "cols")], "the tied layer 'two' is dense"),
    ],
)  # fmt: skip
def test_mismatched_files_change_nothing(tmp_path, change, message):
    check_rejected(Model(), changed(tmp_path, change), message)


def test_mismatched_sparse_models_raise(tmp_path):
    folder = save_like_dynsparse(sparse(4), tmp_path / "saved")
    check_rejected(sparse(2), folder, "blocks of 4 in the file and of 2 in the model")
    check_rejected(ds.sparsify(Model(), 0.5, 4, verbose=False), folder, "'.*': the layer holds")
    check_rejected(
        sparse(4, sparse_table=True), folder, "the layer 'table' is not sparse in the file"
    )
    check_rejected(
        nn.Linear(3, 3), folder, "is a sparse layer in the file, the model has no such layer"
    )
    single = SparseLinear(8, 8, 0.5)
    ds.save_safetensors(single, tmp_path / "m")
    check_rejected(
        nn.Linear(8, 8), tmp_path / "m", "a single Linear, which cannot be replaced in place"
    )


@pytest.mark.parametrize("shards", [1, 3])
def test_folders_with_other_file_names(tmp_path, shards):
    saved = sparse()
    folder = save_like_huggingface(saved, tmp_path / "saved", shards)
    end = "safetensors" if shards == 1 else "safetensors.index.json"
    file = (folder / f"model.{end}").rename(folder / f"diffusion_pytorch_model.{end}")
    assert torch.equal(ds.load_pretrained(Model().eval(), folder)(IDS), saved(IDS))
    (folder / f"other.{end}").write_bytes(file.read_bytes())
    check_rejected(Model(), folder, "has several files, .*other.*: pass the path of one")


def test_truncated_files(tmp_path):
    for shards in (1, 2):
        folder = save_like_huggingface(sparse(), tmp_path / str(shards), shards)
        file = sorted(folder.glob("*.safetensors"))[0]
        file.write_bytes(file.read_bytes()[:-1])
        check_rejected(Model(), folder, f"{file.name} is truncated or no safetensors file")


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "is no index of a sharded model"),
        ("[]", "is no index of a sharded model"),
        ({"weight_map": []}, "is no index of a sharded model"),
        (
            {"weight_map": {"a": 3}},
            "is no index of a sharded model: a file name that is not a string",
        ),
        ({"weight_map": {"a": "../saved/model.safetensors"}}, "must name safetensors files beside"),
        ({"weight_map": {"a": "/etc/model.safetensors"}}, "must name safetensors files beside it"),
        ({"weight_map": {"a": ".."}}, "must name safetensors files beside it, got '..'"),
        ({"weight_map": {"a": "pytorch_model.bin"}}, "must name safetensors files beside it"),
        ({"weight_map": {"nothing": "model.safetensors"}}, "holds 'nothing', which it does not"),
        ("[" * 1000 + "]" * 1000, "is no index of a sharded model"),
    ],
)
def test_wrong_index_raises(tmp_path, index, message):
    folder = save_like_huggingface(sparse(), tmp_path / "saved")
    text = index if isinstance(index, str) else json.dumps(index)
    (folder / "model.safetensors.index.json").write_text(text)
    check_rejected(Model(), folder, message)


def test_limits_and_missing_files(tmp_path, monkeypatch):
    check_rejected(
        Model(), tmp_path, "expected a safetensors file or .*, found neither", FileNotFoundError
    )
    check_rejected(Model(), tmp_path / "none", "none", FileNotFoundError)
    folder = save_like_huggingface(sparse(), tmp_path / "saved", 2)
    index = folder / "model.safetensors.index.json"
    where = json.loads(index.read_text())
    where["weight_map"]["head.weight"] = "gone.safetensors"
    index.write_text(json.dumps(where))
    check_rejected(Model(), folder, "gone.safetensors", FileNotFoundError)
    monkeypatch.setenv("DYNSPARSE_READ_LIMIT", "100")
    check_rejected(Model(), folder, "is too large for an index")


def test_load_safetensors_points_to_load_pretrained(tmp_path):
    folder = save_like_huggingface(sparse(), tmp_path / "saved")
    with pytest.raises(ValueError, match=r"dynsparse\.load_pretrained reads other"):
        ds.load_safetensors(sparse(), folder / "model.safetensors")
