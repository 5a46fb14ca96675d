"""Reader of Kangaroo's adapters: the target's layers and its head are not among the tensors."""

from __future__ import annotations

from draftwood.model.config import ModelConfig
from draftwood.nets.embeddings import TargetEmbeddings
from draftwood.nets.kangaroo import Kangaroo
from draftwood.nets.layouts.common import (
    Tensors,
    check_embedding,
    check_equal,
    draft_config,
    misfit,
    read_head,
    read_vocabulary,
    whole_number,
)
from draftwood.nets.layouts.files import DrafterFiles

EXIT_LAYER = 2  # of all published ones, whose files do not say it


def kangaroo(files: DrafterFiles, target: ModelConfig, words: TargetEmbeddings) -> Kangaroo:
    """`layers.{i}.input_layernorm`, `layers.{i}.self_attn.*` and `norm`; and ours, which says where it exits."""
    tensors = Tensors(files, lambda name: name)
    config = draft_config(files, files.config, target, tensors)
    # Its keys and values lie beside those of the target's own layers.
    check_equal(files, "number of key heads", config.num_kv_heads, target.num_kv_heads)
    check_equal(files, "head size", config.head_dim, target.head_dim)
    exit_layer = whole_number(files, {"exit_layer": EXIT_LAYER, **files.config}, "exit_layer")
    if exit_layer > target.num_layers:
        raise misfit(files, f"it exits after layer {exit_layer}, and the target has {target.num_layers}")
    net = Kangaroo(config, exit_layer, read_head(tensors, words, read_vocabulary(tensors, files.config, target)))
    tensors.fill(net, skip=("head.",))
    check_embedding(tensors, words)
    tensors.finish()
    return net
