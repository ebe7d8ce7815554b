"""One subword vocabulary for both languages (the paper's section 5.1), learned by sentencepiece."""

from __future__ import annotations

import io
import os
from itertools import islice
from pathlib import Path

import sentencepiece

from examples.translation.data import BOS, EOS, PAD, UNK, CorpusError
from examples.translation.lines import count_lines, iter_lines

# Subwords are learned from at most this many lines, taken evenly from all the text.
MAX_LINES = 2_000_000


def learn_subwords(paths: list[Path], vocab_size: int, coverage: float) -> bytes:
    """A sentencepiece BPE model of the text files at `paths`, as the bytes of its file.

    coverage: share of the characters in the text that are in the vocabulary.
    Raises CorpusError where the text does not give that many subwords, or has more characters.
    """
    total = sum(map(count_lines, paths))
    step = -(-total // MAX_LINES)
    sentences = (line for path in paths for line in islice(iter_lines(path), 0, None, step))
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=sentences,
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            character_coverage=coverage,
            # `clean` has normalised the text, and what NFKC changes ("…", "½") the test set keeps.
            normalization_rule_name="identity",
            max_sentence_length=1 << 16,
            num_threads=os.cpu_count() or 1,
            pad_id=PAD,
            bos_id=BOS,
            eos_id=EOS,
            unk_id=UNK,
            minloglevel=2,
        )
    except (RuntimeError, ValueError) as error:
        reason = str(error).strip().rpartition("] ")[2]
        raise CorpusError(f"can't learn {vocab_size} subwords (--vocab-size): {reason}") from error
    return model.getvalue()
