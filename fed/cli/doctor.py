"""``fed doctor``: a check of this machine: what is installed, what each feature lacks, and the command that adds it."""

import os
import platform
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import fed
from fed.cli.tables import console
from fed.machine import usable_cores
from fed.quantities import bytes_text
from fed.wire.engines import FLOWER

__all__ = ["examine"]

_PACKAGES = {
    "torch": "models and training",
    "numpy": "data",
    "pydantic": "experiments",
    "PyYAML": "experiments in files",
    "scikit-learn": "data of kind digits",
    "networkx": "topologies",
    "safetensors": "model.safetensors",
    "matplotlib": "pictures and reports",
    "jinja2": "reports",
    "rich": "progress and tables",
    "typer": "the command line",
    "cryptography": "keys and certificates",
    "grpcio": "real nodes",
}
"""What each package is needed for."""


def examine() -> int:
    """Say what this machine has, and what is missing for which feature.

    Returns:
        The exit code: 1 if experiments cannot run, else 0.
    """
    from rich.table import Table

    shown, machine, packages = (
        console(),
        Table(show_header=False, box=None),
        Table("package", "version", "at least", "for"),
    )
    devices, no_gpu = _devices()
    for row in (
        ("fed", f"{fed.__version__} in {Path(fed.__file__).parent}"),
        ("Python", f"{platform.python_version()} in {sys.prefix}"),
        ("system", platform.platform()),
        ("cores", f"{usable_cores()} of {os.cpu_count()}"),
        ("memory", _memory()),
        *devices,
    ):
        machine.add_row(*row)
    for package, feature in _PACKAGES.items():
        packages.add_row(package, _version(package) or "missing", _minimum(package), feature)
    engine = "Flower's engine, if you want it"
    packages.add_row("flwr", _version("flwr") or "none", FLOWER.removeprefix("flwr=="), engine)
    shown.print(machine)
    shown.print(packages)
    missing = [*_missing_packages()]
    for line in (*missing, *no_gpu, *_missing_extras()):
        shown.print(f"• {line}", markup=False, soft_wrap=True)  # a command is copied whole
    if not missing:
        shown.print("All that experiments need is here.")
    return 1 if missing else 0


def _missing_packages() -> Iterator[str]:
    for package, feature in _PACKAGES.items():
        found, least = _version(package), _minimum(package)
        if found is None or _numbers(found) < _numbers(least):
            what = "is missing" if found is None else f"is {found}, which is too old"
            yield f'{package} {what}: needed for {feature}: pip install "{package}{least and f">={least}"}"'


def _missing_extras() -> Iterator[str]:
    if shutil.which("git") is None:
        yield "git is missing: runs do not record the commit that they ran from"
    found, tested = _version("flwr"), _numbers(FLOWER)
    if found is None:
        yield f'no Flower: only apps that fed flower-app writes need it: pip install "{FLOWER}"'
    elif _numbers(found)[: len(tested)] != tested:
        yield f'flwr is {found}, which is not tested: pip install "{FLOWER}"'


def _devices() -> tuple[list[tuple[str, str]], list[str]]:
    """Devices to train on; and what keeps a GPU from being one."""
    try:
        import torch
    except ImportError:
        return [], []
    found = [("cpu", f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads")]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        text = f"{properties.name}, {bytes_text(properties.total_memory)}, CUDA {torch.version.cuda}"
        found.append((f"cuda:{index}", text))
    if torch.backends.mps.is_available():
        return [*found, ("mps", "Apple GPU")], []
    if torch.cuda.is_available():
        return found, []
    if not Path("/proc/driver/nvidia").exists() and shutil.which("nvidia-smi") is None:
        return found, ["no GPU: training runs on the CPU"]
    if torch.version.cuda is None:
        command = "pip install --force-reinstall torch"
        return found, [f"torch {torch.__version__} cannot train on this machine's GPU: {command}"]
    return found, [f"torch {torch.__version__} finds no GPU through this machine's driver: see nvidia-smi"]


def _memory() -> str:
    try:
        page_bytes = os.sysconf("SC_PAGE_SIZE")
        size_bytes, free_bytes = (os.sysconf(name) * page_bytes for name in ("SC_PHYS_PAGES", "SC_AVPHYS_PAGES"))
    except (AttributeError, OSError, ValueError):  # a system that does not say it this way
        return "unknown"
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else "max"
    limited = f", of which this process may use {bytes_text(int(text))}" if text.isdigit() else ""
    return f"{bytes_text(size_bytes)}, {bytes_text(free_bytes)} free{limited}"


def _version(package: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _minimum(package: str) -> str:
    """Least version that fed requires; empty where fed is not installed."""
    from importlib import metadata

    try:
        needed = metadata.requires("fed") or []
    except metadata.PackageNotFoundError:
        return ""
    found = (re.fullmatch(rf"{re.escape(package)}>=([\d.]+)", text, re.IGNORECASE) for text in needed)
    return next((match[1] for match in found if match), "")


def _numbers(version: str) -> tuple[int, ...]:
    # without a build's name, as in 2.9.0+cpu
    return tuple(int(number) for number in re.findall(r"\d+", version.partition("+")[0]))
