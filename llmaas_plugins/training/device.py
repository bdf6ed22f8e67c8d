"""Device that learns: a GPU that torch can use, else the processor.

``CUDA_VISIBLE_DEVICES=`` (empty) turns a GPU off. Products are computed in float32 on both, without
TF32, so figures of both can be compared.
"""

from __future__ import annotations

import os

import torch

from llmaas_plugins.machine import available_bytes, processor_name, resident_bytes

__all__ = ["device_name", "free_bytes", "learning_device", "used_bytes", "wait"]


def learning_device() -> torch.device:
    """Return the device that learns; the processes that ``torchrun`` started share the GPUs."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


def device_name(device: torch.device) -> str:
    """Return a name of a device for people."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name()


def free_bytes(device: torch.device) -> int:
    """Return the bytes of a device's memory that this process can use, with what it uses."""
    if device.type == "cpu":
        return available_bytes()
    free, _ = torch.cuda.mem_get_info(device)
    return int(free) + torch.cuda.memory_reserved(device)


def used_bytes(device: torch.device) -> int:
    """Return the bytes of a device's memory that this process uses."""
    return resident_bytes() if device.type == "cpu" else torch.cuda.memory_allocated(device)


def wait(device: torch.device) -> None:
    """Wait until a device has done what was started. A GPU computes while its caller goes on."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
