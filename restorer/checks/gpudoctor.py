"""What of this host's GPUs works, measured: the GPU lines of ``rewake doctor``.

Asks the driver through the same helper as the restorer does, so that what it says is what a start would meet.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from policies import drivers
from policies.config import Config
from policies.manifest import GpuFacts
from restorer.boxes.probes import Finding
from restorer.errors import RestorerError
from restorer.gpu import cuda
from restorer.gpu.cuda import Cuda
from restorer.machine.hostfacts import NVIDIA

_GIB = 1 << 30
_SLOW_BYTES_S = 8e9
"""Less than this from pinned memory is a link that has not trained, or is shared."""


async def examine(config: Config) -> tuple[list[Finding], float | None]:
    """(findings about the GPUs and about each model that wants some, bytes a second from pinned memory to the slowest GPU).

    No finding where neither is; None where no link was measured.
    """
    wanting = {name: model for name, model in config.models.items() if model.engine.gpu.count}
    if not config.restorer.gpu_helper and not NVIDIA.exists():
        remedy = "run it on a host with an NVIDIA driver, or set engine.gpu.count: 0"
        return [Finding(f"models.{name}.gpu", "fail", "no NVIDIA driver is here", remedy) for name in wanting], None
    helper = Cuda(cuda.command(config.restorer.gpu_helper))
    try:
        facts = await helper.facts()
        rates = await _bandwidths(helper, facts)
    except RestorerError as error:
        remedy = "pip install 'rewake[gpu]', and see nvidia-smi"
        return [Finding("gpu helper", "fail" if wanting else "warn", str(error), remedy)], None
    finally:
        await helper.close()
    found = [*_facts(facts, config.restorer.drivers), *_links(facts, rates)]
    most = len(facts.gpus or ())
    for name, model in wanting.items():
        if model.engine.gpu.count > most:
            text = f"{model.engine.gpu.count} GPUs asked for, {most} here"
            found.append(Finding(f"models.{name}.gpu", "fail", text, f"lower models.{name}.engine.gpu.count"))
    return found, min((rate for rate in rates.values() if rate), default=None)


async def _bandwidths(helper: Cuda, facts: GpuFacts) -> dict[str, float]:
    """UUID -> bytes a second; 0 where it could not be measured."""
    rates = {}
    for gpu in facts.gpus or ():
        try:
            rates[gpu.uuid] = await helper.bandwidth(gpu.uuid)
        except RestorerError:
            rates[gpu.uuid] = 0.0
    return rates


def _driver(facts: GpuFacts, overrides: Mapping[str, drivers.Word]) -> Finding:
    kind = {True: ", open kernel module", False: ", proprietary kernel module", None: ""}[facts.open_module]
    found = f"{facts.driver or 'of unknown version'}{kind}"
    if facts.driver is None:
        return Finding("gpu driver", "warn", found, "see nvidia-smi; GPU engines start cold until its version can be told")
    if refused := drivers.refused(facts, overrides):
        return Finding("gpu driver", "warn", found, f"{refused[0].remedy}; GPU engines start cold until then")
    if fixed := drivers.immovable(facts, overrides):
        return Finding("gpu driver", "warn", found, fixed[0].remedy)
    return Finding("gpu driver", "ok", found)


def _facts(facts: GpuFacts, overrides: Mapping[str, drivers.Word]) -> Iterator[Finding]:
    yield _driver(facts, overrides)
    gpus = facts.gpus or ()
    off = [str(n) for n, gpu in enumerate(gpus) if gpu.persistence is False]
    if off:
        yield Finding("gpu persistence", "warn", f"off on GPU {', '.join(off)}: the first start pays seconds", "nvidia-smi -pm 1")
    else:
        yield Finding("gpu persistence", "ok", "on")
    split = [str(n) for n, gpu in enumerate(gpus) if gpu.mig is not False]
    if split:
        yield Finding(
            "gpu mig", "warn", f"on or unknown on GPU {', '.join(split)}: nothing there can be captured", "nvidia-smi -mig 0"
        )
    else:
        yield Finding("gpu mig", "ok", "off")
    if facts.mps is not False:
        yield Finding("gpu mps", "warn", "runs: its clients cannot be captured", "echo quit | nvidia-cuda-mps-control")
    else:
        yield Finding("gpu mps", "ok", "does not run")


def _links(facts: GpuFacts, rates: dict[str, float]) -> Iterator[Finding]:
    for number, gpu in enumerate(facts.gpus or ()):
        size = "unknown size" if gpu.memory_bytes is None else f"{gpu.memory_bytes / _GIB:.0f} GiB"
        rate = rates[gpu.uuid]
        found = f"{gpu.name}, {size}; {rate / 1e9:.1f} GB/s from pinned memory"
        if rate == 0:
            remedy = "pip install 'rewake[gpu]', or free a gibibyte on it; without, engines read their weights themselves"
            yield Finding(f"gpu {number}", "warn", f"{gpu.name}, {size}; its link could not be measured", remedy)
        elif rate < _SLOW_BYTES_S:
            yield Finding(
                f"gpu {number}", "warn", found, "see nvidia-smi -q -d PCIE: fewer lanes, or an older generation, than it could"
            )
        else:
            yield Finding(f"gpu {number}", "ok", found)
