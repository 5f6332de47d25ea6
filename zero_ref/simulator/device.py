"""Devices: what one rank computes with, and how long products, attention and touching memory take on it.

The table `devices` has the figures of known GPUs; a `cluster.Cluster` says how devices are connected.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from zero_ref.simulator._checks import check_name, check_number

ATTENTION_KERNELS = {
    "flash-2": "FlashAttention-2, which torch's scaled_dot_product_attention takes",
    "flash-3": "FlashAttention-3, on Hopper",
    "flash-4": "FlashAttention-4, on Hopper and Blackwell",
    "cudnn": "cuDNN's, on Hopper and Blackwell, which Transformer Engine takes, and torch from 2.11 on",
}
"""The kernels of fused attention by name. They keep as much for backward.

Source: torch prefers cuDNN's on compute capabilities 9.0 and 10.0 where cuDNN is newer than 9.15
(aten/src/ATen/native/transformers/cuda/sdp_utils.cpp), which its wheels have from 2.11 on
(https://github.com/huggingface/transformers/pull/48163).
"""


@dataclass(frozen=True)
class Device:
    """The device that one rank computes with.

    Args:
        tflops: 10^12 operations a second, at the peak, in the dtype that the model is trained in; of a
            preset, in 16 bits.
        reached: the share of `tflops` that large matrix products reach; that a whole training reaches, where
            `memory_reached` is None.
        memory_gb: 10^9 bytes of memory; None where it is not known.
        memory_gb_per_s: 10^9 bytes a second that the device reads or writes, which limits an optimizer step.
        overhead_us: microseconds of forward and backward for each parameter tensor, beside its operations.
            It matters for small models; 0 in the presets, since only a measurement tells.
        update_overhead_us: the same of an optimizer step.
        product_passes: the time that a matrix product takes for its bytes, beside that for its operations, as
            so many times that of reading and writing its matrices once. Small products have more of them for
            each operation.
        attention_reached: the share of `tflops` that fused attention reaches by the kernel that is taken
            unless another is asked for; None for `reached`.
        attention_by: that share by the name of the kernel, one of ATTENTION_KERNELS, as far as it is known.
        memory_reached: the share of `memory_gb_per_s` that kernels reach which are limited by it. None where
            `reached` was measured on whole training, with such kernels: they are then not priced.
        allocator_share: of what comes and goes within an iteration, what PyTorch's allocator reserves on top
            with segments that grow; 0 on a device without such an allocator.
        library_gb: 10^9 bytes that the driver's context, kernels and communicators take.
        host_link_gb_per_s: 10^9 bytes a second between the device and its share of the host's memory, in each
            direction; None where no state can be offloaded.
        host_memory_gb_per_s: 10^9 bytes a second that its share of the host reads or writes.
        peaks: `tflops` by dtype, and "tf32"; empty where they are not known.
    Raises:
        ValueError: a figure that is not above 0, or a share above 1.
    """

    name: str
    tflops: float
    reached: float
    memory_gb: float | None
    memory_gb_per_s: float
    overhead_us: float = 0.0
    update_overhead_us: float = 0.0
    product_passes: float = 0.0
    attention_reached: float | None = None
    memory_reached: float | None = None
    allocator_share: float = 0.0
    library_gb: float = 0.0
    host_link_gb_per_s: float | None = None
    host_memory_gb_per_s: float | None = None
    peaks: Mapping[str, float] = field(default_factory=dict, hash=False)
    attention_by: Mapping[str, float] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        check_number(f"{self.name}: tflops", self.tflops, above=True)
        check_number(f"{self.name}: memory_gb_per_s", self.memory_gb_per_s, above=True)
        check_number(f"{self.name}: overhead_us", self.overhead_us)
        check_number(f"{self.name}: update_overhead_us", self.update_overhead_us)
        if self.memory_gb is not None:
            check_number(f"{self.name}: memory_gb", self.memory_gb, above=True)
        for name in ("product_passes", "allocator_share", "library_gb"):
            check_number(f"{self.name}: {name}", getattr(self, name))
        for name in ("host_link_gb_per_s", "host_memory_gb_per_s"):
            if getattr(self, name) is not None:
                check_number(f"{self.name}: {name}", getattr(self, name), above=True)
        for name, peak in self.peaks.items():
            check_number(f"{self.name}: the peak in {name}", peak, above=True)
        shares = {name: getattr(self, name) for name in ("reached", "attention_reached", "memory_reached")}
        for name, share in self.attention_by.items():
            check_name("kernel of attention", name, ATTENTION_KERNELS)
            shares[f"attention_by {name}"] = share
        for name, share in shares.items():
            if share is not None and not 0 < share <= 1:
                raise ValueError(
                    f"{self.name}: {name} is a share of the peak, above 0 up to 1, got {share:g}."
                )

    def in_dtype(self, dtype: str) -> Device:
        """The device as it multiplies matrices of a dtype; the same one where its peak there is not known.

        >>> from zero_ref.simulator.cluster import cluster
        >>> h100 = cluster("h100-ib").device
        >>> h100.in_dtype("float32").tflops, h100.in_dtype("bfloat16") is h100
        (67, True)

        Args:
            dtype: a name, or "tf32" for float32 in tensor cores.
        """
        peak = self.peaks.get(dtype, self.tflops)
        return self if peak == self.tflops else replace(self, tflops=peak)

    def with_attention(self, kernel: str) -> Device:
        """The device whose attention is this kernel's.

        >>> from zero_ref.simulator.cluster import cluster
        >>> h100 = cluster("h100-ib").device
        >>> [h100.with_attention(kernel).attention_reached for kernel in ATTENTION_KERNELS]
        [0.34, 0.58, 0.65, 0.56]

        Programs that ask for cuDNN's have FlashAttention-2 on GPUs before Hopper, as Transformer Engine has.

        Raises:
            ValueError: the kernel is unknown, or nothing is known of it on this device.
        """
        check_name("kernel of attention", kernel, ATTENTION_KERNELS)
        known = self.attention_by
        share = known.get(kernel, known.get("flash-2") if kernel == "cudnn" else None)
        if share is None:
            raise ValueError(
                f"{self.name}: nothing is known of the attention of {kernel}; known are "
                f"{', '.join(known) or 'none'}."
            )
        return self if share == self.attention_reached else replace(self, attention_reached=share)

    def faster(self, *, computing: float = 1.0, memory: float = 1.0) -> Device:
        """The device with these multiples of its rates: of products in every dtype, and of its memory.

        >>> from zero_ref.simulator.cluster import cluster
        >>> twice = cluster("h100-ib").device.faster(computing=2)
        >>> twice.tflops, twice.in_dtype("fp8").tflops, twice.memory_gb_per_s
        (1978, 3958, 3350.0)
        """
        return replace(
            self,
            tflops=self.tflops * computing,
            peaks={dtype: peak * computing for dtype, peak in self.peaks.items()},
            overhead_us=self.overhead_us / computing,
            memory_gb_per_s=self.memory_gb_per_s * memory,
            update_overhead_us=self.update_overhead_us / memory,
        )

    def compute_ms(self, flops: float, tensors: float = 0) -> float:
        """The milliseconds of so many floating-point operations, in forward and backward of so many tensors.

        >>> from zero_ref.simulator.cluster import cluster
        >>> round(cluster("a100-ib").device.compute_ms(312e12))
        1149
        """
        return tensors * self.overhead_us / 1e3 + flops / (self.tflops * self.reached * 1e9)

    def product_ms(self, flops: float, nbytes: float) -> float:
        """The milliseconds of a matrix product whose matrices have so many bytes.

        Large ones reach `reached` of the peak, and those with `knee` operations for each byte half of that.
        Computing takes the more time there, and moving the bytes is added `product_passes` times. Of a
        product that is too thin, as an adapter's, moving takes the more, and computing is added so often.

        >>> from zero_ref.simulator.cluster import cluster
        >>> h100 = cluster("h100-ib").device
        >>> for n in (512, 2048, 8192):
        ...     print(n, round(2 * n**3 / h100.product_ms(2 * n**3, 6 * n**2) / 1e9), "TFLOPS")
        512 163 TFLOPS
        2048 345 TFLOPS
        8192 543 TFLOPS
        """
        times = self.compute_ms(flops), self.touch_ms(nbytes)
        return max(times) + self.product_passes * min(times)

    @property
    def knee(self) -> float:
        """Operations for each byte of its matrices at which a product reaches half of `reached`.

        >>> from zero_ref.simulator.cluster import cluster
        >>> round(cluster("h100-ib").device.knee)
        649
        """
        return self.product_passes * self.touch_ms(1e9) / self.compute_ms(1e9)

    def attention_ms(self, flops: float) -> float:
        """The milliseconds of flash attention.

        >>> from zero_ref.simulator.cluster import cluster
        >>> round(cluster("a100-ib").device.attention_ms(187.2e12))
        1000
        """
        return flops / (self.tflops * (self.attention_reached or self.reached) * 1e9)

    def touch_ms(self, nbytes: float, tensors: float = 0) -> float:
        """The milliseconds to read or write so many bytes, in an update of so many tensors.

        >>> from zero_ref.simulator.cluster import cluster
        >>> round(cluster("a100-ib").device.touch_ms(2039e9))
        1176
        """
        rate = self.memory_gb_per_s * (self.memory_reached or 1.0)
        return tensors * self.update_overhead_us / 1e3 + nbytes / (rate * 1e6)

    def offloaded_ms(self, touched: float, there: float, back: float) -> float:
        """Return milliseconds of an update that the host makes piece by piece, while other pieces travel.

        >>> from zero_ref.simulator.cluster import cluster
        >>> round(cluster("a100-ib").device.offloaded_ms(touched=41e9, there=25.6e9, back=0))
        1000

        Args:
            touched: bytes that the host reads and writes.
            there, back: bytes that go to the host, and that come back.
        Raises:
            ValueError: the device's host is not known.
        """
        if self.host_link_gb_per_s is None or self.host_memory_gb_per_s is None:
            raise ValueError(
                f"{self.name}: nothing can be offloaded, since host_link_gb_per_s and host_memory_gb_per_s "
                "are not known. Give the device both."
            )
        on_the_way = max(there, back) / self.host_link_gb_per_s
        return max(on_the_way, touched / self.host_memory_gb_per_s) / 1e6
