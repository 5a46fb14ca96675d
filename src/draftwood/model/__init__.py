"""Checkpoints, tokenizers and the decoder."""
