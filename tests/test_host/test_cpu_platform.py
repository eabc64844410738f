"""The CPU platform in a worker process of SGLang: what is installed, what is refused, what it costs."""

from __future__ import annotations

import inspect
import json
import os
import pkgutil
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_eagle3_ext.errors import UnsupportedError
from sglang_eagle3_ext.host import contract, cpu

pytestmark = pytest.mark.host

WORKER = """
import json, sys
from sglang.srt.plugins import load_plugins
load_plugins()
heavy_in_launcher = sorted(m for m in sys.modules if m.startswith("sglang_eagle3_ext.host.cpu."))
from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES
from sglang.srt.platforms import current_platform
import sglang.srt.model_executor.model_runner as model_runner
current_platform.init_backend()  # a second time: must change nothing
from sglang.kernels.fused_op import BaseFusedOp
from sglang.kernels.ops.speculative import cache_locs, eagle, spec_tree
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.mem_cache import allocation
from sglang.srt.speculative import eagle_utils, eagle_worker_common, spec_utils
from sglang_eagle3_ext.host.cpu import hooks
def unwrap(f):
    return getattr(f, "__wrapped__", None) is not None
print(json.dumps({
    "platform": type(current_platform).__name__,
    "out_of_tree": current_platform.is_out_of_tree(),
    "choices": ATTENTION_BACKEND_CHOICES.count("eagle3_cpu"),
    "backend": ATTENTION_BACKENDS["eagle3_cpu"].__name__,
    "heavy_in_launcher": heavy_in_launcher,
    "replaced": {t: unwrap(__import__("pkgutil").resolve_name(t)) for t in hooks.REPLACED},
    "propagated": [
        unwrap(eagle_worker_common.fill_bonus_tokens_func),
        unwrap(eagle_worker_common.assign_draft_cache_locs_contiguous_func),
        unwrap(eagle_utils.build_tree_kernel_efficient_func),
        unwrap(eagle_utils.verify_tree_greedy_func),
        unwrap(spec_utils.fill_front_out_cache_loc_func),
        unwrap(spec_utils.fill_accept_out_cache_loc_func),
    ],
    "filled": {n: getattr(eagle_utils, n).__module__ for m in hooks.ABSENT.values() for n in m},
    "none_survives": eagle_utils._PREPARE_FOR_VERIFY_DEPS is None,
    "compiled": hasattr(spec_utils._select_top_k_tokens_later, "_torchdynamo_orig_callable"),
    "oot": sorted(c.__name__ for c in BaseFusedOp._oot_forward_registry["native"]),
}))
"""


@pytest.fixture(scope="module")
def worker() -> dict[str, Any]:
    """Do what SGLang does at the start of a worker process, in a fresh one."""
    environment = os.environ | {"SGLANG_PLATFORM": "eagle3_ext", "EAGLE3_EXT": "off"}
    environment.pop("TORCHDYNAMO_DISABLE", None)
    run = subprocess.run([sys.executable, "-c", WORKER], env=environment, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.strip().splitlines()[-1])


def test_a_worker_has_everything_installed_once(worker: dict[str, Any]) -> None:
    assert worker["platform"] == "Eagle3CpuPlatform"
    assert worker["out_of_tree"]
    assert worker["choices"] == 1
    assert worker["backend"] == "Eagle3CpuAttention"
    assert all(worker["replaced"].values()), worker["replaced"]
    assert all(worker["propagated"])
    assert set(worker["filled"].values()) == {"sglang_eagle3_ext.host.cpu.tree"}
    assert {"RMSNorm", "RotaryEmbedding", "SiluAndMul"} <= set(worker["oot"])
    assert worker["none_survives"], "an operator was put where other modules hold None"


def test_nothing_is_compiled_behind_the_users_back(worker: dict[str, Any]) -> None:
    assert not worker["compiled"]


def test_the_launcher_pays_for_no_more_than_the_platform(worker: dict[str, Any]) -> None:
    assert set(worker["heavy_in_launcher"]) <= {"sglang_eagle3_ext.host.cpu.platform"}


@pytest.mark.parametrize("row", contract.CPU_ROWS, ids=lambda row: row.target)
def test_every_symbol_of_the_contract_is_there(row: contract.Row) -> None:
    owner, _, name = row.target.rpartition(".")
    found = getattr(pkgutil.resolve_name(owner), name)
    if row.parameters:
        assert set(row.parameters) <= set(inspect.signature(found).parameters), row.target


def test_overrides_accept_what_they_override() -> None:
    """An override must take every argument of what it overrides, under the same name."""
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.platforms.interface import SRTPlatform

    from sglang_eagle3_ext.host.cpu.attention import Eagle3CpuAttention
    from sglang_eagle3_ext.host.cpu.platform import Eagle3CpuPlatform

    for ours, theirs in ((Eagle3CpuPlatform, SRTPlatform), (Eagle3CpuAttention, AttentionBackend)):
        for name, override in vars(ours).items():
            original = getattr(theirs, name, None)
            if callable(override) and callable(original) and not name.startswith("__"):
                assert list(inspect.signature(override).parameters) == list(inspect.signature(original).parameters), (
                    name
                )


def test_replacements_take_the_arguments_of_what_they_replace() -> None:
    from sglang_eagle3_ext.host.cpu import hooks

    for target, operator in hooks.REPLACED.items():
        original = inspect.unwrap(pkgutil.resolve_name(target))
        assert list(inspect.signature(operator).parameters) == list(inspect.signature(original).parameters), target


def settings(**changes: Any) -> SimpleNamespace:
    """Make the server settings that the platform looks at."""
    served: dict[str, Any] = {"page_size": None, "kv_cache_dtype": "auto", "speculative_use_rejection_sampling": False}
    served |= {"attention_backend": None, "tp_size": 1, "pp_size": 1, "dp_size": 1}
    served |= {"ep_size": 1, "moe_dense_tp_size": None, "moe_a2a_backend": "none"}
    return SimpleNamespace(**(served | changes))


@pytest.mark.parametrize(
    ("resolved", "served"),
    [(None, cpu.BACKEND), ("intel_amx", cpu.BACKEND), (cpu.BACKEND, cpu.BACKEND), ("triton", "triton")],
)
def test_a_backend_that_nobody_named_is_ours(
    resolved: str | None, served: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.platforms.device_mixin import CpuArchEnum

    from sglang_eagle3_ext.host.cpu.platform import Eagle3CpuPlatform

    platform = Eagle3CpuPlatform()
    monkeypatch.setattr(platform, "cpu_arch", CpuArchEnum.X86)
    chosen = settings(attention_backend=resolved)
    platform.apply_server_args_defaults(chosen)
    assert chosen.attention_backend == served


def test_settings_that_would_be_served_wrongly_are_refused_together() -> None:
    from sglang_eagle3_ext.host.cpu.platform import Eagle3CpuPlatform

    platform = Eagle3CpuPlatform()
    platform.apply_server_args_defaults(settings())
    platform.apply_server_args_defaults(settings(page_size=1, kv_cache_dtype="bfloat16"))
    dealt = {"ep_size": 2, "moe_dense_tp_size": 1, "moe_a2a_backend": "deepep"}
    wrong = settings(page_size=64, kv_cache_dtype="fp8_e5m2", speculative_use_rejection_sampling=True, **dealt)
    with pytest.raises(UnsupportedError) as caught:
        platform.apply_server_args_defaults(wrong)
    lines = str(caught.value).splitlines()
    assert [line.split(":")[0] for line in lines] == [
        "--page-size",
        "--kv-cache-dtype",
        "--ep-size",
        "--moe-dense-tp-size",
        "--moe-a2a-backend",
        "--speculative-use-rejection-sampling",
    ]


@pytest.mark.parametrize(
    ("cores", "ranks", "shares"),
    [([0, 1], 2, "0|1"), ([2, 3, 5, 7, 8], 2, "2,3|5,7"), ([4], 3, "4|4|4"), ([0, 1], 3, "0|1|0"), ([0, 1], 1, "0,1")],
)
def test_cores_are_shared_out_between_ranks(cores: list[int], ranks: int, shares: str) -> None:
    from sglang_eagle3_ext.host.cpu.platform import share_cores

    assert share_cores(cores, ranks) == shares


@pytest.mark.parametrize(("given", "kept"), [(None, True), ("7|8", False)])
def test_ranks_get_cores_unless_the_user_shared_them_out(
    given: str | None, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang_eagle3_ext.host.cpu.platform import Eagle3CpuPlatform, share_cores

    name = "SGLANG_CPU_OMP_THREADS_BIND"
    monkeypatch.setenv(name, given or "")
    if given is None:
        monkeypatch.delenv(name)
    Eagle3CpuPlatform().apply_server_args_defaults(settings())
    assert os.environ.get(name) == given
    Eagle3CpuPlatform().apply_server_args_defaults(settings(tp_size=2))
    assert os.environ[name] == (share_cores(sorted(os.sched_getaffinity(0)), 2) if kept else given)


def test_a_gpu_in_sight_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_eagle3_ext.host.cpu.platform import Eagle3CpuPlatform

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(UnsupportedError, match="Set CUDA_VISIBLE_DEVICES="):
        Eagle3CpuPlatform().apply_server_args_defaults(settings())


def test_the_device_is_named_as_settings_spell_it() -> None:
    from sglang_eagle3_ext.host.cpu.platform import Eagle3CpuPlatform

    assert Eagle3CpuPlatform().get_device() == "cpu"


def layer(**changes: Any) -> SimpleNamespace:
    """Make an attention layer that asks for nothing special."""
    from sglang.srt.layers.radix_attention import AttentionType

    plain = {"layer_id": 3, "sliding_window_size": -1, "logit_cap": 0.0, "is_cross_attention": False}
    return SimpleNamespace(**(plain | {"attn_type": AttentionType.DECODER, "xai_temperature_len": -1} | changes))


def test_other_kinds_of_attention_are_refused() -> None:
    from sglang.srt.layers.radix_attention import AttentionType

    from sglang_eagle3_ext.host.cpu.attention import unsupported_layer

    assert unsupported_layer(layer(), {}) == []
    assert unsupported_layer(layer(), {"sinks": None}) == []
    for change in (
        {"sliding_window_size": 0},
        {"sliding_window_size": 4095},
        {"logit_cap": 50.0},
        {"is_cross_attention": True},
        {"attn_type": AttentionType.ENCODER_ONLY},
        {"xai_temperature_len": 8},
    ):
        assert len(unsupported_layer(layer(**change), {})) == 1, change
    (problem,) = unsupported_layer(layer(), {"sinks": torch.ones(3)})
    assert "attention layer 3" in problem
    assert "'sinks'" in problem


def test_models_with_other_attention_are_refused() -> None:
    from sglang_eagle3_ext.host.cpu.attention import unsupported_model

    hf_config = SimpleNamespace(architectures=["DeepseekV3ForCausalLM"])
    runner = SimpleNamespace(
        model_config=SimpleNamespace(model_path="some/model", hf_config=hf_config),
        use_mla_backend=False,
        sliding_window_size=None,
    )
    assert unsupported_model(runner) == []
    runner.use_mla_backend = True
    assert unsupported_model(runner) == []
    hf_config.index_topk, runner.sliding_window_size = 2048, 4096
    problems = unsupported_model(runner)
    assert len(problems) == 2
    assert all(problem.startswith("some/model: ") for problem in problems)


def test_the_pool_moves_slots_and_launches_nothing() -> None:
    from sglang_eagle3_ext.host.cpu.kv_pool import CpuKVPool

    pool = CpuKVPool(
        size=30,
        page_size=1,
        dtype=torch.float32,
        head_num=2,
        head_dim=4,
        layer_num=3,
        device="cpu",
        enable_memory_saver=False,
        enable_kv_cache_copy=True,
    )
    buffers = [*pool.k_buffer, *pool.v_buffer]
    for number, buffer in enumerate(buffers):
        buffer.copy_(torch.arange(buffer.numel()).view(buffer.shape) + 10000 * number)
    before = [buffer.clone() for buffer in buffers]
    # Overlapping: 5 is read after it would have been overwritten; zeros pad both lists.
    targets, sources = torch.tensor([4, 5, 9, 0, 0]), torch.tensor([5, 7, 9, 0, 0])
    pool.move_kv_cache(targets, sources)
    for old, new in zip(before, buffers, strict=True):
        expected = old.clone()
        expected[4], expected[5] = old[5], old[7]
        assert torch.equal(new, expected)
    pool.move_kv_cache(torch.empty(0, dtype=torch.long), torch.empty(0, dtype=torch.long))
