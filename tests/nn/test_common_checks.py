"""The common tests of transformers and timm models, applied to sparsified models.

Where possible, a check compares with the dense model of the same weights.
"""

import copy
import sys
from pathlib import Path

import pytest
import torch

import dynsparse as ds

sys.path.insert(0, str(Path(__file__).parent))
from architectures import MODELS
from test_architectures import made, tensors

pytestmark = pytest.mark.filterwarnings("ignore")

TEXT = ["GPT2LMHeadModel", "LlamaForCausalLM", "OPTForCausalLM", "Qwen3ForCausalLM"]
FAMILIES = [
    *TEXT,
    "BertForMaskedLM",
    "T5ForConditionalGeneration",
    "BartForConditionalGeneration",
    "ViTForImageClassification",
]
IMAGES = [name for name in MODELS if name.startswith("timm ")]


def sparse(name, **options):
    torch.manual_seed(0)
    model, batch = made(name)
    return ds.sparsify(model, 0.5, verbose=False, **options).eval(), batch


def close(mine, theirs):
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [*FAMILIES, *IMAGES])
def test_batch_equals_single_samples(name):
    model, batch = sparse(name)
    with torch.no_grad():
        together = tensors(model(**batch))[0]
        for i in range(2):
            close(tensors(model(**{k: v[i : i + 1] for k, v in batch.items()}))[0][0], together[i])


@pytest.mark.parametrize("name", [*FAMILIES, *IMAGES])
def test_outputs_and_gradients_equal_the_dense_model(name):
    model, batch = sparse(name)
    dense = ds.densify(copy.deepcopy(model))
    losses = []
    for one in (model, dense):
        one.zero_grad()
        outputs = tensors(one(**batch))
        losses.append([t.detach() for t in outputs])
        sum(t.square().mean() for t in outputs).backward()
    for mine, theirs in zip(*losses, strict=True):
        close(mine, theirs)
    expected = {n: p.grad for n, p in dense.named_parameters() if p.grad is not None}
    for layer_name, layer in model.named_modules():
        if type(layer) is ds.nn.SparseLinear and f"{layer_name}.weight" in expected:
            grad = expected[f"{layer_name}.weight"]
            close(layer.values.grad, layer.pattern.values_of(grad))


@pytest.mark.parametrize("name", FAMILIES)
def test_hidden_states_and_attentions(name):
    model, batch = sparse(name)
    model.set_attn_implementation("eager")
    dense = ds.densify(copy.deepcopy(model))
    wanted = {"output_hidden_states": True, "output_attentions": True}
    with torch.no_grad():
        mine, theirs = (one(**batch, **wanted) for one in (model, dense))
        as_tuple = model(**batch, **wanted, return_dict=False)
    assert mine.keys() == theirs.keys()
    for ours, other in zip(tensors(mine), tensors(theirs), strict=True):
        close(ours, other)
    assert torch.equal(tensors(as_tuple)[0], tensors(mine)[0])


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("name", [*TEXT, "T5ForConditionalGeneration"])
def test_generation(name, cached):
    model, batch = sparse(name)
    dense = ds.densify(copy.deepcopy(model))
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "use_cache": cached}
    found = [one.generate(batch["input_ids"], **options) for one in (model, dense)]
    assert torch.equal(*found)


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "LlamaForCausalLM", "BertForMaskedLM"])
def test_gradient_checkpointing(name):
    model, batch = sparse(name)
    grads = []
    for _ in range(2):
        model.train()
        model.zero_grad()
        torch.manual_seed(0)
        tensors(model(**batch))[0].square().mean().backward()
        grads.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        model.gradient_checkpointing_enable()
    assert len(grads[0]) == len(grads[1])
    for mine, theirs in zip(*grads, strict=True):
        close(mine, theirs)


def test_resize_token_embeddings():
    """transformers requires an untied head to be an nn.Linear."""
    model, _ = sparse("Qwen3ForCausalLM")
    with pytest.raises(TypeError, match="SparseLinear"):
        model.resize_token_embeddings(50)
    model, _ = sparse("Qwen3ForCausalLM", exclude=["lm_head"])
    model.resize_token_embeddings(50)
    assert tensors(model(input_ids=torch.full((1, 3), 49)))[0].shape[-1] == 50
    model, _ = sparse("LlamaForCausalLM")  # a tied head stays dense
    model.resize_token_embeddings(50)


@pytest.mark.parametrize("name", IMAGES)
def test_feature_extraction_and_new_classifier(name):
    model, batch = sparse(name)
    with torch.no_grad():
        features = model.forward_features(**batch)
        close(model.forward_head(features), model(**batch))
        model.reset_classifier(3)
        assert model(**batch).shape == (4, 3)
        model.reset_classifier(0)
        assert model(**batch).shape == (4, model.num_features)
