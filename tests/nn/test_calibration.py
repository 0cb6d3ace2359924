"""Calibration of models of transformers and others: caches, padding, repeated blocks, keywords."""

import copy
import warnings

import pytest
import torch
from torch import nn

import dynsparse as ds
from dynsparse.nn import SparseLinear
from dynsparse.nn.calibration import sum_inputs
from dynsparse.nn.candidates import find_candidates
from dynsparse.training import repair

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its own imports
    transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("default")

SIZES = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4}


def llama(seed=0):
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(**SIZES, num_hidden_layers=3)
    return transformers.LlamaForCausalLM(config).double()


def tokens(*shape, seed=1):
    return torch.randint(1, 32, shape, generator=torch.Generator().manual_seed(seed))


def t5(seed=0):
    torch.manual_seed(seed)
    config = transformers.T5Config(
        vocab_size=32, d_model=16, d_kv=4, d_ff=24, num_layers=2, num_heads=4
    )
    return transformers.T5ForConditionalGeneration(config).double()


def pruned(model, batches, density=0.3, start="wanda", exclude=()):
    model = copy.deepcopy(model)
    return ds.sparsify(
        model, density, start=start, calibration=batches, exclude=exclude, verbose=False
    )


def layers(model):
    return [m for m in model.modules() if isinstance(m, SparseLinear)]


def check_same(first, second):
    assert len(layers(first)) == len(layers(second)) > 0
    for one, other in zip(layers(first), layers(second), strict=True):
        assert one.pattern == other.pattern
        torch.testing.assert_close(one.values, other.values)


class Logits(nn.Module):
    """A model inside a module without a config."""

    def __init__(self, model, **options):
        super().__init__()
        self.model, self.options = model, options

    def forward(self, input_ids):
        return self.model(input_ids, **self.options).logits


class Named(Logits):
    def forward(self, **named):
        return self.model(**named, **self.options).logits


def hooked_sums(model, batches):
    """The sums of x^2 over the inputs of all linear layers, from whole passes."""
    sums = {}

    def add(name, args):
        sums[name] = sums.get(name, 0) + args[0].flatten(0, -2).square().sum(0)

    handles = [
        layer.register_forward_pre_hook(lambda _, args, name=name: add(name, args))
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear)
    ]
    with torch.no_grad():
        for batch in batches:
            model.eval()(batch)
    for handle in handles:
        handle.remove()
    return sums


def calibrated_sums(model, batches):
    groups = {
        name: [layer] for name, layer in find_candidates(model).items() if layer.kind == "Linear"
    }
    sums = {}
    for step in sum_inputs(model, groups, batches, products=False):
        sums |= step
    return sums


@pytest.mark.parametrize("start", ["wanda", "sparsegpt"])
def test_cache_is_off(start):
    model = llama()
    expected = pruned(model, [tokens(2, 9, seed=k) for k in range(3)], start=start)
    ids = [tokens(2, 9, seed=k) for k in range(3)]
    check_same(pruned(Logits(model), ids, start=start), expected)
    named = [{"input_ids": x, "use_cache": True} for x in ids]
    check_same(pruned(model, named, start=start), expected)
    assert model.config.use_cache
    assert expected.config.use_cache


def test_blocks_with_a_cache_take_whole_passes():
    model, ids = llama(), [tokens(2, 9, seed=k) for k in range(3)]
    expected = hooked_sums(Logits(model, use_cache=False), ids)
    sums = calibrated_sums(Logits(model, use_cache=True), ids)
    assert sums.keys() == expected.keys()
    for name, total in sums.items():
        torch.testing.assert_close(total, expected[name], msg=name)


def test_encoder_and_decoder():
    """The encoder and the decoder each have a copy of the config."""
    dense = t5()
    batches = [
        {"input_ids": tokens(2, 7, seed=k), "decoder_input_ids": tokens(2, 5, seed=9 + k)}
        for k in range(3)
    ]
    model = pruned(dense, batches, exclude=["lm_head"])
    assert len(layers(model)) == 2 * 6 + 2 * 10
    results = repair(model, dense, batches, epochs=3, lr=0.003, verbose=False)
    assert [r.name for r in results] == ["decoder.block.0", "decoder.block.1"]
    assert all(r.after < r.before for r in results)
    assert model.decoder.config.use_cache


def test_language_model_inside_a_composite_model():
    vision = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1,
              "num_attention_heads": 2, "image_size": 16, "patch_size": 8}  # fmt: skip
    text = SIZES | {"num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 4}
    torch.manual_seed(0)
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4,
        boi_token_index=29, eoi_token_index=30, image_token_index=31,
    )  # fmt: skip
    dense = transformers.Gemma3ForConditionalGeneration(config).double()
    batches = [{"input_ids": tokens(2, 9, seed=k) % 28} for k in range(3)]
    exclude = ["*vision_tower", "*multi_modal_projector"]
    model = pruned(dense, batches, exclude=exclude)
    results = repair(model, dense, batches, epochs=2, verbose=False)
    assert len(results) == 2
    assert all(r.after < r.before for r in results)


def test_repeated_blocks_count_every_call():
    """ALBERT calls one block several times."""
    torch.manual_seed(0)
    config = transformers.AlbertConfig(**SIZES, embedding_size=8, num_hidden_layers=4)
    model = transformers.AlbertModel(config, add_pooling_layer=False).double()
    ids = [tokens(2, 9, seed=k) for k in range(3)]
    expected = hooked_sums(model, ids)
    sums = calibrated_sums(model, ids)
    assert sums.keys() == expected.keys()
    for name, total in sums.items():
        torch.testing.assert_close(total, expected[name], msg=name)


def test_layers_called_by_keyword():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 8)

        def forward(self, x):
            return self.layer(input=x)

    x = torch.randn(5, 4)
    torch.testing.assert_close(calibrated_sums(Model(), [x])["layer"], x.square().sum(0))


@pytest.mark.parametrize("start", ["wanda", "sparsegpt"])
@pytest.mark.parametrize("blocks", [True, False])
def test_padding_is_ignored(start, blocks):
    model = llama()
    lengths = (9, 4, 6)
    ids = [tokens(1, n, seed=n) for n in lengths]
    padded = torch.stack([nn.functional.pad(x[0], (0, 9 - x.shape[1])) for x in ids])
    mask = torch.arange(9) < torch.tensor(lengths)[:, None]
    batch = {"input_ids": padded, "attention_mask": mask.long(), "use_cache": False}
    if not blocks:  # whole passes
        model = Named(model, use_cache=True)
        batch.pop("use_cache")
        ids = [{"input_ids": x} for x in ids]
    check_same(pruned(model, [batch], start=start), pruned(model, ids, start=start))


def test_repair_ignores_padding():
    dense = llama()
    sparse = pruned(dense, [tokens(2, 9)])
    mask = torch.arange(9) < torch.tensor([[9], [4], [6]])

    def repaired(filler):
        model = copy.deepcopy(sparse)
        ids = tokens(3, 9).where(mask, filler)
        batch = {"input_ids": ids, "attention_mask": mask.long()}
        return model, repair(model, dense, [batch], epochs=3, verbose=False)

    (one, errors), (other, other_errors) = repaired(0), repaired(5)
    assert all(after < before for _, before, after in errors)
    for first, second in zip(errors, other_errors, strict=True):
        assert first[1:] == pytest.approx(second[1:])
    for first, second in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(first, second)


def test_blocks_that_write_in_place():
    class Block(nn.Module):
        def __init__(self, in_place):
            super().__init__()
            self.linear, self.in_place = nn.Linear(8, 8), in_place

        def forward(self, x):
            y = 3 * self.linear(x).relu()
            if self.in_place:
                x += y
                return x
            return x + y

    def model(in_place):
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(32, 8), *(Block(in_place) for _ in range(3)))

    for start in ("wanda", "sparsegpt"):
        check_same(*(pruned(model(flag), [tokens(4, 9)], start=start) for flag in (True, False)))


def test_mask_of_the_encoder_is_not_that_of_the_decoder():
    mask = (torch.arange(9) < 3).expand(3, 9).long()
    batch = {"input_ids": tokens(3, 9), "attention_mask": mask}
    decoder = tokens(3, 9, seed=2)

    def sums(ids, decoder_ids):
        model = t5()
        groups = {n: [c] for n, c in find_candidates(model).items() if c.kind == "Linear"}
        batches = [{**batch, "input_ids": ids, "decoder_input_ids": decoder_ids}]
        found = {}
        for part in sum_inputs(model, groups, batches, products=False):
            found |= part
        return found

    padded = batch["input_ids"].where(mask.bool(), 5)
    one, other = sums(batch["input_ids"], decoder), sums(padded, decoder)
    changed = sums(batch["input_ids"], decoder.where(mask.bool(), 5))
    for name in one:
        if name.startswith("encoder"):
            torch.testing.assert_close(one[name], other[name])
    q = next(name for name in one if name.startswith("decoder.block.0") and name.endswith("q"))
    assert not torch.allclose(one[q], changed[q])
