"""Products of transformers' modules on our own CPU kernels: many times as fast as torch's for a few rows."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from draftwood.model.packing import Arena, Packer
from draftwood.model.universal_folder import UniversalCheckpoint
from draftwood.model.weights import GROUP
from draftwood.ops.native import Kernels, structs


class NativeLinear(nn.Module):
    """x W + b with packed weights, of float32."""

    def __init__(self, library: Kernels, matrix: structs.Matrix, linear: nn.Linear, arena: Arena) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._library, self._matrix = library, matrix
        self._arena = arena  # where the matrix lies

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        rows = x.reshape(-1, self.in_features).contiguous()
        out, threads = rows.new_empty(len(rows), self.out_features), torch.get_num_threads()
        barrier = torch.zeros(1 + threads, 8, dtype=torch.int64)
        self._library.dw_linear(
            ctypes.byref(self._matrix), rows.data_ptr(), len(rows), out.data_ptr(), self.out_features, threads,
            barrier.data_ptr(),
        )  # fmt: skip
        return out.view(*x.shape[:-1], self.out_features)


def pack_products(modules: nn.Module, checkpoint: UniversalCheckpoint, library: Kernels) -> Arena:
    """Put our products in place of torch's, one by one; those that share their weights with others stay."""
    arena = Arena()
    packer = Packer(library, checkpoint, arena, lambda *_: None)
    for parent, name, linear in list(_products(modules)):
        bias = None if linear.bias is None else linear.bias.data
        parent.register_module(name, NativeLinear(library, packer.dense(linear.weight.data, bias), linear, arena))
    return arena


def _products(modules: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    owners: dict[int, int] = {}
    for part in modules.modules():
        for weight in part.parameters(recurse=False):
            owners[id(weight)] = owners.get(id(weight), 0) + 1
    for parent in list(modules.modules()):
        for name, child in parent.named_children():
            if not isinstance(child, nn.Linear) or type(child) is not nn.Linear or child.in_features % GROUP:
                continue  # subclasses compute something else
            if owners[id(child.weight)] == 1 and not (child._forward_hooks or child._forward_pre_hooks):
                yield parent, name, child
