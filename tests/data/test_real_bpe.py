"""GPT-2's real merges, if the files are available."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from dynsparse.data.text import END_OF_TEXT, GPT2_CHECKSUM, load_gpt2

pytest.importorskip("tokenizers")

REAL = Path(__file__).resolve().parents[3] / "shared" / "data"
pytestmark = pytest.mark.skipif(
    not (REAL / "gpt2-bpe").is_dir(), reason="GPT-2's files are not there"
)


def test_checksum_of_the_real_file():
    content = (REAL / "gpt2-bpe" / "vocab.bpe").read_bytes()
    assert f"sha256:{hashlib.sha256(content).hexdigest()}" == GPT2_CHECKSUM


def test_the_real_vocabulary():
    real = load_gpt2(REAL / "gpt2-bpe")
    assert real.size == 50257
    # ids that GPT-2's own files give: token by token in encoder.json
    ids = json.loads((REAL / "gpt2-bpe" / "encoder.json").read_text())
    for text, tokens in {
        "Hello world": ["Hello", "Ġworld"],
        "The quick brown fox": ["The", "Ġquick", "Ġbrown", "Ġfox"],
        "it's 2019\n\nok": ["it", "'s", "Ġ2019", "Ċ", "Ċ", "ok"],
    }.items():
        assert real.encode(text).tolist() == [ids[token] for token in tokens]
    assert real.encode("Hello world").tolist() == [15496, 995]
    assert real.decode(np.array([50256])) == END_OF_TEXT


def test_number_of_tokens_of_tinyshakespeare():
    text = (REAL / "tinyshakespeare" / "input.txt").read_text()
    real = load_gpt2(REAL / "gpt2-bpe")
    ids = real.encode(text)
    assert len(ids) == 338_025  # 301,966 + 36,059 of nanoGPT's preparation
    assert real.decode(ids) == text
