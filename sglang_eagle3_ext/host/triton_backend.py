"""SGLang's Triton attention backend with target verification by this package's kernels.

Made by ``host.verify`` for EAGLE-3 targets that the kernels can serve; what is assumed of SGLang stands there. All
but verification, and every buffer that is not named here, is SGLang's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

from sglang_eagle3_ext.errors import UnsupportedError
from sglang_eagle3_ext.host.verify import tree_verify_for

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


class TreeVerifyTritonBackend(TritonAttnBackend):
    """The backend ``triton`` of an EAGLE-3 target.

    Attributes:
        tree_verify: the kernels' side of verification.
    """

    num_draft_tokens: int | None

    def __init__(self, model_runner: ModelRunner) -> None:
        super().__init__(model_runner)
        self.tree_verify = tree_verify_for(model_runner)
        # The seam: what verifies is called with the arguments of the extend kernel, and says whether it ran.
        self.use_verify_shared_kv = False
        self.use_verify_splitkv = True
        self.verify_splitkv_fwd = torch.compiler.disable(self.tree_verify.attend)
        self._verify_mask = self.tree_verify.mask

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Prepare a pass without a graph."""
        super().init_forward_metadata(forward_batch)
        if forward_batch.forward_mode.is_target_verify():
            made = self.forward_metadata
            self.tree_verify.prepare(made.kv_indptr, made.window_kv_indptr, made.custom_mask, made.max_extend_len)

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> None:
        """Prepare the capture or a replay of a graph, whose kernels read the same buffers each time."""
        verifies, spec_info = forward_batch.forward_mode.is_target_verify(), forward_batch.spec_info
        if verifies and spec_info is not None:
            # What SGLang brings along otherwise, to a capture or for an idle rank, is a placeholder of another size.
            spec_info.custom_mask = self.tree_verify.mask.buffer
        super().init_forward_metadata_out_graph(forward_batch, in_capture)
        if verifies:
            self._prepare_graph(len(forward_batch.req_pool_indices), spec_info)

    def update_verify_buffers_to_fill_after_draft(self, spec_info: Any, cuda_graph_bs: int | None) -> None:
        """Read the tree of a replay, once the draft has built it; the plan of the chunks was made before."""
        if cuda_graph_bs is not None:
            self.tree_verify.read_tree(
                self.kv_indptr[: cuda_graph_bs + 1],
                self.tree_verify.mask.buffer,
                self._target_verify_num_tokens_per_req(spec_info),
            )

    def _prepare_graph(self, requests: int, spec_info: Any) -> None:
        # A replay makes no metadata: a graph knows addresses, and these are theirs.
        windows = self.window_kv_indptr
        self.tree_verify.prepare(
            self.kv_indptr[: requests + 1],
            None if windows is None else windows[: requests + 1],
            self.tree_verify.mask.buffer,
            self._target_verify_num_tokens_per_req(spec_info),
        )

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int, *args: Any, **kwargs: Any) -> None:
        """Allocate SGLang's static buffers, except for the mask over the context, of which no kernel of ours reads."""
        num_draft_tokens, self.num_draft_tokens = self.num_draft_tokens, None
        super().init_cuda_graph_state(max_bs, max_num_tokens, *args, **kwargs)
        self.num_draft_tokens = num_draft_tokens
        self._verify_mask = self.tree_verify.mask

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        sinks: torch.Tensor | None = None,
        score_mod: Any = None,
        aux_tensors: Any = None,
    ) -> Any:
        """Run SGLang's pass; a layer with a score function of its own goes past the seam, for which there is no mask.

        Raises:
            UnsupportedError: such a layer in a verify pass.
        """
        if score_mod is not None and forward_batch.forward_mode.is_target_verify():
            raise UnsupportedError(
                f"attention layer {layer.layer_id}: got a score function of its own in a verify pass; expected none, "
                "since the verify kernels take none. Serve this target with EAGLE3_EXT_KERNELS=off."
            )
        return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache, sinks, score_mod, aux_tensors)
