"""Language models of transformers keep every zero when pruned, fine-tuned and saved."""

import copy
import re
from pathlib import Path

import pytest
import torch

import dynsparse as ds
from dynsparse.nn import SparseLinear
from dynsparse.nn.calibration import Blocks, _hidden, evaluation_mode

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

IDS = {"vocab_size": 48, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
SIZES = IDS | {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
               "intermediate_size": 64, "tie_word_embeddings": False}  # fmt: skip
GROUPED = SIZES | {"num_key_value_heads": 2, "head_dim": 8}
PAGE = Path(__file__).parents[2] / "docs" / "pruned-models.md"
FAMILIES = {
    "GPT2": IDS | {"n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 4},  # a tied head
    "Llama": GROUPED,
    "Mistral": GROUPED,
    "Qwen2": GROUPED | {"tie_word_embeddings": True},
    "OPT": IDS | {"hidden_size": 32, "num_hidden_layers": 2, "ffn_dim": 64,
                  "num_attention_heads": 4, "word_embed_proj_dim": 32},
    "Phi": SIZES,
    "Gemma": GROUPED | {"tie_word_embeddings": True},
    "Mamba": IDS | {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
}  # fmt: skip


def build(family, seed=0):
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(**FAMILIES[family])
    name = "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"
    return getattr(transformers, name)(config).eval()


def tokens(rows=4, length=12):
    return torch.randint(1, 48, (rows, length), generator=torch.Generator().manual_seed(1))


def sparse_layers(model):
    return {name: m for name, m in model.named_modules() if isinstance(m, SparseLinear)}


def zeros(model):
    return {name: layer.to_dense() == 0 for name, layer in sparse_layers(model).items()}


def step(model, ids):
    """Take a fine-tuning step."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(parameters, lr=1e-3)
    model.train()
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    model.eval()


def assert_zeros_kept(model, before):
    after = zeros(model)
    assert after.keys() == before.keys()
    for name, was_zero in before.items():
        assert bool(after[name][was_zero].all()), name


@pytest.mark.parametrize("family", FAMILIES)
def test_pruned_checkpoint_stays_sparse(family, tmp_path):
    model, ids = build(family), tokens()
    reference = copy.deepcopy(model)
    ds.sparsify(reference, 0.3, start="magnitude", verbose=False)
    pruned = ds.densify(reference)  # a dense checkpoint with zeros, as other tools write it
    pruned.save_pretrained(tmp_path / "pruned")
    model = type(pruned).from_pretrained(tmp_path / "pruned").eval()
    expected = model(input_ids=ids).logits
    ds.sparsify(model, start="nonzero", verbose=False)
    before = zeros(model)
    assert len(before) >= 6
    torch.testing.assert_close(model(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-5)
    step(model, ids)
    assert_zeros_kept(model, before)
    model.save_pretrained(tmp_path / "tuned")
    again = ds.load_pretrained(build(family, seed=2), tmp_path / "tuned")
    assert_zeros_kept(again, before)
    assert torch.equal(again(input_ids=ids).logits, model(input_ids=ids).logits)
    head, table = again.get_output_embeddings(), again.get_input_embeddings()
    if getattr(model.config, "tie_word_embeddings", False):
        assert head.weight is table.weight


@pytest.mark.parametrize("family", ["GPT2", "Qwen2", "OPT", "Mamba"])
def test_sparse_tied_head(family, tmp_path):
    model, ids = build(family), tokens()
    names = {id(m): name for name, m in model.named_modules()}
    both = [names[id(m)] for m in (model.get_input_embeddings(), model.get_output_embeddings())]
    ds.sparsify(model, 0.3, start="magnitude", verbose=False)
    options = {"calibration": [{"input_ids": ids}], "verbose": False}
    ds.sparsify(model, 0.3, start="wanda", include=both, **options)
    # Not the zeros: the vector of the padding is zero and stored, and the head trains it.
    before = {n: ~layer.pattern.to_mask() for n, layer in sparse_layers(model).items()}
    assert model.get_output_embeddings().table is model.get_input_embeddings()
    step(model, ids)
    assert_zeros_kept(model, before)
    expected = model(input_ids=ids).logits
    model.save_pretrained(tmp_path)
    for again in (
        type(model).from_pretrained(tmp_path).eval(),
        ds.load_pretrained(build(family, seed=2), tmp_path),
    ):
        assert again.get_output_embeddings().table is again.get_input_embeddings()
        assert_zeros_kept(again, before)
        assert torch.equal(again(input_ids=ids).logits, expected)


def test_embedding_with_extra_operations_stays_dense():
    with pytest.raises(ValueError, match=r"\(GemmaTextScaledWordEmbedding\), which cannot be made"):
        ds.sparsify(build("Gemma"), 0.3, include=["lm_head", "model.embed_tokens"])


@pytest.mark.parametrize("start", ["wanda", "sparsegpt"])
@pytest.mark.parametrize("family", FAMILIES)
def test_pruning_in_this_library(family, start, tmp_path):
    model, ids = build(family), tokens()
    options = {"calibration": [{"input_ids": tokens()}], "verbose": False}
    if family == "Mamba":
        options["exclude"] = ["*.dt_proj"]  # its weight is read, the layer is not called
    ds.sparsify(model, 0.25, start=start, **options)
    before = zeros(model)
    assert all(0.6 < float(zero.float().mean()) < 0.85 for zero in before.values())
    step(model, ids)
    assert_zeros_kept(model, before)
    model.save_pretrained(tmp_path)
    again = ds.load_pretrained(build(family, seed=2), tmp_path)
    assert_zeros_kept(again, before)
    assert torch.equal(again(input_ids=ids).logits, model(input_ids=ids).logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_repair(family):
    dense, batches = build(family), [tokens(), tokens().flip(1)]
    model = copy.deepcopy(dense)
    ds.sparsify(model, 0.5, start="magnitude", verbose=False)
    before = zeros(model)
    blocks = ds.training.repair(model, dense, batches, epochs=5, verbose=False)
    assert len(blocks) == 2
    assert all(block.after < block.before for block in blocks)
    assert_zeros_kept(model, before)


@pytest.mark.parametrize("family", FAMILIES)
def test_merged_adapters(family, tmp_path):
    peft = pytest.importorskip("peft")
    from dynsparse.integrations.peft import sparse_lora

    model, ids = build(family), tokens()
    exclude = ["*.dt_proj"] if family == "Mamba" else []
    ds.sparsify(model, 0.3, start="magnitude", exclude=exclude, verbose=False)
    before = zeros(model)
    # PEFT refuses out_proj of Mamba, whose weight fused kernels read.
    names = {name.rpartition(".")[2] for name in before} - ({"out_proj"} if exclude else set())
    config = sparse_lora(peft.LoraConfig(r=2, target_modules=list(names)))
    tuned = peft.get_peft_model(model, config)
    for _ in range(3):
        step(tuned, ids)
    expected = tuned(input_ids=ids).logits
    merged = tuned.merge_and_unload()
    assert zeros(merged).keys() == before.keys()
    assert_zeros_kept(merged, before)
    torch.testing.assert_close(merged(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-5)
    merged.save_pretrained(tmp_path)
    again = ds.load_pretrained(build(family, seed=2), tmp_path)
    assert_zeros_kept(again, before)
    assert torch.equal(again(input_ids=ids).logits, merged(input_ids=ids).logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_form_a_chain(family):
    model, ids = build(family), tokens()
    layers = {name: m.weight.numel() for name, m in model.named_modules() if hasattr(m, "weight")}
    with torch.no_grad(), evaluation_mode(model):
        blocks = Blocks(model, [ids], layers)
        last = []
        module = model.get_submodule(blocks.names[-1])
        hook = module.register_forward_hook(lambda _, args, y: last.append(_hidden(y)))
        model(ids)
        hook.remove()
        hidden = blocks.inputs
        for k in range(len(blocks.names)):
            hidden = blocks.run_all(k, hidden)
    assert len(blocks.names) == 2
    torch.testing.assert_close(hidden, last)


@pytest.mark.skipif(not PAGE.exists(), reason="the documentation is not part of a wheel")
def test_examples_of_the_page(tmp_path, monkeypatch):
    pytest.importorskip("peft")
    monkeypatch.chdir(tmp_path)
    model = build("Llama")
    ds.sparsify(model, 0.3, start="magnitude", verbose=False)
    before = zeros(model)
    ds.densify(model).save_pretrained("pruned")
    code = "\n".join(re.findall(r"```py\n(.*?)```", PAGE.read_text(), re.S))
    names = {"ds": ds, "torch": torch}
    exec(code, names)
    assert_zeros_kept(names["model"], before)
