"""`from_pretrained` loads folders of sparse models, and raises without dynsparse."""

import copy
import json
import os
import pickle
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import dynsparse as ds
from dynsparse.nn import SparseLinear

pytest.importorskip("accelerate")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its own imports
    transformers = pytest.importorskip("transformers", minversion="5")
    from dynsparse.integrations import huggingface

pytestmark = pytest.mark.filterwarnings("default")

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "deploy.md"
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
         "intermediate_size": 64}  # fmt: skip


def bert(head=False):
    config = transformers.BertConfig(vocab_size=40, **SIZES)
    return (transformers.BertForMaskedLM if head else transformers.BertModel)(config)


def gpt2():
    config = transformers.GPT2Config(
        n_layer=2,
        n_head=4,
        n_embd=32,
        n_positions=16,
        vocab_size=40,
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.GPT2LMHeadModel(config)


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=40, **SIZES))


def vit():
    return transformers.ViTModel(transformers.ViTConfig(image_size=16, patch_size=4, **SIZES))


KINDS = {"bert": (bert, "AutoModel"), "gpt2": (gpt2, "AutoModelForCausalLM"),
         "llama": (llama, "AutoModelForCausalLM"), "vit": (vit, "AutoModel")}  # fmt: skip


def sparse(model, density=0.2, **options):
    return ds.sparsify(model, density, verbose=False, **options).eval()


def rewired(model):
    """Return the model after a pattern update, with slots not in row-major order."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trainer = ds.SET(model, optimizer, total_steps=4, update_interval=1, drop_fraction=0.5)
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        trainer.step()
    trainer.stop()
    return model


def batch(model):
    if model.main_input_name == "pixel_values":
        return {"pixel_values": torch.linspace(-1, 1, 1536).view(2, 3, 16, 16)}
    return {"input_ids": torch.arange(16).view(2, 8)}


def output(model):
    with torch.no_grad():
        return model(**batch(model))[0]


def layers(model):
    return {n: m for n, m in model.named_modules() if isinstance(m, SparseLinear)}


def check_equal(loaded, model):
    assert torch.equal(output(loaded), output(model))
    assert layers(loaded).keys() == layers(model).keys()
    for name, layer in layers(model).items():
        assert torch.equal(layers(loaded)[name].pattern.to_mask(), layer.pattern.to_mask())
        assert type(layers(loaded)[name]) is type(layer)


def run(code, *arguments):
    """Run the code in another process."""
    path = os.pathsep.join([str(Path(ds.__file__).parents[1]), str(TESTS)])
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", f"import torchvision_names\n{code}", *arguments],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip


LOAD = """
import sys, torch
{imports}
for name, kind in [pair.split("=") for pair in sys.argv[2:]]:
    folder = f"{{sys.argv[1]}}/{{name}}"
    model = getattr(transformers, kind).from_pretrained(folder, device_map="cpu")
    with torch.no_grad():
        torch.save(model(**torch.load(f"{{folder}}/batch.pt"))[0], f"{{folder}}/output.pt")
    torch.save(model.state_dict(), f"{{folder}}/state.pt")
"""


@pytest.mark.slow
@pytest.mark.parametrize("first", ["dynsparse", "transformers"])
def test_load_in_another_process(tmp_path, first):
    second = "transformers" if first == "dynsparse" else "dynsparse"
    models = {}
    for name, (make, _) in KINDS.items():
        models[name] = model = sparse(make(), block_size=4 if name == "llama" else 1)
        huggingface.save_pretrained(model, tmp_path / name)
        torch.save(batch(model), tmp_path / name / "batch.pt")
    pairs = [f"{name}={kind}" for name, (_, kind) in KINDS.items()]
    imports = f"import {first}\nimport {second}"
    if first == "dynsparse":
        # Looked for without being imported, and dynsparse loaded twice.
        imports = (
            "import importlib, importlib.util, dynsparse\nimportlib.reload(dynsparse)\n"
            f"importlib.util.find_spec('transformers.modeling_utils')\n{imports}"
        )
    done = run(LOAD.format(imports=imports), str(tmp_path), *pairs)
    assert done.returncode == 0, done.stderr
    for name, model in models.items():
        assert torch.equal(torch.load(tmp_path / name / "output.pt"), output(model))
        state = torch.load(tmp_path / name / "state.pt")
        assert state.keys() == model.state_dict().keys()
        assert all(torch.equal(tensor, state[k]) for k, tensor in model.state_dict().items())


@pytest.mark.slow
def test_loading_without_dynsparse_raises(tmp_path):
    for name, save in (
        ("plain", bert().save_pretrained),
        ("sparse", sparse(bert()).save_pretrained),
    ):
        save(tmp_path / name)
    code = "import sys, transformers; transformers.AutoModel.from_pretrained(sys.argv[1])"
    assert run(code, str(tmp_path / "plain")).returncode == 0
    done = run(code, str(tmp_path / "sparse"))
    assert done.returncode == 1
    assert "Unknown quantization type, got dynsparse" in done.stderr
    assert "MISMATCH" in done.stderr
    assert "RuntimeError" in done.stderr


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("shards", [{}, {"max_shard_size": "6KB"}], ids=["one", "shards"])
@pytest.mark.parametrize("way", ["packed", "its own"])
def test_round_trip(name, shards, way, tmp_path):
    make, kind = KINDS[name]
    model = rewired(sparse(make()))
    if way == "packed":
        huggingface.save_pretrained(model, tmp_path, **shards)
    else:
        model.save_pretrained(tmp_path, **shards)
    files = list(tmp_path.glob("*.safetensors"))
    assert (len(files) > 1) == bool(shards)
    loaded, report = getattr(transformers, kind).from_pretrained(
        tmp_path, device_map="cpu", output_loading_info=True
    )
    assert not any(report.values())
    check_equal(loaded, model)
    if way == "its own":
        for key, tensor in model.state_dict().items():
            assert torch.equal(tensor, loaded.state_dict()[key]), key
    check_equal(ds.load_pretrained(make(), tmp_path).eval(), model)
    # What was loaded is saved and loaded as what was made.
    loaded.save_pretrained(tmp_path / "again")
    check_equal(getattr(transformers, kind).from_pretrained(tmp_path / "again"), model)


def test_files_are_small(tmp_path):
    config = transformers.LlamaConfig(vocab_size=8, **SIZES | {"intermediate_size": 1024})
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "dense")
    huggingface.save_pretrained(sparse(model, 0.1), tmp_path / "sparse")
    dense, small = (
        (tmp_path / kind / "model.safetensors").stat().st_size for kind in ("dense", "sparse")
    )
    assert small < 0.16 * dense  # embeddings, norms and names of 30 layers among it


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_values_are_cast_like_weights(dtype, tmp_path):
    model = sparse(gpt2())
    huggingface.save_pretrained(model, tmp_path)
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path, dtype=dtype)
    assert {parameter.dtype for parameter in loaded.parameters()} == {dtype}
    check_equal(loaded, model.to(dtype))


def test_new_head_is_initialized_and_the_rest_loaded(tmp_path):
    model = sparse(bert(head=True))
    model.save_pretrained(tmp_path)
    base = transformers.AutoModel.from_pretrained(tmp_path)
    body = layers(model.bert)
    assert layers(base).keys() == body.keys()
    assert all(torch.equal(layers(base)[n].to_dense(), body[n].to_dense()) for n in body)
    base.save_pretrained(tmp_path / "base")
    head, report = transformers.AutoModelForMaskedLM.from_pretrained(
        tmp_path / "base", output_loading_info=True
    )
    assert report["missing_keys"]
    assert all(name.startswith("cls.") for name in report["missing_keys"])
    assert layers(head.bert).keys() == body.keys()
    assert not any(parameter.is_meta for parameter in head.parameters())


def test_tied_layers_stay_tied(tmp_path):
    class Tied(transformers.BertModel):
        _tied_weights_keys = {  # noqa: RUF012
            "encoder.layer.1.output.dense.weight": "encoder.layer.0.output.dense.weight",
            "encoder.layer.1.output.dense.bias": "encoder.layer.0.output.dense.bias",
        }

    model = Tied(transformers.BertConfig(vocab_size=40, **SIZES))
    first, second = (layer.output for layer in model.encoder.layer)
    assert first.dense.weight is second.dense.weight
    sparse(model)
    assert first.dense is second.dense
    huggingface.save_pretrained(model, tmp_path)
    loaded = Tied.from_pretrained(tmp_path)
    check_equal(loaded, model)
    first, second = (layer.output for layer in loaded.encoder.layer)
    assert first.dense is second.dense


def test_loaded_model_trains_in_trainer_and_resumes(tmp_path):
    rewired(sparse(gpt2())).save_pretrained(tmp_path / "saved")
    data = [{"input_ids": ids, "labels": ids} for ids in torch.randint(40, (16, 8))]

    def train(resume=None):
        model = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "saved")
        arguments = transformers.TrainingArguments(
            str(tmp_path / "run"), max_steps=6, save_steps=3, learning_rate=0.01, seed=1,
            report_to=[], use_cpu=True, disable_tqdm=True, logging_strategy="no",
        )  # fmt: skip
        callback = huggingface.SparseCallback(ds.RigL, update_interval=2)
        trainer = transformers.Trainer(model, arguments, train_dataset=data, callbacks=[callback])
        trainer.train(resume_from_checkpoint=resume)
        return model.eval()

    model = train()
    resumed = train(str(tmp_path / "run" / "checkpoint-3"))
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, resumed.state_dict()[key]), key
    check_equal(transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "run/checkpoint-6"), model)


def test_save_pretrained_with_state_dict(tmp_path):
    model = sparse(gpt2())
    state = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.save_pretrained(tmp_path, state_dict=state)
    model.load_state_dict(state)
    check_equal(transformers.GPT2LMHeadModel.from_pretrained(tmp_path), model)


def test_dense_model_is_saved_as_dense(tmp_path):
    model = sparse(bert())
    model.save_pretrained(tmp_path)
    ds.densify(model).save_pretrained(tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    assert not layers(transformers.AutoModel.from_pretrained(tmp_path))


def test_copies_are_saved_like_the_model(tmp_path):
    model = sparse(bert())
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        copied.save_pretrained(tmp_path)
        check_equal(transformers.AutoModel.from_pretrained(tmp_path), model)


def test_state_dict_of_the_file_loads_into_a_sparse_model(tmp_path):
    from safetensors.torch import load_file

    model = sparse(bert())
    model.save_pretrained(tmp_path)
    other = sparse(bert())
    other.load_state_dict(load_file(tmp_path / "model.safetensors"))
    check_equal(other, model)


def test_unsupported_models_raise(tmp_path):
    from safetensors.torch import load_file, save_file

    with pytest.raises(ValueError, match="with no sparse layers"):
        huggingface.save_pretrained(bert(), tmp_path)
    bert().save_pretrained(tmp_path / "dense")
    with pytest.raises(ValueError, match="quantization_config cannot make a model sparse"):
        transformers.AutoModel.from_pretrained(
            tmp_path / "dense", quantization_config={"quant_method": "dynsparse"}
        )
    model = sparse(bert())
    huggingface.save_pretrained(model, tmp_path / "sparse")
    for places in ({"": "disk"}, {"embeddings": "cpu", "encoder": 0, "pooler": "cpu"}):
        with pytest.raises(ValueError, match="on one device, such as 'cpu', got"):
            transformers.AutoModel.from_pretrained(tmp_path / "sparse", device_map=places)
    file = tmp_path / "sparse" / "model.safetensors"
    tensors = load_file(file)
    name = "pooler.dense"
    form = "gaps" if f"{name}.gaps" in tensors else "mask"
    for damage, words in (
        ({f"{name}.{form}": tensors[f"{name}.{form}"][:-1]}, f"the pattern of '{name}'"),
        ({f"{name}.{form}": None}, f"'{name}' has no pattern"),
        ({f"{name}.values": None}, f"'{name}' has no values"),
        ({f"{name}.values": tensors[f"{name}.values"][1:]}, f"the pattern of '{name}'"),
    ):
        damaged = {key: t for key, t in (tensors | damage).items() if t is not None}
        save_file(damaged, file, {"format": "pt"})
        with pytest.raises(ValueError, match=words):
            transformers.AutoModel.from_pretrained(tmp_path / "sparse")


@pytest.mark.skipif(not PAGE.exists(), reason="the documentation is not part of a wheel")
def test_code_of_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = PAGE.read_text().partition("## Hugging Face\n")[2].partition("\n## ")[0]
    exec("\n".join(re.findall(r"```py\n(.*?)```", code, re.S)), {})


def test_torch_attention_raises(tmp_path):
    config = transformers.SiglipVisionConfig(image_size=16, patch_size=8, **SIZES)
    model = sparse(transformers.SiglipVisionModel(config))
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"use dynsparse.load_pretrained\(model, folder\)"):
        transformers.SiglipVisionModel.from_pretrained(tmp_path)
    loaded = ds.load_pretrained(transformers.SiglipVisionModel(config), tmp_path).eval()
    check_equal(loaded, model)


def test_int8_is_saved_to_a_separate_file(tmp_path):
    ids = torch.arange(6)[None]
    for make in (gpt2, llama):
        model = ds.quantize(sparse(make()))
        for save in (model.save_pretrained, lambda f, m=model: huggingface.save_pretrained(m, f)):
            with pytest.raises(ValueError, match=r"use dynsparse\.save_safetensors"):
                save(tmp_path / "folder")
        ds.save_safetensors(model, tmp_path / "int8")
        loaded = ds.load_pretrained(make(), tmp_path / "int8")
        assert torch.equal(loaded(ids).logits, model(ids).logits)
