"""The clusters that the simulator knows by name, as data. A new one needs lines here, and nowhere else.

`cluster.CLUSTERS` is made from these tables. The keys are the fields of `cluster.Device`, `cluster.Link` and
`cluster.Cluster`, which say what they mean and in which units. A cluster names its device and its links.
"""

from typing import Any

DEVICES: dict[str, dict[str, Any]] = {
    # reached and knee of A100 and H100 are fitted to published runs, as in tests/test_constants.py; the other
    # cards are supposed to be like the A100. attention_reached: FlashAttention-2 (arXiv:2307.08691) reaches 50
    # to 73% of an A100's peak, and 335 TFLOPS on an H100; a V100's is supposed. memory_reached is supposed:
    # with 0.8 or 0.95 and another knee the runs are met as well.
    "V100 32 GB": {
        "tflops": 125, "reached": 0.78, "memory_gb": 32, "memory_gb_per_s": 900, "knee": 287,
        "attention_reached": 0.40, "memory_reached": 0.85,
    },
    "A100 80 GB": {
        "tflops": 312, "reached": 0.78, "memory_gb": 80, "memory_gb_per_s": 2039, "knee": 316,
        "attention_reached": 0.60, "memory_reached": 0.85,
    },
    "H100 80 GB": {
        "tflops": 989, "reached": 0.63, "memory_gb": 80, "memory_gb_per_s": 3350, "knee": 492,
        "attention_reached": 0.34, "memory_reached": 0.85,
    },
    "RTX 4090": {
        "tflops": 165, "reached": 0.78, "memory_gb": 24, "memory_gb_per_s": 1008, "knee": 338,
        "attention_reached": 0.60, "memory_reached": 0.85,
    },
    "one CPU core": {"tflops": 0.1, "reached": 0.5, "memory_gb": None, "memory_gb_per_s": 8},
}  # fmt: skip

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
