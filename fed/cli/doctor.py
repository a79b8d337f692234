"""``fed doctor``: a check of this machine: what is installed, what each feature lacks, and the command that adds it."""

import importlib
import os
import platform
import re
import shutil
import sys
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from rich.table import Table

import fed
from fed.cli.tables import console
from fed.errors import first_line
from fed.processes.machine import usable_cores
from fed.quantities import bytes_text

__all__ = ["EXTRAS", "examine"]

EXTRAS = {
    "flower": "apps that fed flower-app writes",
    "lora": "examples/lora.py, adapters of peft in a model of transformers",
    "mlflow": "tracking with MLflow",
    "tensorboard": "tracking with TensorBoard",
    "wandb": "tracking with Weights & Biases",
    "privacy": "section privacy, noise with a known cost",
    "ray": "executor ray, simulations on the nodes of a cluster",
    "metrics": "metrics that are scikit-learn's, such as auroc",
}
"""Purpose of each extra of this package; those for its own developers are left out."""


def examine() -> int:
    """Say what this machine has, and what is missing for which feature.

    Returns:
        The exit code: 1 if experiments cannot run, else 0.
    """
    shown = console()
    machine = Table(show_header=False, box=None)
    packages = Table("package", "version", "needed", "for")
    devices, notes = _devices()
    notes += [note for name, _ in devices if (note := _broken(name))]
    for row in (
        ("fed", f"{fed.__version__} in {Path(fed.__file__).parent}"),
        ("Python", f"{platform.python_version()} in {sys.prefix}"),
        ("system", platform.platform()),
        ("cores", f"{usable_cores()} of {os.cpu_count()}"),
        ("memory", _memory()),
        *devices,
    ):
        machine.add_row(*row)
    required = _required()
    optional = {extra: _required(extra) for extra in EXTRAS}
    for extra, needed in {"": required, **optional}.items():
        for package in needed:
            version = _version(package.name) or "none"
            packages.add_row(package.name, version, f"{package.specifier or 'any'}", extra and f"extra {extra}")
    shown.print(machine)
    shown.print(packages)
    missing = [f'{problem}: pip install "{_pinned(package)}"' for package in required if (problem := _problem(package))]
    for extra, purpose in EXTRAS.items():
        if problems := ", ".join(filter(None, map(_problem, optional[extra]))):
            notes.append(f'only for {purpose}: {problems}: pip install "fed[{extra}]"')
    notes += _unfit_torchvision()
    if shutil.which("git") is None:
        notes.append("git is missing: runs do not record the commit that they ran from")
    for line in (*missing, *notes):
        shown.print(f"• {line}", markup=False, soft_wrap=True)  # a command is copied whole
    if not missing:
        shown.print("All that experiments need is here.")
    return 1 if missing else 0


def _required(extra: str = "") -> list[Requirement]:
    """Packages that fed requires, or that one of its extras adds; none where fed is not installed."""
    try:
        needed = [Requirement(text) for text in metadata.requires("fed") or []]
    except metadata.PackageNotFoundError:
        return []
    if not extra:
        return [package for package in needed if package.marker is None]
    return [package for package in needed if package.marker is not None and package.marker.evaluate({"extra": extra})]


def _problem(package: Requirement) -> str:
    """Words on a package that is missing or of another version; else empty."""
    found = _version(package.name)
    # A pre-release that is installed was the user's choice.
    if found is not None and package.specifier.contains(found, prereleases=True):
        return ""
    return f"{package.name} {'is missing' if found is None else f'is {found}, not {package.specifier}'}"


def _pinned(package: Requirement) -> str:
    return f"{package.name}{package.specifier}"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _devices() -> tuple[list[tuple[str, str]], list[str]]:
    """Devices to train on; and what keeps a GPU from being one."""
    try:
        import torch
    # PyTorch may be missing: the table of packages says so already.
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


def _broken(name: str) -> str:
    """A sentence on a device that is there and cannot compute; empty where it can.

    Args:
        name: name of the device, as an experiment writes it.
    """
    import torch

    try:
        ones = torch.ones(8, 8, device=name)
        is_right = bool((ones @ ones == 8).all())
    # PyTorch without CUDA asserts.
    except (RuntimeError, AssertionError) as error:
        return f"{name} is there and cannot compute ({first_line(error)}): choose another device"
    return "" if is_right else f"{name} is there and computes wrongly: choose another device"


def _unfit_torchvision() -> list[str]:
    """A sentence on a torchvision that cannot be imported, as one of another build of PyTorch; none where it can."""
    version = _version("torchvision")
    if version is None:
        return []
    try:
        import torch
    except ImportError:
        return []
    try:
        importlib.import_module("torchvision")
    except Exception as error:  # whatever its compiled part raises beside another PyTorch
        build = torch.__version__.partition("+")[2]
        # The builds that PyTorch has an index of packages for.
        is_known = re.fullmatch(r"cpu|xpu|cu\d+|rocm[\d.]+", build)
        index = f" --index-url https://download.pytorch.org/whl/{build}" if is_known else ""
        said = (
            f"torchvision {version} cannot be imported beside torch {torch.__version__} ({first_line(error)}), and "
            "transformers and peft, which import it, fail, too: pip uninstall torchvision, or install the build that "
            f"fits: pip install --force-reinstall --no-deps torchvision{index}"
        )
        return [said]
    return []


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
