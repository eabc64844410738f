"""Packed weights in SGLang's linear layers, heads, and the plain ``torch.nn.Linear`` of a draft."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import torch
from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod, UnquantizedLinearMethod
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead

from sglang_eagle3_ext.host.cpu.linear import PackedWeight, pack

logger = logging.getLogger(__name__)


class _PackedApply:
    """``apply`` over a packed copy of the layer's weight.

    The copy is made again when the layer holds another weight (a draft that shares the target's head
    gets it after loading) and when SGLang says that weights were loaded.
    """

    _packed: PackedWeight | None = None
    _packed_from: torch.Tensor | None = None

    def process_weights_after_loading(self, layer: Any) -> None:
        """Pack the layer's weight as it is now."""
        self._packed_from = layer.weight
        self._packed = pack(layer.weight)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Compute ``x weight^T + bias`` over the last axis of ``x``."""
        weight = layer.weight
        if weight is not self._packed_from:
            self.process_weights_after_loading(layer)
        packed: Any = self._packed
        if x.dim() == 2:
            return packed(x, weight, bias)
        return packed(x.reshape(-1, x.shape[-1]), weight, bias).view(*x.shape[:-1], -1)

    @property
    def packing(self) -> str:
        """Name how the weight is packed."""
        return self._packed.name if self._packed else "unpacked"


class PackedLinearMethod(_PackedApply, UnquantizedLinearMethod):
    """The linear method of an unquantised layer, packed."""


class PackedEmbeddingMethod(_PackedApply, UnquantizedEmbeddingMethod):
    """The method of an unquantised head, packed; looking tokens up still reads the weight itself."""


class PackedLinear(torch.nn.Linear):
    """A ``torch.nn.Linear`` with the same parameters under the same names, packed."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        torch.nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.quant_method = PackedLinearMethod()  # where SGLang looks for who repacks after an update

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.quant_method.apply(self, input, self.bias)


def pack_model(model: torch.nn.Module) -> None:
    """Pack every unquantised linear layer and the head of a model, in place, and log how.

    A model whose logits are to be computed in float32 keeps its head as it is.

    Args:
        model: a model of SGLang's, target or draft, with its weights loaded.
    """
    packings: Counter[str] = Counter()
    for name, module in list(model.named_modules()):
        method = _method_for(model, module)
        if method is None:
            continue
        if isinstance(method, PackedLinear):
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, method)
            method = method.quant_method
        else:
            module.quant_method = method
        method.process_weights_after_loading(module)
        packings[method.packing] += 1
    summary = ", ".join(f"{count} {packing}" for packing, count in sorted(packings.items()))
    logger.info("%s: packed linear layers: %s", type(model).__name__, summary or "none")


def _method_for(
    model: torch.nn.Module, module: torch.nn.Module
) -> PackedLinearMethod | PackedEmbeddingMethod | PackedLinear | None:
    """Choose what serves a module packed; ``None`` for modules that stay as they are."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.dim() != 2 or not weight.is_floating_point():
        return None
    if type(module) is torch.nn.Linear:
        return PackedLinear(module)
    current: Any = getattr(module, "quant_method", None)
    if type(current) is UnquantizedLinearMethod:
        return PackedLinearMethod()
    is_head = isinstance(module, ParallelLMHead) or module is getattr(model, "lm_head", None)
    if is_head and type(current) is UnquantizedEmbeddingMethod:
        processor = getattr(model, "logits_processor", None)
        return None if getattr(processor, "use_fp32_lm_head", False) else PackedEmbeddingMethod()
    return None
