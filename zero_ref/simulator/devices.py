"""The GPUs that the simulator knows by name, as data: each figure stands beside its source.

The keys are the fields of `device.Device`, which says what they mean and in which units. A new GPU needs an
entry in FIGURES, and nowhere else. A source is a public address or document, or begins with one of two words:
"fitted" to published runs by tests/benchmarks/test_constants.py, or "supposed", where nobody has
published the figure.
"""

from typing import Any

ALLOCATOR_SHARE = 0.12
"""Bytes that PyTorch's allocator reserves beside tensors, with segments that grow, as a share of those that
come and go within an iteration. The share is fitted, to a hundredth, to the two runs of
benchmarks/published_runs whose use is "fit memory": tests/simulator/test_scenario.py."""

LIBRARY_GB = 1.1
"""10^9 bytes that a process holds outside of the allocator: CUDA's context with its kernels, 0.4, and a
communicator, 0.7. Each further process group takes about another 0.7.

Source: pytorch/pytorch, issue 107667 (some 300 MB with lazy loading); NVIDIA/nccl, issue 964 (688 MB for a
group of A100s with NVLink). On AMD's GPUs it is supposed to be as much.
"""

MIB = 2**20 / 1e9
"""10^9 bytes."""

# Peaks are dense: 10^12 operations a second of matrix products with sums in 32 bits. Data sheets print twice
# as much, "with sparsity", for Hopper, Ada and Blackwell. "float32" is what torch computes in unless TF32 is
# asked for (torch.set_float32_matmul_precision). Where a dtype is missing, `tflops` stands: 16 bits.
V100 = (
    "https://images.nvidia.com/content/technologies/volta/pdf/volta-v100-datasheet-update-us-1165301-r5.pdf"
)
A100 = "https://www.nvidia.com/en-us/data-center/a100/"
H100 = "https://www.nvidia.com/en-us/data-center/h100/, with sparsity: half of what it prints"
H200 = "https://www.nvidia.com/en-us/data-center/h200/, with sparsity: half of what it prints"
HGX = "https://www.nvidia.com/en-us/data-center/hgx/, of 8 GPUs, with sparsity"
GB200 = "https://www.nvidia.com/en-us/data-center/gb200-nvl72/, of 72 GPUs, with sparsity"
GB300 = "https://www.nvidia.com/en-us/data-center/gb300-nvl72/, of 72 GPUs, with sparsity"
MI300X = "https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html"
L40S = "https://www.nvidia.com/en-us/data-center/l40s/, without sparsity"
ADA = (
    "NVIDIA Ada GPU architecture whitepaper, appendix A: tensor peaks with FP32 accumulate, without sparsity"
)
RTX_BLACKWELL = (
    "NVIDIA RTX Blackwell GPU architecture whitepaper: peaks with FP32 accumulate, without sparsity"
)

# What the driver reports, which is more than the data sheet says, where gigabytes are 2^30 bytes or cut.
MODAL = "nvidia-smi: https://github.com/modal-labs/modal-client/pull/2797"
RECORDED = (
    "nvidia-smi, recorded: https://github.com/NVIDIA/k8s-test-infra, "
    "tests/e2e/go/assertions/nvidiasmi/testdata/hardware"
)

FITTED = "fitted to published runs"
AS_A100 = "supposed to be as of the A100, where it is fitted"
AS_H100 = "supposed to be as of the H100, where it is fitted"
MEASURED = (
    "supposed to be 0.85 of what the best product in bfloat16 reaches, as on the H100 (0.68 fitted, 0.803 "
    "measured): https://github.com/stas00/ml-engineering, compute/accelerator, MAMF: "
)
FLASH_2 = "FlashAttention-2 (https://arxiv.org/abs/2307.08691): "
# Shares of attention are of forward and backward together, whose operations are as 2 to 5, for 8,192 tokens
# under a causal mask with heads of 128.
CUDNN = "https://github.com/NVIDIA/cudnn-frontend, benchmark/"
HOPPER = (
    {"flash-2": 0.34, "flash-3": 0.58, "flash-4": 0.65, "cudnn": 0.56},
    "10^12 operations a second, forward and backward. flash-2: as attention_reached. flash-3: 602 and 559, "
    "backward without the mask (https://arxiv.org/abs/2407.08608, figures 5 and 6). flash-4 and cudnn, of an "
    f"H200: 675 and 629, 655 and 526 ({CUDNN}attention_training/results/llama3.1/h200, September 2026)",
)
BLACKWELL_FLASH_2 = 0.14
GRACE_ATTENTION = (
    "TFLOPS of cuDNN 9.27 and FlashAttention-4, forward and backward, "
    f"{CUDNN}attention_training/results/llama3.1/"
)
A_B200 = f"{CUDNN}sdpa_benchmark_training/artifacts/sdpa_bf16_benchmark_results_NVIDIA_B200.csv"
OF_A_B200 = f"of a B200, forward and backward: 373 and 299 TFLOPS ({A_B200})"
MEMORY_REACHED = (0.85, "supposed: with 0.8 or 0.95, and passes that fit, the fitted runs are met as well")
PASSES = (2.75, FITTED)
PASSES_SUPPOSED = (2.75, "supposed to be as of the A100 and the H100, where they are fitted")

# PCIe 3.0, 4.0 and 5.0 x16 have 16, 32 and 64 GB/s in each direction. A device's share of the host's memory
# channels is that by their data sheets.
PCIE_3 = (12.8, "supposed: 0.8 of PCIe 3.0 x16")
PCIE_4 = (25.6, "supposed: 0.8 of PCIe 4.0 x16")
PCIE_5 = (51.2, "supposed: 0.8 of PCIe 5.0 x16")
C2C = (
    180,
    "supposed: 0.8 of NVLink-C2C, 450 GB/s each way of a Grace for its two GPUs: "
    "https://github.com/stas00/ml-engineering, network",
)
GRACE = (
    200,
    "supposed: 0.8 of half of a Grace's 500 GB/s: https://www.nvidia.com/en-us/data-center/grace-cpu/",
)

FIGURES: dict[str, dict[str, tuple[Any, str]]] = {
    "V100 32 GB": {
        "peaks": ({"float16": 125, "float32": 15.7}, V100),  # it has no TF32 and no bfloat16
        "reached": (0.87, AS_A100),
        "product_passes": PASSES_SUPPOSED,
        "attention_reached": (0.40, "supposed"),
        "memory_reached": MEMORY_REACHED,
        "memory_gb": (31.74 * 1024 * MIB, "torch: https://github.com/liucongg/ChatGLM-Finetuning/issues/73"),
        "memory_gb_per_s": (900, V100),
        "host_link_gb_per_s": PCIE_3,
        "host_memory_gb_per_s": (12.8, "supposed: 0.8 of DGX-2's 2 x 6 of DDR4-2666 for 16 devices"),
    },
    "A100 80 GB": {
        "peaks": ({"float16": 312, "bfloat16": 312, "tf32": 156, "float32": 19.5}, A100),
        "reached": (0.87, FITTED),
        "product_passes": PASSES,
        "attention_reached": (0.60, FLASH_2 + "50 to 73% of the peak"),
        "memory_reached": MEMORY_REACHED,
        "memory_gb": (81_920 * MIB, MODAL),
        "memory_gb_per_s": (2039, A100),
        "host_link_gb_per_s": PCIE_4,
        "host_memory_gb_per_s": (41, "supposed: 0.8 of DGX A100's 2 x 8 of DDR4-3200 for 8 devices"),
    },
    "H100 80 GB": {
        "peaks": (
            {"float16": 989, "bfloat16": 989, "tf32": 494.5, "float32": 67, "fp8": 1979},
            H100,
        ),
        "reached": (0.68, FITTED),
        "product_passes": PASSES,
        "attention_reached": (0.34, FLASH_2 + "335 TFLOPS"),
        "attention_by": HOPPER,
        "memory_reached": MEMORY_REACHED,
        "memory_gb": (81_559 * MIB, RECORDED),
        "memory_gb_per_s": (3350, H100),
        "host_link_gb_per_s": PCIE_5,
        "host_memory_gb_per_s": (61, "supposed: 0.8 of DGX H100's 2 x 8 of DDR5-4800 for 8 devices"),
    },
    "RTX 4090": {
        # FP8 with sums in 16 bits has 660.
        "peaks": (
            {"float16": 165, "bfloat16": 165, "tf32": 82.6, "float32": 82.6, "fp8": 330},
            ADA,
        ),
        "reached": (0.87, AS_A100),
        "product_passes": PASSES_SUPPOSED,
        "attention_reached": (0.60, AS_A100),
        "memory_reached": MEMORY_REACHED,
        "memory_gb": (24_564 * MIB, "nvidia-smi: https://github.com/vllm-project/vllm/issues/7553"),
        "memory_gb_per_s": (1008, ADA),
        "host_link_gb_per_s": (12.8, "supposed: 0.8 of PCIe 4.0 x16, half of that with four cards in a host"),
        "host_memory_gb_per_s": (20, "supposed"),
    },
    "H100 96 GB": {
        "peaks": (
            {"float16": 989, "bfloat16": 989, "tf32": 494.5, "float32": 67, "fp8": 1979},
            H100,
        ),
        "reached": (0.68, "supposed: its products at 500 W of 700 reach as much as the H100's"),
        "product_passes": PASSES_SUPPOSED,
        "attention_reached": (0.34, AS_H100),
        "attention_by": HOPPER,
        "memory_reached": MEMORY_REACHED,
        "memory_gb": (94.99 * 1024 * MIB, "torch: https://github.com/pytorch/torchtitan/pull/1625"),
        "memory_gb_per_s": (
            2400,
            "https://github.com/pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md",
        ),
        "host_link_gb_per_s": PCIE_5,
        "host_memory_gb_per_s": (61, "supposed: as DGX H100's"),
    },
    "H200": {
        "peaks": (
            {"float16": 989, "bfloat16": 989, "tf32": 494.5, "float32": 67, "fp8": 1979},
            H200,
        ),
        "reached": (0.68, AS_H100 + ": it is the same chip"),
        "product_passes": PASSES_SUPPOSED,
        "attention_reached": (0.34, AS_H100),
        "attention_by": HOPPER,
        "memory_reached": MEMORY_REACHED,
        "memory_gb": (140 * 1024 * MIB, "the report trainy-h200 of benchmarks/published_runs: 140 GiB"),
        "memory_gb_per_s": (4800, H200),
        "host_link_gb_per_s": PCIE_5,
        "host_memory_gb_per_s": (61, "supposed: as DGX H100's"),
    },
    "B200": {
        "peaks": (
            {"float16": 2250, "bfloat16": 2250, "tf32": 1125, "float32": 75, "fp8": 4500},
            HGX,
        ),
        "reached": (0.66, MEASURED + "0.776"),
        "product_passes": PASSES_SUPPOSED,
        "attention_reached": (0.44, f"cuDNN 9.10, forward and backward: 1,171 and 943 TFLOPS ({A_B200})"),
        "attention_by": (
            {"flash-2": BLACKWELL_FLASH_2, "cudnn": 0.44},
            "cudnn: as attention_reached; flash-2 " + OF_A_B200,
        ),
        "memory_reached": MEMORY_REACHED,
        "memory_gb": (183_359 * MIB, RECORDED),
        # Data sheets say 8,000; the driver reports a bus of 7,680 bits at 3,996 MHz, twice a clock.
        "memory_gb_per_s": (7672, "https://github.com/pytorch/ao/pull/4002"),
        "host_link_gb_per_s": PCIE_5,
        "host_memory_gb_per_s": (71, "supposed: 0.8 of DGX B200's 2 x 8 of DDR5-5600 for 8 devices"),
    },
    "GB200": {
        "peaks": (
            {"float16": 2500, "bfloat16": 2500, "tf32": 1250, "float32": 80, "fp8": 5000},
            GB200,
        ),
        "reached": (0.62, MEASURED + "0.729"),
        "product_passes": PASSES_SUPPOSED,
        "attention_reached": (0.55, GRACE_ATTENTION + "gb200: 1,559 and 1,297"),
        "attention_by": (
            {"flash-2": BLACKWELL_FLASH_2, "flash-4": 0.54, "cudnn": 0.55},
            f"{GRACE_ATTENTION}gb200: 1,576 and 1,280 of flash-4, 1,559 and 1,297 of cudnn; flash-2 "
            + OF_A_B200,
        ),
        "memory_reached": MEMORY_REACHED,
        "memory_gb": (189_471 * MIB, RECORDED),
        "memory_gb_per_s": (8000, GB200),
        "host_link_gb_per_s": C2C,
        "host_memory_gb_per_s": GRACE,
    },
    "GB300": {
        "peaks": (
            {"float16": 2500, "bfloat16": 2500, "tf32": 1250, "float32": 80, "fp8": 5000},
            GB300,
        ),
        "reached": (0.62, "supposed to be as of the GB200"),
        "product_passes": PASSES_SUPPOSED,
        "attention_reached": (0.61, GRACE_ATTENTION + "gb300: 1,886 and 1,420"),
        "attention_by": (
            {"flash-2": BLACKWELL_FLASH_2, "flash-4": 0.61, "cudnn": 0.61},
            f"{GRACE_ATTENTION}gb300: 1,888 and 1,409 of flash-4, 1,886 and 1,420 of cudnn; flash-2 "
            + OF_A_B200,
        ),
        "memory_reached": MEMORY_REACHED,
        "memory_gb": (284_208 * MIB, RECORDED),
        "memory_gb_per_s": (8000, GB300),
        "host_link_gb_per_s": C2C,
        "host_memory_gb_per_s": GRACE,
    },
    "MI300X": {
        "peaks": (
            {"float16": 1307.4, "bfloat16": 1307.4, "tf32": 653.7, "float32": 163.4, "fp8": 2614.9},
            MI300X,
        ),
        "reached": (0.44, MEASURED + "0.514"),
        "product_passes": PASSES_SUPPOSED,
        "attention_reached": (0.34, AS_H100),
        "memory_reached": MEMORY_REACHED,
        "memory_gb": (
            206_141_652_992 / 1e9,
            "rocm-smi: https://github.com/ROCm/legacy-rocm-build/issues/4750",
        ),
        "memory_gb_per_s": (5300, MI300X),
        "host_link_gb_per_s": PCIE_5,
        "host_memory_gb_per_s": (92, "supposed: 0.8 of 2 x 12 of DDR5-4800 for 8 devices"),
    },
    "L40S": {
        "peaks": (
            {"float16": 362, "bfloat16": 362, "tf32": 183, "float32": 91.6, "fp8": 733},
            L40S,
        ),
        "reached": (0.68, "supposed to be as of the H100, which its power limits too"),
        "product_passes": PASSES_SUPPOSED,
        "attention_reached": (0.60, AS_A100),
        "memory_reached": MEMORY_REACHED,
        "memory_gb": (46_068 * MIB, RECORDED),
        "memory_gb_per_s": (864, L40S),
        "host_link_gb_per_s": PCIE_4,
        "host_memory_gb_per_s": (41, "supposed: as DGX A100's"),
    },
    "RTX 5090": {
        # FP8 with sums in 16 bits has 838. Three cards reached 179, 237 and 240 in bfloat16, two above the
        # rated clock: https://github.com/zzc0721/torch-performance-test-data, issues 200, 124 and 96.
        "peaks": (
            {"float16": 209.5, "bfloat16": 209.5, "tf32": 104.8, "float32": 104.8, "fp8": 419},
            RTX_BLACKWELL,
        ),
        "reached": (0.87, AS_A100),
        "product_passes": PASSES_SUPPOSED,
        "attention_reached": (0.60, AS_A100),
        "memory_reached": MEMORY_REACHED,
        "memory_gb": (32_607 * MIB, "nvidia-smi: https://github.com/noonghunna/club-3090/issues/1229"),
        "memory_gb_per_s": (1792, RTX_BLACKWELL),
        "host_link_gb_per_s": (25.6, "supposed: 0.8 of PCIe 5.0 x16, half of that with four cards in a host"),
        "host_memory_gb_per_s": (20, "supposed"),
    },
    "one CPU core": {
        "tflops": (0.1, "supposed"),
        "reached": (0.5, "supposed"),
        "memory_gb_per_s": (8, "supposed"),
        "memory_gb": (None, "a core has no memory of its own"),
    },
}
"""By device and field: the figure, and where it comes from."""

SOURCES: dict[str, dict[str, str]] = {
    name: {field: source for field, (_, source) in fields.items()} for name, fields in FIGURES.items()
}
"""The source of each figure, by device and field."""

DEVICES: dict[str, dict[str, Any]] = {
    name: {field: figure for field, (figure, _) in fields.items()} for name, fields in FIGURES.items()
}
"""The fields of `device.Device` by name."""

for _device in DEVICES.values():
    if "peaks" in _device:  # a GPU
        _device.setdefault("attention_by", {"flash-2": _device["attention_reached"]})
        _device |= {"tflops": _device["peaks"]["float16"]}
        _device |= {"allocator_share": ALLOCATOR_SHARE, "library_gb": LIBRARY_GB}
