"""Sparse models in folders of sentence-transformers."""

import warnings

import numpy as np
import pytest

import dynsparse as ds

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of their own imports
    transformers = pytest.importorskip("transformers")
    library = pytest.importorskip("sentence_transformers")
    models = pytest.importorskip("sentence_transformers.models")

pytestmark = pytest.mark.filterwarnings("default")


def test_folder_round_trips(tmp_path):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "sparse", "dense"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    transformers.BertTokenizerFast(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path / "bert")
    config = transformers.BertConfig(
        vocab_size=len(words),
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
    )
    transformers.BertModel(config).save_pretrained(tmp_path / "bert")
    bert = models.Transformer(str(tmp_path / "bert"))
    model = library.SentenceTransformer(modules=[bert, models.Pooling(32)], device="cpu")
    ds.sparsify(model, 0.3, verbose=False)
    model.save(str(tmp_path / "saved"))
    loaded = library.SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    texts = ["sparse", "dense sparse"]
    assert np.array_equal(loaded.encode(texts), model.encode(texts))
    counts = [sum(isinstance(m, ds.nn.SparseLinear) for m in x.modules()) for x in (loaded, model)]
    assert counts[0] == counts[1] > 0
