"""The clusters that the simulator knows by name, as data. A new one needs lines here, and nowhere else.

`cluster.CLUSTERS` is made from these tables. The keys are the fields of `cluster.Device`, `cluster.Link` and
`cluster.Cluster`, which say what they mean and in which units. A cluster names its device and its links.
"""

from typing import Any

ALLOCATOR_SHARE = 0.1
"""What PyTorch's allocator reserves beside tensors, as a share of these. Fitted, to a hundredth, to the two
runs of published_runs whose use is "fit memory": tests/test_scenario.py."""

LIBRARY_GB = 1.1
"""What a process holds outside of the allocator: CUDA's context with its kernels, 0.4, and a communicator,
0.7. Each further process group takes about another 0.7.

Source: pytorch/pytorch, issue 107667 (some 300 MB with lazy loading); NVIDIA/nccl, issue 964 (688 MB for a
group of A100s with NVLink).
"""

PEAKS: dict[str, dict[str, float]] = {
    # Dense 10^12 operations a second of matrix products, sums in 32 bits. "float32" is what torch computes in
    # unless TF32 is asked for (torch.set_float32_matmul_precision). A V100 has no TF32 and no bfloat16; where
    # a dtype is missing, a device's `tflops` stands.
    # H100 SXM data sheet, whose tensor figures are with sparsity, twice these; A100 data sheet; V100 data
    # sheet (NVLink); Ada GPU architecture whitepaper, appendix A.
    "V100 32 GB": {"float16": 125, "float32": 15.7},
    "A100 80 GB": {"float16": 312, "bfloat16": 312, "tf32": 156, "float32": 19.5},
    "H100 80 GB": {"float16": 989, "bfloat16": 989, "tf32": 494.5, "float32": 67, "fp8": 1979},
    "H100 96 GB": {"float16": 989, "bfloat16": 989, "tf32": 494.5, "float32": 67, "fp8": 1979},
    "RTX 4090": {"float16": 165, "bfloat16": 165, "tf32": 82.6, "float32": 82.6, "fp8": 330},
}
"""Peaks of GPUs by dtype."""

DEVICES: dict[str, dict[str, Any]] = {
    # reached and product_passes of A100 and H100 are fitted to published runs, as in tests/test_constants.py;
    # the other cards are supposed to be like the A100. attention_reached: FlashAttention-2 (arXiv:2307.08691)
    # reaches 50 to 73% of an A100's peak, and 335 TFLOPS on an H100; a V100's is supposed. memory_reached is
    # supposed: with 0.8 or 0.95 and other passes the runs are met as well.
    "V100 32 GB": {
        "reached": 0.87, "memory_gb_per_s": 900, "product_passes": 2.75,
        "attention_reached": 0.40, "memory_reached": 0.85,
    },
    "A100 80 GB": {
        "reached": 0.87, "memory_gb_per_s": 2039, "product_passes": 2.75,
        "attention_reached": 0.60, "memory_reached": 0.85,
    },
    "H100 80 GB": {
        "reached": 0.68, "memory_gb_per_s": 3350, "product_passes": 2.75,
        "attention_reached": 0.34, "memory_reached": 0.85,
    },
    "RTX 4090": {
        "reached": 0.87, "memory_gb_per_s": 1008, "product_passes": 2.75,
        "attention_reached": 0.60, "memory_reached": 0.85,
    },
    # As an H100 80 GB, with HBM2e. Its products at 500 W of 700 are supposed to reach as much.
    "H100 96 GB": {
        "reached": 0.68, "memory_gb_per_s": 2400, "product_passes": 2.75,
        "attention_reached": 0.34, "memory_reached": 0.85,
    },
    "one CPU core": {"tflops": 0.1, "reached": 0.5, "memory_gb_per_s": 8},
}  # fmt: skip

MIB = 2**20 / 1e9
"""10^9 bytes."""

MEMORY: dict[str, dict[str, float]] = {
    # memory_gb: as the driver reports it, or torch: 81,559 and 81,920 MiB (modal-labs/modal-client, pull
    # request 2797); of a V100 31.74 GiB (liucongg/ChatGLM-Finetuning, issue 73); of an RTX 4090 24,564 MiB;
    # of torchtitan's H100 94.99 GiB (pytorch/torchtitan, pull request 1625).
    # host_link_gb_per_s: PCIe 3.0, 4.0 and 5.0 x16 have 16, 32 and 64 in each direction, of which we suppose
    # 0.8; of four cards in a workstation half of that.
    # host_memory_gb_per_s: a device's share of the host's memory channels by their data sheets, of which we
    # suppose 0.8. DGX-2: 2 x 6 of DDR4-2666 for 16 devices; DGX A100: 2 x 8 of DDR4-3200 for 8; DGX H100:
    # 2 x 8 of DDR5-4800 for 8; a workstation's are supposed.
    "V100 32 GB": {"memory_gb": 31.74 * 1024 * MIB, "host_link_gb_per_s": 12.8, "host_memory_gb_per_s": 12.8},
    "A100 80 GB": {"memory_gb": 81_920 * MIB, "host_link_gb_per_s": 25.6, "host_memory_gb_per_s": 41},
    "H100 80 GB": {"memory_gb": 81_559 * MIB, "host_link_gb_per_s": 51.2, "host_memory_gb_per_s": 61},
    "H100 96 GB": {"memory_gb": 94.99 * 1024 * MIB, "host_link_gb_per_s": 51.2, "host_memory_gb_per_s": 61},
    "RTX 4090": {"memory_gb": 24_564 * MIB, "host_link_gb_per_s": 12.8, "host_memory_gb_per_s": 20},
}
"""The memory of GPUs, and of their host. A CPU has none of its own."""

for _device in MEMORY.values():
    _device.update(allocator_share=ALLOCATOR_SHARE, library_gb=LIBRARY_GB)

for _name, _peaks in PEAKS.items():
    DEVICES[_name].update(tflops=_peaks["float16"], peaks=_peaks)

LINKS: dict[str, dict[str, float]] = {
    # Line rates in one direction, of one rank, and the share of them that large messages reach. NVLink of an
    # H100: 370 GB/s; InfiniBand at 400 Gb/s: 46 to 48 GB/s (NVIDIA/nccl-tests, issues 212 and 290); NVLink of
    # an A100: 235 GB/s, NCCL's own limit (src/graph/tuning.cc); the others are supposed. Latencies are those
    # of NCCL's tuning model for a ring of whole messages (same file); of Ethernet supposed.
    "NVLink of a V100": {"latency_us": 3.4, "gb_per_s": 150, "reached": 0.85},
    "NVLink of an A100": {"latency_us": 3.4, "gb_per_s": 300, "reached": 0.78},
    "NVLink of an H100": {"latency_us": 3.4, "gb_per_s": 450, "reached": 0.82},
    "half of PCIe 4.0 x16": {"latency_us": 5.7, "gb_per_s": 16},
    "InfiniBand, 50 Gb/s": {"latency_us": 14.0, "gb_per_s": 6.25, "reached": 0.94},
    "InfiniBand, 200 Gb/s": {"latency_us": 14.0, "gb_per_s": 25, "reached": 0.94},
    "InfiniBand, 400 Gb/s": {"latency_us": 14.0, "gb_per_s": 50, "reached": 0.94},
    "Ethernet, 2.5 Gb/s": {"latency_us": 30.0, "gb_per_s": 0.3125, "reached": 0.94},
    "Ethernet, 50 Gb/s": {"latency_us": 30.0, "gb_per_s": 6.25, "reached": 0.80},
    "loopback": {"latency_us": 100, "gb_per_s": 2.5},
}

CLUSTERS: dict[str, dict[str, Any]] = {
    "h100-ib": {
        "device": "H100 80 GB",
        "ranks_per_node": 8,
        "within": "NVLink of an H100",
        "between": "InfiniBand, 400 Gb/s",
        "source": "NVIDIA H100 SXM data sheet: 989 TFLOPS dense bf16, 80 GB, 3.35 TB/s, NVLink 900 GB/s "
        "both ways together; DGX H100: 400 Gb/s InfiniBand for each GPU. Shares: tests/test_constants.py; "
        "latencies: NCCL, src/graph/tuning.cc.",
    },
    "h100-96-ib": {
        "device": "H100 96 GB",
        "ranks_per_node": 8,
        "within": "NVLink of an H100",
        "between": "InfiniBand, 400 Gb/s",
        "source": "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md: 96 GB of HBM2e at 2.4 TB/s, "
        "NVLink, 400 Gb/s between nodes for each GPU, 500 W; all else as h100-ib.",
    },
    "a100-ib": {
        "device": "A100 80 GB",
        "ranks_per_node": 8,
        "within": "NVLink of an A100",
        "between": "InfiniBand, 200 Gb/s",
        "source": "NVIDIA A100 80 GB SXM data sheet: 312 TFLOPS dense bf16, 80 GB, 2,039 GB/s, NVLink 600 "
        "GB/s both ways together; DGX A100: 200 Gb/s InfiniBand for each GPU. Shares: "
        "tests/test_constants.py; latencies: NCCL, src/graph/tuning.cc.",
    },
    "v100-ib": {
        "device": "V100 32 GB",
        "ranks_per_node": 16,
        "within": "NVLink of a V100",
        "between": "InfiniBand, 50 Gb/s",
        "source": "The ZeRO paper's cluster (arXiv:1910.02054, section 10): DGX-2 nodes of 16 V100, 800 "
        "Gb/s between nodes. Shares: supposed. NVIDIA V100 SXM3 data sheet: 125 TFLOPS, 32 GB, 900 GB/s, "
        "NVLink 300 GB/s both ways together.",
    },
    "a100-ethernet": {
        "device": "A100 80 GB",
        "ranks_per_node": 8,
        "within": "NVLink of an A100",
        "between": "Ethernet, 50 Gb/s",
        "source": "As a100-ib, with 400 Gb/s of Ethernet for a node's 8 GPUs together: AWS p4de.24xlarge.",
    },
    "rtx4090-10gbe": {
        "device": "RTX 4090",
        "ranks_per_node": 4,
        "within": "half of PCIe 4.0 x16",
        "between": "Ethernet, 2.5 Gb/s",
        "source": "NVIDIA Ada whitepaper: 165 TFLOPS dense bf16 with fp32 sums, 24 GB, 1,008 GB/s; PCIe 4.0 "
        "x16 has 32 GB/s each way, of which we suppose half: these cards reach each other through "
        "the host's memory; 10 Gb/s Ethernet for a workstation's four GPUs together. Share of the peak: "
        "supposed.",
    },
    "loopback": {
        "device": "one CPU core",
        "ranks_per_node": 64,
        "within": "loopback",
        "between": "loopback",
        "backend": "gloo",
        "shared": True,
        "overlaps": False,
        "source": "Gloo between processes of one machine: a laptop's order of magnitude. `zero-ref "
        "calibrate` measures yours.",
    },
}
