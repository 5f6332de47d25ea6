"""The links and clusters that the simulator knows by name, as data. A new one needs lines here, and no more.

`cluster.CLUSTERS` is made from these tables and from `devices.DEVICES`. The keys are the fields of
`cluster.Link` and `cluster.Cluster`, which say what they mean and in which units. A cluster names its device
and its links.
"""

from typing import Any

LINKS: dict[str, dict[str, float]] = {
    # Line rates in one direction, of one rank, and the share of them that large messages reach. NVLink of an
    # H100: 370 GB/s; InfiniBand at 400 Gb/s: 46 to 48 GB/s (NVIDIA/nccl-tests, issues 212 and 290); NVLink of
    # an A100: 235 GB/s, NCCL's own limit (src/graph/tuning.cc); of a B200: 18 links of 40.1 GB/s, what NCCL
    # counts with (src/graph/topo.h; NVIDIA/nccl, issue 1807). Infinity Fabric of an MI300X: 7 links of 64
    # GB/s, to each of the others one, of which 48 remain (ROCm/rccl, issue 1210): a group of fewer GPUs has
    # fewer links. PCIe 5.0 between RTX 5090s: 35 GB/s of four cards (NVIDIA/nccl, issue 1639). The others are
    # supposed. Latencies are those of NCCL's tuning model for a ring of whole messages (src/graph/tuning.cc);
    # of Ethernet supposed.
    "NVLink of a V100": {"latency_us": 3.4, "gb_per_s": 150, "reached": 0.85},
    "NVLink of an A100": {"latency_us": 3.4, "gb_per_s": 300, "reached": 0.78},
    "NVLink of an H100": {"latency_us": 3.4, "gb_per_s": 450, "reached": 0.82},
    "NVLink of a B200": {"latency_us": 3.4, "gb_per_s": 900, "reached": 0.802},
    "Infinity Fabric of an MI300X": {"latency_us": 3.4, "gb_per_s": 448, "reached": 0.75},
    "PCIe 5.0 x16": {"latency_us": 5.7, "gb_per_s": 64, "reached": 0.55},
    "half of PCIe 4.0 x16": {"latency_us": 5.7, "gb_per_s": 16},
    "InfiniBand, 50 Gb/s": {"latency_us": 14.0, "gb_per_s": 6.25, "reached": 0.94},
    "InfiniBand, 200 Gb/s": {"latency_us": 14.0, "gb_per_s": 25, "reached": 0.94},
    "InfiniBand, 400 Gb/s": {"latency_us": 14.0, "gb_per_s": 50, "reached": 0.94},
    "InfiniBand, 800 Gb/s": {"latency_us": 14.0, "gb_per_s": 100, "reached": 0.94},
    "Ethernet, 2.5 Gb/s": {"latency_us": 30.0, "gb_per_s": 0.3125, "reached": 0.94},
    "Ethernet, 50 Gb/s": {"latency_us": 30.0, "gb_per_s": 6.25, "reached": 0.80},
    "loopback": {"latency_us": 100, "gb_per_s": 2.5},
}

CLUSTERS: dict[str, dict[str, Any]] = {
    # disk_gb_per_s is supposed: 1.25 for each GPU of a node of 8 or 72, from a parallel file system; 5 of one
    # NVMe drive, or of storage over Ethernet; 1 on a laptop. NVIDIA's reference architecture of a
    # SuperPOD with DGX H100 says over 40 for a node that reads with GPUDirect Storage, four times as much.
    "h100-ib": {
        "device": "H100 80 GB",
        "ranks_per_node": 8,
        "within": "NVLink of an H100",
        "between": "InfiniBand, 400 Gb/s",
        "disk_gb_per_s": 10,
        "source": "NVIDIA H100 SXM data sheet: 989 TFLOPS dense bf16, 80 GB, 3.35 TB/s, NVLink 900 GB/s "
        "both ways together; DGX H100: 400 Gb/s InfiniBand for each GPU. "
        "Shares: tests/benchmarks/test_constants.py; latencies: NCCL, src/graph/tuning.cc.",
    },
    "h100-96-ib": {
        "device": "H100 96 GB",
        "ranks_per_node": 8,
        "within": "NVLink of an H100",
        "between": "InfiniBand, 400 Gb/s",
        "disk_gb_per_s": 10,
        "source": "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md: 96 GB of HBM2e at 2.4 TB/s, "
        "NVLink, 400 Gb/s between nodes for each GPU, 500 W; all else as h100-ib.",
    },
    "a100-ib": {
        "device": "A100 80 GB",
        "ranks_per_node": 8,
        "within": "NVLink of an A100",
        "between": "InfiniBand, 200 Gb/s",
        "disk_gb_per_s": 10,
        "source": "NVIDIA A100 80 GB SXM data sheet: 312 TFLOPS dense bf16, 80 GB, 2,039 GB/s, NVLink 600 "
        "GB/s both ways together; DGX A100: 200 Gb/s InfiniBand for each GPU. Shares: "
        "tests/benchmarks/test_constants.py; latencies: NCCL, src/graph/tuning.cc.",
    },
    "v100-ib": {
        "device": "V100 32 GB",
        "ranks_per_node": 16,
        "within": "NVLink of a V100",
        "between": "InfiniBand, 50 Gb/s",
        "disk_gb_per_s": 10,
        "source": "The ZeRO paper's cluster (arXiv:1910.02054, section 10): DGX-2 nodes of 16 V100, 800 "
        "Gb/s between nodes. Shares: supposed. NVIDIA V100 SXM3 data sheet: 125 TFLOPS, 32 GB, 900 GB/s, "
        "NVLink 300 GB/s both ways together.",
    },
    "a100-ethernet": {
        "device": "A100 80 GB",
        "ranks_per_node": 8,
        "within": "NVLink of an A100",
        "between": "Ethernet, 50 Gb/s",
        "disk_gb_per_s": 5,
        "source": "As a100-ib, with 400 Gb/s of Ethernet for a node's 8 GPUs together: AWS p4de.24xlarge.",
    },
    "rtx4090-10gbe": {
        "device": "RTX 4090",
        "ranks_per_node": 4,
        "within": "half of PCIe 4.0 x16",
        "between": "Ethernet, 2.5 Gb/s",
        "disk_gb_per_s": 5,
        "source": "NVIDIA Ada whitepaper: 165 TFLOPS dense bf16 with fp32 sums, 24 GB, 1,008 GB/s; PCIe 4.0 "
        "x16 has 32 GB/s each way, of which we suppose half: these cards reach each other through "
        "the host's memory; 10 Gb/s Ethernet for a workstation's four GPUs together. Share of the peak: "
        "supposed.",
    },
    "h200-ib": {
        "device": "H200",
        "ranks_per_node": 8,
        "within": "NVLink of an H100",
        "between": "InfiniBand, 400 Gb/s",
        "disk_gb_per_s": 10,
        "source": "DGX H200: 8 H200 with the NVLink of an H100, 400 Gb/s InfiniBand for each "
        "(https://docs.nvidia.com/dgx/dgxh100-user-guide/). Links and shares as h100-ib.",
    },
    "b200-ib": {
        "device": "B200",
        "ranks_per_node": 8,
        "within": "NVLink of a B200",
        "between": "InfiniBand, 400 Gb/s",
        "disk_gb_per_s": 10,
        "nvls_share": 0.74,
        "source": "DGX B200: 8 B200, NVLink 1.8 TB/s both ways together, 400 Gb/s InfiniBand for each "
        "(https://resources.nvidia.com/en-us-dgx-systems/dgx-b200-datasheet). Links: NCCL, "
        "src/graph/topo.h and tuning.cc.",
    },
    "gb200-nvl72": {
        "device": "GB200",
        "ranks_per_node": 72,
        "within": "NVLink of a B200",
        "between": "InfiniBand, 400 Gb/s",
        "disk_gb_per_s": 90,
        "nvls_share": 0.74,
        "source": "GB200 NVL72: a rack of 72 GPUs with 36 Grace, NVLink 1.8 TB/s of each both ways together "
        "(https://www.nvidia.com/en-us/data-center/gb200-nvl72/); 400 Gb/s InfiniBand for each between racks "
        "(https://learn.microsoft.com/azure/virtual-machines/sizes/gpu-accelerated/nd-gb200-v6-series).",
    },
    "gb300-nvl72": {
        "device": "GB300",
        "ranks_per_node": 72,
        "within": "NVLink of a B200",
        "between": "InfiniBand, 800 Gb/s",
        "disk_gb_per_s": 90,
        "nvls_share": 0.74,
        "source": "GB300 NVL72: as gb200-nvl72, with 800 Gb/s InfiniBand for each GPU between racks: "
        "ConnectX-8 (https://www.nvidia.com/en-us/data-center/gb300-nvl72/).",
    },
    "mi300x-ib": {
        "device": "MI300X",
        "ranks_per_node": 8,
        "within": "Infinity Fabric of an MI300X",
        "mesh": True,
        "between": "InfiniBand, 400 Gb/s",
        "disk_gb_per_s": 10,
        "source": "8 MI300X, each connected with each by 128 GB/s both ways together "
        "(https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html), 400 Gb/s for each "
        "between nodes: Azure ND-MI300X-v5. RCCL, made of NCCL, is supposed to time its calls alike.",
    },
    "l40s-ethernet": {
        "device": "L40S",
        "ranks_per_node": 8,
        "within": "half of PCIe 4.0 x16",
        "between": "Ethernet, 50 Gb/s",
        "disk_gb_per_s": 5,
        "source": "AWS g6e.48xlarge: 8 L40S on PCIe 4.0, without NVLink, 400 Gb/s of Ethernet for a node's 8 "
        "GPUs together (https://aws.amazon.com/ec2/instance-types/g6e/). That a ring reaches half of PCIe is "
        "supposed, as for rtx4090-10gbe.",
    },
    "rtx5090-10gbe": {
        "device": "RTX 5090",
        "ranks_per_node": 4,
        "within": "PCIe 5.0 x16",
        "between": "Ethernet, 2.5 Gb/s",
        "disk_gb_per_s": 5,
        "source": "As rtx4090-10gbe, with PCIe 5.0 x16, of which four cards were measured to reach 35 GB/s "
        "(https://github.com/NVIDIA/nccl/issues/1639).",
    },
    "loopback": {
        "device": "one CPU core",
        "ranks_per_node": 64,
        "within": "loopback",
        "between": "loopback",
        "backend": "gloo",
        "shared": True,
        "overlaps": False,
        "disk_gb_per_s": 1,
        "source": "Gloo between processes of one machine: a laptop's order of magnitude.",
    },
}
