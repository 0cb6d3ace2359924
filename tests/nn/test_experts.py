"""split_experts and merge_experts, beside the experts of `transformers` in float64."""

import copy
import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import dynsparse as ds
from dynsparse.nn import SparseLinear, merge_experts, split_experts

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its own imports
    transformers = pytest.importorskip("transformers", minversion="5")
    from dynsparse.integrations import huggingface

pytestmark = pytest.mark.filterwarnings("ignore")

SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_experts_per_tok": 2,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "experts_implementation": "eager",
}
KINDS = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen3Moe": {"num_experts": 6, "moe_intermediate_size": 24},
    # Biases, transposed matrices, gates between the rows.
    "GptOss": {"num_local_experts": 4, "head_dim": 8},
    # The first block is dense, the others have a shared expert.
    "DeepseekV3": {
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    },
    # Without gates.
    "NemotronH": {
        "layers_block_type": ["attention", "moe"],
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 16,
        "moe_shared_expert_intermediate_size": 16,
        "head_dim": 8,
    },
}


def make(kind="Mixtral", **options):
    sizes = SIZES | KINDS[kind] | options
    if kind == "NemotronH":
        del sizes["num_hidden_layers"]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**sizes)
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval()


def tokens(n=4, length=9):
    return torch.randint(50, (n, length), generator=torch.Generator().manual_seed(1))


def split_and_sparse(model, density=0.5, **options):
    return ds.sparsify(split_experts(model), density, verbose=False, **options).eval()


def experts_of(model):
    return [m for m in model.modules() if hasattr(m, "down_layers")]


@pytest.mark.parametrize("kind", KINDS)
def test_split_experts_compute_the_same_and_merge_exactly(kind):
    model = make(kind).double().requires_grad_()
    split = split_experts(copy.deepcopy(model))
    x = tokens()
    losses = [m(x, labels=x).loss for m in (model, split)]
    torch.testing.assert_close(losses[1], losses[0])
    for loss in losses:
        loss.backward()
    for experts in experts_of(split):  # `merge_experts` does not merge gradients: move them
        for layer in experts.modules():
            if isinstance(layer, nn.Linear):
                for name, p in list(layer.named_parameters()):
                    grad = torch.zeros_like(p) if p.grad is None else p.grad
                    setattr(layer, name, nn.Parameter(grad))
    gradients = dict(merge_experts(split).named_parameters())
    for name, p in model.named_parameters():
        if ".experts." in name:
            assert p.grad.abs().max() > 0
            torch.testing.assert_close(gradients[name].data, p.grad)


@pytest.mark.parametrize("kind", KINDS)
def test_merging_restores_the_model(kind):
    model = make(kind)
    other = type(model)(model.config)  # of the same config
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.requires_grad_(False)
    split_experts(model)
    assert len(experts_of(model)) in (1, 2)
    assert not any(p.requires_grad for p in model.parameters())
    other(tokens())  # still computes its own experts
    merge_experts(model)
    assert not any(p.requires_grad for p in model.parameters())
    assert model.state_dict().keys() == state.keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[name]), name
        assert tensor.is_contiguous()
    other.load_state_dict(state)
    assert torch.equal(model(tokens()).logits, other(tokens()).logits)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["packed", "its own"])
def test_sparse_experts_save_and_load(kind, way, tmp_path):
    model = split_and_sparse(make(kind))
    if way == "packed":
        huggingface.save_pretrained(model, tmp_path)
    else:
        model.save_pretrained(tmp_path)
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, experts_implementation="eager", output_loading_info=True
    )
    assert not any(report.values())
    output = model(tokens()).logits
    assert torch.equal(loaded(tokens()).logits, output)
    assert all(isinstance(e, SparseLinear) for m in experts_of(loaded) for e in m.down_layers)
    other = ds.load_pretrained(split_experts(make(kind)), tmp_path)
    assert torch.equal(other.eval()(tokens()).logits, output)


def test_dense_model_of_pruned_experts_is_an_ordinary_one(tmp_path):
    model = make("Qwen3Moe")
    calibration = [tokens(8, 32), tokens(8, 32).flip(0)]
    split_and_sparse(model, start="sparsegpt", calibration=calibration)
    output = model(tokens()).logits
    merge_experts(ds.densify(model)).save_pretrained(tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(loaded(tokens()).logits, output)
    zeros = (loaded.model.layers[0].mlp.experts.gate_up_proj == 0).float().mean()
    assert 0.45 < zeros < 0.55
    again = ds.sparsify(split_experts(loaded), start="nonzero", verbose=False)
    torch.testing.assert_close(again(tokens()).logits, output)
    assert isinstance(again.model.layers[0].mlp.experts.down_layers[3], SparseLinear)


def test_experts_without_tokens_keep_their_patterns():
    model = split_and_sparse(make(num_experts_per_tok=1), include="*.experts")
    experts = experts_of(model)[0]
    called = set()
    for i, layer in enumerate(experts.down_layers):
        layer.register_forward_hook(lambda *_, i=i: called.add(i))
    optimizer = torch.optim.AdamW(model.parameters())
    trainer = ds.RigL(model, optimizer, total_steps=10, update_interval=1)
    before = [layer.pattern.to_mask() for layer in experts.down_layers]
    x = tokens(1, 2)
    model.train()(x, labels=x).loss.backward()
    trainer.step()
    assert 0 < len(called) < 4
    for i, layer in enumerate(experts.down_layers):
        assert torch.equal(layer.pattern.to_mask(), before[i]) == (i not in called)


def test_no_tokens():
    experts = experts_of(split_experts(make()))[0]
    chosen = torch.zeros(0, 2, dtype=torch.int64)
    assert experts(torch.zeros(0, 32), chosen, torch.zeros(0, 2)).shape == (0, 32)


def test_generation():
    model = split_and_sparse(make("Qwen3Moe"))
    options = {"max_new_tokens": 6, "do_sample": False}
    expected = ds.densify(copy.deepcopy(model)).generate(tokens(2), **options)
    assert torch.equal(model.generate(tokens(2), **options), expected)


def test_bad_input(tmp_path):
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got str"):
        split_experts("model")
    with pytest.raises(ValueError, match="has no experts in three-dimensional parameters"):
        split_experts(nn.Linear(4, 4))
    with pytest.raises(ValueError, match="no experts that split_experts split"):
        merge_experts(make())
    model = make()
    model.model.layers[1].mlp.experts._is_expert_parallel = True
    with pytest.raises(ValueError, match=r"layers.1.mlp.experts' is distributed over ranks"):
        split_experts(model)
    assert not experts_of(model)
    model = split_experts(make())
    with pytest.raises(ValueError, match=r"without sparse layers: call .*merge_experts first"):
        model.save_pretrained(tmp_path)
    ds.sparsify(model, 0.5, include="*layers.1.mlp.experts", verbose=False)
    with pytest.raises(ValueError, match=r"layers.1.mlp.experts' has sparse experts: call densify"):
        merge_experts(model)
    assert len(experts_of(model)) == 2


LOAD = """
import sys, torch
import torchvision_names
model = torch.load(sys.argv[1], weights_only=False)
x, y = torch.load(sys.argv[2])
assert torch.equal(model(x).logits, y)
"""


@pytest.mark.slow
def test_a_pickled_model_computes_in_another_process(tmp_path):
    model = split_and_sparse(make())
    torch.save(model, tmp_path / "model.pt")
    torch.save((tokens(), model(tokens()).logits.detach()), tmp_path / "output.pt")
    files = [str(tmp_path / name) for name in ("model.pt", "output.pt")]
    tests = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LOAD, *files], capture_output=True, text=True,
        cwd=tests,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
