"""The paper's Transformer on real text: prepare, train, translate, score."""
