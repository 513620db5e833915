"""Memory and time of a run before it starts, against figures worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flows.cli.plan import show
from flows.cli.resources import memory_verdicts
from ratchet.config.load import load_config
from ratchet.config.run import GrpoConfig, LoraConfig, OpdConfig, SftConfig
from ratchet.models.check import SEEDLING, num_parameters, packaged_model_dir
from ratchet.models.shape import ModelShape, model_folder, shape_of
from ratchet.pipeline.request import Request
from ratchet.resources import device
from ratchet.resources.device import Device
from ratchet.resources.memory import LOGIT_COPIES, Estimate, Part, Sampling, cache_gib, whole_logits
from ratchet.resources.memory_check import Fit, Wanted, judge, vllm_shortage
from ratchet.resources.pace import pace
from ratchet.store.store import Store
from tests.support.made_up import artifact

QWEN = ModelShape(
    num_parameters=494_032_768,
    vocab_size=151_936,
    hidden_size=896,
    intermediate_size=4864,
    num_layers=24,
    num_heads=14,
    num_kv_heads=2,
    head_dim=64,
    adapted_width=24 * (2 * (896 + 896) + 2 * (896 + 128) + 3 * (896 + 4864)),
)
"""Qwen2.5-0.5B."""
GPU = Device("a GPU", True, 24 * 10**9, 24 * 10**9)
CPU = Device("this machine's memory", False, 24 * 10**9, 20 * 10**9)


def wanted(
    section: GrpoConfig | SftConfig | OpdConfig,
    name: str = "grpo",
    *,
    dtype: str = "float32",
    longest: int = 512,
    engine: str = "vllm",
    on: Device = CPU,
    shape: ModelShape = QWEN,
    teacher: ModelShape | None = None,
    dev_tokens: int = 0,
) -> Wanted:
    return Wanted(
        name=name,
        section=section,
        dtype=dtype,  # type: ignore[arg-type]
        longest=longest,
        prompt_tokens=128,
        sampling=Sampling(engine, 128),
        shape=shape,
        device=on,
        teacher=teacher,
        dev_tokens=dev_tokens,
    )


def sizes(estimate: Estimate) -> dict[str, int]:
    return {part.what: part.num_bytes for part in estimate.parts}


def test_whole_logits_over_a_large_vocabulary_take_50_gb() -> None:
    one = whole_logits(8 * 2048, 151_936)
    assert one == 8 * 2048 * 151_936 * 4 == 9_957_277_696
    assert one * LOGIT_COPIES == pytest.approx(50e9, rel=0.01)
    # which is why TRL's tiles matter: on a GPU they are 4,096 tokens by 32,768 rows.
    parts = wanted(GrpoConfig(), longest=2048, on=GPU).estimate().parts
    (tiles,) = [part for part in parts if part.what == "log-probabilities"]
    assert tiles.num_bytes == 4096 * 32_768 * 4 + 8 * 2048 * 896 * 4
    assert "whole logits would be 10.0 GB a copy, 5 copies" in tiles.why


def test_weights_gradients_and_adamw_are_exact() -> None:
    full = sizes(wanted(GrpoConfig(lora=LoraConfig(enabled=False))).estimate())
    assert full["weights"] == full["gradients"] == 494_032_768 * 4
    assert full["AdamW"] == 494_032_768 * 8
    lora = sizes(wanted(GrpoConfig(), dtype="bfloat16").estimate())
    assert lora["weights"] == 494_032_768 * 2
    # PEFT says the same of rank 16 on all linear layers: 8,798,208 parameters
    assert lora["adapter"] == lora["gradients"] == 8_798_208 * 4
    assert lora["AdamW"] == 8_798_208 * 8
    masters = sizes(wanted(GrpoConfig(lora=LoraConfig(enabled=False)), dtype="bfloat16").estimate())
    assert (masters["weights"], masters["bfloat16 copy"]) == (494_032_768 * 4, 494_032_768 * 2)
    with_reference = GrpoConfig(lora=LoraConfig(enabled=False), beta=0.1)
    assert sizes(wanted(with_reference).estimate())["reference"] == 494_032_768 * 4
    assert "reference" not in sizes(wanted(GrpoConfig(beta=0.1)).estimate())  # the base is it


def test_what_the_sampler_takes() -> None:
    # 24 layers × 2 heads × 64 × (key and value) × 4 bytes = 24,576 bytes a token
    assert QWEN.kv_token_bytes(4) == 24_576
    on_cpu = sizes(wanted(GrpoConfig()).estimate())
    # 64 sequences × 640 tokens × 24,576 = 0.94 GiB
    assert on_cpu["vLLM's cache"] == 2**30
    assert cache_gib(QWEN, 128, 2048, 4, 24 * 10**9) == 2  # an eighth of the memory at most
    assert on_cpu["vLLM's weights"] == 494_032_768 * 4
    assert sizes(wanted(GrpoConfig(), on=GPU).estimate())["vLLM"] == int(0.35 * 24e9)
    apart = GrpoConfig(vllm_mode="server", vllm_server_device="1")
    assert "vLLM" not in sizes(wanted(apart, on=GPU).estimate())
    own = sizes(wanted(GrpoConfig(), engine="transformers").estimate())
    assert own["generation"] == 64 * 640 * 24_576 + 64 * 151_936 * 12
    two = sizes(wanted(GrpoConfig(processes=2)).estimate())
    assert two["weights"] == 2 * on_cpu["weights"]  # two copies in one memory
    assert two["vLLM's cache"] == 2 * on_cpu["vLLM's cache"]
    assert sizes(wanted(GrpoConfig(processes=2), on=GPU).estimate())["weights"] == 494_032_768 * 4


def test_activations_by_hand() -> None:
    # 8 × 640 tokens, 24 layers; widths 8 × 896 + 5 × 896 + 4 × 128 + 4 × 4864 = 31,616 numbers
    on_cpu = sizes(wanted(GrpoConfig()).estimate())
    assert on_cpu["activations"] == 8 * 640 * 24 * 31_616 * 4
    # with checkpoints: an input per layer, and one whole layer with its attention weights
    on_gpu = sizes(wanted(GrpoConfig(), dtype="bfloat16", on=GPU).estimate())
    assert on_gpu["activations"] == 8 * 640 * (896 * 2 * 24 + 31_616 * 3 + 640 * 14 * 6)


def test_surely_too_big_is_refused_and_doubt_is_told() -> None:
    full = GrpoConfig(lora=LoraConfig(enabled=False), micro_batch_size=64)
    found = judge(wanted(full), 6 * 10**9)
    assert found.fit is Fit.NO
    assert "surely too big. Largest: activations 124.3 GB (64 × 640 tokens, 24 lay" in found.words()
    found = judge(wanted(GrpoConfig(micro_batch_size=16)), 20 * 10**9)
    assert found.fit is Fit.PERHAPS
    assert [line.split(" (")[0] for line in found.advice] == [
        "grpo.micro_batch_size = 4",
        "sampler.max_completion_tokens = 64",
    ]
    for line in found.advice:
        assert float(line.split(" (")[1].removesuffix(" GB)")) <= 20
    assert judge(wanted(GrpoConfig(micro_batch_size=4)), 20 * 10**9).fit is Fit.SURELY
    # 24 GB, fp32 full fine-tuning of 0.5B beside vLLM: LoRA or a smaller share
    found = judge(wanted(GrpoConfig(lora=LoraConfig(enabled=False)), on=GPU), 16 * 10**9)
    assert any(line.startswith("grpo.lora.enabled = true") for line in found.advice)
    tiny = judge(wanted(GrpoConfig()), 10**9)
    assert "no single setting makes it fit" in tiny.words()


def test_a_share_that_cannot_hold_the_model_is_refused() -> None:
    small = GrpoConfig(vllm_memory_utilization=0.08)
    words = vllm_shortage(wanted(small, on=GPU))
    # 1.976 GB of weights and 640 × 24,576 bytes of cache of 24 GB
    assert words is not None
    assert "gives vLLM 1.9 GB, and weights and one sequence take 2.0 GB" in words
    assert words.endswith("raise it to at least 0.08")
    assert vllm_shortage(wanted(GrpoConfig(), on=GPU)) is None
    assert vllm_shortage(wanted(small)) is None  # the share is of a GPU


def test_distillation_holds_a_teacher_and_sft_no_sampler() -> None:
    opd = sizes(wanted(OpdConfig(), "opd", dtype="bfloat16", teacher=QWEN).estimate())
    assert opd["teacher"] == 494_032_768 * 2
    # student in float32 whatever the run's number format, with autocast's copy
    assert opd["weights"] == 494_032_768 * 4
    assert opd["bfloat16 copy"] == 494_032_768 * 2
    on_gpu = sizes(wanted(OpdConfig(), "opd", on=GPU).estimate())
    assert on_gpu["vLLM"] == int(0.3 * 24e9)
    parts = wanted(OpdConfig(), "opd", teacher=QWEN).estimate().parts
    assert sum(part.what == "log-probabilities" for part in parts) == 2
    sft = wanted(SftConfig(), "sft", longest=1024).estimate()
    assert not {"vLLM's weights", "generation"} & set(sizes(sft))


def test_a_warm_start_answers_dev_questions_with_its_own_weights() -> None:
    # 100 dev questions by default, 128 at once at most; prompts of 128, answers of 512 tokens
    answered = 100 * 640 * 24_576 + 100 * 151_936 * 12
    sft = wanted(SftConfig(), "sft", longest=1024, dev_tokens=512)
    assert sizes(sft.estimate())["generation"] == answered
    assert sizes(sft.estimate(4))["generation"] == 100 * 160 * 24_576 + 100 * 151_936 * 12
    many = wanted(SftConfig(dev_questions=1000), "sft", longest=1024, dev_tokens=512)
    assert sizes(many.estimate())["generation"] == 128 * 640 * 24_576 + 128 * 151_936 * 12
    none = wanted(SftConfig(dev_questions=0), "sft", longest=1024, dev_tokens=512)
    assert "generation" not in sizes(none.estimate())
    opd = wanted(OpdConfig(), "opd", dev_tokens=512)  # beside vLLM
    assert sizes(opd.estimate())["generation"] == answered
    assert "vLLM's weights" in sizes(opd.estimate())
    # Without vLLM the batch and the dev questions are written one after the other.
    own = wanted(OpdConfig(batch_size=16), "opd", engine="transformers", dev_tokens=512).estimate()
    assert [part.num_bytes for part in own.parts if part.what == "generation"] == [answered]


def test_a_hub_model_is_there_with_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = tmp_path / "cached"
    cached.mkdir()
    seedling = packaged_model_dir(SEEDLING)
    (cached / "config.json").symlink_to(seedling / "config.json")
    monkeypatch.setattr(
        "huggingface_hub.try_to_load_from_cache", lambda *args, **kwargs: str(cached / args[1])
    )
    monkeypatch.setattr(device, "find_device", lambda: CPU)
    assert model_folder("a/b", None) is None
    hub = load_config("demo", ["model.path=a/b"])
    assert memory_verdicts(hub, Store(tmp_path), {"grpo"}) == (
        [],
        "memory: unknown until a/b is on this machine",
    )
    taught = load_config("demo", ["warmstart.method=opd", "opd.teacher=a/b"])
    both = {"warmstart_opd", "grpo"}
    verdicts, unknown = memory_verdicts(taught, Store(tmp_path), both)
    assert [found.wanted.name for found in verdicts] == ["grpo"]
    assert unknown == "Memory of opd: unknown until a/b is on this machine"
    (cached / "model.safetensors").symlink_to(seedling / "model.safetensors")
    assert model_folder("a/b", None) == cached
    verdicts, unknown = memory_verdicts(taught, Store(tmp_path), both)
    assert [found.wanted.name for found in verdicts] == ["opd", "grpo"]
    assert unknown is None


def test_shape_of_the_seedling() -> None:
    folder = model_folder(SEEDLING, None)
    assert folder is not None
    shape = shape_of(folder)
    assert shape is not None
    assert shape.num_parameters == num_parameters(packaged_model_dir(SEEDLING))
    assert (shape.num_layers, shape.vocab_size > 100) == (3, True)
    assert model_folder("someone/nowhere", None) is None


def test_memory_of_the_machine_and_of_a_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: 600 kB\n")
    monkeypatch.setattr(device, "MEMINFO", meminfo)
    monkeypatch.setattr(device, "CGROUP", tmp_path)
    monkeypatch.setattr(device, "PROGRAM", "no-such-program")
    found = device.find_device()
    assert found is not None
    assert (found.total, found.free, found.is_gpu) == (1_024_000, 614_400, False)
    (tmp_path / "memory.max").write_text("500000\n")
    (tmp_path / "memory.current").write_text("400000\n")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 100000\n")
    found = device.find_device()
    assert found is not None
    assert (found.total, found.free) == (500_000, 200_000)


def test_gpus_are_asked_for_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "smi"
    fake.write_text(
        "#!/bin/sh\necho 'NVIDIA A, GPU-a1f, 80, 20'\necho 'NVIDIA B, GPU-a2e, 40, 30'\n"
    )
    fake.chmod(0o755)
    monkeypatch.setattr(device, "PROGRAM", str(fake))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert device.find_device() == Device("NVIDIA A", True, 80 * 2**20, 20 * 2**20)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    assert device.find_device() == Device("NVIDIA B", True, 40 * 2**20, 30 * 2**20)
    assert [one.name for one in device.visible_gpus()] == ["NVIDIA B", "NVIDIA A"]
    for hides_all in ("", "-1", "NoDevFiles", "2", "GPU-a"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hides_all)
        assert device.visible_gpus() == []
    for named, seen in (
        (" 1 , 0", "BA"),
        ("1,-1,0", "B"),
        ("0,7,1", "A"),
        ("GPU-a2e,GPU-a1", "BA"),
        ("GPU-a2e,GPU-b,GPU-a1f", "B"),
        ("MIG-4c5", "AB"),  # a slice of one of them
    ):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
        assert "".join(one.name[-1] for one in device.visible_gpus()) == seen


def test_device_names_accelerators_before_the_processor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "smi"
    fake.write_text(
        "#!/bin/sh\n"  # nothing is told of memory that is shared with the processor
        "case $1 in *memory*) rest=', GPU-a, [N/A], [N/A]';; esac\n"
        'echo "NVIDIA H200$rest"; echo "NVIDIA H200$rest"\n'
    )
    fake.chmod(0o755)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")  # a run may be shown one, the machine has two
    monkeypatch.setattr(device, "PROGRAM", str(fake))
    device.device_description.cache_clear()
    assert device.device_description() == "2 x NVIDIA H200"
    monkeypatch.setattr(device, "PROGRAM", "no-such-program")
    device.device_description.cache_clear()
    assert device.device_description().endswith("cores")
    device.device_description.cache_clear()


def test_pace_is_that_of_the_newest_run_of_the_model(tmp_path: Path) -> None:
    config = load_config("demo", ['sampler.engine="transformers"'])
    running = {"presample", "grpo", "report"}
    assert [
        line.split(":")[1].split(",")[0] for line in pace(config, Store(tmp_path), running, 9)
    ] == [
        " unknown",
        " unknown",
    ]
    own = config.model_dump(mode="json")
    for key, seconds, started in (("a" * 20, 999.0, "2026-01-01"), ("b" * 20, 16.0, "2026-01-02")):
        made = artifact(
            tmp_path / "grpo" / key,
            "grpo",
            {},
            key=key,
            config=own | {"grpo": own["grpo"] | {"prompts_per_step": 4}},
            summary={"num_steps": 2, "train_seconds": seconds, "sampled_tokens": 1600},
            started_at=started,
        )
        (made.folder / "manifest.json").write_text(made.manifest.model_dump_json())
    (line,) = pace(config, Store(tmp_path), {"grpo"}, None)
    # 16 s for 2 steps of 4 × 8 completions, a quarter second each; now 40 steps of 64
    assert line.startswith("grpo: about 11 min (40 steps of 16.0 s, 100 tokens/s")
    other = load_config("demo", ['sampler.engine="transformers"', "model.dtype=bfloat16"])
    assert next(iter(pace(other, Store(tmp_path), {"grpo"}, None))).startswith("grpo: unknown")
    settings = ["grpo.processes=2", "grpo.micro_batch_size=16"]
    two = load_config("demo", ['sampler.engine="transformers"', *settings])
    (line,) = pace(two, Store(tmp_path), {"grpo"}, None)
    assert line == "grpo: unknown, no earlier one with this model and grpo.processes = 2 here"


def test_presampling_is_foreseen_for_the_questions_there_will_be(tmp_path: Path) -> None:
    settings = ['sampler.engine="transformers"', "presample.k=4", "presample.k_block=4"]
    config = load_config("demo", settings)
    made = artifact(
        tmp_path / "presample" / ("a" * 20),
        "presample",
        {},
        key="a" * 20,
        config=config.model_dump(mode="json"),
        summary={
            "num_questions": 10,
            "num_completions": 40,
            "num_tokens": 2000,
            "tokens_per_second": 100.0,
        },
    )
    (made.folder / "manifest.json").write_text(made.manifest.model_dump_json())
    (line,) = pace(config, Store(tmp_path), {"presample"}, 30)
    # 30 × 4 completions of 50 tokens at 100 a second
    assert line.startswith("presample: about 60 s (30 questions × 4 × 50 tokens at 100 tokens/s")
    (line,) = pace(config, Store(tmp_path), {"presample"}, None)
    assert line == "presample: unknown until the questions are loaded and counted"
    more = load_config("demo", [*settings, "workers.count=2"])
    (line,) = pace(more, Store(tmp_path), {"presample"}, 30)
    assert line == "presample: unknown, no earlier one with this model and workers.count = 2 here"


def test_a_plan_says_what_memory_and_time_it_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "find_device", lambda: Device("a small machine", False, 10**9, 1))
    transformers = ['sampler.engine="transformers"']
    asked = Request("demo", None, transformers, None, None, tmp_path)
    show(asked, as_json=False)
    out = " ".join(capsys.readouterr().out.split())
    assert "Memory of grpo: 1.2 to 1.8 GB of 1.0 GB (a small machine): surely too big" in out
    assert "grpo: unknown, no earlier one with this model here" in out
    show(asked, as_json=True)
    rows = {row["node"]: row["memory"] for row in json.loads(capsys.readouterr().out)}
    assert rows["grpo"]["fit"] == "surely too big"
    assert rows["grpo"]["device_bytes"] == 10**9
    assert sum(rows["grpo"]["parts"].values()) == rows["grpo"]["high_bytes"]
    assert rows["filter"] is None
    hub = Request("demo", None, [*transformers, "model.path=a/b"], None, None, tmp_path)
    show(hub, as_json=False)
    assert "memory: unknown until a/b is on this machine" in capsys.readouterr().out


def test_parts_add_up() -> None:
    assert Estimate((Part("a", 1, ""), Part("b", 2, ""))).total == 3
