"""sparsify on small models of the `transformers` library."""

import copy
import re

import pytest
import torch

import dynsparse as ds
from dynsparse.nn import SparseLinear

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

SIZES = {"vocab_size": 50, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
WIDE = SIZES | {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
                "intermediate_size": 64}  # fmt: skip


def gpt2():
    config = transformers.GPT2Config(**SIZES, n_positions=16, n_embd=32, n_layer=2, n_head=4)
    return transformers.GPT2LMHeadModel(config), 8


def bert():
    return transformers.BertForMaskedLM(transformers.BertConfig(**WIDE)), 13


def llama():
    config = transformers.LlamaConfig(**WIDE, num_key_value_heads=2)
    return transformers.LlamaForCausalLM(config), 15


def t5():
    config = transformers.T5Config(
        **SIZES, d_model=32, d_kv=8, num_layers=2, num_heads=4, d_ff=64, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config), 32  # reads the type of `wo.weight`


def logits(model, ids):
    more = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    return model(input_ids=ids, **more).logits


@pytest.mark.parametrize("make", [gpt2, bert, llama, t5])
def test_model_from_config(make):
    model, layers = make()
    model = model.double().eval()
    ids = torch.randint(50, (2, 7))
    before = logits(model, ids)
    kinds = [type(m) for m in model.modules()]
    ds.sparsify(model, 1.0, verbose=False)
    assert torch.equal(logits(model, ids), before)
    ds.sparsify(model, 0.2, start="magnitude", verbose=False)
    assert sum(isinstance(m, SparseLinear) for m in model.modules()) == layers
    assert not torch.equal(logits(model, ids), before)
    dense = ds.densify(copy.deepcopy(model))
    assert [type(m) for m in dense.modules()] == kinds
    torch.testing.assert_close(logits(model, ids), logits(dense, ids))
    optimizer = torch.optim.AdamW(model.parameters())
    trainer = ds.RigL(model, optimizer, total_steps=10, update_interval=1)
    logits(model.train(), ids).square().mean().backward()
    assert len(trainer.step()) == layers


@pytest.mark.parametrize("make", [gpt2, bert, t5])
def test_tied_output_layer_stays_dense_and_is_reported(make, capsys):
    model = make()[0]
    ds.sparsify(model, 0.2)
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    assert head.weight is table.weight
    assert re.search(r"stays dense: it shares its weight with .* \(Embedding\)",
                     capsys.readouterr().out)  # fmt: skip


@pytest.mark.parametrize("make", [gpt2, bert, t5])
@pytest.mark.parametrize("size", ["5GB", "20KB"])
def test_save_pretrained_round_trip(make, size, tmp_path):
    model = make()[0].eval()
    ds.sparsify(model, 0.2, verbose=False)
    model.save_pretrained(tmp_path, max_shard_size=size)
    assert (tmp_path / "model.safetensors.index.json").exists() is (size == "20KB")
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    again = ds.load_pretrained(type(model)(config).eval(), tmp_path)
    ids = torch.randint(50, (2, 7))
    assert torch.equal(logits(again, ids), logits(model, ids))
    assert again.get_output_embeddings().weight is again.get_input_embeddings().weight
