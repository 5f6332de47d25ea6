"""The tables of GPUs, links and clusters: every figure has its source, and none is another unit's."""

from __future__ import annotations

import pytest

from zero_ref.simulator import presets
from zero_ref.simulator.cluster import CLUSTERS
from zero_ref.simulator.device import Device
from zero_ref.simulator.devices import DEVICES, FIGURES, SOURCES

GPUS = [name for name, fields in DEVICES.items() if "peaks" in fields]

ADDRESS = ("https://", "whitepaper", "benchmarks/published_runs")


@pytest.mark.parametrize("name", DEVICES)
def test_every_figure_of_a_device_has_a_source_or_says_that_it_is_supposed(name: str) -> None:
    assert set(FIGURES[name]) == set(SOURCES[name])
    for field, source in SOURCES[name].items():
        begins = source.startswith(("supposed", "fitted", "a core has no memory"))
        assert begins or any(word in source for word in ADDRESS), field


def test_what_a_gpu_reaches_is_fitted_for_two_and_supposed_for_the_others() -> None:
    fitted = [name for name in GPUS if SOURCES[name]["reached"].startswith("fitted")]
    assert fitted == ["A100 80 GB", "H100 80 GB"]
    for name in set(GPUS) - set(fitted):
        assert SOURCES[name]["reached"].startswith("supposed"), name
        assert SOURCES[name]["product_passes"].startswith("supposed"), name


@pytest.mark.parametrize("name", GPUS)
def test_peaks_are_dense_and_halve_from_format_to_format(name: str) -> None:
    peaks = DEVICES[name]["peaks"]
    assert DEVICES[name]["tflops"] == peaks["float16"] == peaks.get("bfloat16", peaks["float16"])
    # A figure with sparsity among dense ones would be a factor of 4 from its neighbour, or none.
    for more, less in (("fp8", "float16"), ("float16", "tf32")):
        if {more, less} <= set(peaks):
            assert peaks[more] == pytest.approx(2 * peaks[less], rel=0.02), "printed in round numbers"
    assert peaks["float32"] <= peaks.get("tf32", peaks["float16"])


@pytest.mark.parametrize("name", GPUS)
def test_figures_are_in_their_units(name: str) -> None:
    device = Device(name, **DEVICES[name])
    assert device.memory_gb is not None
    assert 20 < device.memory_gb < 400, "10^9 bytes"
    assert 100 < device.tflops < 3000, "10^12 operations a second"
    assert 800 < device.memory_gb_per_s < 10_000, "10^9 bytes a second"
    assert device.host_link_gb_per_s is not None
    assert 10 < device.host_link_gb_per_s < 450, "in one direction"
    # A driver reports at least as many bytes as gigabytes are printed on the box, and at most a tenth more.
    printed = {"V100 32 GB": 32, "A100 80 GB": 80, "H100 80 GB": 80, "H200": 141, "B200": 180, "GB200": 186}
    printed |= {"GB300": 279, "MI300X": 192, "L40S": 48, "RTX 4090": 24, "RTX 5090": 32, "H100 96 GB": 96}
    assert 1 <= device.memory_gb / printed[name] < 1.1


def test_every_device_and_every_link_is_of_a_cluster() -> None:
    of_clusters = presets.CLUSTERS.values()
    assert {fields["device"] for fields in of_clusters} == set(DEVICES)
    named = {fields[place] for fields in of_clusters for place in ("within", "between")}
    assert named == set(presets.LINKS)


def test_every_cluster_of_gpus_names_an_address_and_the_rate_of_its_storage() -> None:
    new = ["h200-ib", "b200-ib", "gb200-nvl72", "gb300-nvl72", "mi300x-ib", "l40s-ethernet", "rtx5090-10gbe"]
    for name, here in CLUSTERS.items():
        assert here.disk_gb_per_s is not None
        assert ("https://" in here.source) == (name in new) or name not in new
    assert {CLUSTERS[name].ranks_per_node for name in new} == {4, 8, 72}
